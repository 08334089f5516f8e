"""Finds code that picks samples of a batch by their number and combines them with others, as ``h - h[:1]`` does.

The record is followed from the inputs on: which samples each value is made of, and where its dims hold them. Code that
takes samples apart and puts them together again, as a loop over the samples of a batch does, combines none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.analysis.dims.dim_letters import Concat, Dim, DimLetters
from shardwright.analysis.dims.operator_dims import relation_of
from shardwright.analysis.dims.run_axes import RunAxes, leaves, product_of, unify
from shardwright.analysis.recorded.recording import RecordedCall, Recording, TensorUse

NO_SAMPLE = -1
"""Stands for a row that belongs to no sample in a dim of samples, such as a row that code has concatenated to them."""

_DIM_ARGUMENTS = {
    "chunk": 2, "gather": 1, "index_select": 1, "narrow": 1, "select": 1, "slice": 1, "split": 2, "split_with_sizes": 2,
    "tensor_split": 2, "unbind": 1, "unsafe_split": 2,
}  # fmt: skip
"""Operators that pick elements of a dim by their numbers, and the number of the argument that names the dim."""

_MOVES = {"flip": 1, "roll": 2}
"""Operators that change the order along dims, and the number of the argument that names these dims."""

_COMBINES = frozenset((
    "_cdist_forward", "add", "addcdiv", "addcmul", "addmm", "atan2", "baddbmm", "bmm", "div", "dot", "fmod", "lerp",
    "linear", "maximum", "minimum", "mm", "mul", "mv", "pow", "rsub", "sub", "where", "xlogy",
    "binary_cross_entropy", "huber_loss", "mse_loss", "scaled_dot_product_attention", "smooth_l1_loss",
))  # fmt: skip
"""Operators that compute each result from several operands; others, such as ``cat``, only put operands together."""

_TOO_LARGE = 1 << 16
"""The largest constant, in elements, that is computed to see which samples its indices choose."""


class SampleDim(NamedTuple):
    """Which sample each index of a dim belongs to.

    The dim is a product of three factors: ``outside`` elements, then the rows, then ``inside`` elements, which vary the
    fastest. ``rows`` has the number of the sample of each row, or :data:`NO_SAMPLE`.
    """

    rows: tuple[int, ...]
    outside: int = 1
    inside: int = 1

    @property
    def each(self) -> list[int]:
        """For each index of the dim, the number of the sample to which its elements belong."""
        return [row for row in self.rows for _ in range(self.inside)] * self.outside

    @property
    def is_permuted(self) -> bool:
        """Whether samples, each at most once, are in another order than in the batch; rows of no sample are ignored."""
        held = [row for row in self.rows if row != NO_SAMPLE]
        return held != sorted(held) and len({*held}) == len(held)


class SampleUse(NamedTuple):
    """Which samples a value was computed from, and which of its dims hold them.

    ``samples`` is None if they are not known. ``dims`` has None for a dim without samples. ``picked`` is the last
    operator that picked some of the samples.
    """

    samples: frozenset[int] | None
    dims: tuple[SampleDim | None, ...]
    picked: RecordedCall | None = None


@dataclass
class SampleFlow:
    """The samples that each value of a recorded run was computed from, and where code combines picked ones with others.

    Both fields are empty for a run whose code picks no samples. An entry of ``combined`` has the operator that picked
    the samples, the values that were combined, and the results.
    """

    values: dict[TensorUse, SampleUse] = field(default_factory=dict)
    combined: list[tuple[RecordedCall, Sequence[TensorUse], Sequence[TensorUse]]] = field(default_factory=list)

    def sample_of(self, use: TensorUse) -> int | None:
        """Returns the number of the only sample that a value was computed from; None for several samples or none."""
        value = self.values.get(use)
        return next(iter(value.samples)) if value is not None and value.samples and len(value.samples) == 1 else None

    def permutes(self, use: TensorUse) -> bool:
        """Returns whether a dim of a value holds samples, each at most once, in another order than the batch."""
        value = self.values.get(use)
        return value is not None and any(dim is not None and dim.is_permuted for dim in value.dims)


def follow_samples(recording: Recording, axes: RunAxes) -> SampleFlow:
    """Returns which samples the values of a recorded run were computed from; empty if code does not pick samples.

    The result is not empty either if inputs have rows or list entries of samples. If code has put a dim together from
    all samples in order, as a loop over the samples does, the dim gets the samples' :class:`DimAxis` in ``axes``.
    """
    batch = axes.of_samples(recording.inputs)

    def may_pick(call: RecordedCall) -> bool:
        first = next(iter(call.operands), None)
        picks = call.name in ("index", "embedding") or call.name.removesuffix("_copy") in _DIM_ARGUMENTS
        if first is None or first.kind == "constant" or not picks:
            return False
        return any(not batch.isdisjoint(leaves(axis)) for axis in axes.of(first))

    if not recording.rows_of_samples and not any(map(may_pick, recording.calls)):
        return SampleFlow()
    follower = _SampleFollower(recording)
    for call in recording.calls:
        follower.follow(call)
    source = next(use for use in recording.inputs if use.shape)
    every = tuple(range(source.shape[0]))
    for use, value in follower.flow.values.items():
        for axis, rows in zip(axes.of(use), value.dims, strict=True):
            if rows is not None and rows.rows == every and rows.outside == 1:
                unify(axis, product_of(axes.of(source)[0], rows.inside))
    return follower.flow


def picking_calls(
    flow: SampleFlow, trained: Collection[TensorUse], leading: Collection[TensorUse]
) -> list[RecordedCall]:
    """Returns the operators that pick samples by number, if code combines the picked samples with others.

    Operators that permute the samples are among them. A combined value must depend on parameters (``trained``), and
    outputs must depend on the result (``leading``).
    """
    calls = dict[RecordedCall, None]()
    for picked, operands, results in flow.combined:
        is_trained = any(use in trained and use.dtype.is_floating_point for use in operands)
        if is_trained and any(use in leading for use in results):
            calls[picked] = None
    return list(calls)


def parameters_by_sample(recording: Recording, flow: SampleFlow) -> set[str]:
    """Returns the names of parameters that code reads for each sample of the batch alone, as in a loop over it."""
    made_of = {use: {name} for name, use in recording.parameters.items()}  # parameters, and what is computed from them
    samples_by_name: dict[str, set[int]] = {}
    for call in recording.calls:
        names = set().union(*(made_of.get(use, ()) for use in call.operands))
        if not names:
            continue
        if not any(use in flow.values for use in call.operands):
            made_of.update((use, names) for use in call.results)
            continue
        samples = {flow.sample_of(use) for use in call.operands} - {None}
        for name in names if samples else ():
            samples_by_name.setdefault(name, set()).update(sample for sample in samples if sample is not None)
    return {name for name, samples in samples_by_name.items() if len(samples) == recording.num_samples > 1}


def calls_picking_for_some(recording: Recording, flow: SampleFlow, leading: Set[TensorUse]) -> list[RecordedCall]:
    """Returns the operators that pick samples by number for a layer that other samples do not pass, as ``f(h[:4])``.

    A layer that takes each sample in one of several calls, as in a loop over parts of the batch, is none, and neither
    is one whose results lead to no output (``leading``).
    """
    made_of = {use: {name} for name, use in recording.parameters.items()}
    every, samples_by_name = frozenset(range(recording.num_samples)), dict[str, frozenset[int]]()
    picked_for = dict[str, RecordedCall | None]()
    for call in recording.calls:
        names = set().union(*(made_of.get(use, ()) for use in call.operands))
        values = [flow.values[use] for use in call.operands if use in flow.values]
        if names and not values:
            made_of.update((use, names) for use in call.results)
        for name in names if values and not leading.isdisjoint(call.results) else ():
            samples = frozenset().union(*(every if value.samples is None else value.samples for value in values))
            samples_by_name[name] = samples_by_name.get(name, frozenset()) | samples
            picked_for.setdefault(name, next((value.picked for value in values if value.picked is not None), None))
    some = (name for name, samples in samples_by_name.items() if samples and samples < every)
    return [picked for name in some if (picked := picked_for[name]) is not None]


class _SampleFollower:
    """Finds which samples the values of a recorded run were computed from, operator by operator (:meth:`follow`)."""

    def __init__(self, recording: Recording) -> None:
        self.flow = SampleFlow()
        self._values = self.flow.values
        self._slots: dict[TensorUse, tuple[TensorUse, int, int]] = {}  # view -> (base tensor, dim, index)
        self._filled: dict[tuple[TensorUse, int], dict[int, int]] = {}  # (base tensor, dim) -> {index: sample there}
        self._num_samples = max(recording.num_samples, 1)
        self._constants: dict[TensorUse, Tensor | None] = {}  # computed values of constants; None if unknown
        self._made_by = {use: call for call in recording.calls for use in call.results if use.kind == "constant"}
        for use, rows_of in recording.rows_of_samples.items():
            first = SampleDim(rows_of) if use.shape and use.shape[0] == len(rows_of) > 1 else None
            self._values[use] = SampleUse(frozenset(rows_of), (first, *_none(use)[1:]) if use.shape else ())
        self._of_all = set[TensorUse]()  # values that are equal on all ranks: inputs without samples, and their results
        for use in recording.inputs:
            if use.shape and use.shape[0] == recording.num_samples:
                rows = SampleDim(tuple(range(recording.num_samples)))
                self._values[use] = SampleUse(frozenset(rows.rows), (rows, *(None for _ in use.shape[1:])))
            else:
                self._values[use] = SampleUse(None, tuple(None for _ in use.shape))
                self._of_all.add(use)

    def follow(self, call: RecordedCall) -> None:
        """Notes which samples the results of the next operator come from, and whether it combines picked samples."""
        self._note_slots(call)
        self._note_by_index(call)
        if all(use in self._of_all or use not in self._values for use in call.operands):
            self._of_all.update(call.results)
        values = [self._values[use] for use in call.operands if use in self._values]
        if not values:
            for use in (*call.results, *call.written):
                self._values.pop(use, None)
            return
        name = call.name.removesuffix("_copy")
        first = self._values.get(call.operands[0])
        if first is not None and name in _DIM_ARGUMENTS and len(values) == 1:
            results = self._picked(call, first, call.argument(_DIM_ARGUMENTS[name], "dim", 0))
        elif call.name in ("index", "embedding"):
            results = self._indexed(call, first)
        elif call.name in _MOVES and first is not None:
            given_dims = call.argument(_MOVES[call.name], "dims") or range(len(first.dims))
            moved = {dim % max(len(first.dims), 1) for dim in given_dims}
            dims = tuple(None if dim in moved else rows for dim, rows in enumerate(first.dims))
            results = [SampleUse(first.samples if dims == first.dims else None, dims, first.picked)]
        else:
            results = self._combined(call, values)
        for use, value in zip(call.results, results, strict=True):
            self._values[use] = value

    def _note_by_index(self, call: RecordedCall) -> None:
        """Notes an operator that takes samples at indices which are unknown and do not depend on the samples.

        Such indices are in a buffer, a constant or an input that has no samples. They are not noted if a dim of the
        tensor of indices is as large as the number of samples, or a multiple of it: they may take each sample in order.
        Known indices are followed instead, unless they lie beyond the samples of the record.
        """
        for use, index, dim in _indexed_dims(call):
            value = self._values.get(use)
            rows = value.dims[dim] if value is not None and dim < len(value.dims) else None
            if rows is None or (index in self._values and index not in self._of_all) or index.dtype is torch.bool:
                continue
            if any(size % self._num_samples == 0 for size in index.shape):
                continue
            chosen = self._constant(index)
            if chosen is None or not _is_within(chosen, use.shape[dim]):
                self._note(call, [use], call.results)

    def _note_slots(self, call: RecordedCall) -> None:
        """Notes which samples a new tensor holds once code has written one sample to each index (``out[i] = ...``)."""
        first = next(iter(call.operands), None)
        if call.name == "select" and first is not None and first not in self._values and first not in self._slots:
            dim = call.args[1] % len(first.shape)
            self._slots[call.results[0]] = first, dim, call.args[2] % first.shape[dim]
        elif getattr(call.function, "is_view", False) and first in self._slots:
            self._slots.update((use, self._slots[first]) for use in call.results)
        for use in (target for target in call.written if target in self._slots):
            base, dim, index = self._slots[use]
            samples = {self.flow.sample_of(arg) for arg in call.operands if arg in self._values and arg is not use}
            filled = self._filled.setdefault((base, dim), {})
            filled.pop(index, None)  # forget the sample that was there before
            filled.update((index, sample) for sample in samples if sample is not None and len(samples) == 1)
            if len(filled) == base.shape[dim]:
                row_samples = tuple(filled[index] for index in range(len(filled)))
                dims = tuple(_rows_of(row_samples, SampleDim(())) if d == dim else None for d in range(len(base.shape)))
                self._values[base] = SampleUse(frozenset(row_samples), dims)

    def _picked(self, call: RecordedCall, value: SampleUse, dim: int) -> list[SampleUse]:
        """Returns the samples of the results of an operator that picks elements of dim ``dim`` by their numbers."""
        x = call.operands[0].shape
        dim %= max(len(x), 1)
        dims = self._dims(call)
        rows = value.dims[dim]
        if rows is None:
            is_known = value.samples is not None and (len(value.samples) < 2 or any(value.dims))
            samples = value.samples if is_known else None
            return [SampleUse(samples, result_dims, value.picked) for result_dims in dims]
        numbers = self._numbers(call, x[dim], dim)
        results = []
        for number, chosen in enumerate(numbers):
            if chosen is None:
                results.append(SampleUse(None, _none(call.results[number])))
                continue
            held = rows.each if len(chosen) < x[dim] or list(chosen) != list(range(x[dim])) else None
            if held is None:  # the whole dim
                results.append(SampleUse(value.samples, value.dims, value.picked))
                continue
            row_samples = tuple(held[index] for index in chosen)
            new_dims = list(dims[number])
            if len(call.results[number].shape) == len(x):
                new_dims[dim] = _rows_of(row_samples, rows)
            results.append(self._chosen(call, value, rows, row_samples, tuple(new_dims)))
        return results

    def _chosen(
        self, call: RecordedCall, value: SampleUse, rows: SampleDim, row_samples: tuple[int, ...],
        dims: tuple[SampleDim | None, ...],
    ) -> SampleUse:  # fmt: skip
        """Returns the samples of a result whose rows an operator took from a value, and notes a permutation.

        ``rows`` are those of the value, and ``row_samples`` has the sample of each index of the result.
        """
        samples = frozenset(row_samples) - {NO_SAMPLE}
        is_permuted = samples == value.samples and len(row_samples) == len(rows.rows) and row_samples != rows.rows
        if is_permuted and (rows.inside, rows.outside) == (1, 1):
            self._note(call, call.operands[:1], call.results)
        picked = value.picked if samples == value.samples else call
        return SampleUse(samples, dims, picked)

    def _indexed(self, call: RecordedCall, value: SampleUse | None) -> list[SampleUse]:
        """Returns the samples of the result of ``x[index]``, or of a lookup of samples as if they were a table's rows.

        Only an index that is a constant shows what it picks.
        """
        out = call.results[0]
        by_dim = enumerate(call.args[1]) if call.name == "index" else ((0, call.args[1]),)
        indices = [(dim, index) for dim, index in by_dim if index is not None]
        lost = [SampleUse(None, _none(out))]
        if value is None or any(index.dtype is torch.bool for _, index in indices):
            return lost
        dims = list(self._dims(call)[0])
        held = [(value.dims[dim], index, dim) for dim, index in indices if value.dims[dim] is not None]
        if not held:
            is_known = value.samples is not None and any(value.dims)
            others = {self._values[index].samples for _, index in indices if index in self._values} - {value.samples}
            return [SampleUse(value.samples, tuple(dims), value.picked)] if is_known and not others else lost
        rows, index, _ = held[0]
        chosen = self._constant(index)
        if len(held) > 1 or rows is None or chosen is None:
            return lost
        varying = [dim for dim, size in enumerate(chosen.shape) if size > 1]
        if len(varying) > 1:
            return lost
        held_by = rows.each
        if not _is_within(chosen, len(held_by)):
            return lost
        row_samples = tuple(held_by[number] for number in chosen.flatten().tolist())
        places = [dim for dim, _ in indices]
        joint = len(torch.broadcast_shapes(*(other.shape for _, other in indices)))
        start = places[0] if places == list(range(places[0], places[0] + len(places))) else 0
        if varying:
            dims[start + joint - len(chosen.shape) + varying[0]] = _rows_of(row_samples, rows)
        return [self._chosen(call, value, rows, row_samples, tuple(dims))]

    def _combined(self, call: RecordedCall, values: Sequence[SampleUse]) -> list[SampleUse]:
        """Returns the samples of the results of an operator that itself picks no samples.

        An operator that combines picked samples with others is noted.
        """
        dims = self._dims(call)
        sample_sets = {value.samples for value in values}
        picked = next((value.picked for value in values if value.picked is not None), None)
        samples: frozenset[int] | None = None
        if None not in sample_sets:
            samples = frozenset().union(*(sample_set for sample_set in sample_sets if sample_set is not None))
            if len(sample_sets) > 1 and call.name.removesuffix("_") in _COMBINES:
                self._compare(call)
            elif len(sample_sets) > 1 and call.name not in ("cat", "stack"):
                samples = None
        if call.name in ("cat", "stack"):
            dims = [self._put_together(call, dims[0])]
        return [SampleUse(samples, result_dims, picked) for result_dims in dims]

    def _put_together(self, call: RecordedCall, dims: tuple[SampleDim | None, ...]) -> tuple[SampleDim | None, ...]:
        """Returns where a concatenation holds its samples, and notes a concatenation in another order than the batch's.

        ``dims`` are returned unchanged if none of the operands comes from one sample alone.
        """
        dim = call.argument(1, "dim", 0) % max(len(dims), 1)
        if not dims:
            return dims
        rows = dims[dim]
        if any(self.flow.sample_of(use) is not None for use in call.operands):  # rows that no dim of the operand shows
            parts = [self._held_along(use, dim, call.name == "stack") for use in call.operands]
            is_known = rows is not None or all(NO_SAMPLE not in part for part in parts)
            rows = _rows_of(tuple(chain.from_iterable(parts)), SampleDim(())) if is_known else rows
        if rows is not None and (rows.is_permuted or self._displaces(rows)):
            self._note(call, call.operands, call.results)
        return (*dims[:dim], rows, *dims[dim + 1 :])

    def _held_along(self, use: TensorUse, dim: int, is_stacked: bool) -> list[int]:
        """Returns the sample of each index along a dim of one of the tensors that are put together."""
        sample, size = self.flow.sample_of(use), 1 if is_stacked else use.shape[dim]
        if sample is not None:
            return [sample] * size
        value = self._values.get(use)
        rows = None if value is None or is_stacked else value.dims[dim]
        return [NO_SAMPLE] * size if rows is None else rows.each

    def _displaces(self, rows: SampleDim) -> bool:
        """Returns whether a dim has a row for each sample of the batch, and at one of them the row of another."""
        if (rows.outside, len(rows.rows)) != (1, self._num_samples):
            return False
        return any(sample not in (NO_SAMPLE, place) for place, sample in enumerate(rows.rows))

    def _compare(self, call: RecordedCall) -> None:
        """Notes an operator that combines picked samples with others, unless the operands are single numbers."""
        large = [use for use in call.operands if use in self._values and use.shape]
        if len({self._values[use].samples for use in large}) < 2:
            return  # single numbers, such as the losses of samples, may be added up
        for use in large:
            picked = self._values[use].picked
            if picked is not None:
                self._note(picked, [use], call.results)
                return

    def _note(self, picked: RecordedCall, operands: Sequence[TensorUse], results: Sequence[TensorUse]) -> None:
        self.flow.combined.append((picked, operands, results))

    def _numbers(self, call: RecordedCall, size: int, dim: int) -> list[Sequence[int] | None]:
        """Returns, for each result of a picking operator, the numbers of the picked elements, or None if not known."""
        name = call.name.removesuffix("_copy")
        if name == "select":
            return [[call.args[2] % size]]
        if name == "unbind":
            return [[number] for number in range(size)]
        if name in ("slice", "narrow"):
            start = call.args[2] if name == "narrow" else call.argument(2, "start") or 0
            start = min(max(start + size if start < 0 else start, 0), size)
            step = 1 if name == "narrow" else call.argument(4, "step", 1)
            return [range(start, start + step * call.results[0].shape[dim], step)]
        if name in ("gather", "index_select"):
            return [_places(self._constant(call.args[2]), size, dim if name == "gather" else 0)]
        numbers: list[Sequence[int] | None] = []
        start = 0
        for use in call.results:
            numbers.append(range(start, start + use.shape[dim]))
            start += use.shape[dim]
        return numbers

    def _dims(self, call: RecordedCall) -> list[tuple[SampleDim | None, ...]]:
        """Returns, for each result of an operator, the samples of its dims, by their relation to the operands' dims."""
        relation = relation_of(call)
        of_letters: dict[int, SampleDim] = {}
        for use, dims in zip(call.operands, relation.operands, strict=True):
            if use not in self._values or dims is None:
                continue
            for rows, dim in zip(self._values[use].dims, dims, strict=True):
                if rows is not None:
                    _give(of_letters, relation.letters, rows, dim)
        return [tuple(_taken(of_letters, relation.letters, dim) for dim in dims) for dims in relation.results]

    def _constant(self, use: TensorUse) -> Tensor | None:
        """Returns a constant's values, computed again by the operators that made it, or None if that is impossible."""
        if use not in self._constants:
            self._constants[use] = self._computed(use)
        return self._constants[use]

    def _computed(self, use: TensorUse) -> Tensor | None:
        call = self._made_by.get(use)
        if call is None or call.written or prod(use.shape) > _TOO_LARGE or len(call.results) > 1:
            return None
        tensors: dict[TensorUse, Tensor] = {}
        for operand in call.operands:
            constant = self._constant(operand)
            if constant is None:
                return None
            tensors[operand] = constant

        def replaced(leaf: Any) -> Any:
            return tensors[leaf] if isinstance(leaf, TensorUse) else leaf

        args, named = tree_map(replaced, (call.args, call.named))
        if "device" in named or not tensors:
            named = {**named, "device": torch.device("cpu")}
        try:
            result = call.function(*args, **named)
        except (RuntimeError, TypeError):  # the operator does not run on the CPU, or not on these tensors
            return None
        return result if isinstance(result, Tensor) and len(tree_leaves(result)) == 1 else None


