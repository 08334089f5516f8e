"""What every note of the plan sends in a step, by formula: payload bytes of each call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shardwright.analysis.module_calls import ModuleCall
from shardwright.mesh import Coord
from shardwright.plan.batch_shard import BatchShard, RowMoves
from shardwright.plan.plan import LOSS, OUTPUT, Plan
from shardwright.plan.traffic import StepCalls, Traffic, statistics_traffic, sync_traffic
from shardwright.strategies.tensor_parallel.convolution import ConvolutionNote, price_convolution
from shardwright.strategies.tensor_parallel.features import Features, width
from shardwright.strategies.tensor_parallel.mode import (
    EntryNote,
    GateNote,
    Gathering,
    HeadsNote,
    LinearNote,
    LossNote,
    Mode,
    NormNote,
    TableNote,
    TokensNote,
)
from shardwright.strategies.tensor_parallel.multihead_attention import MultiheadNote, price_multihead

INDEX_BYTES = 8


def traffic(plan: Plan, batch: StepCalls, coord: Coord, mode: Mode) -> tuple[Traffic, ...]:
    """The calls of one step on the rank at ``coord``: each microbatch's, then the gradients shared over the grid."""
    found: list[Traffic] = []
    trained = {use.module for use in plan.uses if use.parameter not in plan.frozen}
    weights = {use.module: use.parameter for use in plan.uses if use.parameter.endswith("weight")}
    for module_calls, shard in zip(batch.module_calls, batch.shards, strict=True):
        pricing = _Pricing(plan, shard, coord, mode, trained, weights)
        for path, note in plan.notes.items():
            where = {LOSS: note.head if isinstance(note, LossNote) else "", OUTPUT: ""}.get(path, path)
            for visit in module_calls.get(where, ()):
                found += pricing.of(path, note, visit)
    found += [each for axis in mode.axes for each in sync_traffic(plan, batch, coord, axis.name)]
    rows_cut = [axis.name for axis in mode.axes if axis.stream == "T"]
    found += [each for axis in rows_cut for each in statistics_traffic(plan, batch, coord, axis)]
    return tuple(each for each in found if each.num_ranks > 1 and each.num_bytes)


