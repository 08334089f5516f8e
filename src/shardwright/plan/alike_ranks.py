"""Finds which ranks send alike: ranks whose tensors, samples and neighbours have the same sizes.

The messages of 3,072 ranks are then computed for a few of them. Two indices of an axis are alike if exchanging one for
the other changes no size, whatever the indices on the other axes are: neither the size of a shard (of a parameter, a
buffer or an activation) nor a number of samples or tokens. Then the two ranks hold equally much, and so do the ranks
that they send to. Stages are never alike, because each runs other actions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from shardwright.axes import mesh_axes
from shardwright.mesh import Coord, balanced
from shardwright.plan.batch_shard import RowMoves, local_range
from shardwright.plan.param_groups import ParamGroup
from shardwright.plan.plan import ActivationCut, Plan, held_slices
from shardwright.plan.traffic import group_sums, sum_dtype, sync_axes
from shardwright.sharding.box import Ranges, width
from shardwright.sharding.tensor_layout import TensorLayout


class FeatureParts(NamedTuple):
    """The cut of ``size`` features over axes, slowest first: the ranges of each joint index, counted row-major."""

    size: int
    axes: tuple[str, ...]
    parts: Ranges


class TrafficCuts(NamedTuple):
    """The sizes that a strategy's ``traffic`` reads in addition to those of the plan's parameters, buffers and inputs.

    ``features`` are cuts of features, and ``rows`` the gathers and cuts of rows (samples or tokens) after which
    ``traffic`` counts rows. ``parted`` are axes along which ranks each send a balanced part of values between stages.
    ``apart`` are axes whose indices may send messages of sizes that these fields do not tell.
    """

    features: tuple[FeatureParts, ...] = ()
    rows: tuple[RowMoves, ...] = ()
    parted: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()


MessageTable = tuple[tuple[str, ...], Mapping[tuple[int, ...], Hashable]]
"""A size for each combination of indices on some axes, which are named first."""


class AlikeRanks:
    """Chooses, for each rank of a plan, one rank that stands for all that send the same in a step on a global batch.

    ``cuts`` has the :class:`TrafficCuts` of each of the plan's strategies: None for a strategy whose messages depend on
    more than sizes, such as on which rank is the first; then no two ranks are alike. ``num_samples`` is the size of the
    global batch, and ``num_tokens`` that of each sample, or 0 if the layout does not cut sequences. ``parted_elements``
    returns the sizes of the values that the rank at a coordinate sends between stages in parts; it is called only if
    there are any.
    """

    def __init__(
        self, plan: Plan, cuts: Sequence[TrafficCuts | None], num_samples: int, num_tokens: int = 0,
        parted_elements: Callable[[Coord], Collection[int]] = lambda _: (),
    ) -> None:  # fmt: skip
        self._plan, self._num_samples, self._num_tokens = plan, num_samples, num_tokens
        self._parted_elements = parted_elements
        self._cuts = [cut for cut in cuts if cut is not None]
        self._inside = tuple(axis for axis in plan.mesh.axes if axis in mesh_axes("operators"))
        # copies of the model with different tokens may have equally many samples, so they are classed apart
        tokens = plan.token_axes.difference(self._inside)
        apart = tokens.union(mesh_axes("stages"), *(cut.apart for cut in self._cuts))
        self._apart = frozenset(plan.mesh.axes if None in cuts else apart)
        self._like_of_copy: dict[tuple[int, ...], Mapping[str, tuple[int, ...]]] = {}
        self._first_copies: dict[tuple[int, ...], Coord] = {}

    def like(self, coord: Coord) -> Coord:
        """Returns the coordinate of the rank that stands for all ranks that send the same as the one at ``coord``."""
        apart, plan = self._apart | self._sliced, self._plan
        if apart.issuperset(plan.mesh.axes):
            return coord
        counts = self._counts(coord)
        if counts not in self._like_of_copy:
            self._like_of_copy[counts] = self._alike_inside(coord)
        inside = self._like_of_copy[counts]
        representative = {axis: inside[axis][index] if axis in inside else index for axis, index in coord.items()}
        copies = [axis for axis in coord if axis not in apart and axis not in inside]
        if copies:
            # Copies of the model are alike if they have equal numbers of samples and sum equally much of gradients that
            # are stored in parts: no samples are gathered across copies.
            key = (*counts, *(coord[axis] for axis in plan.mesh.axes if axis in apart and axis not in self._inside),
                   *(self._alike_in_sums[axis][coord[axis]] for axis in copies))  # fmt: skip
            first = self._first_copies.setdefault(key, coord)
            representative.update({axis: first[axis] for axis in copies})
        return representative

    def _counts(self, coord: Coord) -> tuple[int, ...]:
        """Returns how many samples the ranks of the copy of the model at ``coord`` have."""
        plan = self._plan
        cutting = [axis for axis in self._inside if axis in plan.row_axes]
        ranks = ({**coord, **at} for at in plan.mesh.coords(cutting))
        return tuple(len(local_range(plan.mesh, plan.row_axes, at, self._num_samples)) for at in ranks)

    @cached_property
    def _sliced(self) -> frozenset[str]:
        """The axes along which each index is a class of its own: none of its ranks is taken as alike with another.

        These are the axes that cut parameters but no operators and, if the parts of some ranks overlap, also all axes
        that cut operators.
        """
        axes = {axis for layout in self._plan.compute.values() for axis in layout.axes if axis not in self._inside}
        return frozenset(axes) | (frozenset(self._inside) if self._overlaps else frozenset())

    @cached_property
    def _alike_in_sums(self) -> Mapping[str, tuple[int, ...]]:
        """By axis and index: the first index that sums equally much of the gradients that ranks store in parts."""
        mesh = self._plan.mesh
        return {axis: _first_alike(axis, mesh[axis], self._sum_tables) for axis in mesh.axes}

    @cached_property
    def _sum_tables(self) -> tuple[MessageTable, ...]:
        """Tables of how much each rank sums of gradients that ranks store in parts, for each kind of param group."""
        plan, tables = self._plan, dict[Hashable, MessageTable]()
        stages = [axis for axis in plan.mesh.axes if axis in mesh_axes("stages")]
        for group in plan.param_groups:
            over = {name: axes for name in group.parameters if (axes := sync_axes(plan, name))}
            gradients = {name: plan.state[name].gradient for name in over if name not in plan.frozen}
            if all(set(layout.axes) <= set(plan.compute[name].axes) for name, layout in gradients.items()):
                continue
            summed = [axis for axis in stages if any(axis in axes for axes in over.values())]
            stored = [(plan.compute[name], layout) for name, layout in gradients.items()]
            for axis in (axis for axis in stages if axis not in summed):  # a group of the same kind on another stage
                stored = [(compute.on_all(axis), layout.on_all(axis)) for compute, layout in stored]
            key = (*stored, *((over[name], sum_dtype(plan, name)) for name in gradients))
            if key not in tables:
                tables[key] = self._sums_of(group._replace(parameters=tuple(gradients)), summed)
        return tuple(tables.values())

    def _sums_of(self, group: ParamGroup, summed: Sequence[str]) -> MessageTable:
        """Returns the table of how much each rank sums of a param group: on one stage, or on all along ``summed``."""
        plan = self._plan
        layouts = [plan.state[name].gradient for name in group.parameters]
        indices_by_axis = {
            axis: sorted({i for layout in layouts for i in layout.held_along(axis)}) for axis in mesh_axes("stages")
        }
        first = {axis: indices[0] for axis, indices in indices_by_axis.items() if indices and axis not in summed}
        inner = {axis for layout in layouts for axis in layout.axes if axis not in first}
        axes = tuple(axis for axis in plan.mesh.axes if axis in inner)
        sums: dict[tuple[int, ...], Hashable] = {}
        for at in product(*(indices_by_axis.get(axis) or range(plan.mesh[axis]) for axis in axes)):
            coord = {**dict.fromkeys(plan.mesh.axes, 0), **first, **dict(zip(axes, at, strict=True))}
            sums[at] = tuple(group_sums(plan, group, coord))
        return axes, sums

    @cached_property
    def _layouts(self) -> tuple[TensorLayout, ...]:
        """The different layouts of parameters and buffers, on all stages."""
        layouts = dict.fromkeys([*self._plan.compute.values(), *self._plan.buffers.values()])
        for axis in mesh_axes("stages"):
            layouts = dict.fromkeys(layout.on_all(axis) for layout in layouts)
        return tuple(layouts)

    @cached_property
    def _features(self) -> tuple[FeatureParts, ...]:
        cuts = {cut for activation in self._plan.activations.values() for cut in activation}
        return (
            *dict.fromkeys(feature for cut in self._cuts for feature in cut.features),
            *(FeatureParts(cut.size, (cut.axis,), cut.ranges) for cut in cuts),
        )

    @cached_property
    def _overlaps(self) -> bool:
        """Whether ranks of an axis hold some of the same elements, and some that others do not hold."""
        mesh = self._plan.mesh
        for layout in self._layouts:
            held = sum(layout.num_elements(at) for at in mesh.coords(layout.axes))
            if held != prod(layout.shape):
                return True
        return any(feature.size != sum(map(width, feature.parts)) for feature in self._features)

    def _alike_inside(self, coord: Coord) -> dict[str, tuple[int, ...]]:
        """Returns, for each axis that cuts operators, the first index that is like each index."""
        mesh = self._plan.mesh
        axes = [axis for axis in self._inside if axis not in self._apart | self._sliced]
        tables = [*self._size_tables, *self._sum_tables, *self._row_tables(coord)]
        classes = {axis: _first_alike(axis, mesh[axis], tables) for axis in axes}
        for axis in (axis for axis in axes if any(axis in cut.parted for cut in self._cuts)):
            # The values sent between stages are computed for one rank of each class. Their sizes tell whether the parts
            # that ranks send are equal.
            firsts = ({**coord, **{a: classes[a][coord[a]] for a in axes}, axis: first} for first in set(classes[axis]))
            values = sorted({size for at in firsts for size in self._parted_elements(at)})
            parts = zip(*([b - a for a, b in pairwise(balanced(size, mesh[axis]))] for size in values), strict=True)
            tables.append(((axis,), {(index,): sizes for index, sizes in enumerate(parts)}))
            classes[axis] = _first_alike(axis, mesh[axis], tables)
        return classes

    @cached_property
    def _size_tables(self) -> tuple[MessageTable, ...]:
        mesh = self._plan.mesh
        tables: list[MessageTable] = []
        for layout in self._layouts:
            coords = mesh.coords(layout.axes)
            tables.append((layout.axes, {tuple(at.values()): layout.local_shape(at) for at in coords}))
        for feature in self._features:
            indices = product(*(range(mesh[axis]) for axis in feature.axes))
            tables.append((feature.axes, {at: width(part) for at, part in zip(indices, feature.parts, strict=True)}))
        for cuts in dict.fromkeys(self._plan.activations.values()):
            tables.append(_activation_table(self._plan, cuts))
        return tuple(tables)

    def _row_tables(self, coord: Coord) -> Iterable[MessageTable]:
        """Yields tables of how many rows each rank of a model copy has in a microbatch, after row gathers and cuts."""
        plan, shard = self._plan, self._plan.batch_shard(coord)
        shard.set_num_tokens(self._num_tokens)
        ranks = [{**coord, **at} for at in plan.mesh.coords(self._inside)]
        moves = dict.fromkeys([(), *plan.row_moves.values(), *(rows for cut in self._cuts for rows in cut.rows)])
        seen = set()
        for number in range(plan.layout.num_microbatches):
            shard.set_microbatch(self._num_samples, number, plan.layout.num_microbatches)
            counts = tuple(len(shard.samples((), at)) for at in ranks)
            if counts in seen:
                continue
            seen.add(counts)
            for row_moves in moves:
                sizes = [(len(shard.samples(row_moves, at)), len(shard.tokens(row_moves, at))) for at in ranks]
                yield self._inside, dict(zip((tuple(at[a] for a in self._inside) for at in ranks), sizes, strict=True))


def _activation_table(plan: Plan, cuts: Sequence[ActivationCut]) -> MessageTable:
    """Returns the table of how much each rank holds of the cut dims of a module's input."""
    axes = tuple(axis for axis in plan.mesh.axes if any(cut.axis == axis for cut in cuts))
    sizes: dict[tuple[int, ...], Hashable] = {}
    for at in plan.mesh.coords(axes):
        sizes[tuple(at.values())] = tuple((part.dim, width(part.ranges)) for part in held_slices(cuts, at))
    return axes, sizes


def _first_alike(axis: str, size: int, tables: Iterable[MessageTable]) -> tuple[int, ...]:
    """Returns, for each index of an axis, the first one for which all tables have the same sizes."""
    columns: list[list[Hashable]] = [[] for _ in range(size)]
    for axes, sizes in tables:
        if axis in axes:
            place = axes.index(axis)
            for index, column in enumerate(columns):
                column.append(tuple(value for at, value in sizes.items() if at[place] == index))
    first: dict[tuple[Hashable, ...], int] = {}
    return tuple(first.setdefault(tuple(column), index) for index, column in enumerate(columns))