def _indexed_dims(call: RecordedCall) -> Iterator[tuple[TensorUse, TensorUse, int]]:
    """Yields each dim along which an operator takes elements by indices: the tensor, the indices, the dim."""
    if call.name == "embedding":
        yield call.args[0], call.args[1], 0
    elif call.name in ("index_select", "gather"):
        x, dim, index = call.args[:3]
        yield x, index, dim % max(len(x.shape), 1)
    elif call.name == "index" and isinstance(call.args[0], TensorUse):
        for dim, index in enumerate(call.args[1]):
            if isinstance(index, TensorUse):
                yield call.args[0], index, dim


def _places(index: Tensor | None, size: int, dim: int = 0) -> list[int] | None:
    """Returns the numbers that an index tensor takes from a dim of ``size``.

    The result is None if the index is unknown, or takes other numbers at other places of the remaining dims.
    """
    if index is None or not _is_within(index, size):
        return None
    rows = index.movedim(dim, 0) if index.dim() > dim else index.reshape(-1)
    numbers = rows.reshape(len(rows), -1) if rows.numel() else rows.reshape(0, 1)
    return None if (numbers != numbers[:, :1]).any() else [int(number) for number in numbers[:, 0].tolist()]


def _is_within(index: Tensor, size: int) -> bool:
    """Returns whether all numbers name an element of a dim of ``size``, counted from its start or, below 0, its end."""
    return bool(((index >= -size) & (index < size)).all())


