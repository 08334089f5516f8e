"""Finds other ways than a plain sum in which the samples of a batch meet, of which layouts that cut the batch warn."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from shardwright.analysis.dims.dim_letters import Role
from shardwright.analysis.dims.run_axes import DimAxis, RunAxes, leaves
from shardwright.analysis.recorded.recording import RecordedCall, Recording, TensorUse
from shardwright.analysis.samples.class_counts import used_counts
from shardwright.analysis.samples.sample_selections import SampleFlow, calls_picking_for_some, picking_calls
from shardwright.analysis.samples.sample_windows import adds_up_groups, needs_other_samples
from shardwright.analysis.samples.sums_over_samples import leading_to, sums_over_samples, trained_values

_REDUCTIONS = frozenset((
    "amax", "amin", "aminmax", "linalg_vector_norm", "logsumexp", "max", "median", "min", "norm", "prod", "std",
    "std_mean", "var", "var_mean",
))  # fmt: skip
"""Operators whose result on all samples is not the sum of the results on some of them."""

_ALONG = {
    "_fft_c2c": 1, "_fft_c2r": 1, "_fft_r2c": 1, "_log_softmax": 1, "_safe_softmax": 1, "_softmax": 1,
    "cummax": 1, "cummin": 1, "cumprod": 1, "cumsum": 1, "flip": 1, "glu": 1, "kthvalue": 2, "log_softmax": 1,
    "logcumsumexp": 1, "roll": 2, "softmax": 1, "sort": 1, "topk": 2, "unfold": 1,
}  # fmt: skip
"""Operators that mix elements along some dims, and the number of the argument that names these dims."""

_BENDS = frozenset((
    "_cdist_forward", "_linalg_det", "_linalg_eigh", "_linalg_slogdet", "_linalg_svd", "_log_softmax", "_softmax",
    "abs", "addcmul", "atan", "binary_cross_entropy", "binary_cross_entropy_with_logits", "clamp", "clamp_max",
    "clamp_min", "cos", "cumprod", "elu", "erf", "exp", "exp2", "expm1", "gelu", "huber_loss", "hypot", "leaky_relu",
    "linalg_cross", "linalg_inv_ex", "linalg_matrix_exp", "linalg_vector_norm", "log", "log10", "log1p", "log2",
    "log_sigmoid_forward", "logit", "logsumexp", "mse_loss", "native_layer_norm", "norm", "pow", "prod", "reciprocal",
    "relu", "rsqrt", "sigmoid", "silu", "sin", "smooth_l1_loss", "softplus", "sort", "sqrt", "square", "std", "tan",
    "tanh", "var",
))  # fmt: skip
"""Nonlinear operators: the mean of their results on parts of a batch is not that on the whole batch.

