"""Finds the parameters that a recorded forward reads by other code than the forwards of the modules that have them."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from shardwright.analysis.recording import Recording
from shardwright.analysis.structure import owners


def read_by_others(model: nn.Module, recording: Recording) -> set[str]:
    """Returns the names of the parameters that another module's code reads, as a sum over all weights does.

    Those of the output layer of an ``nn.MultiheadAttention``, which that module reads, are not among them.

    >>> import torch
    >>> from shardwright.analysis.record_forward import record_forward
    >>> class Penalized(nn.Sequential):
    ...     def forward(self, x):
    ...         return super().forward(x), self[0].weight.norm()
    >>> model = Penalized(nn.Linear(4, 8), nn.Linear(8, 2)).to("meta")
    >>> read_by_others(model, record_forward(model, torch.empty(2, 4, device="meta")))
    {'0.weight'}
    """
    users, readers = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for call in recording.calls:
        for use in call.operands:
            if use.kind == "parameter":
                readers[use.name].add(call.module)
    for path, _, _, name in owners(model):
        users[name].add(path)
        around = path.rpartition(".")[0]
        if path and isinstance(model.get_submodule(around), nn.MultiheadAttention):
            users[name].add(around)
    return {name for name, paths in users.items() if readers[name] - paths}
