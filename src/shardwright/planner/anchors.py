"""Corrects predicted step times by runs that the user has measured on the same cluster ("anchors")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.axes import layout_axes
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.planner.price import Price

WIDTH = 0.3
"""The expected difference of a factor of :class:`Scale` from the mean ratio of measured to predicted steps, relative to
that ratio."""

NOISE = 0.1
"""The expected relative error of a step's prediction that no factors correct."""


@dataclass(frozen=True)
class Scale:
    """The factors by which the predicted seconds of operators and of messages are multiplied, to match measured runs.

    >>> Scale(2.0, 1.0).operators
    2.0
    """

    operators: float = 1.0
    messages: float = 1.0

    def of(self, price: Price) -> Price:
        """Returns ``price`` with its seconds multiplied by the factors.

        The seconds of exposed messages are multiplied by ``messages``, all others by ``operators``. The step's seconds
        and the bubble's share follow from the parts.
        """
        axes = layout_axes()
        waterfall = {n: s * (self.messages if n in axes else self.operators) for n, s in price.waterfall.items()}
        step_s = sum(waterfall.values())
        return price._replace(waterfall=waterfall, step_s=step_s, bubble=waterfall["bubble"] / step_s)


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


def scale_of(anchors: Sequence[tuple[Price, float]]) -> Scale:
    """Returns the factors that bring predicted step times close to measured ones.

    ``anchors`` has pairs of a predicted price and the measured seconds of a step. Without any, both factors are 1. With
    one, both are its measured seconds divided by its predicted ones. With more, operators and messages get factors of
    their own by least squares of the relative errors, pulled towards the mean ratio; if one of the two would not be
    above zero, both are the mean ratio.
    """
    if not anchors:
        return Scale()
    common = sum(measured / price.step_s for price, measured in anchors) / len(anchors)
    if len(anchors) == 1:
        return Scale(common, common)
    axes = layout_axes()
    aa = bb = (NOISE / WIDTH / common) ** 2  # the pull towards the common factor
    ab, ra, rb = 0.0, aa * common, bb * common
    for price, measured in anchors:
        messages = sum(seconds for name, seconds in price.waterfall.items() if name in axes)
        a, b = (price.step_s - messages) / measured, messages / measured
        aa, ab, bb, ra, rb = aa + a * a, ab + a * b, bb + b * b, ra + a, rb + b
    det = aa * bb - ab * ab
    operators, each = (ra * bb - rb * ab) / det, (rb * aa - ra * ab) / det
    if min(operators, each) <= 0:
        return Scale(common, common)
    return Scale(operators, each)