def _none(use: TensorUse) -> tuple[SampleDim | None, ...]:
    return tuple(None for _ in use.shape)


def _rows_of(row_samples: tuple[int, ...], before: SampleDim) -> SampleDim | None:
    """Returns the :class:`SampleDim` of a dim from the sample of each of its indices; None for fewer than two indices.

    ``before`` is the dim from which the indices were taken; its factor ``inside`` is kept where it fits. For a dim that
    code has put together, ``before`` is empty: then ``inside`` is the number of indices of the first sample in a row.
    """
    if len(row_samples) < 2:
        return None
    inside = before.inside if len(row_samples) % before.inside == 0 else 1
    if not before.rows:
        same = next((number for number, sample in enumerate(row_samples) if sample != row_samples[0]), len(row_samples))
        inside = same if len(row_samples) % same == 0 else 1
    rows = row_samples[::inside]
    sample_dim = SampleDim(rows, 1, inside)
    return sample_dim if tuple(sample_dim.each) == row_samples else SampleDim(row_samples)


def _give(of_letters: dict[int, SampleDim], letters: DimLetters, rows: SampleDim, dim: Dim) -> None:
    """Adds to ``of_letters`` the samples of each letter (independent index) of a dim; ``rows`` has those of the dim."""
    total = letters.size(dim)
    if total != len(rows.rows) * rows.outside * rows.inside:
        return  # a dim that an operator broadcasts
    slower = 1
    for piece in dim:
        size = letters.size((piece,))
        faster = total // (slower * size)
        if rows.inside % faster == 0 and rows.outside % slower == 0:
            inner = SampleDim(rows.rows, rows.outside // slower, rows.inside // faster)
            if not isinstance(piece, Concat):
                of_letters.setdefault(piece, inner)
            elif inner.outside == 1:
                start = 0
                for part in piece.parts:
                    end = start + letters.size(part)
                    if start % inner.inside == 0 and end % inner.inside == 0 and end > start:
                        own = inner.rows[start // inner.inside : end // inner.inside]
                        _give(of_letters, letters, SampleDim(own, 1, inner.inside), part)
                    start = end
        slower *= size


def _taken(of_letters: dict[int, SampleDim], letters: DimLetters, dim: Dim) -> SampleDim | None:
    """Returns the samples of a dim, composed from those of its letters (independent indices); None if it has none."""
    total, slower, sample_dim = letters.size(dim), 1, None
    for piece in dim:
        size = letters.size((piece,))
        faster = total // (slower * size) if size else 1
        own = _joined(of_letters, letters, piece) if isinstance(piece, Concat) else of_letters.get(piece)
        if own is not None and sample_dim is None:
            sample_dim = SampleDim(own.rows, own.outside * slower, own.inside * faster)
        slower *= size
    return sample_dim


def _joined(of_letters: dict[int, SampleDim], letters: DimLetters, joined: Concat) -> SampleDim | None:
    parts = [(_taken(of_letters, letters, part), letters.size(part)) for part in joined.parts]
    inside = next((rows.inside for rows, _ in parts if rows is not None), 0)
    if not inside:
        return None
    made: list[int] = []
    for rows, size in parts:
        if size % inside or (rows is not None and (rows.inside != inside or len(rows.rows) * inside != size)):
            return None
        made += [NO_SAMPLE] * (size // inside) if rows is None else rows.rows
    return SampleDim(tuple(made), 1, inside)
