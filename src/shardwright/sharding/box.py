"""Boxes of a tensor (a range of each dim), pieces of local tensors, and functions that read and write local tensors.

A rank's part of a tensor is an ordered list of pieces. A piece is a box of the whole tensor together with the place
where that box begins in the rank's local tensor::

    whole (4, 4)            local (4, 2): two pieces        local (5,): a flat run, two pieces
    . A A .                 A A                             . . . .
    . A A .                 A A                             . . P P       P P Q Q Q
    . B B .                 B B                             Q Q Q .
    . B B .                 B B                             . . . .
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from math import prod
from operator import lt
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.mesh import balanced

Range = tuple[int, int]
"""A half-open range of a dim: the first index, and one past the last."""

Ranges = tuple[tuple[Range, ...], ...]
"""For each part of a dim, such as each rank of an axis, its ranges in the order in which they are stored."""


class Box(NamedTuple):
    """A box of a tensor: for each dim the range from ``start`` up to, but not including, ``stop``.

    A box of a 0-d tensor has one element.

    >>> box = Box((0, 2), (3, 4))
    >>> box.shape, box.size, box.intersect(Box((2, 0), (9, 3)))
    ((3, 2), 6, Box(start=(2, 2), stop=(3, 3)))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Box:
        """Returns the box of all elements of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of the box in every dim."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """The number of elements in the box."""
        return prod(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that index a whole tensor to get this box."""
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """Returns the box of elements that are in this box and in ``other``, or None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(lt, start, stop)) else None

    def shift(self, offset: Sequence[int]) -> Box:
        """Returns the box moved by ``offset``, one number for each dim."""
        return Box(
            tuple(a + by for a, by in zip(self.start, offset, strict=True)),
            tuple(b + by for b, by in zip(self.stop, offset, strict=True)),
        )

    def minus(self, other: Box) -> tuple[Box, ...]:
        """Returns the rest of this box without the elements of ``other``: disjoint boxes, at most two for each dim.

        >>> Box((0,), (9,)).minus(Box((2,), (4,)))
        (Box(start=(0,), stop=(2,)), Box(start=(4,), stop=(9,)))
        """
        common = self.intersect(other)
        if common is None:
            return (self,)
        # dim by dim, cut off the slabs before and after the common part; what remains shrinks towards it
        rest, (start, stop) = [], self
        for dim, (first, last) in enumerate(zip(*common, strict=True)):
            if start[dim] < first:
                rest.append(Box(start, (*stop[:dim], first, *stop[dim + 1 :])))
            if last < stop[dim]:
                rest.append(Box((*start[:dim], last, *start[dim + 1 :]), stop))
            start = (*start[:dim], first, *start[dim + 1 :])
            stop = (*stop[:dim], last, *stop[dim + 1 :])
        return tuple(rest)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


class Piece(NamedTuple):
    """A box of the whole tensor, and the offset at which a rank's local tensor stores it.

    ``local_offset`` has one number for each dim of the whole tensor. If the local tensor is a flat 1-D buffer, it has
    one number instead, and the buffer holds the box's elements in row-major order without gaps. For a 1-D tensor both
    are the same.

    >>> Piece(Box((2, 0), (4, 3)), (0, 0)).is_flat, Piece(Box((2, 0), (4, 3)), (7,)).is_flat
    (False, True)
    """

    whole: Box
    local_offset: tuple[int, ...]

    @property
    def is_flat(self) -> bool:
        """Whether the local tensor is a flat buffer rather than one with the dims of the whole."""
        return len(self.local_offset) != len(self.whole.start)

    @property
    def local_box(self) -> Box:
        """The box of the local tensor that this piece occupies; it is 1-D if the local tensor is flat."""
        return Box.of((self.whole.size,) if self.is_flat else self.whole.shape).shift(self.local_offset)

    def parts(self, box: Box) -> tuple[Piece, ...]:
        """Returns the pieces of the local tensor that hold ``box``, a box of the whole tensor inside this piece.

        There is one piece or, if this piece is flat, one for each contiguous run of ``box``.

        >>> Piece(Box((2, 0), (4, 3)), (7,)).parts(Box((2, 1), (4, 2)))
        (Piece(whole=Box(start=(2, 1), stop=(3, 2)), local_offset=(8,)),
         Piece(whole=Box(start=(3, 1), stop=(4, 2)), local_offset=(11,)))
        """
        back = tuple(-a for a in self.whole.start)
        inside = box.shift(back)
        if not self.is_flat:
            return (Piece(box, inside.shift(self.local_offset).start),)
        offset = self.local_offset[0]
        return tuple(
            Piece(run.shift(self.whole.start), (offset + first,)) for first, run in runs(self.whole.shape, inside)
        )


def balanced_ranges(size: int, parts: int) -> Ranges:
    """Returns, for each part, its range of a dim of ``size`` that is cut into ``parts`` slices of nearly equal size.

    Each part has one range (start, stop), or none if it would be empty.

    >>> balanced_ranges(5, 3), balanced_ranges(1, 2)
    ((((0, 2),), ((2, 4),), ((4, 5),)), (((0, 1),), ()))
    """
    cuts = balanced(size, parts)
    return tuple(((a, b),) if a < b else () for a, b in pairwise(cuts))


def width(ranges: Sequence[Range]) -> int:
    """Returns the number of elements in ranges that do not overlap."""
    return sum(b - a for a, b in ranges)


def concat(blocks: Sequence[int], sections: Sequence[Ranges]) -> Ranges:
    """Returns, for each part, its ranges of a dim that joins several sections, from its ranges in each section.

    An example is the dim of fused Q, K and V. ``blocks`` are the sizes of the sections. The ranges in ``sections``
    count from the start of their own section, the returned ranges from the start of the dim.

    >>> concat((4, 1), [balanced_ranges(4, 2), (((0, 1),), ((0, 1),))])  # the last one is held by both parts
    (((0, 2), (4, 5)), ((2, 4), (4, 5)))
    """
    assert len(blocks) == len(sections), f"{len(blocks)} sizes for {len(sections)} sections"
    joined: list[tuple[Range, ...]] = [()] * len(sections[0])
    start = 0
    for size, section in zip(blocks, sections, strict=True):
        assert all(0 <= a <= b <= size for ranges in section for a, b in ranges), f"{section} leaves {size}"
        shifted = (tuple((start + a, start + b) for a, b in ranges) for ranges in section)
        joined = [have + more for have, more in zip(joined, shifted, strict=True)]
        start += size
    return tuple(joined)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Returns the elements ``start:stop`` of a flattened tensor of ``shape`` as boxes of that shape, in order.

    There are at most ``2 n - 1`` boxes for n dims, and at most one for a 0-d shape. An empty range gives none.

    >>> [str(box) for box in flat_boxes((4, 4), 6, 13)]
    ['[1:2, 2:4]', '[2:3, 0:4]', '[3:4, 0:1]']
    """
    assert 0 <= start <= stop <= prod(shape), f"{start}:{stop} leaves {tuple(shape)}"
    return tuple(_flat_boxes(tuple(shape), start, stop)) if start < stop else ()


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if len(shape) < 2:
        yield Box((start,), (stop,)) if shape else Box((), ())
        return
    row, inner = prod(shape[1:]), Box.of(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if head or first == last:  # a part of the first row
        for box in _flat_boxes(shape[1:], head, tail if first == last else row):
            yield Box((first, *box.start), (first + 1, *box.stop))
        first += 1
    if first < last:  # whole rows
        yield Box((first, *inner.start), (last, *inner.stop))
    if tail and first <= last:  # a part of the last row
        for box in _flat_boxes(shape[1:], 0, tail):
            yield Box((last, *box.start), (last + 1, *box.stop))


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, Box]]:
    """Yields (first flat index, box) of each contiguous run of a box in a row-major tensor of ``shape``.

    >>> [(first, str(run)) for first, run in runs((3, 4), Box((0, 1), (2, 3)))]
    [(1, '[0:1, 1:3]'), (5, '[1:2, 1:3]')]
    """
    dim = len(shape)
    while dim > 0 and box.start[dim - 1] == 0 and box.stop[dim - 1] == shape[dim - 1]:
        dim -= 1
    dim = max(dim - 1, 0)  # a run spans this dim and all later ones; the earlier dims are walked index by index
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    for index in product(*(range(a, b) for a, b in zip(box.start[:dim], box.stop[:dim], strict=True))):
        run = Box(index + box.start[dim:], tuple(i + 1 for i in index) + box.stop[dim:])
        yield sum(a * stride for a, stride in zip(run.start, strides, strict=True)), run


