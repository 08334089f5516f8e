"""Corrects predicted step times by runs that the user has measured on the same cluster ("anchors")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from typing import NamedTuple

from shardwright.axes import layout_axes
from shardwright.cost.cluster import constants_of
from shardwright.cost.constants import Constants
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.planner.price import Price

WIDTH = 0.3
"""The expected difference of a factor of :class:`TimeScale` from the mean ratio of measured to predicted steps.

It is relative to that ratio.
"""

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
    own, usual = ([getattr(each, key) for key in FITTED] for each in (constants, Constants()))
    if name in UNMEASURED and own == [getattr(constants_of(name), key) for key in FITTED]:
        return UNMEASURED[name]
    return UNKNOWN if own == usual else None


MOST_ANCHORED = 5
"""The factor from predicted to measured seconds above which anchors are warned of."""


@dataclass(frozen=True)
class TimeScale:
    """The factors by which the predicted seconds of operators and of messages are multiplied, to match measured runs.

    ``error`` is the relative error that nine in ten corrected predictions are taken not to exceed.

    >>> TimeScale(2.0, 1.0).operators
    2.0
    """

    operators: float = 1.0
    messages: float = 1.0
    error: float = INTERVAL

    def of(self, price: Price) -> Price:
        """Returns ``price`` with its seconds multiplied by the factors.

        The seconds of exposed messages are multiplied by ``messages``, all others by ``operators``. The step's seconds
        follow from the parts; the bubble's share of the stages' time stays.
        """
        axes = layout_axes()
        waterfall = {n: s * (self.messages if n in axes else self.operators) for n, s in price.waterfall.items()}
        return price._replace(waterfall=waterfall, step_s=sum(waterfall.values()))


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
    if not line or not 0 < measured < 1e9:
        raise PlanError(
            "an anchor is a layout and the seconds of its step",
            given=text,
            allowed="LINE=SECONDS, such as 'dp8 tp8 bf16=2.5'",
            fix="write --anchor 'dp8 tp8 bf16=2.5'",
        )
    return Layout.parse(line), measured


def anchors_in(texts: Sequence[str]) -> dict[str, float]:
    """Returns the measured seconds by layout line, from texts such as ``dp8 tp8 bf16=2.5s`` (:func:`parse_anchor`).

    Raises: PlanError: two texts are of one layout.

    >>> anchors_in(["dp8=2.5", "dp4 tp2=3"])
    {'dp8': 2.5, 'dp4 tp2': 3.0}
    """
    found: dict[str, float] = {}
    for layout, seconds in map(parse_anchor, texts):
        line = str(layout)
        if line in found:
            raise PlanError(
                "a layout has one anchor",
                given=f"{line}={found[line]:g} and {line}={seconds:g}",
                allowed="one --anchor for each layout: the median of its steps, of however many runs",
                fix=f"write --anchor '{line}=SECONDS' once",
            )
        found[line] = seconds
    return found


def scale_of(anchors: Sequence[tuple[Price, float]]) -> TimeScale:
    """Returns the factors that bring predicted step times close to measured ones, as :func:`factors_of` finds them.

    ``anchors`` has pairs of a predicted price and the measured seconds of a step.
    """
    axes, parts = layout_axes(), []
    for price, measured in anchors:
        messages = sum(seconds for name, seconds in price.waterfall.items() if name in axes)
        parts.append((price.step_s - messages, messages, measured))
    return factors_of(parts)


def factors_of(parts: Sequence[tuple[float, float, float]]) -> TimeScale:
    """Returns the factors from runs as (predicted seconds of operators, of messages, measured seconds of a step).

    Without any run, both factors are 1. With one, both are its measured seconds divided by its predicted ones. With
    more, operators and messages get factors of their own by least squares of the relative errors, pulled towards the
    mean ratio; if one of the two would not be above zero, both are the mean ratio.

    >>> factors_of([(1.0, 1.0, 3.0)]), factors_of([])
    (TimeScale(operators=1.5, messages=1.5, error=0.240...), TimeScale(operators=1.0, messages=1.0, error=0.17))
    """
    if not parts:
        return TimeScale()
    found = _factors(parts)
    return replace(found, error=error_of(parts, found))


def error_of(parts: Sequence[tuple[float, float, float]], scale: TimeScale) -> float:
    """Returns the relative error that nine in ten predictions, corrected by these runs, are taken not to exceed.

    It starts from :data:`INTERVAL`. Runs that agree with each other narrow it, from three on, and others widen it: the
    variance of the errors is estimated from the runs' own and from the interval, which counts as :data:`DEGREES` runs.
    A factor of few runs carries their noise, so one or two widen it.

    >>> agreeing = [(1.0, 1.0, 2.0)] * 6
    >>> [round(error_of(agreeing[:number], TimeScale()), 3) for number in (1, 3, 6)]
    [0.24, 0.16, 0.122]
    """
    width = INTERVAL / NINE_IN_TEN
    errors = (log((scale.operators * a + scale.messages * b) / measured) / width for a, b, measured in parts)
    variance = (DEGREES + sum(each * each for each in errors)) / (DEGREES + len(parts) - 1)
    return min(MOST_ERROR, INTERVAL * sqrt(variance * (1 + 1 / len(parts))))


def _factors(parts: Sequence[tuple[float, float, float]]) -> TimeScale:
    common = sum(measured / (operators + messages) for operators, messages, measured in parts) / len(parts)
    if len(parts) == 1:
        return TimeScale(common, common)
    aa = bb = (NOISE / WIDTH / common) ** 2  # the pull towards the common factor
    ab, ra, rb = 0.0, aa * common, bb * common
    for operators, messages, measured in parts:
        a, b = operators / measured, messages / measured
        aa, ab, bb, ra, rb = aa + a * a, ab + a * b, bb + b * b, ra + a, rb + b
    det = aa * bb - ab * ab
    first, second = (ra * bb - rb * ab) / det, (rb * aa - ra * ab) / det
    if min(first, second) <= 0:
        return TimeScale(common, common)
    return TimeScale(first, second)
