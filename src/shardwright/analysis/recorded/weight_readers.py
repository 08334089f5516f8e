"""Finds which modules' code reads each parameter in a recorded forward, and which parameters other modules read."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from shardwright.analysis.recorded.recording import Recording
from shardwright.analysis.traced.structure import owners


def readers_of(recording: Recording) -> defaultdict[str, set[str]]:
    """Returns, for each parameter that a recorded forward uses, the names of the modules whose code uses it.

    Code that reads the shape of a parameter, or replaces its tensor, uses the parameter too. Parameters that the model
    returns are used by the loss, whose name is "".
    """
    readers = defaultdict(set, {name: set(modules) for name, modules in recording.measured.items()})
    for use in recording.outputs:
        if use.kind == "parameter":
            readers[use.name].add("")
    for name, module in recording.replaced.items():
        readers[name].add(module)
    for call in recording.calls:
        for use in call.operands:
            if use.kind == "parameter":
                readers[use.name].add(call.module)
    return readers


def read_by_others(model: nn.Module, recording: Recording) -> set[str]:
    """Returns the names of the parameters that are used by code of another module than their own.

    For example, a model that adds the norms of all weights to its output uses the weights of its layers. Not returned
    are the parameters of the output projection of an ``nn.MultiheadAttention``, which uses them without calling that
    layer.

    >>> import torch
    >>> from shardwright.analysis.recorded.record_forward import record_forward
    >>> class Penalized(nn.Sequential):
    ...     def forward(self, x):
    ...         return super().forward(x), self[0].weight.norm()
    >>> model = Penalized(nn.Linear(4, 8), nn.Linear(8, 2)).to("meta")
    >>> read_by_others(model, record_forward(model, torch.empty(2, 4, device="meta")))
    {'0.weight'}
    """
    users, readers = defaultdict[str, set[str]](set), readers_of(recording)
    for path, _, _, name in owners(model):
        around = path.rpartition(".")[0]
        is_inner = bool(path) and isinstance(model.get_submodule(around), nn.MultiheadAttention)
        users[name] |= {path, around} if is_inner else {path}
    return {name for name, paths in users.items() if readers[name] - paths}
