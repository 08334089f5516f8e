"""Corrects predicted step times by runs that the user has measured on the same cluster ("anchors")."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from numbers import Real
from operator import mul
from typing import NamedTuple

import numpy as np

from shardwright.axes import layout_axes
from shardwright.cost.cluster import constants_of
from shardwright.cost.constants import Constants
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.planner.price import Price

SPREAD = (0.1, 0.6, 0.3)
"""Prior standard deviations of the factors of :class:`TimeScale` around their common value: products, memory, messages.

Chosen, not fitted. Products reach much the same share of the peak whoever calls them. Operators that memory bounds are
counted as this runtime runs them, one by one; another one fuses some or nearly all. How much of messages hides lies
between.
"""

COMMON, FAR = 0.2, 1.5
"""The expected difference from 1 of what all three factors share, if the runs do not show a larger one; and how many
times as long as predicted runs take, or predictions as runs, that are taken to be of a slower or faster machine, and
not of one that is expected to be as predicted. Both chosen."""

LEAST = 0.05
"""The least factor, of what all are expected to be: what another runtime hides or fuses takes some time still."""

NINE_IN_TEN, MOST_ERROR = 1.645, 0.9
"""How many standard deviations nine in ten normal errors stay within; and the largest relative error that is stated."""

NOISE = 0.1
"""The expected relative error of a step's prediction that no factors correct."""


INTERVAL, DEGREES = 0.17, 4
"""The error of predicted step times, relative to measured ones, that nine in ten published runs do not exceed, and how
many anchors it weighs as much as.

It is the ninth decile, rounded up to a percent, of the row "several nodes, a model size left out" in the newest file of
``benchmarks/planner/results``: constants were fitted to runs of other model sizes. On machines of which nothing was
measured errors are taken to be at least as large. The rows with anchors there say how many runs lie within the interval
that :func:`error_of` gives them."""


SecondsByCause = tuple[float, float, float]
"""Seconds, or factors, of a step's matrix products, of its other operators, and of its messages."""


class StepTimes(NamedTuple):
    """How long published runs took, as multiples of the prediction: quantiles of 5, 50 and 95 percent.

    ``low`` is the first of them and ``high`` the last. ``runs_on`` names the accelerators of the runs. ``is_fitted``
    says whether the constants of the prediction were fitted to runs on the accelerator itself.
    """

    low: float
    median: float
    high: float
    runs_on: str
    is_fitted: bool = True


FITTED = ("matmul_efficiency", "attention_efficiency")
"""The constants that were fitted to published runs; profiles of accelerators without such runs have their defaults."""

_ON_H100 = StepTimes(0.92, 1.01, 1.11, "h100-80gb")

UNMEASURED = {
    "a100-40gb": StepTimes(0.93, 1.02, 1.19, "a100-40gb"),
    "a100-80gb": StepTimes(0.92, 0.98, 1.20, "a100-80gb"),
    "h100-80gb": _ON_H100,
    "h200-141gb": _ON_H100,
}
"""How long steps took on accelerators of which nothing was measured here: 99 published runs of another library.

They are rows of the newest file of ``benchmarks/planner_unmeasured/results``, rounded to a percent. Steps were priced
as ``plan`` does, with two constants that were fitted to runs of models of other widths. The constants of profiles are
fitted to all of them. The H200 has the chip of the H100, and other memory."""

UNKNOWN = StepTimes(1.08, 1.24, 1.89, "A100s and H100s", is_fitted=False)
"""The same for other accelerators, which have default constants: of runs priced with these, the outermost quantiles of
an accelerator, and the median of all."""


def published_times(name: str, constants: Constants) -> StepTimes | None:
    """Returns how long published runs took, as multiples of predictions for accelerator ``name`` by ``constants``.

    It is None if the constants of products and attention are neither those of the profile nor the defaults.

    >>> from shardwright.cost.cluster import constants_of
    >>> published_times("h100-80gb", constants_of("h100-80gb")).runs_on, published_times("mine", Constants()).runs_on
    ('h100-80gb', 'A100s and H100s')
    """
    values, defaults = ([getattr(constant_set, key) for key in FITTED] for constant_set in (constants, Constants()))
    if name in UNMEASURED and values == [getattr(constants_of(name), key) for key in FITTED]:
        return UNMEASURED[name]
    return UNKNOWN if values == defaults else None


MOST_ANCHORED = 5
"""The factor from predicted to measured seconds above which anchors are warned of."""


