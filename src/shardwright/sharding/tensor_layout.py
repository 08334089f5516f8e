"""Where one tensor lies on every coordinate of a mesh."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, chain, product
from math import prod
from typing import NamedTuple

from shardwright.axes import mesh_axes
from shardwright.mesh import Coord, Mesh, balanced
from shardwright.sharding.box import Box, Piece, Range, Ranges, cells, flat_boxes, runs


class _HeldOnly(NamedTuple):
    """Held only at some indices of an axis."""

    axis: str
    indices: tuple[int, ...]


class _Cut(NamedTuple):
    """Index i of the axis holds ``ranges[i]`` of a dim of the whole."""

    axis: str
    dim: int
    ranges: Ranges


class _FlatSlices(NamedTuple):
    """Index i of the axis holds the i-th of ``parts`` balanced slices of the local row-major sequence.

    Where tensors lie ``beside`` each other, the slices are those of all of them, one after the other; this one has
    its ``place`` among them.
    """

    axis: str
    parts: int
    beside: tuple[TensorLayout, ...] = ()
    place: int = 0

    def slice_of(self, index: int, coord: Coord, size: int) -> Range:
        """What of this tensor's ``size`` local elements an index holds."""
        sizes = [lies.num_elements(coord) for lies in self.beside] or [size]
        first = sum(sizes[: self.place])
        cuts = _balanced(sum(sizes), self.parts)
        return min(max(cuts[index] - first, 0), size), min(max(cuts[index + 1] - first, 0), size)


_LayoutStep = _HeldOnly | _Cut | _FlatSlices