def cells(held: Iterable[tuple[int, Iterable[Box]]]) -> tuple[tuple[Box, frozenset[int]], ...]:
    """Splits overlapping boxes into disjoint ones; returns each with the set of ranks that hold it, sorted by start.

    ``held`` gives the boxes of each rank; empty boxes are left out. Neighboring boxes with the same ranks are joined if
    together they form a box.

    >>> for cell, holders in cells([(0, [Box((0,), (4,))]), (1, [Box((2,), (6,))])]):
    ...     print(cell, sorted(holders))
    [0:2] [0]
    [2:4] [0, 1]
    [4:6] [1]
    """
    holders_of: defaultdict[Box, set[int]] = defaultdict(set)
    for holder, boxes in held:
        for box in boxes:
            if box.size:
                holders_of[box].add(holder)
    if not holders_of:
        return ()
    num_dims = len(next(iter(holders_of)).start)
    # the sweep cuts at every edge of every box, also where the holders do not change; the joins undo such cuts
    held_boxes = list(_cells([(box, frozenset(holders)) for box, holders in holders_of.items()], 0, num_dims))
    for dim in reversed(range(num_dims)):
        held_boxes = _joined(held_boxes, dim)
    return tuple(sorted(held_boxes, key=lambda cell: cell[0]))


