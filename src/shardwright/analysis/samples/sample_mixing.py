"""Finds code in a recorded run that computes one sample's values from other samples of the batch.

Such code gives other results on a rank, or in a microbatch, that has only some of the samples. Layers such as BatchNorm
are known by their class. Code outside of layers is found by its operators: a sum over the samples whose result goes
back into each sample, or a batch norm that uses the batch's own statistics. Other ways in which samples meet, of which
layouts warn, are in ``meetings``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.dims.run_axes import DimAxis, RunAxes, axes_of, leaves
from shardwright.analysis.objects.copying import copied
from shardwright.analysis.objects.marked_inputs import sample_tensors
from shardwright.analysis.on_meta.hidden_outputs import unseen_outputs
from shardwright.analysis.recorded.record_forward import record_forward
from shardwright.analysis.recorded.recording import RecordedCall, Recording
from shardwright.analysis.samples.loss_means import other_means, sum_call
from shardwright.analysis.samples.meetings import meetings
from shardwright.analysis.samples.sample_selections import SampleFlow, follow_samples
from shardwright.analysis.samples.sums_over_samples import leading_to, sums_over_samples, trained_values

COUNTS = (23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107)
"""The batch sizes tried for a recording: primes, which few other dims have as their size, so that the samples' dim is
recognised."""

NAMED = 3
"""The most modules that a warning names."""

BATCH_NORM_CALLS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "batch_norm",
)
"""The operators that compute a batch norm."""


def mixing_call(
    recording: Recording, axes: RunAxes, shared: Collection[str], flow: SampleFlow | None = None
) -> RecordedCall | None:
    """Returns the first operator that mixes samples and whose result goes back into each sample, or None.

    ``shared`` names the BatchNorms that may mix samples, because ranks add up their statistics. A call of one of them
    counts all the same if it takes its statistics over some of the samples only, or over one sample, as in a loop over
    the batch, which ``flow`` shows. A sum that ends in one number, such as a loss, does not count, and neither do sums
    of integers, such as counts and positions.

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
        and _is_in_training(call)
        and (
            call.module not in shared or _normalises_some(call, recording, axes)
            if _normalises_samples(call, axes, samples)
            else call.module in shared and flow is not None and flow.sample_of(call.operands[0]) is not None
        )
    )
    calls = [*sums_over_samples(recording, axes)[1][:1], *norms]
    return min(calls, key=recording.calls.index, default=None)


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
        sums, back = sums_over_samples(branch, axes)
        names += [call.name for call in back] + [name for _, name in meetings(branch, axes, flow)]
        names += [call.name for call in other_means(branch, axes, sums, trained_values(branch), targets=targets)]
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
    leading, sums = leading_to(recording, [loss]), sums_over_samples(recording, axes)[0]
    of_loss = leading.intersection(sums)  # leaves out the sums of metrics beside the loss
    means = other_means(recording, axes, of_loss, trained_values(recording), targets=labels, counted=(counted,))
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
    # the tensors are listed before the loss runs, since it may pop entries from the dicts that it is given
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


def norms_without_samples(recording: Recording) -> set[str]:
    """Returns the modules whose every batch norm is of a tensor that nothing of the samples leads to, such as a table.

    All ranks compute these alike, so they have no statistics to share.
    """
    varying = {*recording.inputs, *recording.packed_inputs}
    varies = dict[str, bool]()
    for call in recording.calls:
        if not varying.isdisjoint(call.operands):
            varying.update(call.results, call.written, (recording.bases.get(use, use) for use in call.written))
        if call.name in BATCH_NORM_CALLS:
            varies[call.module] = varies.get(call.module, False) or call.operands[0] in varying
    return {module for module, of_samples in varies.items() if not of_samples}


def _is_in_training(call: RecordedCall) -> bool:
    """Whether a batch norm takes statistics of what it is given."""
    return "_no_stats" in str(call.function) or bool(call.argument(5, "training", False))


def _normalises_samples(call: RecordedCall, axes: RunAxes, samples: Collection[DimAxis]) -> bool:
    """Whether a batch norm normalizes over samples.

    An instance norm does not: its samples are among the channels.
    """
    over = [leaf for place, axis in enumerate(axes.of(call.operands[0])) if place != 1 for leaf in leaves(axis)]
    return any(leaf in samples for leaf in over)


def _normalises_some(call: RecordedCall, recording: Recording, axes: RunAxes) -> bool:
    """Whether a batch norm takes its statistics over some of the samples, as a ghost BatchNorm does over each chunk.

    Chunks of a rank's samples are other sets of samples than the chunks of the whole batch.
    """
    dims = [{*leaves(axis)} for axis in axes.of(call.operands[0])]
    over, every = set().union(*(dim for place, dim in enumerate(dims) if place != 1)), set().union(*dims)
    sample_axes = (axes.of_samples([use]) for use in recording.inputs)
    # samples that the channels dim holds, such as the two of each pair, are normalized apart from each other
    return any(samples & over and samples - every for samples in sample_axes)
