"""Finds code in a recorded run that computes one sample's values from other samples of the batch.

Such code gives other results on a rank, or in a microbatch, that has only some of the samples. Layers such as BatchNorm
are known by their class. Code outside of layers is found by its operators: a sum over the samples whose result goes
back into each sample, or a batch norm that uses the batch's own statistics.
"""

from __future__ import annotations

from collections.abc import Collection

from shardwright.analysis.recording import RecordedCall, Recording, TensorUse
from shardwright.analysis.run_axes import DimAxis, RunAxes, leaves

_SUMS = (
    "sum", "mean", "var", "std", "var_mean", "logsumexp", "prod", "norm", "linalg_vector_norm",
    "mm", "bmm", "addmm", "baddbmm", "linear", "mv", "dot",
)  # fmt: skip
"""Operators that compute one value from many. An operator that picks a sample, such as an index, is not one of them,
because masks use it. A maximum is not either, because it may serve precision alone; :meth:`Draws.check` warns of it.
"""

BATCH_NORM_CALLS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "batch_norm",
)
"""The operators that compute a batch norm."""


def mixing_call(recording: Recording, axes: RunAxes, shared: Collection[str]) -> RecordedCall | None:
    """Returns the first operator that mixes samples and whose result goes back into each sample, or None.

    ``shared`` names the BatchNorms that may mix samples, because ranks add up their statistics. A sum that ends in one
    number, such as a loss, does not count, and neither do integers such as counts and positions.

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
    known: dict[TensorUse, bool] = {}

    def has_samples(use: TensorUse) -> bool:
        if use not in known:
            known[use] = any(leaf in samples for axis in axes.of(use) for leaf in leaves(axis) if leaf.size > 1)
        return known[use]

    sums: dict[TensorUse, RecordedCall] = {}  # values made of several samples, and what made them
    for call in recording.calls:
        operands = [use for use in call.operands if _has_values(use)]
        results = [use for use in call.results if _has_values(use)]
        if call.name in BATCH_NORM_CALLS and call.module not in shared and _normalises_samples(call, axes, samples):
            return call
        origin = next((sums[use] for use in operands if use in sums and not has_samples(use)), None)
        if origin is None and call.name in _SUMS and any(map(has_samples, operands)):
            origin = call
        elif origin is not None and any(map(has_samples, results)):
            return origin
        if origin is not None:
            sums.update((use, origin) for use in results if not has_samples(use))
    return None


def _has_values(use: TensorUse) -> bool:
    return use.dtype.is_floating_point or use.dtype.is_complex


def _normalises_samples(call: RecordedCall, axes: RunAxes, samples: Collection[DimAxis]) -> bool:
    """Whether a batch norm takes its statistics over samples.

    An instance norm does not: its samples are among the channels.
    """
    over = [leaf for place, axis in enumerate(axes.of(call.operands[0])) if place != 1 for leaf in leaves(axis)]
    is_training = "_no_stats" in str(call.function) or call.argument(5, "training", False)
    return bool(is_training) and any(leaf in samples for leaf in over)
