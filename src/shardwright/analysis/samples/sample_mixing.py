"""Finds code in a recorded run that computes one sample's values from other samples of the batch.

Such code gives other results on a rank, or in a microbatch, that has only some of the samples. Layers such as BatchNorm
are known by their class. Code outside of layers is found by its operators: a sum over the samples whose result goes
back into each sample, or a batch norm that uses the batch's own statistics. :func:`meetings` finds other ways in which
samples meet, of which layouts warn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.dims.dim_letters import Role
from shardwright.analysis.dims.run_axes import DimAxis, RunAxes, axes_of, leaves
from shardwright.analysis.objects.copying import copied
from shardwright.analysis.objects.marked_inputs import sample_tensors
from shardwright.analysis.on_meta.hidden_outputs import unseen_outputs
from shardwright.analysis.recorded.record_forward import record_forward
from shardwright.analysis.recorded.recording import RecordedCall, Recording, TensorUse
from shardwright.analysis.samples.class_counts import used_counts
from shardwright.analysis.samples.loss_means import other_means, sum_call
from shardwright.analysis.samples.sample_selections import SampleFlow, follow_samples, picking_calls
from shardwright.analysis.samples.sample_windows import adds_up_groups, needs_other_samples

COUNTS = (23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107)
"""The batch sizes tried for a recording: primes, which few other dims have as their size, so that the samples' dim is
recognised."""

NAMED = 3
"""The most modules that a warning names."""

_SUMS = frozenset((
    "sum", "nansum", "mean", "var", "std", "var_mean", "logsumexp", "prod", "norm", "linalg_vector_norm",
    "_foreach_norm", "mm", "bmm", "addmm", "baddbmm", "linear", "mv", "addmv", "dot",
))  # fmt: skip
"""Operators that compute one value from many.

Operators that pick a sample, such as an index, are left out, because masks use them. So is a maximum, because code may
use it for precision alone; :func:`meetings` reports it.
"""

_LOSSES = frozenset((
    "binary_cross_entropy", "huber_loss", "mse_loss", "nll_loss2d_forward", "nll_loss_forward", "smooth_l1_loss",
    "soft_margin_loss",
))  # fmt: skip
"""Operators that compute one value from all samples, if their result is a single number."""

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
"""Operators that are not linear where several operands are sums over samples."""

_SOLVES = frozenset(("_linalg_solve_ex", "cholesky_solve", "linalg_lu_solve", "linalg_solve_triangular"))
"""Operators that solve with a matrix: one that is made of several samples goes back into each sample's result."""

_VIEWS = frozenset(("as_strided", "narrow", "select", "slice", "split", "split_with_sizes", "unbind", "view"))
"""Operators whose results are views of elements of their operand: a write to a result also changes the operand."""

BATCH_NORM_CALLS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "batch_norm",
)
"""The operators that compute a batch norm."""


def mixing_call(recording: Recording, axes: RunAxes, shared: Collection[str]) -> RecordedCall | None:
    """Returns the first operator that mixes samples and whose result goes back into each sample, or None.

    ``shared`` names the BatchNorms that may mix samples, because ranks add up their statistics. A call of one of them
    counts all the same if it takes its statistics over some of the samples only. A sum that ends in one number, such as
    a loss, does not count, and neither do sums of integers, such as counts and positions.

    >>> import torch
    >>> from torch import nn
    >>> from shardwright.analysis.model_graph import ModelGraph
    >>> class Centred(nn.Linear):
    ...     def forward(self, x):
    ...         y = super().forward(x)
    ...         return y - y.mean(0)
    >>> run = ModelGraph(Centred(3, 4), torch.empty(2, 3)).run
    >>> mixing_call(run.recording, run.axes, ()).name
    'mean'
    """
    samples = axes.of_samples(recording.inputs)
    norms = (
        call
        for call in recording.calls
        if call.name in BATCH_NORM_CALLS
        and _normalises_samples(call, axes, samples)
        and (call.module not in shared or _normalises_some(call, recording, axes))
    )
    calls = [*_sums(recording, axes)[1][:1], *norms]
    return min(calls, key=recording.calls.index, default=None)


