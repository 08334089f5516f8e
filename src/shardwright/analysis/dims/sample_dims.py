"""Finds layers that a recorded forward calls with the samples of the batch elsewhere than in dim 0."""

from __future__ import annotations

from shardwright.analysis.dims.run_axes import RunAxes, leaves
from shardwright.analysis.recorded.recording import Recording


def layers_without_samples_first(recording: Recording, axes: RunAxes) -> set[str]:
    """Returns the modules that multiply or look up a parameter by a tensor whose dim 0 is not exactly the samples.

    The samples may be in a later dim, for example if code puts the tokens of sequences first. They may be one factor of
    a dim, for example if code joins samples and tokens to rows. Or the tensor has no samples, like positions; but
    lookups of a table by such a tensor do not count.

    >>> import torch
    >>> from torch import nn
    >>> from shardwright.analysis.model_graph import ModelGraph
    >>> class Sequences(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
    ...     def forward(self, x):
    ...         return self.second(self.first(x).transpose(0, 1))
    >>> run = ModelGraph(Sequences(), torch.empty(2, 5, 3)).run
    >>> layers_without_samples_first(run.recording, run.axes)
    {'second'}
    """
    samples = axes.of_samples(recording.inputs)
    modules = set[str]()
    for call in recording.calls:
        inputs = [use for use in call.operands if use.kind != "parameter"]
        if len(inputs) == len(call.operands):
            continue
        for use in inputs:
            dims = [set(leaves(axis)) for axis in axes.of(use)]
            has_samples = [not dim.isdisjoint(samples) for dim in dims]
            is_counted = any(has_samples) or call.name != "embedding"
            if dims and is_counted and (not has_samples[0] or len(dims[0]) > 1):
                modules.add(call.module)
    return modules