Operators with which losses guard a division, as ``where`` and ``maximum``, are left out.
"""

_PRODUCTS = frozenset(("addmm", "baddbmm", "bmm", "div", "dot", "linear", "mm", "mul", "mv"))
"""Operators that multiply or divide: their results are not linear in sums over samples if several operands are such."""


def meetings(recording: Recording, axes: RunAxes, flow: SampleFlow) -> dict[tuple[str, str], None]:
    """Returns (module, operator) for each operator that combines the samples of a batch other than in a plain sum.

    Reported are:

    - reductions such as a maximum, and softmax and the like along the samples;
    - operators that compare or multiply all samples with one another, as a contrastive loss does;
    - operators that need the dim of the samples whole, such as a convolution along it;
    - sums of samples in groups, and samples picked by number that code combines with other samples, or that pass a
      layer which other samples do not pass;
    - nonlinear functions, such as a root, of sums over samples, if the sums depend on parameters and outputs on the
      results;
    - sums over samples that are written into a buffer, or whose values code reads;
    - running counts, along the samples, of what the model has decided, as for experts of limited capacity;
    - counts of samples by class, with which code computes (:func:`used_counts`);
    - rows in which the samples lie in two orders, and operators that mix rows which a condition has selected.

    ``flow`` has the samples picked by number (:func:`follow_samples`). It may be empty, for example where some inputs
    have something other than samples in dim 0; then none of these are reported.
    """
    of_run = _MeetingSearch(recording, axes)
    causes = [cause for call in recording.calls if call.operands for cause in of_run.causes_of(call)]
    causes += of_run.buffers_set_anew()
    causes += of_run.rows_in_two_orders()
    causes += used_counts(recording, axes, of_run.trained, of_run.leading)
    read = ((module, of_run.sums.get(use)) for module, use in recording.read)
    causes += [(module, f"a decision by a {call.name}") for module, call in read if call is not None]
    causes += [(call.module, call.name) for call in picking_calls(flow, of_run.trained, of_run.leading)]
    causes += [
        (call.module, f"{call.name}, for layers that other samples do not pass,")
        for call in calls_picking_for_some(recording, flow, of_run.leading)
        if (call.module, call.name) not in causes
    ]
    selected = _meetings_of_selected(recording, axes, of_run.leading)
    causes += [(call.module, f"{call.name}, of rows that a condition selects,") for call in selected]
    return dict.fromkeys(causes)


class _MeetingSearch:
    """Looks at the operators of one record: ``sums`` are values summed over samples, with the operator that summed."""

    def __init__(self, recording: Recording, axes: RunAxes) -> None:
        self.recording, self.axes = recording, axes
        self.batch = axes.of_samples(recording.inputs)
        self.sums, _ = sums_over_samples(recording, axes)
        self.bases = recording.bases
        self.trained, self.leading = trained_values(recording), leading_to(recording)
        kept = {use for call in recording.calls for use in call.written if self.bases.get(use, use).kind == "buffer"}
        kept.update(recording.new_buffers.values(), *recording.set_attributes.values())
        self.used = leading_to(recording, {*recording.outputs, *kept, *(use for _, use in recording.read)})
        """The values that have an effect: on outputs, buffers, attributes of modules, or the code's branches."""
        uses = (use for use in axes.uses if use.role is Role.SUM and not self.batch.isdisjoint(leaves(use.axis)))
        self.over = {id(use.call) for use in uses}
        """The ids of the operators that sum over a dim of samples."""

    def of_batch(self, use: TensorUse) -> list[set[DimAxis]]:
        """Returns, for each dim of a tensor, the axes of samples in it."""
        return [self.batch.intersection(leaves(axis)) for axis in self.axes.of(use)]

    def leads(self, uses: Iterable[TensorUse]) -> bool:
        """Returns whether an output depends on one of the values."""
        return not self.leading.isdisjoint(uses)

    def causes_of(self, call: RecordedCall) -> Iterator[tuple[str, str]]:
        """Yields (module, what) for each way in which samples meet in an operator."""
        name, first = call.name.removesuffix("_"), call.operands[0]
        if name == "cumsum" and not first.has_fractions:  # places in a queue, as for experts of limited capacity
            along = self.of_batch(first)[call.argument(1, "dim", -1)] if first in self.trained else ()
            if along and self.leads(call.results):
                yield call.module, "a running count"
        decides = name in ("all", "any") and first in self.trained and self.leads(call.results)
        if not decides and not any(use.has_fractions for use in call.results):
            return
        if (decides and self._reduces(call)) or self._meet_in(call, name, first) or self._bends_sums(call, name):
            yield call.module, call.name
        changed = [base.name for use in call.written if (base := self.bases.get(use, use)).kind == "buffer"]
        summed = [self.sums[use].name for use in call.operands if use in self.sums]
        if changed and summed:
            yield call.module, f"a {summed[0]}, with which it changes the buffer '{changed[0]}',"

    def _meet_in(self, call: RecordedCall, name: str, first: TensorUse) -> bool:
        """Returns whether an operator computes values from several samples otherwise than by a plain sum."""
        if self.used.isdisjoint((*call.results, *call.written)):
            return False
        if name in _REDUCTIONS and first.kind != "constant" and self._reduces(call):
            return True
        if name in _ALONG and first.has_fractions and self._is_along_samples(call, name, first):
            return True
        if name in ("view", "_unsafe_view") and self._exchanges_samples(call, first):
            return True
        results = [use for use in call.results if use.has_fractions]
        # a product with a matrix of weights between samples makes each sample a sum over all samples
        if name in _PRODUCTS and id(call) in self.over and any(map(any, map(self.of_batch, results))):
            return True
        is_used = not self.trained.isdisjoint(call.operands) and self.leads((*results, *call.written))
        return (
            self._pairs_samples(call, results)
            or needs_other_samples(call, self.axes, self.batch)
            or (is_used and adds_up_groups(call, self.axes, self.batch, self.recording.num_samples))
        )

    def _reduces(self, call: RecordedCall) -> bool:
        """Returns whether the result has no index of samples that the first operand has."""
        before, after = self.of_batch(call.operands[0]), self.of_batch(call.results[0])
        return bool(set().union(*before) - set().union(*after))

    def _is_along_samples(self, call: RecordedCall, name: str, first: TensorUse) -> bool:
        """Returns whether an operator mixes elements along a dim of samples, as a softmax may."""
        before = self.of_batch(first)
        dims = call.argument(_ALONG[name], "dims" if name in ("flip", "roll") else "dim", -1)
        return any(before[dim] for dim in ([dims] if isinstance(dims, int) else dims) if before)

    def _exchanges_samples(self, call: RecordedCall, first: TensorUse) -> bool:
        """Returns whether a view loses the samples' index, as that of (samples, tokens) as (tokens, samples) does."""
        after = set().union(*(axis for use in call.results for axis in self.of_batch(use)))
        return self.leads(call.results) and not set().union(*self.of_batch(first)) <= after

    def _pairs_samples(self, call: RecordedCall, results: Sequence[TensorUse]) -> bool:
        """Returns whether results have two dims of samples, as scores between all samples have, and no operand has."""

        def number(use: TensorUse) -> int:
            return sum(map(bool, self.of_batch(use)))

        return all(number(use) < 2 for use in call.operands) and any(number(use) > 1 for use in results)

    def _bends_sums(self, call: RecordedCall, name: str) -> bool:
        """Returns whether an operator is not linear in the sums over samples that it takes."""
        of_sums = [use for use in call.operands if use in self.sums and use in self.trained]
        bends = name in _BENDS or (name in _PRODUCTS and len(of_sums) > 1)
        return bool(of_sums) and bends and self.leads(use for use in call.results if use.has_fractions)

    def buffers_set_anew(self) -> Iterator[tuple[str, str]]:
        """Yields the sums over samples that code puts in the place of buffers."""
        for name, use in self.recording.new_buffers.items():
            if use in self.sums:
                what = f"a {self.sums[use].name}, with which it changes the buffer '{name}',"
                yield name.rpartition(".")[0], what

    def rows_in_two_orders(self) -> Iterator[tuple[str, str]]:
        """Yields the operators that combine rows, products of samples and other indices, in two orders of samples."""
        for call, orders in self.axes.in_two_orders:
            one, other = (
                [place for place, axis in enumerate(order) if self.batch.intersection(leaves(axis))] for order in orders
            )
            meets = bool(one and other) and one != other and any(use.has_fractions for use in call.results)
            if meets and self.leads(call.results):
                yield call.module, f"{call.name}, of rows in which the samples lie in two orders,"


