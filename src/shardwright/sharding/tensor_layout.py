"""``TensorLayout``: the elements of a tensor that each coordinate of a mesh stores, and their order.

Plans, checkpoints and transfers all describe sharding with it. A layout is a list of steps, applied in order::

    TensorLayout.whole((4, 6))                        every rank holds a copy
        .cut("tp", 0, balanced_ranges(4, 2))          tensor parallel: rows 0:2 and 2:4
        .flat("dp", 2)                                ZeRO: the local tensor, flattened, in two slices
        .only("pp", [1])                              pipeline: on stage 1 alone
"""

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
    """A step by which only the indices ``indices`` of an axis hold the tensor."""

    axis: str
    indices: tuple[int, ...]


class _Cut(NamedTuple):
    """A step by which index i of the axis holds ``ranges[i]`` of a dim of the whole tensor."""

    axis: str
    dim: int
    ranges: Ranges

    @property
    def parts(self) -> int:
        return len(self.ranges)


class _FlatSlices(NamedTuple):
    """A step by which index i of the axis holds slice i of ``parts`` balanced slices of the flattened local tensor.

    If several tensors form one flat parameter, ``beside`` has the layouts of all of them. The slices are then cut from
    the tensors joined end to end, and this tensor is number ``place`` among them.
    """

    axis: str
    parts: int
    beside: tuple[TensorLayout, ...] = ()
    place: int = 0

    def slice_of(self, index: int, coord: Coord, size: int) -> Range:
        """Returns the range of this tensor's ``size`` local elements that an index holds."""
        sizes = [layout.num_elements(coord) for layout in self.beside] or [size]
        first = sum(sizes[: self.place])
        cuts = _balanced(sum(sizes), self.parts)
        return min(max(cuts[index] - first, 0), size), min(max(cuts[index + 1] - first, 0), size)


_LayoutStep = _HeldOnly | _Cut | _FlatSlices