def meetings(recording: Recording, axes: RunAxes, flow: SampleFlow) -> dict[tuple[str, str], None]:
    """Returns (module, operator) for each operator that combines the samples of a batch other than in a plain sum.

    Reported are:

    - reductions such as a maximum, and softmax and the like along the samples;
    - operators that compare or multiply all samples with one another, as a contrastive loss does;
    - operators that need the dim of the samples whole, such as a convolution along it;
    - sums of samples in groups, and samples picked by number that code combines with other samples;
    - nonlinear functions, such as a root, of sums over samples, if the sums depend on parameters and outputs on the
      results;
    - sums over samples that are written into a buffer, or whose values code reads;
    - running counts, along the samples, of what the model has decided, as for experts of limited capacity;
    - counts of samples by class, with which code computes (:func:`used_counts`);
    - rows in which the samples lie in two orders, and operators that mix rows which a condition has selected.

    ``flow`` has the samples picked by number (:func:`follow_samples`). It may be empty, for example where some inputs
    have something other than samples in dim 0; then none of these are reported.
    """
    batch = axes.of_samples(recording.inputs)
    count = recording.num_samples
    sums, causes = _sums(recording, axes)[0], dict[tuple[str, str], None]()
    trained, leading = _trained(recording), _leading(recording)
    over = {id(use.call) for use in axes.uses if use.role is Role.SUM and not batch.isdisjoint(leaves(use.axis))}

    bases: dict[TensorUse, TensorUse] = {}  # view, such as a slice of a buffer -> the tensor that it is a part of
    for call in recording.calls:
        if call.name in _VIEWS and call.operands:
            bases |= dict.fromkeys(call.results, bases.get(call.operands[0], call.operands[0]))

    def of_batch(use: TensorUse) -> list[set[DimAxis]]:
        return [batch.intersection(leaves(axis)) for axis in axes.of(use)]

    for call in recording.calls:
        name, first = call.name.removesuffix("_"), next(iter(call.operands), None)
        results = [use for use in call.results if use.has_fractions]
        if first is None:
            continue
        if name == "cumsum" and not first.has_fractions:  # places in a queue, as for experts of limited capacity
            is_used = first in trained and not leading.isdisjoint(call.results)
            if is_used and of_batch(first)[call.argument(1, "dim", -1)]:
                causes[call.module, "a running count"] = None
        before, meets = of_batch(first), False
        decides = name in ("all", "any") and first in trained and not leading.isdisjoint(call.results)
        if not results and not decides:
            continue
        if all(sum(map(bool, of_batch(use))) < 2 for use in call.operands):
            meets = any(sum(map(bool, of_batch(use))) > 1 for use in results)
        if decides or (name in _REDUCTIONS and first.kind != "constant"):
            meets |= bool(set().union(*before) - set().union(*of_batch(call.results[0])))
        if name in _ALONG and first.has_fractions:
            dims = call.argument(_ALONG[name], "dims" if name in ("flip", "roll") else "dim", -1)
            meets |= any(before[dim] for dim in ([dims] if isinstance(dims, int) else dims) if before)
        # a product with a matrix of weights between samples makes each sample a sum over all samples
        meets |= name in _PRODUCTS and id(call) in over and any(map(any, map(of_batch, results)))
        meets |= needs_other_samples(call, axes, batch)
        if name in ("view", "_unsafe_view") and not leading.isdisjoint(
            results
        ):  # as (batch, time) viewed (time, batch)
            meets |= not set().union(*before) <= set().union(*(axis for use in call.results for axis in of_batch(use)))
        is_used = not trained.isdisjoint(call.operands) and not leading.isdisjoint((*results, *call.written))
        meets |= is_used and adds_up_groups(call, axes, batch, count)
        of_sums = [use for use in call.operands if use in sums and use in trained]
        bends = name in _BENDS or (name in _PRODUCTS and len(of_sums) > 1)
        meets |= bool(of_sums) and bends and any(use in leading for use in results)
        if meets:
            causes[call.module, call.name] = None
        changed = [base.name for use in call.written if (base := bases.get(use, use)).kind == "buffer"]
        if changed and (sums_of := [sums[use].name for use in call.operands if use in sums]):
            causes[call.module, f"a {sums_of[0]}, with which it changes the buffer '{changed[0]}',"] = None
    for name, use in recording.new_buffers.items():
        if use in sums:
            causes[name.rpartition(".")[0], f"a {sums[use].name}, with which it changes the buffer '{name}',"] = None
    for call, orders in axes.in_two_orders:  # one dim is a product of samples and other indices, in two orders
        one, other = (
            [place for place, axis in enumerate(order) if batch.intersection(leaves(axis))] for order in orders
        )
        meets = bool(one and other) and one != other and any(use.has_fractions for use in call.results)
        if meets and not leading.isdisjoint(call.results):
            causes[call.module, f"{call.name}, of rows in which the samples lie in two orders,"] = None
    causes.update(dict.fromkeys(used_counts(recording, axes, trained, leading)))
    for module, use in recording.read:
        if use in sums:
            causes[module, f"a decision by a {sums[use].name}"] = None
    for call in picking_calls(flow, trained, leading):
        causes[call.module, call.name] = None
    for call in _meetings_of_selected(recording, axes, leading):
        causes[call.module, f"{call.name}, of rows that a condition selects,"] = None
    return causes


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
        if name in _PICKS and named.intersection(dims):
            taken.setdefault(x, []).append(call)
        elif named.intersection(dims) or (name in _REDUCTIONS and not any(map(dims_of, call.results))):
            yield call
    for x, calls in taken.items():
        (dim, *_) = dims_of(x)
        counts = [pick.results[0].shape[dim] if len(pick.results[0].shape) == len(x.shape) else 1 for pick in calls]
        if sum(counts) < x.shape[dim]:  # else the calls together may take all rows, one after the other
            yield calls[0]
    known = _sums(recording, axes)[1]
    yield from (call for call in _sums(recording, axes, selected)[1] if call not in known)