class _Local(NamedTuple):
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorLayout:
    """Where one tensor lies: for every coordinate of a mesh, the ordered pieces that it holds.

    It is kept as the steps that made it, so it is as small on 3,072 ranks as on three, and two that were made
    by the same steps are equal. An axis that no step names holds copies.

    >>> from shardwright.sharding.box import balanced_ranges
    >>> lies = TensorLayout.whole((4, 6)).cut("tp", 0, balanced_ranges(4, 2)).cut("dp", 1, balanced_ranges(6, 3))
    >>> lies.axes, lies.local_shape({"dp": 2, "tp": 1})
    (('dp', 'tp'), (2, 2))
    >>> [str(piece.whole) for piece in lies.pieces({"dp": 2, "tp": 1})]
    ['[2:4, 4:6]']
    """

    shape: tuple[int, ...]
    steps: tuple[_LayoutStep, ...] = ()
    _found: dict[tuple[int, ...], _Local] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert all(size >= 0 for size in self.shape), f"no tensor has shape {self.shape}"
        named = [step.axis for step in self.steps]
        assert set(named) <= set(mesh_axes()), f"no such axis among {named}"
        assert len(set(named)) == len(named), f"an axis cuts once, not twice: {named}"

    @staticmethod
    def whole(shape: Sequence[int]) -> TensorLayout:
        """Copied to every rank.

        >>> TensorLayout.whole((2, 3)).pieces({"tp": 5})
        (Piece(whole=Box(start=(0, 0), stop=(2, 3)), local_offset=(0, 0)),)
        """
        return TensorLayout(tuple(shape))

    def cut(self, axis: str, dim: int, ranges: Ranges) -> TensorLayout:
        """Index i on ``axis`` holds, of what was held here before, ``ranges[i]`` of ``dim``.

        The ranges count in the whole tensor. Those of one index are stored in the order given and are
        disjoint; those of different indices may overlap, and together they cover the dim.

        >>> from shardwright.sharding.box import fused_ranges
        >>> qkv = TensorLayout.whole((6,)).cut("tp", 0, fused_ranges((2, 2, 2), 2))
        >>> [str(piece.whole) for piece in qkv.pieces({"tp": 1})]
        ['[1:2]', '[3:4]', '[5:6]']
        """
        assert not self.is_flat, "flat slices cannot be cut along a dim: cut first"
        assert 0 <= dim < len(self.shape), f"{self.shape} has no dim {dim}"
        size = self.shape[dim]
        for held in ranges:
            assert all(0 <= a <= b <= size for a, b in held), f"{held} leaves a dim of {size}"
            assert sum(b - a for a, b in held) == _covered(held), f"{held} overlap"
        assert _covered([r for held in ranges for r in held]) == size, f"{ranges} leave out a part of {size}"
        return self._then(_Cut(axis, dim, tuple(map(tuple, ranges))))

    def only(self, axis: str, indices: Iterable[int]) -> TensorLayout:
        """Held only at these indices of ``axis``; the others hold nothing.

        >>> stage = TensorLayout.whole((2,)).only("pp", [1])
        >>> [stage.num_elements({"pp": pp}) for pp in range(3)]
        [0, 2, 0]
        """
        kept = set(indices)
        before = [step for step in self.steps if isinstance(step, _HeldOnly) and step.axis == axis]
        for step in before:
            kept &= set(step.indices)
        assert kept, f"held at no index of {axis}"
        assert min(kept) >= 0, f"{axis} has no index {min(kept)}"
        others = tuple(step for step in self.steps if step not in before)
        return TensorLayout(self.shape, others)._then(_HeldOnly(axis, tuple(sorted(kept))))

    def on_all(self, axis: str) -> TensorLayout:
        """The same, but held at every index of ``axis``: what :meth:`only` took away is back.

        >>> TensorLayout.whole((2,)).only("pp", [1]).on_all("pp").num_elements({"pp": 0})
        2
        """
        return TensorLayout(
            self.shape, tuple(s for s in self.steps if not (isinstance(s, _HeldOnly) and s.axis == axis))
        )

    def flat(self, axis: str, parts: int, beside: Sequence[TensorLayout] = (), place: int = 0) -> TensorLayout:
        """Index i on ``axis`` holds the i-th of ``parts`` balanced slices of what each rank held before.

        The slices are cut from the local tensor's row-major sequence; the local tensor is then 1-D. Tensors ``beside``
        each other, this one at ``place`` among them, form one sequence, and the slices are cut from that: then an
        index may hold much of one and nothing of another. All of them are cut along the same axes.

        >>> lies = TensorLayout.whole((2, 3)).flat("dp", 4)
        >>> [[str(piece.whole) for piece in lies.pieces({"dp": dp})] for dp in range(4)]
        [['[0:1, 0:2]'], ['[0:1, 2:3]', '[1:2, 0:1]'], ['[1:2, 1:2]'], ['[1:2, 2:3]']]
        >>> both = (TensorLayout.whole((2, 3)), TensorLayout.whole((2,)))
        >>> [[each.flat("dp", 2, both, i).num_elements({"dp": dp}) for i, each in enumerate(both)] for dp in (0, 1)]
        [[4, 0], [2, 2]]
        """
        assert parts > 0, "no parts"
        assert not beside or beside[place] == self, "a tensor has its own place among those beside it"
        assert all(lies.axes == self.axes for lies in beside), "slices of all are the same on the same ranks alone"
        return self._then(_FlatSlices(axis, parts, tuple(beside), place))

    def _then(self, step: _LayoutStep) -> TensorLayout:
        # Steps that may change places are kept in one order, so that equal layouts compare equal.
        def order(step: _LayoutStep) -> tuple[int, int]:
            if isinstance(step, _HeldOnly):
                return 0, mesh_axes().index(step.axis)
            return (1, step.dim) if isinstance(step, _Cut) else (2, 0)

        assert step.axis in mesh_axes(), f"no such axis: {step.axis}"
        return TensorLayout(self.shape, tuple(sorted((*self.steps, step), key=order)))

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which not all ranks hold the same, slowest first."""
        named = {step.axis for step in self.steps}
        return tuple(axis for axis in mesh_axes() if axis in named)

    @property
    def is_flat(self) -> bool:
        """Whether the local tensors are flat 1-D buffers."""
        return any(isinstance(step, _FlatSlices) for step in self.steps)

    @cached_property
    def table(self) -> Mapping[tuple[int, ...], tuple[Piece, ...]]:
        """The pieces by the indices on ``axes``, of every index that holds any, in rank order.

        >>> from shardwright.sharding.box import balanced_ranges
        >>> sorted(TensorLayout.whole((4,)).cut("tp", 0, balanced_ranges(4, 2)).only("pp", [1]).table)
        [(1, 0), (1, 1)]
        """
        indices: dict[str, Iterable[int]] = {}
        for step in self.steps:
            if isinstance(step, _HeldOnly):
                indices[step.axis] = step.indices
            else:
                indices[step.axis] = range(len(step.ranges) if isinstance(step, _Cut) else step.parts)
        keys = product(*(indices[axis] for axis in self.axes))
        every = ((key, self._local(key).pieces) for key in keys)
        return {key: pieces for key, pieces in every if pieces}

    def pieces(self, coord: Coord) -> tuple[Piece, ...]:
        """What ``coord`` holds, in the order in which it stores it; an axis left out counts as 0."""
        return self._local(self._key(coord)).pieces

    def local_shape(self, coord: Coord) -> tuple[int, ...]:
        """The shape of the local tensor at ``coord``; where nothing is held it has no elements.

        >>> TensorLayout.whole((2, 3)).only("pp", [1]).local_shape({"pp": 0})
        (0, 0)
        """
        return self._local(self._key(coord)).shape

    def num_elements(self, coord: Coord) -> int:
        """How many elements ``coord`` holds.

        >>> [TensorLayout.whole((2, 3)).flat("dp", 4).num_elements({"dp": dp}) for dp in range(4)]
        [2, 2, 1, 1]
        """
        return prod(self.local_shape(coord))

    def by_rank(self, mesh: Mesh, ranks: Iterable[int] | None = None) -> dict[int, tuple[Piece, ...]]:
        """The pieces of these ranks, all of the mesh when left out: what the transfer planner reads.

        >>> TensorLayout.whole(()).only("pp", [0]).by_rank(Mesh(pp=2))
        {0: (Piece(whole=Box(start=(), stop=()), local_offset=()),), 1: ()}
        """
        return {rank: self.pieces(mesh.coord(rank)) for rank in (range(mesh.size) if ranks is None else ranks)}

    def holders(self, mesh: Mesh, axes: Collection[str], at: Coord) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """Who shares what among the ranks that differ from ``at`` only on ``axes``.

        Returns disjoint boxes, each with the ranks that hold it, in rank order; together they cover all that
        these ranks hold.

        >>> from shardwright.sharding.box import balanced_ranges
        >>> lies = TensorLayout.whole((4,)).cut("tp", 0, balanced_ranges(4, 2))
        >>> [(str(box), ranks) for box, ranks in lies.holders(Mesh(dp=2, tp=2), {"dp", "tp"}, {})]
        [('[0:2]', (0, 2)), ('[2:4]', (1, 3))]
        """
        self._check(mesh)
        theirs = mesh.coords(set(axes) & set(self.axes))
        copied = set(axes) - set(self.axes)
        held = [(n, [p.whole for p in self.pieces({**at, **there})]) for n, there in enumerate(theirs)]

        def ranks(who: Iterable[int]) -> tuple[int, ...]:
            groups = [mesh.group(copied, mesh.rank({**at, **theirs[n]})) for n in who]
            return groups[0] if len(groups) == 1 else tuple(sorted(chain.from_iterable(groups)))

        return tuple((box, ranks(who)) for box, who in cells(held))

    def owned(self, coord: Coord, mesh: Mesh) -> tuple[Piece, ...]:
        """What ``coord`` holds and answers for: over all coordinates of the mesh each element is owned once.

        The owner is, among the holders, the lowest index on every axis but those of flat slices; where there
        are none of these, that is the first rank that holds it.

        >>> lies = TensorLayout.whole((3,)).cut("tp", 0, (((0, 2),), ((1, 3),)))  # both hold the middle
        >>> [[str(piece.whole) for piece in lies.owned({"tp": tp}, Mesh(dp=9, tp=2))] for tp in range(2)]
        [['[0:2]'], ['[2:3]']]
        """
        self._check(mesh)
        if any(coord.get(axis, 0) for axis in mesh.axes if axis not in self.axes):
            return ()
        own: list[tuple[Range, ...]] = [((0, size),) for size in self.shape]
        for step in self.steps:
            index = coord.get(step.axis, 0)
            if isinstance(step, _HeldOnly) and index != step.indices[0]:
                return ()
            if isinstance(step, _Cut):
                own[step.dim] = _intersections(_first_holders(step.ranges)[index], own[step.dim])
        boxes = [piece.whole for piece in _grid(own)]
        common = ((piece, piece.whole.intersect(box)) for piece in self.pieces(coord) for box in boxes)
        return tuple(part for piece, box in common if box is not None for part in piece.parts(box))

    def _check(self, mesh: Mesh) -> None:
        for step in self.steps:
            if isinstance(step, _HeldOnly):
                assert step.indices[-1] < mesh[step.axis], f"{step.axis}={mesh[step.axis]} for {step.indices}"
            else:
                parts = len(step.ranges) if isinstance(step, _Cut) else step.parts
                assert parts == mesh[step.axis], f"cut in {parts}, and {step.axis}={mesh[step.axis]}"

    def _key(self, coord: Coord) -> tuple[int, ...]:
        return tuple(coord.get(axis, 0) for axis in self.axes)

    def _local(self, key: tuple[int, ...]) -> _Local:
        if key not in self._found:
            self._found[key] = self._build(dict(zip(self.axes, key, strict=True)))
        return self._found[key]

    def _build(self, coord: Coord) -> _Local:
        dims: list[tuple[Range, ...]] = [_joined(((0, size),)) for size in self.shape]
        flat: tuple[Piece, ...] | None = None
        for step in self.steps:
            index = coord[step.axis]
            if isinstance(step, _HeldOnly):
                if index not in step.indices:
                    return _Local((), (0,) if self.is_flat else (0,) * max(1, len(self.shape)))
            elif isinstance(step, _Cut):
                dims[step.dim] = _intersections(step.ranges[index], dims[step.dim])
            else:
                if flat is None:
                    flat = _flattened(tuple(dims))
                size = sum(piece.whole.size for piece in flat)
                flat = _sliced(flat, *step.slice_of(index, coord, size))
        if flat is not None:
            return _Local(flat, (sum(piece.whole.size for piece in flat),))
        return _Local(_grid(dims), _grid_shape(dims))


_balanced = lru_cache(maxsize=64)(balanced)  # thousands of ranks ask for the same cut


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """The same ranges without empty ones, those that follow on each other joined."""
    joined: list[Range] = []
    for a, b in ranges:
        if joined and joined[-1][1] == a < b:
            joined[-1] = (joined[-1][0], b)
        elif a < b:
            joined.append((a, b))
    return tuple(joined)


def _covered(ranges: Iterable[Range]) -> int:
    """How many elements lie in at least one of the ranges."""
    covered = end = 0
    for a, b in sorted(ranges):
        covered += max(0, b - max(a, end))
        end = max(end, b)
    return covered


def _intersections(ranges: Iterable[Range], held: Sequence[Range]) -> tuple[Range, ...]:
    return _joined((max(a, c), min(b, d)) for a, b in ranges for c, d in held)


@lru_cache(maxsize=256)
def _first_holders(ranges: Ranges) -> Ranges:
    """Of each index's ranges, what no lower index holds."""
    taken: tuple[Range, ...] = ()
    first: list[tuple[Range, ...]] = []
    for held in ranges:
        rest = tuple(held)
        for c, d in taken:
            rest = tuple(r for a, b in rest for r in ((a, min(b, c)), (max(a, d), b)) if r[0] < r[1])
        first.append(_joined(rest))
        taken = _joined(sorted((*taken, *rest)))
    return tuple(first)


