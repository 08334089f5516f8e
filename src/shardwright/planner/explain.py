"""Explains a predicted step time part by part, and what one layout loses against another.

The parts are those of :attr:`~.price.Price.waterfall`. They add up to the step, so the differences between two layouts'
parts add up to the difference of their steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10
from typing import Any, NamedTuple

from shardwright.axes import layout_axes
from shardwright.cost.operators import PARTS
from shardwright.formatting import format_decimal_bytes
from shardwright.planner.memory import offloaded_bytes
from shardwright.planner.price import Price

NAMES = {"matmul": "matrix products", "memory": "memory-bound", "other": "constant of a step"}
"""Parts of a step whose names in text differ from those in data."""


LEAST = 5e-4
"""The share of a step below which text leaves a part of it out; data have all parts."""


TIED = 1e-2
"""The relative difference of two steps below which prices cannot tell which is faster, since their errors are larger.
Of layouts that are this close, the simplest comes first (:func:`burdens`)."""

_FAST, _WHOLE = 1e-3, 1e-2
"""Relative differences of two steps: below the first, text calls them as fast; below the second, it gives a decimal."""


FEW_GAINS = 0.1
"""The share of the time lost in one part of a step that the other parts may gain before text names their gain too."""


def known_parts() -> list[str]:
    """Returns the names of all parts that a step may have, in the order of tables."""
    return [*PARTS, "launch", *layout_axes(), "bubble", "optimizer", "other"]


def parts_of_step(*waterfalls: Mapping[str, float]) -> tuple[str, ...]:
    """Returns the names of the parts of a step that take time in one of ``waterfalls``, in the order of tables.

    A waterfall gives the seconds of a step by the name of the part.

    >>> parts_of_step({"bubble": 1.0, "matmul": 3.0}, {"dp": 1.0, "bubble": 0.0})
    ('matmul', 'dp', 'bubble')
    """
    names = dict.fromkeys([*known_parts(), *(name for waterfall in waterfalls for name in waterfall)])
    return tuple(name for name in names if any(waterfall.get(name) for waterfall in waterfalls))


def name_of_part(name: str) -> str:
    """Returns the name that tables give a part of a step, such as "matrix products" for "matmul".

    >>> name_of_part("matmul"), name_of_part("dp"), name_of_part("bubble")
    ('matrix products', 'dp not hidden', 'bubble')
    """
    return f"{name} not hidden" if name in layout_axes() else NAMES.get(name, name)


def waterfall_lines(waterfall: Mapping[str, float], step_s: float) -> list[str]:
    """Returns the parts of a step as lines of text: name, seconds and share of the step; the last line is the step.

    Parts that take less than 0.05 % of the step are left out.

    >>> print(*waterfall_lines({"matmul": 3.0, "dp": 1.0}, 4.0), sep="\\n")
      matrix products          3 s  75.0 %
      dp not hidden            1 s  25.0 %
      step                     4 s
    """
    lines = []
    for name in parts_of_step(waterfall):
        seconds = waterfall[name]
        if abs(seconds) < LEAST * step_s:
            continue
        lines.append(f"  {name_of_part(name):20} {seconds:>7.3g} s {seconds / step_s:>6.1%}".replace("%", " %"))
    return [*lines, f"  {'step':20} {step_s:>7.3g} s"]


def burdens(price: Price) -> tuple[bool, int]:
    """Returns what makes a layout harder to run: whether it offloads, then the number of its axes, options and words.

    Of several layouts, the simplest is the one for which this is the smallest.
    """
    line = str(price.layout)
    offloads = bool(offloaded_bytes(price.records)) or (price.layout.recompute or "").startswith("offload")
    return offloads, len(line.split()) + line.count("/")


def simplest_first(prices: Sequence[Price]) -> tuple[Price, ...]:
    """Returns ``prices``, which are sorted by seconds, with the simplest of the fastest ones moved to the front.

    The fastest ones are those whose steps are less than :data:`TIED` longer than the first.
    """
    fast = (price for price in prices if price.step_s < (1 + TIED) * prices[0].step_s)
    best = min(fast, key=burdens)
    return best, *(price for price in prices if price is not best)


class StepPart(NamedTuple):
    """The seconds of one part of a step under the best layout (``best_s``) and under another one (``other_s``)."""

    part: str
    best_s: float
    other_s: float

    @property
    def more_s(self) -> float:
        """The seconds by which the other layout takes longer in this part; negative where it is faster."""
        return self.other_s - self.best_s


def differences(best: Price, other: Price) -> tuple[StepPart, ...]:
    """Returns the parts of two layouts' steps side by side; their ``more_s`` add up to the difference of the steps."""
    names = parts_of_step(best.waterfall, other.waterfall)
    return tuple(StepPart(name, best.waterfall.get(name, 0.0), other.waterfall.get(name, 0.0)) for name in names)


