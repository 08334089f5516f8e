"""The traffic of a tensor-parallel step: the collectives of each module, computed from how the plan cuts it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from shardwright.analysis.module_calls import ModuleCall
from shardwright.mesh import Coord
from shardwright.plan.batch_shard import BatchShard, RowMoves
from shardwright.plan.plan import LOSS, OUTPUT, Plan
from shardwright.plan.traffic import StepCalls, Traffic, statistics_traffic, sync_traffic
from shardwright.strategies.tensor_parallel.convolution import ConvolutionNote, convolution_traffic
from shardwright.strategies.tensor_parallel.features import Features, width
from shardwright.strategies.tensor_parallel.mode import (
    AxisMove,
    EmbeddingNote,
    EntryNote,
    GatherNote,
    HeadsNote,
    LinearNote,
    LossNote,
    Mode,
    NormNote,
    TokensNote,
)
from shardwright.strategies.tensor_parallel.multihead_attention import MultiheadNote

INDEX_BYTES = 8


def traffic(plan: Plan, batch: StepCalls, coord: Coord, mode: Mode) -> tuple[Traffic, ...]:
    """Returns the collectives of one step on the rank at ``coord``: each microbatch's, then those of gradient sync."""
    found: list[Traffic] = []
    trained = {use.module for use in plan.uses if use.parameter not in plan.frozen}
    weights = {use.module: use.parameter for use in plan.uses if use.parameter.endswith("weight")}
    known: dict[tuple[object, ...], list[Traffic]] = {}  # equal microbatches send alike
    grid = [axis.name for axis in mode.axes]
    for module_calls, shard in zip(batch.module_calls, batch.shards, strict=True):
        key = id(module_calls), *shard.counts(grid)
        if key not in known:
            pricing, sent = _GridPricing(plan, shard, coord, mode, trained, weights), list[Traffic]()
            for path, note in plan.notes.items():
                where = {LOSS: note.head if isinstance(note, LossNote) else "", OUTPUT: ""}.get(path, path)
                for visit in module_calls.get(where, ()):
                    sent += [each._replace(layer=path) for each in pricing.of(path, note, visit)]
            known[key] = sent
        found += known[key]
    found += [each for axis in mode.axes for each in sync_traffic(plan, batch, coord, axis.name)]
    rows_cut = [axis.name for axis in mode.axes if axis.stream == "T"]
    found += [each for axis in rows_cut for each in statistics_traffic(plan, batch, coord, axis)]
    return tuple(each for each in found if each.num_ranks > 1 and each.num_bytes)