@dataclass
class _Pricing:
    plan: Plan
    shard: BatchShard
    coord: Coord
    mode: Mode
    trained: Collection[str]
    weights: Mapping[str, str]

    def of(self, path: str, note: Any, visit: ModuleCall) -> Iterator[Traffic]:
        """The calls of one visit of a module."""
        trained = path in self.trained
        if isinstance(note, LinearNote):
            again = not self.mode.keep and self._trains_weight(path)
            yield from self._taken(note.takes(), note.step.rows_before, note.x, visit, again=again)
            yield from self._given(note, visit, visit.needs_gradient or trained)
            yield from self._fetched(path, note, visit)
        elif isinstance(note, EntryNote):
            yield from self._taken(note.takes(), note.step.rows_before, note.x, visit)
        elif isinstance(note, HeadsNote):
            if note.entry is not None:
                yield from self._taken(note.entry.takes(), note.entry.step.rows_before, note.entry.x, visit)
            yield from self._scores(note, visit)
            if note.tokens is not None:
                yield from self._joined(note.tokens, visit)
        elif isinstance(note, TokensNote):
            yield from self._joined(note, visit)
        elif isinstance(note, NormNote):
            yield from self._norm(path, note, visit, visit.needs_gradient or trained)
        elif isinstance(note, TableNote):
            yield from self._table(note, visit, trained)
        elif isinstance(note, LossNote):
            yield from self._loss(note, visit)
        elif isinstance(note, GateNote):
            yield from self._gate(path, note, visit)
        elif isinstance(note, MultiheadNote):
            yield from price_multihead(self, note, visit)
        elif isinstance(note, ConvolutionNote):
            yield from price_convolution(note, self.plan, self.coord, visit)

    def _trains_weight(self, path: str) -> bool:
        return self.weights[path] not in self.plan.frozen

    def _each(self, shape: Sequence[int]) -> int:
        """The rows of one sample in a tensor (samples, ..., features); of one token, where sequences are cut."""
        return prod(shape[1:-1]) if self.mode.dim == 0 else prod(shape[:1]) * prod(shape[2:-1])

    def _num_rows(self, rows: RowMoves, each: int) -> int:
        held = self.shard.samples(rows) if self.mode.dim == 0 else self.shard.tokens(rows)
        return len(held) * each

    def _taken(
        self, gatherings: Sequence[Gathering], rows: RowMoves, x: Features, visit: ModuleCall, *, again: bool = False
    ) -> Iterator[Traffic]:
        """All-gathers of an input, and the sums of its gradient."""
        of_each = self._each(visit.x_shape)
        shape = (self._num_rows(rows, of_each), width(x.held(self.coord)))
        for each in gatherings:
            if each.lies == "rows":
                shape = (sum(self.shard.sizes(each.rows, each.axis)) * of_each, shape[1])
            elif each.lies == "features":
                shape = (shape[0], sum(each.feature_sizes(self.coord)))
            num_bytes, size = prod(shape) * visit.element_bytes, self.plan.mesh[each.axis]
            if each.lies != "whole":
                yield Traffic("all_gather", each.axis, num_bytes, size, visit.num_forwards + again)
            if visit.needs_gradient:
                kind = "all_reduce" if each.lies == "whole" else "reduce_scatter"
                yield Traffic(kind, each.axis, num_bytes, size)

    def _given(self, note: LinearNote, visit: ModuleCall, learns: bool) -> Iterator[Traffic]:
        gatherings = note.gives()
        joined = [each.axis for each in gatherings if each.lies == "features"]
        shape = (
            self._num_rows(note.step.rows_gathered, self._each(visit.y_shape)),
            width(note.y.held(self.coord, over=joined)),
        )
        yield from self._summed(gatherings, shape, visit, learns)

    def _summed(
        self, gatherings: Sequence[Gathering], shape: tuple[int, int], visit: ModuleCall, learns: bool
    ) -> Iterator[Traffic]:
        """The sums of an output's terms, and all-gathers of its gradient."""
        of_each = self._each(visit.y_shape)
        for each in gatherings:
            num_bytes, size = prod(shape) * visit.element_bytes, self.plan.mesh[each.axis]
            if each.lies == "whole":
                yield Traffic("all_reduce", each.axis, num_bytes, size, visit.num_forwards)
                continue
            yield Traffic("reduce_scatter", each.axis, num_bytes, size, visit.num_forwards)
            if learns:
                yield Traffic("all_gather", each.axis, num_bytes, size)
            index = self.coord[each.axis]
            if each.lies == "rows":
                shape = (self.shard.sizes(each.rows, each.axis)[index] * of_each, shape[1])
            else:
                shape = (shape[0], each.feature_sizes(self.coord)[index])

    def _fetched(self, path: str, note: LinearNote, visit: ModuleCall) -> Iterator[Traffic]:
        """All-gathers of a weight, and the sums of its gradient."""
        name = self.weights[path]
        lies = self.plan.compute[name]
        for number, axis in enumerate(note.fetches):
            there = self.plan.mesh.coords(note.fetches[: number + 1])
            num_elements = sum(lies.num_elements({**self.coord, **at}) for at in there)
            num_bytes, size = num_elements * self.plan.compute_dtypes[name].itemsize, self.plan.mesh[axis]
            again = not self.mode.keep and visit.needs_gradient
            yield Traffic("all_gather", axis, num_bytes, size, visit.num_forwards + again)
            if name not in self.plan.frozen:
                yield Traffic("reduce_scatter", axis, num_bytes, size)

    def _scores(self, note: HeadsNote, visit: ModuleCall) -> Iterator[Traffic]:
        if note.inside:
            members = sum(held == note.held[note.heads.number(self.coord)] for held in note.held)
            seen = visit.x_shape[1] if note.tokens is None else self._num_seen(note.tokens)
            queries = visit.x_shape[1] if note.tokens is None else len(self.shard.tokens(note.rows))
            num_bytes = len(self.shard.samples(note.rows)) * queries * seen * visit.element_bytes
            yield Traffic("all_reduce", note.heads.names[0], num_bytes, members, visit.num_forwards + 1)

    def _num_seen(self, note: TokensNote) -> int:
        return self.shard.span(note.rows).stop if note.causal else self.shard.num_tokens

    def _joined(self, note: TokensNote, visit: ModuleCall) -> Iterator[Traffic]:
        """All-gathers of keys and values, and the sums of their gradients."""
        elements = visit.x_shape[0] * 2 * width(note.kv.kept(self.coord))
        learns = visit.needs_gradient or any(maker in self.trained for maker in note.makers)
        for each in note.gathers:
            num_bytes = sum(self.shard.sizes(each.rows, each.axis)) * elements * visit.element_bytes
            size = self.plan.mesh[each.axis]
            yield Traffic("all_gather", each.axis, num_bytes, size, visit.num_forwards)
            if learns:
                yield Traffic("reduce_scatter", each.axis, num_bytes, size)

    def _norm(self, path: str, note: NormNote, visit: ModuleCall, learns: bool) -> Iterator[Traffic]:
        num_rows = prod(visit.x_shape[:-1])
        two = 2 if note.centred else 1
        element_bytes = max(visit.element_bytes, 4)  # statistics are no narrower than float32
        for axis in note.features.names:
            size = self.plan.mesh[axis]
            if note.centred:
                yield Traffic("all_gather", axis, size * two * num_rows * element_bytes, size, visit.num_forwards)
            else:
                yield Traffic("all_reduce", axis, num_rows * element_bytes, size, visit.num_forwards)
            if learns:
                yield Traffic("all_reduce", axis, two * num_rows * element_bytes, size)

    def _table(self, note: TableNote, visit: ModuleCall, trained: bool) -> Iterator[Traffic]:
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

    def _gate(self, path: str, note: GateNote, visit: ModuleCall) -> Iterator[Traffic]:
        shape = visit.y_shape if path == OUTPUT else visit.x_shape
        times = (
            1 if path == OUTPUT or path in self.plan.recomputed else visit.num_forwards
        )  # hooks are outside of a block
        for features in note.arguments:
            joined: tuple[str, ...] = ()
            for axis in reversed(features.names) if features is not None else ():
                assert features is not None
                num_bytes = prod(shape[:-1]) * sum(features.sizes(self.coord, axis, joined)) * visit.element_bytes
                joined += (axis,)
                yield Traffic("all_gather", axis, num_bytes, self.plan.mesh[axis], times)
