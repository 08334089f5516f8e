"""Finds which modules' code reads each parameter in a recorded forward, and what others read than its own module."""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from shardwright.analysis.recording import Recording
from shardwright.analysis.structure import owners


def readers_of(recording: Recording) -> defaultdict[str, set[str]]:
    """Returns, for each parameter that a recorded forward uses, the names of the modules whose code uses it.

    Code that asks for the shape of a parameter, or replaces its tensor, uses it too, and the loss, named "", those that
    the model returns.
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
    """Returns the names of the parameters that the code of another module than their own uses.

    A model that adds the norms of all its weights to its output, for example, uses those of its layers. An
    ``nn.MultiheadAttention`` computes its output projection itself, with the parameters of a layer that it never calls;
    these are not returned.

    >>> import torch
    >>> from shardwright.analysis.record_forward import record_forward
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