@dataclass
class _GridPricing:
    plan: Plan
    shard: BatchShard
    coord: Coord
    mode: Mode
    trained: Collection[str]
    weights: Mapping[str, str]

    def of(self, path: str, note: Any, visit: ModuleCall) -> Iterator[Traffic]:
        """Yields the collectives of one call of a module, forward and backward, from its note."""
        trained = path in self.trained
        if isinstance(note, LinearNote):
            again = not self.mode.keep and self.weights[path] not in self.plan.frozen
            yield from self._taken(note.input_moves(), note.step.rows_before, note.x, visit, again=again)
            moves, num_rows = note.output_moves(), self._num_rows(note.step.rows_gathered, self._each(visit.y_shape))
            shape = (num_rows, width(note.y.held(self.coord, over=[m.axis for m in moves if m.kind == "features"])))
            yield from self._summed(moves, shape, visit, visit.needs_gradient or trained)
            again = not self.mode.keep and visit.needs_gradient
            yield from self._fetched(self.weights[path], note.fetches, visit.num_forwards + again)
        elif isinstance(note, EntryNote):
            yield from self._taken(note.input_moves(), note.step.rows_before, note.x, visit)
        elif isinstance(note, HeadsNote):
            if note.entry is not None:
                yield from self._taken(note.entry.input_moves(), note.entry.step.rows_before, note.entry.x, visit)
            yield from self._scores(note, visit)
            if note.tokens is not None:
                yield from self._joined(note.tokens, visit)
        elif isinstance(note, TokensNote):
            yield from self._joined(note, visit)
        elif isinstance(note, NormNote):
            yield from self._norm(path, note, visit, visit.needs_gradient or trained)
        elif isinstance(note, EmbeddingNote):
            yield from self._table(note, visit, trained)
        elif isinstance(note, LossNote):
            yield from self._loss(note, visit)
        elif isinstance(note, GatherNote):
            yield from self._gate(path, note, visit)
        elif isinstance(note, MultiheadNote):
            yield from self._multihead(note, visit)
        elif isinstance(note, ConvolutionNote):
            yield from convolution_traffic(note, self.plan, self.coord, visit)

    def _each(self, shape: Sequence[int]) -> int:
        """Returns the number of rows of one sample in a (samples, ..., features) tensor; of one token with ``/seq``."""
        return prod(shape[1:-1]) if self.mode.dim == 0 else prod(shape[:1]) * prod(shape[2:-1])

    def _num_rows(self, rows: RowMoves, each: int) -> int:
        held = self.shard.samples(rows) if self.mode.dim == 0 else self.shard.tokens(rows)
        return len(held) * each

    def _taken(
        self, moves: Sequence[AxisMove], rows: RowMoves, x: Features, visit: ModuleCall, *, again: bool = False
    ) -> Iterator[Traffic]:
        """Yields the all-gathers of an input, and the reduce-scatters or all-reduces of its gradient."""
        of_each = self._each(visit.x_shape)
        shape = (self._num_rows(rows, of_each), width(x.held(self.coord)))
        for each in moves:
            if each.kind == "rows":
                shape = (sum(self.shard.sizes(each.rows, each.axis)) * of_each, shape[1])
            elif each.kind == "features":
                shape = (shape[0], sum(each.feature_sizes(self.coord)))
            num_bytes, size = prod(shape) * visit.element_bytes, self.plan.mesh[each.axis]
            if each.kind != "whole":
                yield Traffic("all_gather", each.axis, num_bytes, size, visit.num_forwards + again)
            if visit.needs_gradient:
                kind = "all_reduce" if each.kind == "whole" else "reduce_scatter"
                yield Traffic(kind, each.axis, num_bytes, size)

    def _summed(
        self, moves: Sequence[AxisMove], shape: tuple[int, int], visit: ModuleCall, learns: bool
    ) -> Iterator[Traffic]:
        """Yields the reduce-scatters or all-reduces of an output, and the all-gathers of its gradient."""
        of_each = self._each(visit.y_shape)
        for each in moves:
            num_bytes, size = prod(shape) * visit.element_bytes, self.plan.mesh[each.axis]
            if each.kind == "whole":
                yield Traffic("all_reduce", each.axis, num_bytes, size, visit.num_forwards)
                continue
            yield Traffic("reduce_scatter", each.axis, num_bytes, size, visit.num_forwards)
            if learns:
                yield Traffic("all_gather", each.axis, num_bytes, size)
            index = self.coord[each.axis]
            if each.kind == "rows":
                shape = (self.shard.sizes(each.rows, each.axis)[index] * of_each, shape[1])
            else:
                shape = (shape[0], each.feature_sizes(self.coord)[index])

    def _fetched(self, name: str, axes: Sequence[str], times: int) -> Iterator[Traffic]:
        """Yields the all-gathers of a weight, and the reduce-scatters of its gradient."""
        layout = self.plan.compute[name]
        for number, axis in enumerate(axes):
            there = self.plan.mesh.coords(axes[: number + 1])
            num_elements = sum(layout.num_elements({**self.coord, **at}) for at in there)
            num_bytes, size = num_elements * self.plan.compute_dtypes[name].itemsize, self.plan.mesh[axis]
            yield Traffic("all_gather", axis, num_bytes, size, times)
            if name not in self.plan.frozen:
                yield Traffic("reduce_scatter", axis, num_bytes, size)

    def _scores(self, note: HeadsNote, visit: ModuleCall) -> Iterator[Traffic]:
        if note.inside:
            members = sum(held == note.held[note.heads.number(self.coord)] for held in note.held)
            seen = visit.x_shape[1]
            if note.tokens is not None:  # of gathered tokens, a causal query needs those before it alone
                seen = self.shard.span(note.tokens.rows).stop if note.tokens.causal else self.shard.num_tokens
            queries = visit.x_shape[1] if note.tokens is None else len(self.shard.tokens(note.rows))
            num_bytes = len(self.shard.samples(note.rows)) * queries * seen * visit.element_bytes
            yield Traffic("all_reduce", note.heads.names[0], num_bytes, members, visit.num_forwards + 1)

    def _joined(self, note: TokensNote, visit: ModuleCall) -> Iterator[Traffic]:
        """Yields the all-gathers of other tokens' keys and values, and the reduce-scatters of their gradients."""
        elements = visit.x_shape[0] * 2 * width(note.kv.kept(self.coord))
        learns = visit.needs_gradient or any(maker in self.trained for maker in note.makers)
        for each in note.gathers:
            num_bytes = sum(self.shard.sizes(each.rows, each.axis)) * elements * visit.element_bytes
            size = self.plan.mesh[each.axis]
            yield Traffic("all_gather", each.axis, num_bytes, size, visit.num_forwards)
            if learns:
                yield Traffic("reduce_scatter", each.axis, num_bytes, size)

    def _multihead(self, note: MultiheadNote, visit: ModuleCall) -> Iterator[Traffic]:
        """Yields the collectives of an ``nn.MultiheadAttention`` but for its out-projection, which has its own note."""
        call, frozen = visit.call, self.plan.frozen
        assert call is not None, "an attention was called"
        moved, before = note.input_moves(), note.before.rows_before
        rows = tuple(each for each in moved if each.kind == "rows")
        # self-attention with one packed weight is one product, which gathers its input again if it did not keep it
        again = len(call.inputs) == len(note.projections) == 1 and not self.mode.keep
        operands = [(moved, *each, again and note.projections[0].name not in frozen) for each in call.inputs]
        operands += [(rows, 1, call.mask, call.mask_learns, False)] if call.mask else []
        operands += [(rows, 1, call.padding, call.padding_learns, False)] if call.padding else []
        for moves, tokens, num_features, learns, twice in operands:
            shape = (call.num_samples, tokens, num_features)
            operand = ModuleCall(shape, shape, visit.element_bytes, learns, num_forwards=visit.num_forwards)
            yield from self._taken(moves, before, Features.balanced(num_features, ()), operand, again=twice)
        of_each = [call.mask] * call.mask_learns + [call.padding] * call.padding_learns
        learnt = [call.shared_mask, *(self._num_rows(before, 1) * size for size in of_each)]
        for axis in (each.axis for each in moved if each.kind == "whole"):
            for size in learnt:
                yield Traffic("all_reduce", axis, size * visit.element_bytes, self.plan.mesh[axis])
        for _, name, axes in note.projections:
            yield from self._fetched(name, axes, visit.num_forwards + (again and call.inputs[0][2]))
        if note.inside:
            made = (note.bias, *(each.name for each in note.projections[:2]))  # queries and keys
            learns = call.scores_learn or any(name is not None and name not in frozen for name in made)
            num_bytes = self._num_rows(note.before.rows_after, 1) * call.scores * visit.element_bytes
            members = len(note.sharing(self.coord))
            yield Traffic("all_reduce", note.heads.names[0], num_bytes, members, visit.num_forwards + learns)
        if call.weights:
            given = (self._num_rows(note.after.rows_gathered, 1), call.weights)
            yield from self._summed(note.output_moves(), given, replace(visit, y_shape=given), call.weights_learn)

    def _norm(self, path: str, note: NormNote, visit: ModuleCall, learns: bool) -> Iterator[Traffic]:
        num_rows = prod(visit.x_shape[:-1])
        two = 2 if note.centered else 1
        element_bytes = max(visit.element_bytes, 4)  # statistics are no narrower than float32
        for axis in note.features.names:
            size = self.plan.mesh[axis]
            if note.centered:
                yield Traffic("all_gather", axis, size * two * num_rows * element_bytes, size, visit.num_forwards)
            else:
                yield Traffic("all_reduce", axis, num_rows * element_bytes, size, visit.num_forwards)
            if learns:
                yield Traffic("all_reduce", axis, two * num_rows * element_bytes, size)

    def _table(self, note: EmbeddingNote, visit: ModuleCall, trained: bool) -> Iterator[Traffic]:
        numbers, rows = self._each((*visit.x_shape, 1)), note.rows
        for each in note.gathers:
            num_bytes = sum(self.shard.sizes(each.rows, each.axis)) * numbers * INDEX_BYTES
            yield Traffic("all_gather", each.axis, num_bytes, self.plan.mesh[each.axis], visit.num_forwards)
        num_rows = self._num_rows(rows, self._each(visit.y_shape)) if note.per_sample else prod(visit.y_shape[:-1])
        yield from self._summed(note.sums, (num_rows, note.width(self.coord)), visit, trained)

    def _loss(self, note: LossNote, visit: ModuleCall) -> Iterator[Traffic]:
        of_each = self._each(visit.y_shape)
        num_rows = self._num_rows((), of_each)
        element_bytes = max(visit.element_bytes, 4)  # losses are no narrower than float32
        for each in note.gathers:
            num_rows = sum(self.shard.sizes(each.rows, each.axis)) * of_each
            size = self.plan.mesh[each.axis]
            yield Traffic("all_gather", each.axis, num_rows * INDEX_BYTES, size)
            yield Traffic("all_gather", each.axis, num_rows * element_bytes, size)
        for axis in note.vocabulary.names:
            size = self.plan.mesh[axis]
            yield Traffic("all_gather", axis, num_rows * note.num_numbers * size * element_bytes, size)

    def _gate(self, path: str, note: GatherNote, visit: ModuleCall) -> Iterator[Traffic]:
        shape = visit.y_shape if path == OUTPUT else visit.x_shape
        # hooks are outside of a recomputed module: its second forward gathers nothing
        times = 1 if path == OUTPUT or path in self.plan.recomputed else visit.num_forwards
        for features in note.arguments:
            for axis, sizes in features.joins(self.coord) if features is not None else ():
                num_bytes = prod(shape[:-1]) * sum(sizes) * visit.element_bytes
                yield Traffic("all_gather", axis, num_bytes, self.plan.mesh[axis], times)