def _masks_of(call: RecordedCall) -> list[TensorUse]:
    """Returns the masks by which ``x[mask]`` selects elements; none of any other operator."""
    indices = call.args[1] if call.name == "index" else ()
    return [index for index in indices if isinstance(index, TensorUse) and index.dtype is torch.bool]


def warn_of_meeting(places: Sequence[str], function: str, stacklevel: int) -> None:
    """Warns that ``function`` combines samples of the batch in the modules or the loss named in ``places``.

    Call it where a layout cuts the batch: a rank or microbatch then combines only the samples that it has.
    """
    named = list(places) if len(places) <= NAMED else [*places[:NAMED], f"{len(places) - NAMED} more"]
    where = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    warn(
        f"{where} {'takes' if len(named) == 1 else 'take'} {function} over all samples of a batch, which this layout "
        "cuts: if the result matters, it differs from one device; verify says by how much",
        stacklevel=stacklevel + 1,
    )


def warn_of_loss(loss: nn.Module, output: Any, targets: Any) -> bool:
    """Warns of each operator of a loss that combines samples (:func:`meetings`), and returns whether there is one.

    A copy of the loss runs on meta tensors with the shapes of a model's ``output`` and its ``targets``, but with
    another number of samples. No warning is given for a loss that does not run in this way, nor if it needs tensors
    that are hidden inside of an object.

    >>> import warnings
    >>> def contrastive(output, targets): return (output @ output.T).logsumexp(1).sum(), len(output)
    >>> from shardwright.models.given_loss import as_loss
    >>> with warnings.catch_warnings(record=True, action="always") as given:
    ...     warn_of_loss(as_loss(contrastive), torch.ones(2, 3), torch.zeros(2))
    True
    >>> str(given[0].message)[:52]
    'the loss takes mm over all samples of a batch, which'
    """
    tensors = [x for x in sample_tensors((targets, output)) if x.dim()]
    number = len(tensors[0]) if tensors else 0
    sizes = {size for x in tensors for size in x.shape}
    if not number or any(x.is_meta for x in tensors) or unseen_outputs(output):
        return False
    prime = next((count for count in COUNTS if count not in sizes), COUNTS[0])
    # a list in the targets may have one entry per sample, with tensors whose dim 0 has, say, the boxes of a picture
    alike = {len(x) for x in tensors} == {number} and not has_list(targets)
    # a loss that halves the batch, for two views of each sample, say, does not run on an odd number of samples
    tried = (_recorded_loss(loss, output, targets, number, count) for count in ((prime, number) if alike else (prime,)))
    recording = next((record for record in tried if record is not None), None)
    if recording is None:
        return False
    names = list[str]()
    for branch in recording.branches:
        axes = axes_of(branch)
        flow = follow_samples(branch, axes) if alike else SampleFlow()
        sums, back = _sums(branch, axes)
        names += [call.name for call in back] + [name for _, name in meetings(branch, axes, flow)]
        names += [call.name for call in other_means(branch, axes, sums, _trained(branch), targets=targets)]
    for name in dict.fromkeys(names):
        warn_of_meeting(["the loss"], name, stacklevel=2)
    return bool(names)