_HeldBox = tuple[Box, frozenset[int]]


def _cells(held: Sequence[_HeldBox], dim: int, num_dims: int) -> Iterator[_HeldBox]:
    """Yields disjoint boxes from a sweep along ``dim``; the boxes between two edges are swept along the next dim."""
    if dim == num_dims or len(held) == 1:  # no dim left to sweep, or one box left
        holders = frozenset[int]().union(*(ranks for _, ranks in held))
        start, stop = held[0][0]
        yield Box(start[dim:], stop[dim:]), holders
        return
    begins: defaultdict[int, list[int]] = defaultdict(list)
    ends: defaultdict[int, list[int]] = defaultdict(list)
    for number, (box, _) in enumerate(held):
        begins[box.start[dim]].append(number)
        ends[box.stop[dim]].append(number)
    edges = sorted({*begins, *ends})
    crossing: dict[int, None] = {}
    for low, high in pairwise(edges):
        for number in ends[low]:  # ends before begins: a box that stops at an edge is not in the slab after it
            del crossing[number]
        crossing.update(dict.fromkeys(begins[low]))
        if crossing:
            for cell, holders in _cells([held[number] for number in crossing], dim + 1, num_dims):
                yield Box((low, *cell.start), (high, *cell.stop)), holders


def _joined(held_boxes: Sequence[_HeldBox], dim: int) -> list[_HeldBox]:
    """Returns the boxes, with those joined that meet along ``dim`` and agree in every other dim and their holders."""
    lines: defaultdict[object, list[_HeldBox]] = defaultdict(list)
    for box, holders in held_boxes:
        others = (*box.start[:dim], *box.start[dim + 1 :], *box.stop[:dim], *box.stop[dim + 1 :])
        lines[(holders, others)].append((box, holders))
    joined: list[_HeldBox] = []
    for line in lines.values():
        line.sort(key=lambda cell: cell[0].start[dim])
        last = len(joined)
        for box, holders in line:
            if len(joined) > last and joined[-1][0].stop[dim] == box.start[dim]:
                joined[-1] = (Box(joined[-1][0].start, box.stop), holders)
            else:
                joined.append((box, holders))
    return joined


def read(local: Tensor, piece: Piece, box: Box) -> Tensor:
    """Returns a view of the elements of a local tensor that are ``box`` of the whole tensor.

    ``piece`` is the piece of ``local`` that contains the box.

    >>> flat = torch.arange(6)  # rows 2 and 3 of a tensor with three columns
    >>> read(flat, Piece(Box((2, 0), (4, 3)), (0,)), Box((2, 1), (4, 3)))
    tensor([[1, 2],
            [4, 5]])
    """
    assert piece.whole.intersect(box) == box, f"{box} is not inside {piece.whole}"
    inside = box.shift(tuple(-a for a in piece.whole.start))
    if piece.is_flat:
        run = local.narrow(0, piece.local_offset[0], piece.whole.size)
        return run.view(piece.whole.shape)[inside.slices]
    return local[inside.shift(piece.local_offset).slices]


def write(local: Tensor, piece: Piece, box: Box, values: Tensor) -> None:
    """Writes ``values`` into the elements of a local tensor that are ``box`` of the whole tensor.

    ``piece`` is the piece of ``local`` that contains the box.

    >>> local = torch.zeros(2)
    >>> write(local, Piece(Box((4,), (6,)), (0,)), Box((5,), (6,)), torch.ones(1)); local
    tensor([0., 1.])
    """
    with torch.no_grad():
        read(local, piece, box).copy_(values)


def cut(whole: Tensor, pieces: Sequence[Piece], local_shape: Sequence[int]) -> Tensor:
    """Returns a new contiguous local tensor of ``local_shape`` into which ``pieces`` of ``whole`` were copied.

    Elements that no piece covers are uninitialized.

    >>> cut(torch.arange(6), [Piece(Box((4,), (6,)), (0,)), Piece(Box((0,), (1,)), (2,))], (3,))
    tensor([4, 5, 0])
    """
    local = whole.new_empty(tuple(local_shape))
    for piece in pieces:
        write(local, piece, piece.whole, whole[piece.whole.slices])
    return local
