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

They are chosen, not fitted. Matrix products reach much the same share of the peak in every program. Memory-bound
operators differ the most: they are priced one by one, as this runtime runs them, and other programs fuse some or nearly
all of them. Messages lie between, since programs differ in how much of them they overlap with computation.
"""

COMMON, FAR = 0.2, 1.5
"""``COMMON`` is the prior standard deviation of what all three factors share, around its expected value. ``FAR`` is the
ratio of measured to predicted seconds up to which that expected value is 1. Beyond it (or below its inverse), the
machine is taken to be slower (or faster) as a whole, and the expected value is the ratio divided by ``FAR`` (or by its
inverse). Both are chosen, not fitted."""

LEAST = 0.05
"""The smallest factor, as a share of the expected value. What another runtime hides or fuses still takes some time."""

NINE_IN_TEN, MOST_ERROR = 1.645, 0.9
"""How many standard deviations nine in ten normal errors lie within, and the largest error that is ever returned."""

NOISE = 0.1
"""The expected relative error of a predicted step time that remains after the factors have corrected it."""


INTERVAL, DEGREES = 0.17, 4
"""``INTERVAL`` is the relative error of predicted step times that nine in ten published runs do not exceed, and
``DEGREES`` is the number of anchors that it weighs as much as in :func:`error_of`.

``INTERVAL`` is the ninth decile, rounded up to a percent, of the row "several nodes, a model size left out" in the
newest file of ``benchmarks/planner/results``, where constants were fitted to runs of other model sizes. On machines
where nothing was measured, errors are taken to be at least as large. The rows with anchors in that file say how many
runs lie within the interval that :func:`error_of` gives them."""


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
"""By accelerator, how long the steps of 99 published runs of another library took, as multiples of the prediction.

They are used where nothing was measured on the user's cluster. The numbers are rows of the newest file of
``benchmarks/planner_unmeasured/results``, rounded to a percent. There steps are priced as ``plan`` does, with the
constants of :data:`FITTED` fitted to runs of models of other widths; in the profiles these are fitted to all runs. The
H200 has the chip of the H100 with other memory, so it has the same numbers."""

UNKNOWN = StepTimes(1.08, 1.24, 1.89, "A100s and H100s", is_fitted=False)
"""The same for all other accelerators, from these runs priced with the default constants: the lowest and the highest
quantile of any accelerator, and the median of all runs."""


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
"""The factor of a :class:`TimeScale` above which ``plan`` warns that the anchors may be wrong."""


@dataclass(frozen=True)
class TimeScale:
    """The factors by which predicted seconds are multiplied to match measured runs, one for each kind of work.

    ``products`` is that of matrix products and attention, ``messages`` that of exposed messages, and ``memory`` that of
    all other parts: other operators, launches, the optimizer and the constant of a step. ``error`` is the relative
    error that nine in ten corrected predictions are taken not to exceed.

    >>> TimeScale(2.0, 1.0, 1.0).products
    2.0
    """

    products: float = 1.0
    memory: float = 1.0
    messages: float = 1.0
    error: float = INTERVAL

    @property
    def factors(self) -> tuple[float, float, float]:
        """The three factors as a tuple: ``products``, ``memory``, ``messages``."""
        return self.products, self.memory, self.messages

    def of(self, price: Price) -> Price:
        """Returns ``price`` with its seconds multiplied by the factors.

        The bubble's seconds are multiplied by the mean factor of the operators, weighted by their seconds. ``step_s``
        becomes the sum of the parts; the share ``bubble`` is unchanged.
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

    ``waterfall`` has the seconds of each part. Those of the bubble are divided between products and other operators in
    proportion to their own seconds.

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
    maximize the posterior probability, for relative errors of :data:`NOISE` and a normal prior: factors differ from
    their common value by :data:`SPREAD`, and that differs from its expected value by :data:`COMMON`, or by as much as
    the runs do in the mean if that is more. :data:`FAR` says what the expected value is.

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

    The variance of the errors is estimated from those of ``runs`` and from :data:`INTERVAL`, which counts as
    :data:`DEGREES` runs. So runs that agree with each other narrow the error from three or four runs on, and others
    widen it. One or two runs widen it too, since factors found from few runs carry their noise. ``fitted`` is how many
    of the three factors the runs determine; a factor that the prior holds near its expected value counts as a fraction.

    >>> agreeing = [((1.0, 0.5, 0.5), 2.0)] * 6
    >>> [round(error_of(agreeing[:number], (1.0, 1.0, 1.0)), 3) for number in (1, 3, 6)]
    [0.24, 0.16, 0.122]
    """
    width = INTERVAL / NINE_IN_TEN
    errors = (log(sum(map(mul, factors, parts)) / measured) / width for parts, measured in runs)
    variance = (DEGREES + sum(error * error for error in errors)) / (DEGREES + len(runs) - fitted)
    return min(MOST_ERROR, INTERVAL * sqrt(variance * (1 + fitted / len(runs))))


def _factors(runs: Sequence[tuple[SecondsByCause, float]]) -> tuple[SecondsByCause, float]:
    """Returns the factors, and how many of them the runs determine, which is ``fitted`` in :func:`error_of`."""
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
    while free.any():  # factors that are not free are held at LEAST
        remainder = right_side[free] - matrix[np.ix_(free, ~free)].sum(1) * LEAST
        factors[free] = np.linalg.solve(matrix[np.ix_(free, free)], remainder)
        if factors.min() >= LEAST:
            break
        free[factors.argmin()] = False
        factors[~free] = LEAST
    fitted = float(np.trace(np.linalg.solve(matrix, products)))
    first, second, third = (float(factor) for factor in before * factors)
    return (first, second, third), fitted
