"""``SearchConstraints``: what a search may try: the words of ``--fix`` and ``--without``, the precision, the memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwright.errors import LayoutError
from shardwright.layout import OWN, Layout, Precision
from shardwright.plan.recompute import OFFLOADS, WORDS

MOST_PRICED = 4
"""The layouts that a search prices by default; each takes seconds of rehearsals."""

MOST_TO_FIT = 8
"""How many more layouts a search may price if none of those with the best estimates fits in memory."""

RECOMPUTE = (None, *(word for word in WORDS if word not in OFFLOADS))


@dataclass(frozen=True)
class SearchConstraints:
    """The constraints of a search: parts that a layout line must have, words that it must not, precision and memory.

    ``fix`` has the parts, separated by spaces, such as "tp8 dp/zero1 mb32": each names an axis, with or without its
    size, and options that it must have, or is another word of a line: "mb32", "bf16", "recompute:full", or "recompute"
    for any of its kinds. ``without`` has the words, which name axes or options. ``limit_bytes`` is the memory that a
    rank may take, and ``most`` the most layouts to price.
    """

    fix: str = ""
    without: tuple[str, ...] = ()
    precision: Precision = "bf16"
    limit_bytes: float = 0.0
    most: int = MOST_PRICED
    most_stages: int = 0
    """The most stages that the model has whole blocks for. 0: unknown."""
    most_to_fit: int = MOST_TO_FIT
    """How many more layouts may be priced if none of those with the best estimates fits in memory."""

    def allows(self, layout: Layout) -> bool:
        """Returns whether a layout has all parts that must be there, and none of the words that must not."""
        return not self.is_left_out(layout) and not self.lacking(layout)

    def is_left_out(self, layout: Layout) -> bool:
        """Returns whether a layout has one of the words that it must not have."""
        items = str(layout).split()
        words = {word for item in items for word in (item, *item.split("/"))}
        words |= {word.partition(":")[0] for word in words} | {word.rstrip("0123456789x") for word in items}
        return bool(words & set(self.without)) or any(factor.axis in self.without for factor in layout.factors)

    def lacking(self, layout: Layout, *, may_get_options: bool = False) -> str:
        """Returns the first part that the layout must have and has not; "" if it has all.

        If the layout ``may_get_options``, such as a schedule or a ZeRO stage, parts need not have theirs yet.
        """
        items = str(layout).split()
        words = {f"mb{layout.num_microbatches}", layout.precision, f"recompute:{layout.recompute}"}
        words |= {"recompute"} if layout.recompute is not None else set()
        missing = (part for part in self._parts if part not in words)
        wanted = ((part, part.partition("/")[0] if may_get_options else part) for part in missing)
        return next((part for part, word in wanted if not any(_has(item, word) for item in items)), "")

    @cached_property
    def _parts(self) -> tuple[str, ...]:
        return tuple(map(_as_written, self.fix.split()))

    @property
    def num_microbatches(self) -> int | None:
        """The number of microbatches that is fixed, as by "mb8"; None if any may be."""
        numbers = (part.partition("/")[0].removeprefix("mb") for part in self.fix.split() if part.startswith("mb"))
        return next((int(number) for number in numbers if number.isdecimal() and int(number)), None)

    @property
    def own_statistics(self) -> bool:
        """Whether microbatches are to have statistics of their own, as by "mb8/own-statistics"."""
        return any(part.startswith("mb") and OWN in part.split("/") for part in self.fix.split())

    @property
    def recomputed(self) -> tuple[str | None, ...]:
        """The ways to recompute activations that are tried: the one that is fixed, or all that a search tries."""
        head = "recompute:"
        ways = tuple(part.removeprefix(head) for part in self.fix.split() if part.startswith(head))
        return ways[:1] or (RECOMPUTE[1:] if "recompute" in self.fix.split() else RECOMPUTE)


def _as_written(part: str) -> str:
    """Returns a part as the line of a layout writes it, if it has sizes and options.

    >>> _as_written("tp8/3d"), _as_written("dp/zero1"), _as_written("tp8")
    ('tp2x2x2/3d', 'dp/zero1', 'tp8')
    """
    try:
        factors = Layout.parse(part).factors if "/" in part else ()
    except LayoutError:  # it has no size, as "dp/zero1", or is wrong
        return part
    return str(factors[0]) if factors else part


def _has(item: str, part: str) -> bool:
    """Whether an item of a line has all that a part asks for: its axis with the size, and its options.

    >>> _has("dp8/zero1", "dp8"), _has("dp8/zero1", "dp/zero1"), _has("dp8", "dp4"), _has("tp8", "tp/sp")
    (True, True, False, False)
    """
    head, *options = part.split("/")
    own, *others = item.split("/")
    return (own == head or own.rstrip("0123456789x") == head) and set(options) <= set(others)