def _grid_shape(dims: Sequence[tuple[Range, ...]]) -> tuple[int, ...]:
    return tuple(sum(b - a for a, b in ranges) for ranges in dims)


def _grid(dims: Sequence[tuple[Range, ...]]) -> tuple[Piece, ...]:
    """Every combination of one range for each dim, packed as one n-D tensor."""
    placed = [list(zip(ranges, accumulate((b - a for a, b in ranges), initial=0), strict=False)) for ranges in dims]
    return tuple(
        Piece(
            Box(tuple(a for (a, _), _ in choice), tuple(b for (_, b), _ in choice)),
            tuple(o for _, o in choice),
        )
        for choice in product(*placed)
    )


@lru_cache(maxsize=64)
def _flattened(dims: tuple[tuple[Range, ...], ...]) -> tuple[Piece, ...]:
    """The same elements in the same order as the n-D local tensor, as pieces of a flat one."""
    shape, flat = _grid_shape(dims), []
    for piece in _grid(dims):
        to_whole = tuple(a - o for a, o in zip(piece.whole.start, piece.local_offset, strict=True))
        flat += [Piece(run.shift(to_whole), (first,)) for first, run in runs(shape, piece.local_box)]
    return tuple(sorted(flat, key=lambda piece: piece.local_offset))


def _sliced(flat: Sequence[Piece], start: int, stop: int) -> tuple[Piece, ...]:
    """The slice ``start:stop`` of a flat local tensor, as pieces of a smaller one."""
    sliced, offset = [], 0
    for piece in flat:
        first, size = piece.local_offset[0], piece.whole.size
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            for box in flat_boxes(piece.whole.shape, low, high):
                sliced.append(Piece(box.shift(piece.whole.start), (offset,)))
                offset += box.size
    return tuple(sliced)