@dataclass(frozen=True)
class TimeScale:
    """The factors by which predicted seconds are multiplied to match measured runs, by what bounds the operators.

    ``products`` is that of matrix products and attention, ``memory`` that of all other operators, of launches and of
    the optimizer, and ``messages`` that of exposed messages. ``error`` is the relative error that nine in ten corrected
    predictions are taken not to exceed.

    >>> TimeScale(2.0, 1.0, 1.0).products
    2.0
    """

    products: float = 1.0
    memory: float = 1.0
    messages: float = 1.0
    error: float = INTERVAL

    @property
    def factors(self) -> tuple[float, float, float]:
        """The three factors, in order."""
        return self.products, self.memory, self.messages

    def of(self, price: Price) -> Price:
        """Returns ``price`` with its seconds multiplied by the factors.

        A bubble takes as much longer as the operators of the stage do. The step's seconds follow from the parts; the
        bubble's share of the stages' time stays.
        """
        products, others, _ = _alone(price.waterfall)
        bubble = (self.products * products + self.memory * others) / (products + others) if products + others else 1.0
        by_part = {"bubble": bubble, **dict.fromkeys(_PRODUCTS, self.products)}
        by_part |= dict.fromkeys(layout_axes(), self.messages)
        waterfall = {name: seconds * by_part.get(name, self.memory) for name, seconds in price.waterfall.items()}
        return price._replace(waterfall=waterfall, step_s=sum(waterfall.values()))


_PRODUCTS = ("matmul", "attention")
"""The parts of a step that are matrix products."""


def _alone(waterfall: Mapping[str, float]) -> SecondsByCause:
    """Returns the seconds of a step's products, of its other operators and of its messages, without the bubble."""
    axes = layout_axes()
    products = sum(seconds for name, seconds in waterfall.items() if name in _PRODUCTS)
    messages = sum(seconds for name, seconds in waterfall.items() if name in axes)
    return products, sum(waterfall.values()) - products - messages - waterfall.get("bubble", 0.0), messages


def parse_anchor(text: str) -> tuple[Layout, float]:
    """Parses ``LINE=SECONDS``, such as ``dp8 tp8 bf16=2.5s``, into a layout and the measured seconds of its step.

    The "s" may be left out.

    Raises: PlanError: the text has another form, or the seconds are not above zero and below 1e9. LayoutError: the line
        is no layout.

    >>> layout, seconds = parse_anchor("dp2 tp2 bf16=0.5s")
    >>> str(layout), seconds
    ('dp2 tp2 bf16', 0.5)
    """
    line, _, seconds = text.rpartition("=")
    try:
        measured = float(seconds.strip().removesuffix("s"))
    except ValueError:
        measured = 0.0
    return _anchor(line, measured, text)


def _anchor(line: str, seconds: object, given: str) -> tuple[Layout, float]:
    measured = float(seconds) if isinstance(seconds, Real) else 0.0
    if not line or not 0 < measured < 1e9:
        raise PlanError(
            "an anchor is a layout and the seconds of its step",
            given=given,
            allowed="LINE=SECONDS, such as 'dp8 tp8 bf16=2.5', with a number above 0 and below 1e9",
            fix="write --anchor 'dp8 tp8 bf16=2.5', or anchors={'dp8 tp8 bf16': 2.5}",
        )
    return Layout.parse(line), measured


def anchors_in(texts: Sequence[str]) -> dict[str, float]:
    """Returns the measured seconds by layout line, from texts such as ``dp8 tp8 bf16=2.5s`` (:func:`parse_anchor`).

    Raises: PlanError: two texts are of one layout.

    >>> anchors_in(["dp8=2.5", "dp4 tp2=3"])
    {'dp8': 2.5, 'dp4 tp2': 3.0}
    """
    return _once(map(parse_anchor, texts))