def means_within(recording: Recording, axes: RunAxes, counted: int | None, labels: Any) -> list[tuple[str, str]]:
    """Returns (module, operator) for each operator that keeps the model's own loss from being a mean over ``labels``.

    Such a loss is a mean over another count, a sum, or a sum of means over several counts. ``counted`` is the label
    that the caller does not count, or None if the caller counts samples.

    >>> from shardwright.analysis.model_graph import ModelGraph
    >>> class Masked(nn.Linear):
    ...     def forward(self, x, mask, labels):
    ...         each = (super().forward(x)[:, 0] - labels).square() * mask
    ...         return {"loss": each.sum() / mask.sum()}
    >>> run = ModelGraph(Masked(3, 1), {"x": torch.empty(2, 3), "mask": torch.empty(2), "labels": torch.empty(2)}).run
    >>> means_within(run.recording, run.axes, -100, None)
    [('', 'div')]
    """
    loss = recording.loss
    if loss is None or loss.shape or not loss.has_fractions:
        return []
    leading, sums = _leading(recording, [loss]), _sums(recording, axes)[0]
    of_loss = leading.intersection(sums)  # leaves out the sums of metrics beside the loss
    means = other_means(recording, axes, of_loss, _trained(recording), targets=labels, counted=(counted,))
    added = sum_call(recording, axes, loss)
    used = [call for call in means if not leading.isdisjoint(call.results)] + ([added] if added is not None else [])
    return [(call.module, call.name) for call in used]


def has_list(tree: Any) -> bool:
    """Returns whether a tree has a list in it, which may have an entry for each sample."""
    return any(isinstance(leaf, list) for leaf in tree_leaves(tree, is_leaf=lambda value: isinstance(value, list)))


def _recorded_loss(loss: nn.Module, output: Any, targets: Any, number: int, count: int) -> Recording | None:
    """Returns the record of a loss on ``count`` samples in place of ``number``, or None if the loss does not run so.

    The tensors of the output count as parameters.
    """

    def with_others(x: Tensor) -> Tensor:
        several = count * len(x) // number if x.dim() and len(x) % number == 0 else 0
        return torch.empty((several, *x.shape[1:]) if several else x.shape, dtype=x.dtype, device="meta")

    inputs = tree_map_only(Tensor, with_others, (output, targets))
    # listed before the loss runs, which may pop entries from its inputs
    outputs, tensors = set(map(id, sample_tensors(inputs[0]))), sample_tensors(inputs)
    try:
        with torch.random.fork_rng(devices=()):
            recording = record_forward(copied(loss, {}), inputs)  # a copy: the loss may keep state
    except Exception:  # of the user's own code, on tensors without values
        return None
    if len(tensors) != len(recording.inputs):
        return None
    learning = [use for x, use in zip(tensors, recording.inputs, strict=True) if id(x) in outputs]
    recording.parameters.update({f"output {place}": use for place, use in enumerate(learning)})
    return recording


