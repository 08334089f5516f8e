"""The traffic of a tensor-parallel step: the collectives of each module, computed from how the plan cuts it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from shardwright.analysis.on_meta.module_calls import ModuleCall
from shardwright.mesh import Coord
from shardwright.plan.batch_shard import BatchShard, RowMoves
from shardwright.plan.plan import Plan
from shardwright.plan.traffic import StepCalls, Traffic, repeated, statistics_traffic, sync_traffic
from shardwright.sharding.box import width
from shardwright.strategies.tensor_parallel.features import Features
from shardwright.strategies.tensor_parallel.mode import Mode
from shardwright.strategies.tensor_parallel.moves import AxisMove
from shardwright.strategies.tensor_parallel.note import notes_of

INDEX_BYTES = 8
"""The bytes of a token's number or of a target, which are int64."""


def traffic(plan: Plan, batch: StepCalls, coord: Coord, mode: Mode) -> tuple[Traffic, ...]:
    """Returns the collectives of one step on the rank at ``coord``: each microbatch's, then those of gradient sync."""
    collectives: list[Traffic] = []
    trained = {use.module for use in plan.uses if use.parameter not in plan.frozen}
    weights = {use.module: use.parameter for use in plan.uses if use.parameter.endswith("weight")}
    for number, times in batch.kinds().items():
        here = RankTraffic(plan, batch.shards[number], coord, mode, trained, weights)
        for path, note in notes_of(plan):
            for call in batch.module_calls[number].get(note.called_as(path), ()):
                collectives += (
                    collective._replace(layer=path) for collective in repeated(note.traffic(here, path, call), times)
                )
    collectives += [collective for axis in mode.axes for collective in sync_traffic(plan, coord, axis.name)]
    rows_cut = [axis.name for axis in mode.axes if axis.stream == "T"]
    collectives += [collective for axis in rows_cut for collective in statistics_traffic(plan, batch, coord, axis)]
    return tuple(collective for collective in collectives if collective.num_ranks > 1 and collective.num_bytes)


@dataclass
class RankTraffic:
    """One microbatch on the rank at ``coord``, for which the plan's notes (entries for modules) state the collectives.

    ``trained`` are the paths of modules with parameters that are trained, and ``weights`` the names of their weights.
    """

    plan: Plan
    shard: BatchShard
    coord: Coord
    mode: Mode
    trained: Collection[str]
    weights: Mapping[str, str]

    def rows_each(self, shape: Sequence[int]) -> Fraction:
        """Returns the number of rows of one sample in a (..., features) tensor of the rank; of one token with ``/seq``.

        The samples may be in any dim: code may put tokens first, or join samples and tokens to rows. Where the rank has
        none, they are taken to be dim 0.
        """
        if self.mode.dim == 1:
            return Fraction(prod(shape[:1]) * prod(shape[2:-1]))
        num_samples = self.num_held(())
        return Fraction(prod(shape[:-1]), num_samples) if num_samples else Fraction(prod(shape[1:-1]))

    def num_held(self, rows: RowMoves) -> int:
        """Returns the number of samples that the rank holds after ``rows``; of tokens with ``/seq``."""
        return len(self.shard.samples(rows) if self.mode.dim == 0 else self.shard.tokens(rows))

    def num_rows(self, rows: RowMoves, shape: Sequence[int]) -> int:
        """Returns the number of rows that the rank holds after ``rows`` of a tensor that has ``shape`` before them.

        If this rank has no samples, a tensor that still has rows does not hold samples (it may be one of position
        embeddings): its rows are counted as they are.
        """
        num_before = prod(shape[:-1])
        if num_before and self.mode.dim == 0 and not self.num_held(()):
            return num_before
        return int(self.num_held(rows) * self.rows_each(shape))

    def input_traffic(
        self, moves: Sequence[AxisMove], rows: RowMoves, x: Features, call: ModuleCall, *, again: bool = False
    ) -> Iterator[Traffic]:
        """Yields the collectives of a layer's input: all-gathers, and reduce-scatters or all-reduces of its gradient.

        ``moves`` are the input's collectives. ``rows`` and ``x`` say how its rows and features are cut before them.
        With ``again`` the backward all-gathers the input once more.
        """
        of_each = self.rows_each(call.x_shape)
        shape = (self.num_rows(rows, call.x_shape), width(x.held(self.coord)))
        for move in moves:
            if move.kind == "rows":
                shape = (int(sum(self.shard.sizes(move.rows, move.axis)) * of_each), shape[1])
            elif move.kind == "features":
                shape = (shape[0], sum(move.feature_sizes(self.coord)))
            num_bytes, size = prod(shape) * call.element_bytes, self.plan.mesh[move.axis]
            if move.kind != "whole":
                yield Traffic("all_gather", move.axis, num_bytes, size, call.num_forwards + again)
            if call.needs_gradient:
                kind = "all_reduce" if move.kind == "whole" else "reduce_scatter"
                yield Traffic(kind, move.axis, num_bytes, size)

    def output_traffic(
        self, moves: Sequence[AxisMove], shape: tuple[int, int], call: ModuleCall, learns: bool
    ) -> Iterator[Traffic]:
        """Yields the reduce-scatters or all-reduces of an output, and the all-gathers of its gradient."""
        of_each = self.rows_each(call.y_shape)
        for move in moves:
            num_bytes, size = prod(shape) * call.element_bytes, self.plan.mesh[move.axis]
            if move.kind == "whole":
                yield Traffic("all_reduce", move.axis, num_bytes, size, call.num_forwards)
                continue
            yield Traffic("reduce_scatter", move.axis, num_bytes, size, call.num_forwards)
            if learns:
                yield Traffic("all_gather", move.axis, num_bytes, size)
            index = self.coord[move.axis]
            if move.kind == "rows":
                shape = (int(self.shard.sizes(move.rows, move.axis)[index] * of_each), shape[1])
            else:
                shape = (shape[0], move.feature_sizes(self.coord)[index])

    def weight_traffic(self, name: str, axes: Sequence[str], times: int) -> Iterator[Traffic]:
        """Yields the all-gathers of a weight, and the reduce-scatters of its gradient."""
        layout = self.plan.compute[name]
        for number, axis in enumerate(axes):
            there = self.plan.mesh.coords(axes[: number + 1])
            num_elements = sum(layout.num_elements({**self.coord, **at}) for at in there)
            num_bytes, size = num_elements * self.plan.compute_dtypes[name].itemsize, self.plan.mesh[axis]
            yield Traffic("all_gather", axis, num_bytes, size, times)
            if name not in self.plan.frozen:
                yield Traffic("reduce_scatter", axis, num_bytes, size)