def seconds_by_layout(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns the measured seconds by layout line, as the layout writes itself, from pairs of a line and seconds.

    Raises: PlanError: the seconds are not a number above zero and below 1e9, or two lines are of one layout.
        LayoutError: a line is no layout.

    >>> seconds_by_layout({"bf16 dp2": 0.5}.items())
    {'dp2 bf16': 0.5}
    """
    return _once(_anchor(line, seconds, f"{line}={seconds}") for line, seconds in pairs)


def _once(anchors: Iterable[tuple[Layout, float]]) -> dict[str, float]:
    seconds_by_line: dict[str, float] = {}
    for layout, seconds in anchors:
        line = str(layout)
        if line in seconds_by_line:
            raise PlanError(
                "a layout has one anchor",
                given=f"{line}={seconds_by_line[line]:g} and {line}={seconds:g}",
                allowed="one anchor for each layout: the median of its steps, of however many runs",
                fix=f"write --anchor '{line}=SECONDS' once",
            )
        seconds_by_line[line] = seconds
    return seconds_by_line


def scale_of(anchors: Sequence[tuple[Price, float]]) -> TimeScale:
    """Returns the factors that bring predicted step times close to measured ones, as :func:`factors_of` finds them.

    ``anchors`` has pairs of a predicted price and the measured seconds of a step.
    """
    return factors_of([(parts_of(price.waterfall), measured) for price, measured in anchors])


def parts_of(waterfall: Mapping[str, float]) -> SecondsByCause:
    """Returns the seconds of a step's products, of its other operators, and of its messages; they add up to the step.

    ``waterfall`` has the seconds of each part. Those of the bubble are divided among operators as the others are.

    >>> parts_of({"matmul": 3.0, "memory": 1.0, "tp": 0.5, "bubble": 2.0})
    (4.5, 1.5, 0.5)
    """
    products, others, messages = _alone(waterfall)
    bubble = waterfall.get("bubble", 0.0)
    share = products / (products + others) if products + others else 0.0
    return products + share * bubble, others + (1 - share) * bubble, messages


def factors_of(runs: Sequence[tuple[SecondsByCause, float]]) -> TimeScale:
    """Returns the factors from runs as (predicted seconds by part, measured seconds of a step).

    Without any run, all are 1. With one, all are its measured seconds divided by its predicted ones. With more, they
    are the likeliest ones for errors of :data:`NOISE` where, before the runs are known, factors differ from each other
    by :data:`SPREAD`, and all together from 1 by :data:`COMMON`, or by as much as the runs do in the mean. If that is
    more than :data:`FAR`, the rest of it is taken as known.

    >>> factors_of([((1.0, 0.5, 0.5), 3.0)])
    TimeScale(products=1.5, memory=1.5, messages=1.5, error=0.240...)
    >>> fused = [((9.0, 1.0, 0.0), 9.5), ((6.0, 4.0, 0.0), 8.0)]  # as if memory took half as long as predicted
    >>> [round(each, 2) for each in factors_of(fused).factors]
    [0.97, 0.6, 0.97]
    """
    if not runs:
        return TimeScale()
    factors, fitted = _factors(runs)
    return TimeScale(*factors, error=error_of(runs, factors, fitted))


def error_of(runs: Sequence[tuple[SecondsByCause, float]], factors: SecondsByCause, fitted: float = 1.0) -> float:
    """Returns the relative error that nine in ten predictions, corrected by these runs, are taken not to exceed.

    It starts from :data:`INTERVAL`. Runs that agree with each other narrow it, from three or four on, and others widen
    it: the variance of the errors is estimated from the runs' own and from the interval, which counts as
    :data:`DEGREES` runs. A factor of few runs carries their noise, so one or two widen it. ``fitted`` is how many
    factors the runs have determined, three at most: one that stays near to what was expected counts as a part of one.

    >>> agreeing = [((1.0, 0.5, 0.5), 2.0)] * 6
    >>> [round(error_of(agreeing[:number], (1.0, 1.0, 1.0)), 3) for number in (1, 3, 6)]
    [0.24, 0.16, 0.122]
    """
    width = INTERVAL / NINE_IN_TEN
    errors = (log(sum(map(mul, factors, parts)) / measured) / width for parts, measured in runs)
    variance = (DEGREES + sum(error * error for error in errors)) / (DEGREES + len(runs) - fitted)
    return min(MOST_ERROR, INTERVAL * sqrt(variance * (1 + fitted / len(runs))))


def _factors(runs: Sequence[tuple[SecondsByCause, float]]) -> tuple[SecondsByCause, float]:
    """Returns the factors, and how many of them the runs have determined."""
    common = sum(measured / sum(parts) for parts, measured in runs) / len(runs)
    if len(runs) == 1:
        return (common, common, common), 1.0
    before = common / min(max(common, 1 / FAR), FAR)  # what the factors are expected to be
    predicted = before * np.array([[part / measured for part in parts] for parts, measured in runs])
    shared = max(COMMON, abs(log(common / before))) ** 2
    weights = NOISE**2 * np.linalg.inv(shared * np.ones((3, 3)) + np.diag(np.square(SPREAD)))
    products = predicted.T @ predicted
    right_side, matrix = predicted.sum(0) + weights.sum(1), products + weights
    factors, free = np.full(3, LEAST), np.ones(3, dtype=bool)
    while free.any():  # the others are at their least
        remainder = right_side[free] - matrix[np.ix_(free, ~free)].sum(1) * LEAST
        factors[free] = np.linalg.solve(matrix[np.ix_(free, free)], remainder)
        if factors.min() >= LEAST:
            break
        free[factors.argmin()] = False
        factors[~free] = LEAST
    fitted = float(np.trace(np.linalg.solve(matrix, products)))
    first, second, third = (float(factor) for factor in before * factors)
    return (first, second, third), fitted
