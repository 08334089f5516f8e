"""Finds code that counts the samples of a batch by class, such as the tokens of each expert, and trains by the counts.

A rank or a microbatch counts only its own samples. Counts are integers, so no gradient shows that they are used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod

import torch

from shardwright.analysis.dims.run_axes import DimAxis, RunAxes, leaves
from shardwright.analysis.recorded.recording import RecordedCall, Recording, TensorUse

_COUNTING = frozenset((
    "bincount", "count_nonzero", "histc", "index_add", "index_put", "scatter_add", "scatter_reduce", "sum",
))  # fmt: skip
"""Operators that count, if they take integers or conditions; ``histc`` also counts numbers with fractions."""

_USING = frozenset((
    "add", "addmm", "baddbmm", "bmm", "div", "dot", "linear", "mm", "mul", "mv", "nll_loss2d_forward",
    "nll_loss_forward", "sub",
))  # fmt: skip
"""Operators by which counts change values that are trained."""


def used_counts(
    recording: Recording, axes: RunAxes, trained: Collection[TensorUse], leading: Collection[TensorUse]
) -> Iterator[tuple[str, str]]:
    """Yields (module, what it counts with) for counts over the samples by which the output changes.

    ``trained`` are the values that depend on parameters, ``leading`` those that lead to an output. Counts of one
    number, such as the number of labels that a mean divides by, are left out, but where they change a buffer.

    >>> from torch import nn
    >>> from shardwright.analysis.model_graph import ModelGraph
    >>> class Router(nn.Linear):
    ...     def forward(self, x):
    ...         shares = super().forward(x).softmax(-1)
    ...         return shares.mean(0) @ shares.argmax(-1).bincount(minlength=3).float()
    >>> run = ModelGraph(Router(4, 3), torch.empty(2, 4)).run
    >>> values = {use for call in run.recording.calls for use in (*call.operands, *call.results)}
    >>> list(used_counts(run.recording, run.axes, values, values))
    [('', 'counts (bincount)')]
    """
    batch = axes.of_samples(recording.inputs)
    counts: dict[TensorUse, RecordedCall] = {}
    for call in recording.calls:
        name, made = call.name.removesuffix("_"), [*call.results, *call.written]
        origin = next((counts[use] for use in call.operands if use in counts), None)
        if origin is None and name in _COUNTING and _counts(call, axes, batch):
            origin = call
        if origin is None:
            continue
        others = [use for use in call.operands if use not in counts and use.has_fractions and use in trained]
        buffers = [use.name for use in call.written if use.kind == "buffer"]
        if buffers:
            yield call.module, f"counts ({origin.name}), with which it changes the buffer '{buffers[0]}',"
        by_class = any(use in counts and prod(use.shape) > 1 for use in call.operands)
        if others and by_class and name in _USING and any(use in leading for use in made):
            yield call.module, f"counts ({origin.name})"
        if origin is call or not others:
            counts.update((use, origin) for use in made if use.dtype is not torch.bool)
    for name, use in recording.new_buffers.items():
        if use in counts:
            yield name.rpartition(".")[0], f"counts ({counts[use].name}), with which it changes the buffer '{name}',"


def _counts(call: RecordedCall, axes: RunAxes, batch: Collection[DimAxis]) -> bool:
    """Returns whether an operator's result counts something over all samples, of which no dim is left."""

    def has_samples(use: TensorUse) -> bool:
        return any(leaf in batch for axis in axes.of(use) if axis.size > 1 for leaf in leaves(axis))

    whole = call.name == "histc" or not any(use.has_fractions for use in call.results)
    return whole and any(map(has_samples, call.operands)) and not any(map(has_samples, call.results))