def _sums(
    recording: Recording, axes: RunAxes, more: Collection[DimAxis] = ()
) -> tuple[dict[TensorUse, RecordedCall], list[RecordedCall]]:
    """Returns the values that were summed over samples, each with the operator that summed, and the sums that go back.

    Such a value depends on several samples and has no dim of samples. The list has the operators whose sums go back
    into each sample, in the order of the run. ``more`` has further axes whose indices count as samples.
    """
    samples = axes.of_samples(recording.inputs).union(more)
    known: dict[TensorUse, bool] = {}

    def has_samples(use: TensorUse) -> bool:
        if use not in known:
            known[use] = any(leaf in samples for axis in axes.of(use) if axis.size > 1 for leaf in leaves(axis))
        return known[use]

    sums: dict[TensorUse, RecordedCall] = {}
    back: list[RecordedCall] = []
    viewed: dict[TensorUse, TensorUse] = {}  # view -> the tensor that it is a view of
    for call in recording.calls:
        if call.name in _VIEWS and call.operands:
            viewed.update(dict.fromkeys(call.results, call.operands[0]))
        origin = next((sums[use] for use in call.operands if use in sums and not has_samples(use)), None)
        valued = [use for use in call.operands if use.has_fractions]
        is_sum = call.name.removesuffix("_") in _SUMS or (call.name in _LOSSES and not call.results[0].shape)
        if origin is None and is_sum and any(map(has_samples, valued)):
            origin = call
        elif origin is not None and any(map(has_samples, call.operands if call.name in _SOLVES else call.results)):
            back.append(origin)
        if origin is not None:
            made = [*call.results, *call.written]
            for use in made:
                if use in viewed and viewed[use] not in made:  # a view that changes nothing is its own base
                    made.append(viewed[use])
            sums.update((use, origin) for use in made if not has_samples(use))
    return sums, back


def _trained(recording: Recording) -> set[TensorUse]:
    """Returns the values that depend on parameters."""
    values = {*recording.parameters.values()}
    for call in recording.calls:
        if not values.isdisjoint(call.operands):
            values.update(call.results, call.written)
    return values


def _leading(recording: Recording, outputs: Collection[TensorUse] | None = None) -> set[TensorUse]:
    """Returns the values that ``outputs`` depend on, by default all outputs of the recording."""
    values = {*(recording.outputs if outputs is None else outputs)}
    for call in reversed(recording.calls):
        if not values.isdisjoint((*call.results, *call.written)):
            values.update(call.operands)
    return values


def _normalises_samples(call: RecordedCall, axes: RunAxes, samples: Collection[DimAxis]) -> bool:
    """Whether a batch norm takes its statistics over samples.

    An instance norm does not: its samples are among the channels.
    """
    over = [leaf for place, axis in enumerate(axes.of(call.operands[0])) if place != 1 for leaf in leaves(axis)]
    is_training = "_no_stats" in str(call.function) or call.argument(5, "training", False)
    return bool(is_training) and any(leaf in samples for leaf in over)


def _normalises_some(call: RecordedCall, recording: Recording, axes: RunAxes) -> bool:
    """Whether a batch norm takes its statistics over some of the samples, as a ghost BatchNorm does over each chunk.

    Chunks of a rank's samples are other sets of samples than the chunks of the whole batch.
    """
    dims = [{*leaves(axis)} for axis in axes.of(call.operands[0])]
    over, every = set().union(*(dim for place, dim in enumerate(dims) if place != 1)), set().union(*dims)
    sample_axes = (axes.of_samples([use]) for use in recording.inputs)
    # samples that the channels dim holds, such as the two of each pair, are normalized apart from each other
    return any(samples & over and samples - every for samples in sample_axes)
