"""The cut of a layer's features over several mesh axes at once: one part for each combination of indices on them.

The number of a combination, counted row-major with the slowest axis first, is called its joint index.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from shardwright.mesh import Coord, balanced
from shardwright.sharding.box import Range, Ranges, balanced_ranges, width


def merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Returns the union of index ranges as ascending ranges that neither overlap nor touch."""
    union: list[Range] = []
    for a, b in sorted(ranges):
        if union and a <= union[-1][1]:
            union[-1] = (union[-1][0], max(b, union[-1][1]))
        elif a < b:
            union.append((a, b))
    return tuple(union)


def common(ranges: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Returns the intersection of two lists of index ranges, as a list of ranges."""
    return [(max(a, c), min(b, d)) for a, b in ranges for c, d in others if max(a, c) < min(b, d)]


@dataclass(frozen=True)
class Features:
    """The cut of ``size`` features over mesh axes: the index ranges of features that ranks hold.

    ``axes`` are pairs (name, size), the slowest first. ``parts`` gives the ranges for each joint index: a row-major
    count of the combinations of indices on these axes. Without axes the features are whole.

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
        """Returns ``size`` features cut over ``axes`` as evenly as possible; the first parts have one more."""
        return Features(size, tuple(axes), balanced_ranges(size, prod(n for _, n in axes)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes over which the features are cut."""
        return tuple(name for name, _ in self.axes)

    @property
    def fewest(self) -> int:
        """The number of features in the smallest part."""
        return min(map(width, self.parts))

    @property
    def overlaps(self) -> bool:
        """Whether some feature is in several parts, such as a key head that several ranks need."""
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
        """Returns the index in ``parts`` of the ranges that the rank at ``coord`` holds: its joint index, row-major."""
        return self._number([coord[name] for name in self.names])

    def held(self, coord: Coord, over: Collection[str] = ()) -> tuple[Range, ...]:
        """Returns the feature ranges of the rank at ``coord`` after an all-gather over the axes ``over``."""
        return merged(self._parts_at({name: coord[name] for name in self.names if name not in over}))

    def kept(self, coord: Coord) -> tuple[Range, ...]:
        """Returns the ranges that the rank at ``coord`` has if each axis cuts independently of the others.

        Where parts overlap, this is more than :meth:`held` returns.

        >>> overlapping = Features(2, (("row", 2), ("col", 2)), (((0, 1),), ((0, 2),), ((1, 2),), ((1, 2),)))
        >>> overlapping.held({"row": 0, "col": 0}), overlapping.kept({"row": 0, "col": 0})
        (((0, 1),), ((0, 2),))
        """
        kept: tuple[Range, ...] = ((0, self.size),)
        for axis in self.names:
            kept = merged(common(kept, self.along(axis)[coord[axis]]))
        return kept

    def along(self, axis: str) -> Ranges:
        """Returns, for each index on ``axis``, the ranges that all ranks at that index hold together."""
        return tuple(merged(self._parts_at({axis: i})) for i in range(dict(self.axes)[axis]))

    def sizes(self, coord: Coord, axis: str, over: Collection[str] = ()) -> tuple[int, ...]:
        """Returns the number of features of each rank along ``axis`` after an all-gather over the axes ``over``."""
        members = range(dict(self.axes)[axis])
        return tuple(width(self.held({**coord, axis: i}, over)) for i in members)

    def joins(self, coord: Coord) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the all-gathers that make the features whole: each axis, fastest first, and its ranks' feature counts.

        The counts are those after the all-gathers over the axes before.
        """
        for number, axis in reversed(list(enumerate(self.names))):
            yield axis, self.sizes(coord, axis, self.names[number + 1 :])


def nested(held: Mapping[tuple[int, ...], Sequence[Range]], parts: int) -> Ranges:
    """Cuts the index ranges of each rank further, into ``parts`` balanced slices, and returns the ranges by slice.

    ``held`` gives the ranges of each rank, by the rank's indices on the axes that cut them so far. Entry i of the
    result is the union of the i-th slices of all ranks.
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
    return tuple(merged(pieces) for pieces in slices)