_PICKS = {"index_select": 1, "narrow": 1, "select": 1, "slice": 1}
"""Operators that take rows by their numbers, and the number of the argument that names the dim.

Operators that split a tensor into parts are left out: the sizes of the parts may be the samples' numbers of rows.
"""


def _meetings_of_selected(
    recording: Recording, axes: RunAxes, leading: set[TensorUse]
) -> Iterator[RecordedCall]:  # fmt: skip
    """Yields the operators that combine rows which a condition on values has selected, as ``x[mask]`` does.

    A rank has only some of the selected rows. Yielded are operators that take some of the rows by number, such as the
    first ones, or that compute each row from others, as a softmax does; reductions such as a maximum; and means and
    other sums of rows whose result goes back into each row.
    """
    batch, selected = axes.of_samples(recording.inputs), set[DimAxis]()
    for call in recording.calls:
        masks = call.operands if call.name in ("nonzero", "masked_select") else _masks_of(call)
        if any(batch.intersection(leaves(axis)) for use in masks for axis in axes.of(use)) and call.results[0].shape:
            selected.update(leaves(axes.of(call.results[0])[0]))
    selected -= batch
    if not selected:
        return

    def dims_of(use: TensorUse) -> list[int]:
        return [dim for dim, axis in enumerate(axes.of(use)) if not selected.isdisjoint(leaves(axis))]

    taken: dict[TensorUse, list[RecordedCall]] = {}  # by tensor, the calls that take rows of it
    for call in recording.calls:
        x, name = next(iter(call.operands), None), call.name.removesuffix("_")
        dims = dims_of(x) if x is not None and x.shape and not leading.isdisjoint(call.results) else []
        if x is None or not dims:
            continue
        # flip and roll change only the order of the selected rows
        along = None if name in ("flip", "roll") else _PICKS.get(name, _ALONG.get(name))
        dim_argument = [] if along is None else call.argument(along, "dim", 0 if name in _PICKS else -1)
        named = {dim % len(x.shape) for dim in ([dim_argument] if isinstance(dim_argument, int) else dim_argument)}
        mixes = named.intersection(dims) or (name in _REDUCTIONS and not any(map(dims_of, call.results)))
        if name in _PICKS and named.intersection(dims):
            taken.setdefault(x, []).append(call)
        elif mixes and (x.has_fractions or name != "sort"):  # numbers such as lengths are sorted to pack sequences
            yield call
    for x, calls in taken.items():
        (dim, *_) = dims_of(x)
        counts = [pick.results[0].shape[dim] if len(pick.results[0].shape) == len(x.shape) else 1 for pick in calls]
        if sum(counts) < x.shape[dim]:  # else the calls together may take all rows, one after the other
            yield calls[0]
    _, known = sums_over_samples(recording, axes)
    _, back = sums_over_samples(recording, axes, selected)
    yield from (call for call in back if call not in known)


def _masks_of(call: RecordedCall) -> list[TensorUse]:
    """Returns the masks by which ``x[mask]`` selects elements; none of any other operator."""
    indices = call.args[1] if call.name == "index" else ()
    return [index for index in indices if isinstance(index, TensorUse) and index.dtype is torch.bool]