def loses(best: Price, other: Price) -> tuple[str, float]:
    """Returns the part of the step in which ``other`` loses the most time against ``best``, and the seconds lost."""
    most = max(differences(best, other), key=lambda part: part.more_s)
    return most.part, most.more_s


def how_much_slower(best: Price, other: Price) -> str:
    """Returns by how much the step of ``other`` is longer than that of ``best``, such as "+4%", "+0.2%" or "as fast".

    It is "as fast" below one in a thousand, which is less than prices can tell.
    """
    slower = other.step_s / best.step_s - 1
    return "as fast" if abs(slower) < _FAST else f"{slower:+.1%}" if abs(slower) < _WHOLE else f"{slower:+.0%}"


def is_tied(best: Price, other: Price) -> bool:
    """Returns whether ``other`` is faster than ``best`` by less than prices can tell apart, and is less simple."""
    return best.step_s / (1 + TIED) < other.step_s < best.step_s and burdens(best) < burdens(other)


def where_it_loses(best: Price, other: Price) -> str:
    """Returns a phrase that names the part of the step in which ``other`` loses the most against ``best``.

    It says that the best layout is simpler where the other one is a little faster. If the other parts together gain
    more than a tenth of that loss, it says how much.
    """
    if is_tied(best, other):
        return f"less than prices tell apart, and {best.layout} is simpler"
    part, seconds = loses(best, other)
    gained = other.step_s - best.step_s - seconds
    if gained < -FEW_GAINS * seconds:
        return f"{name_of_part(part)} {seconds:+.3g} s, all other parts {gained:+.3g} s"
    return f"most of it {name_of_part(part)} ({seconds:+.3g} s)"


class PriceDifference(NamedTuple):
    """A comparison of a layout with the best one: memory against the limit in bytes, and step time part by part."""

    best: Price
    other: Price
    limit_bytes: float

    @property
    def fits(self) -> bool:
        """Whether the layout's memory is at most the limit."""
        return self.other.memory_bytes <= self.limit_bytes

    def differences(self) -> tuple[StepPart, ...]:
        """Returns the parts of both steps side by side, as :func:`differences`."""
        return differences(self.best, self.other)

    def why(self) -> str:
        """Returns one sentence about how the layout compares with the best one.

        It says that the layout does not fit, and which kind of memory is the largest; that it is the best one; that it
        fits and the best one does not; or how much slower it is and in which part, or how much faster.
        """
        other, best = self.other, self.best
        if not self.fits:
            heaviest = max(other.memory, key=lambda memory: memory.num_bytes)
            kind = max(heaviest.by_kind, key=lambda name: heaviest.by_kind[name])
            return (
                f"{other.layout} does not fit: {format_decimal_bytes(other.memory_bytes)} on the fullest device, of "
                f"{format_decimal_bytes(self.limit_bytes)} that it may take; most of it {kind}, "
                f"{format_decimal_bytes(heaviest.by_kind[kind])}"
            )
        slower = other.step_s / best.step_s - 1
        if other.layout == best.layout:
            return f"{other.layout} is the best layout found"
        if best.memory_bytes > self.limit_bytes:
            return f"{other.layout} fits, and {best.layout}, the nearest to fit of those that were priced, does not"
        if is_tied(best, other):
            return f"{other.layout} is {-slower:.1%} faster than {best.layout}, {where_it_loses(best, other)}"
        if slower < 0:
            return (
                f"{other.layout} is {-slower:.1%} faster than {best.layout}, and is not among the layouts priced here"
            )
        return f"{other.layout} is {slower:.1%} slower than {best.layout}, {where_it_loses(best, other)}"

    def text(self) -> str:
        """Returns the sentence of :meth:`why`, followed by a table of both steps part by part.

        Parts that take less than 0.05 % of the best step under both layouts are left out.
        """
        rows = [(name_of_part(part.part), part.best_s, part.other_s) for part in self.differences()]
        rows.append(("step", self.best.step_s, self.other.step_s))
        head = f"  {'seconds':20} {'best':>9} {'this':>9} {'more':>9}"
        shown = [row for row in rows if max(row[1:]) >= LEAST * self.best.step_s]
        digits = 3 - floor(log10(self.best.step_s))  # what is less than a thousandth of a step is rounding
        more = [round(b - a, digits) + 0.0 for _, a, b in shown]
        lines = (f"  {n:20} {a:>9.3g} {b:>9.3g} {m:>+9.3g}" for (n, a, b), m in zip(shown, more, strict=True))
        return "\n".join([self.why(), head, *lines])

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain data for JSON."""
        return {
            "layout": str(self.other.layout), "against": str(self.best.layout), "why": self.why(), "fits": self.fits,
            "step_s": self.other.step_s, "memory_bytes": self.other.memory_bytes,
            "parts": [{"part": part.part, "best_s": part.best_s, "this_s": part.other_s, "more_s": part.more_s}
                      for part in self.differences()],
        }  # fmt: skip