class _Local(NamedTuple):
    pieces: tuple[Piece, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorLayout:
    """The sharding of one tensor over a mesh: the pieces (boxes of the tensor) that each rank stores, in order.

    Build it from :meth:`whole` by :meth:`cut`, :meth:`flat` and :meth:`only`. A layout stores these steps, so it is as
    small on 3,072 ranks as on three, and layouts made by the same steps are equal. An axis occurs in at most one step;
    ranks along an axis that occurs in none hold copies.

    >>> from shardwright.sharding.box import balanced_ranges
    >>> layout = TensorLayout.whole((4, 6)).cut("tp", 0, balanced_ranges(4, 2)).cut("dp", 1, balanced_ranges(6, 3))
    >>> layout.axes, layout.local_shape({"dp": 2, "tp": 1})
    (('dp', 'tp'), (2, 2))
    >>> [str(piece.whole) for piece in layout.pieces({"dp": 2, "tp": 1})]
    ['[2:4, 4:6]']
    """

    shape: tuple[int, ...]
    steps: tuple[_LayoutStep, ...] = ()
    _local_of_key: dict[tuple[int, ...], _Local] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert all(size >= 0 for size in self.shape), f"no tensor has shape {self.shape}"
        named = [step.axis for step in self.steps]
        assert set(named) <= set(mesh_axes()), f"no such axis among {named}"
        assert len(set(named)) == len(named), f"an axis cuts once, not twice: {named}"

    @staticmethod
    def whole(shape: Sequence[int]) -> TensorLayout:
        """Returns the layout of a tensor of ``shape`` that is replicated on every rank."""
        return TensorLayout(tuple(shape))

    def cut(self, axis: str, dim: int, ranges: Ranges) -> TensorLayout:
        """Returns this layout sharded over ``axis`` too: index i of the axis keeps only ``ranges[i]`` of ``dim``.

        The ranges count in the whole tensor. Those of one index are disjoint and are stored in the order given. Those
        of different indices may overlap, and together they cover the dim. A layout with flat slices cannot be cut.
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
        """Returns this layout on ``indices`` of ``axis`` alone, such as a pipeline stage; other ranks store nothing.

        If the axis was restricted before, only the indices in both restrictions hold the tensor.
        """
        kept = set(indices)
        for step in self.steps:
            if isinstance(step, _HeldOnly) and step.axis == axis:
                kept &= set(step.indices)
        assert kept, f"held at no index of {axis}"
        assert min(kept) >= 0, f"{axis} has no index {min(kept)}"
        return self.on_all(axis)._then(_HeldOnly(axis, tuple(sorted(kept))))

    def on_all(self, axis: str) -> TensorLayout:
        """Returns this layout on all indices of ``axis`` again, without the restriction that :meth:`only` set."""
        steps: list[_LayoutStep] = []
        for step in self.steps:
            if isinstance(step, _FlatSlices):
                steps.append(step._replace(beside=tuple(layout.on_all(axis) for layout in step.beside)))
            elif not (isinstance(step, _HeldOnly) and step.axis == axis):
                steps.append(step)
        return TensorLayout(self.shape, tuple(steps))

    def of_shape(self, shape: Sequence[int]) -> TensorLayout:
        """Returns the layout of a tensor of ``shape`` that the same ranks store whole; this one if ranks store parts.

        A forward may replace a buffer by one of another shape, such as a longer table of positions.

        >>> TensorLayout.whole((1, 3)).only("pp", [1]).of_shape((5, 3)).local_shape({"pp": 1})
        (5, 3)
        """
        stored_whole = all(isinstance(step, _HeldOnly) for step in self.steps)
        return TensorLayout(tuple(shape), self.steps) if stored_whole else self

    def flat(self, axis: str, parts: int, beside: Sequence[TensorLayout] = (), place: int = 0) -> TensorLayout:
        """Returns this layout with local tensors flattened and sharded over ``axis`` in ``parts`` slices, as in ZeRO.

        The slices are balanced and are cut from the local tensor's row-major sequence of elements; the local tensor is
        then 1-D. Several tensors may form one sequence that is sliced as a whole, as in a flat parameter: ``beside``
        lists the layouts of all of them, and this layout is number ``place`` among them. An index may then hold much of
        one tensor and nothing of another. All of these layouts must have the same :attr:`axes`.

        >>> layout = TensorLayout.whole((2, 3)).flat("dp", 4)
        >>> [[str(piece.whole) for piece in layout.pieces({"dp": dp})] for dp in range(4)]
        [['[0:1, 0:2]'], ['[0:1, 2:3]', '[1:2, 0:1]'], ['[1:2, 1:2]'], ['[1:2, 2:3]']]
        >>> both = (TensorLayout.whole((2, 3)), TensorLayout.whole((2,)))
        >>> [[each.flat("dp", 2, both, i).num_elements({"dp": dp}) for i, each in enumerate(both)] for dp in (0, 1)]
        [[4, 0], [2, 2]]
        """
        assert parts > 0, "no parts"
        assert not beside or beside[place] == self, "a tensor has its own place among those beside it"
        assert all(layout.axes == self.axes for layout in beside), "slices of all are the same on the same ranks alone"
        return self._then(_FlatSlices(axis, parts, tuple(beside), place))

    def _then(self, step: _LayoutStep) -> TensorLayout:
        # steps that commute are sorted, so that equal layouts compare equal
        def order(step: _LayoutStep) -> tuple[int, int]:
            if isinstance(step, _HeldOnly):
                return 0, mesh_axes().index(step.axis)
            return (1, step.dim) if isinstance(step, _Cut) else (2, 0)

        assert step.axis in mesh_axes(), f"no such axis: {step.axis}"
        return TensorLayout(self.shape, tuple(sorted((*self.steps, step), key=order)))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes along which the ranks hold different elements, slowest first."""
        named = {step.axis for step in self.steps}
        return tuple(axis for axis in mesh_axes() if axis in named)

    @property
    def cut_dims(self) -> Mapping[str, int]:
        """Maps each axis that cuts a dim of the tensor to that dim. Axes that only cut flat slices are left out."""
        return {step.axis: step.dim for step in self.steps if isinstance(step, _Cut)}

    @property
    def is_flat(self) -> bool:
        """Whether the local tensors are flat 1-D buffers."""
        return any(isinstance(step, _FlatSlices) for step in self.steps)

    @cached_property
    def table(self) -> Mapping[tuple[int, ...], tuple[Piece, ...]]:
        """The pieces of every rank that stores any, keyed by the rank's indices along ``axes``, in rank order."""
        indices: dict[str, Iterable[int]] = {
            step.axis: step.indices if isinstance(step, _HeldOnly) else range(step.parts) for step in self.steps
        }
        keys = product(*(indices[axis] for axis in self.axes))
        every = ((key, self._local(key).pieces) for key in keys)
        return {key: pieces for key, pieces in every if pieces}

    def pieces(self, coord: Coord) -> tuple[Piece, ...]:
        """Returns the pieces (boxes) that the rank at ``coord`` stores, in order.

        An axis that is missing in ``coord`` counts as index 0.
        """
        return self._local(self._key(coord)).pieces

    def local_shape(self, coord: Coord) -> tuple[int, ...]:
        """Returns the shape of the local tensor of the rank at ``coord``, with a size of 0 if it stores nothing.

        An axis that is missing in ``coord`` counts as index 0.
        """
        return self._local(self._key(coord)).shape

    def num_elements(self, coord: Coord) -> int:
        """Returns the number of elements that the rank at ``coord`` stores; a missing axis counts as index 0."""
        return prod(self.local_shape(coord))

    def held_along(self, axis: str) -> tuple[int, ...]:
        """Returns the only indices of an axis that hold the tensor, as :meth:`only` set them; () if all indices do.

        >>> TensorLayout.whole((2, 3)).only("pp", [0, 3]).held_along("pp")
        (0, 3)
        """
        return next((step.indices for step in self.steps if isinstance(step, _HeldOnly) and step.axis == axis), ())

    def is_cut_evenly(self, axis: str) -> bool:
        """Returns whether all indices of an axis hold copies, or disjoint parts of one size, on all other coordinates.

        >>> from shardwright.sharding.box import balanced_ranges
        >>> [TensorLayout.whole((n,)).cut("tp", 0, balanced_ranges(n, 2)).is_cut_evenly("tp") for n in (4, 5)]
        [True, False]
        """
        mine = [step for step in self.steps if step.axis == axis]
        if not mine or not isinstance(cut := mine[0], _Cut):
            return not mine
        beside = [step for step in self.steps if isinstance(step, _Cut) and step.dim == cut.dim]
        widths = {sum(b - a for a, b in held) for held in cut.ranges}
        return len(beside) == len(widths) == 1 and widths.pop() * cut.parts == self.shape[cut.dim]

    def is_held_at(self, coord: Coord) -> bool:
        """Returns whether ranks at ``coord``, such as the ranks of a pipeline stage, may hold any of the tensor.

        Only restrictions of :meth:`only` are checked, for the axes in ``coord``.
        """
        return all(
            coord[step.axis] in step.indices
            for step in self.steps
            if isinstance(step, _HeldOnly) and step.axis in coord
        )

    def by_rank(self, mesh: Mesh, ranks: Iterable[int] | None = None) -> dict[int, tuple[Piece, ...]]:
        """Maps each rank of ``ranks``, by default of the whole mesh, to the pieces that it stores.

        :func:`plan_transfer` takes such a map.
        """
        return {rank: self.pieces(mesh.coord(rank)) for rank in (range(mesh.size) if ranks is None else ranks)}

    def holders(self, mesh: Mesh, axes: Collection[str], at: Coord) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """Returns disjoint boxes of the tensor, each with the ranks that hold it, in rank order.

        Considered are the ranks whose coordinates equal those of ``at`` on every axis that is not in ``axes``. The
        boxes together cover all elements that these ranks hold.
        """
        self._check(mesh)
        theirs = mesh.coords(set(axes) & set(self.axes))
        copied = set(axes) - set(self.axes)
        # boxes are split only for coordinates that hold different elements; ranks with copies are added afterwards
        held = [(n, [p.whole for p in self.pieces({**at, **there})]) for n, there in enumerate(theirs)]

        def ranks(holders: Iterable[int]) -> tuple[int, ...]:
            groups = [mesh.group(copied, mesh.rank({**at, **theirs[n]})) for n in holders]
            return groups[0] if len(groups) == 1 else tuple(sorted(chain.from_iterable(groups)))

        return tuple((box, ranks(holders)) for box, holders in cells(held))

    def owned(self, coord: Coord, mesh: Mesh) -> tuple[Piece, ...]:
        """Returns the pieces that the rank at ``coord`` owns: every element has exactly one owner in the whole mesh.

        Use it to write or count each element once. The owner is the first rank that holds the element; with flat slices
        it is the holder with the lowest index on every axis other than those of the slices.
        """
        self._check(mesh)
        if any(coord.get(axis, 0) for axis in mesh.axes if axis not in self.axes):
            return ()
        # overlapping cuts: an index owns only what no lower index holds; flat slices never overlap
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
                assert step.parts == mesh[step.axis], f"cut in {step.parts}, and {step.axis}={mesh[step.axis]}"

    def _key(self, coord: Coord) -> tuple[int, ...]:
        return tuple(coord.get(axis, 0) for axis in self.axes)

    def _local(self, key: tuple[int, ...]) -> _Local:
        if key not in self._local_of_key:
            self._local_of_key[key] = self._build(dict(zip(self.axes, key, strict=True)))
        return self._local_of_key[key]

    def _build(self, coord: Coord) -> _Local:
        if not self.is_held_at(coord):
            return _Local((), (0,) if self.is_flat else (0,) * max(1, len(self.shape)))
        dims: list[tuple[Range, ...]] = [_joined(((0, size),)) for size in self.shape]
        flat: tuple[Piece, ...] | None = None
        for step in self.steps:
            index = coord[step.axis]
            if isinstance(step, _Cut):
                dims[step.dim] = _intersections(step.ranges[index], dims[step.dim])
            elif isinstance(step, _FlatSlices):
                if flat is None:
                    flat = _flattened(tuple(dims))
                size = sum(piece.whole.size for piece in flat)
                flat = _sliced(flat, *step.slice_of(index, coord, size))
        if flat is not None:
            return _Local(flat, (sum(piece.whole.size for piece in flat),))
        return _Local(_grid(dims), _grid_shape(dims))


_balanced = lru_cache(maxsize=64)(balanced)  # thousands of ranks need the same cut


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Returns the ranges without empty ones, with neighbors joined."""
    joined: list[Range] = []
    for a, b in ranges:
        if joined and joined[-1][1] == a < b:
            joined[-1] = (joined[-1][0], b)
        elif a < b:
            joined.append((a, b))
    return tuple(joined)


def _covered(ranges: Iterable[Range]) -> int:
    """Returns the number of elements that are in at least one of the ranges."""
    covered = end = 0
    for a, b in sorted(ranges):
        covered += max(0, b - max(a, end))
        end = max(end, b)
    return covered


def _intersections(ranges: Iterable[Range], held: Sequence[Range]) -> tuple[Range, ...]:
    return _joined((max(a, c), min(b, d)) for a, b in ranges for c, d in held)


@lru_cache(maxsize=256)
def _first_holders(ranges: Ranges) -> Ranges:
    """Returns, for each index, the part of its ranges that no lower index holds."""
    taken: tuple[Range, ...] = ()  # the union of the ranges of lower indices, sorted
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
    """Returns the pieces of an n-D local tensor: every combination of one range for each dim."""
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
    """Returns the pieces of the flattened local tensor, one for each run of adjacent elements."""
    shape, flat = _grid_shape(dims), []
    for piece in _grid(dims):  # each run of a local row becomes a piece, so that a slice can cut anywhere
        to_whole = tuple(a - o for a, o in zip(piece.whole.start, piece.local_offset, strict=True))
        flat += [Piece(run.shift(to_whole), (first,)) for first, run in runs(shape, piece.local_box)]
    return tuple(sorted(flat, key=lambda piece: piece.local_offset))


def _sliced(flat: Sequence[Piece], start: int, stop: int) -> tuple[Piece, ...]:
    """Returns the pieces of the slice ``start:stop`` of a flat local tensor."""
    sliced, offset = [], 0
    for piece in flat:
        first, size = piece.local_offset[0], piece.whole.size
        low, high = max(start - first, 0), min(stop - first, size)
        if low < high:
            for box in flat_boxes(piece.whole.shape, low, high):
                sliced.append(Piece(box.shift(piece.whole.start), (offset,)))
                offset += box.size
    return tuple(sliced)
