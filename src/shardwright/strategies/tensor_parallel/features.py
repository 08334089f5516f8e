"""How features lie along several axes at once: one part for each joint index."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from shardwright.mesh import Coord, balanced
from shardwright.sharding.box import Range, Ranges, balanced_ranges


def merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same elements as ascending ranges that do not touch.

    >>> merged([(4, 6), (0, 2), (2, 4), (5, 7)])
    ((0, 7),)
    """
    found: list[Range] = []
    for a, b in sorted(ranges):
        if found and a <= found[-1][1]:
            found[-1] = (found[-1][0], max(b, found[-1][1]))
        elif a < b:
            found.append((a, b))
    return tuple(found)


def common(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """The elements that both have.

    >>> common([(0, 4)], [(1, 2), (3, 6)])
    [(1, 2), (3, 4)]
    """
    return [(max(a, c), min(b, d)) for a, b in ranges for c, d in others if max(a, c) < min(b, d)]


def width(ranges: Sequence[Range]) -> int:
    """How many elements ranges hold."""
    return sum(b - a for a, b in ranges)


@dataclass(frozen=True)
class Features:
    """Features cut over ``axes``, (name, size) slowest first: ``parts`` by joint index, row-major. No axes: whole.

    >>> cut = Features.balanced(7, (("row", 2), ("col", 2)))
    >>> cut.held({"row": 0, "col": 1}), cut.held({"row": 0, "col": 1}, over=["col"])
    (((2, 4),), ((0, 4),))
    >>> cut.along("col")
    (((0, 2), (4, 6)), ((2, 4), (6, 7)))
    """

    size: int
    axes: tuple[tuple[str, int], ...]
    parts: Ranges

    @staticmethod
    def balanced(size: int, axes: Sequence[tuple[str, int]]) -> Features:
        """As even as can be; the first parts hold one more."""
        return Features(size, tuple(axes), balanced_ranges(size, prod(n for _, n in axes)))

    @property
    def names(self) -> tuple[str, ...]:
        """The axes that cut."""
        return tuple(name for name, _ in self.axes)

    @property
    def fewest(self) -> int:
        """How many elements the smallest part has."""
        return min(map(width, self.parts))

    @property
    def overlaps(self) -> bool:
        """Whether some element lies in two parts."""
        return sum(width(part) for part in self.parts) > width(merged([r for part in self.parts for r in part]))

    def _parts_at(self, fixed: Mapping[str, int]) -> list[Range]:
        choices = [(fixed[name],) if name in fixed else range(size) for name, size in self.axes]
        return [held for index in product(*choices) for held in self.parts[self._number(index)]]

    def _number(self, index: Sequence[int]) -> int:
        number = 0
        for (_, size), i in zip(self.axes, index, strict=True):
            number = number * size + i
        return number

    def number(self, coord: Coord) -> int:
        """The joint index of ``coord``."""
        return self._number([coord[name] for name in self.names])

    def held(self, coord: Coord, over: Collection[str] = ()) -> tuple[Range, ...]:
        """What ``coord`` holds, with all that the members along ``over`` hold."""
        return merged(self._parts_at({name: coord[name] for name in self.names if name not in over}))

    def kept(self, coord: Coord) -> tuple[Range, ...]:
        """What ``coord`` holds once each axis has cut by itself: more than its part, where parts overlap.

        >>> overlapping = Features(2, (("row", 2), ("col", 2)), (((0, 1),), ((0, 2),), ((1, 2),), ((1, 2),)))
        >>> overlapping.held({"row": 0, "col": 0}), overlapping.kept({"row": 0, "col": 0})
        (((0, 1),), ((0, 2),))
        """
        kept: tuple[Range, ...] = ((0, self.size),)
        for axis in self.names:
            kept = merged(common(kept, self.along(axis)[coord[axis]]))
        return kept

    def along(self, axis: str) -> Ranges:
        """What any member at each index of one axis holds: the cut that this axis makes."""
        return tuple(merged(self._parts_at({axis: i})) for i in range(dict(self.axes)[axis]))

    def sizes(self, coord: Coord, axis: str, over: Collection[str] = ()) -> tuple[int, ...]:
        """How many features each member of ``axis`` holds, with what lies along ``over`` joined."""
        members = range(dict(self.axes)[axis])
        return tuple(width(self.held({**coord, axis: i}, over)) for i in members)


def nested(held: Mapping[tuple[int, ...], Sequence[Range]], parts: int) -> Ranges:
    """A further cut of what each joint index holds, in balanced slices: the ranges of each slice, over all.

    >>> nested({(0,): [(0, 3)], (1,): [(3, 6)]}, 2)
    (((0, 2), (3, 5)), ((2, 3), (5, 6)))
    """
    slices: list[list[Range]] = [[] for _ in range(parts)]
    for ranges in held.values():
        for number, (start, stop) in enumerate(pairwise(balanced(width(ranges), parts))):
            offset = 0
            for a, b in ranges:
                low, high = max(a, a + start - offset), min(b, a + stop - offset)
                if low < high:
                    slices[number].append((low, high))
                offset += b - a
    return tuple(merged(each) for each in slices)
