"""Chooses the units of a recorded forward, of which each call is one event, and the modules that are cut inside."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from shardwright.analysis.chunks.call_graph import weights_by_module
from shardwright.analysis.chunks.forward_record import ForwardRecord
from shardwright.analysis.traced.torch_loops import KNOWN_LOOPS


def opened_modules(
    model: nn.Module, record: ForwardRecord, num_chunks: int, names: Sequence[str], closed: Collection[str],
    finest: float,
) -> set[str]:  # fmt: skip
    """Returns the names of the modules in which a stage may begin: the calls that their code makes are the events.

    Those are modules whose call takes more than ``finest`` of an even chunk's work, those around ``names``, and those
    that compute from the inputs alone; none of torch's layers, none in ``closed``, and none that calls no module with
    weights, since no stage could begin inside.
    """
    share = record.scopes[0].cost.work / num_chunks
    opened = {".".join(parts[:n]) for name in names for parts in [name.split(".")] for n in range(len(parts))}
    weighted = {path for path, inside in weights_by_module(model).items() if inside}
    callers = {0, *(scope.caller for scope in record.scopes if scope.path in weighted)}
    for number, scope in enumerate(record.scopes):
        module = model.get_submodule(scope.path)
        if scope.path in closed or number not in callers or is_layer_of_torch(module):
            continue
        is_called = scope.caller < 0 or record.scopes[scope.caller].path in opened
        if is_called and (scope.caller < 0 or scope.cost.work > share * finest):
            opened.add(scope.path)
    free = {scope.path for scope in record.scopes if scope.is_free}
    return opened | (free - {scope.path for scope in record.scopes if not scope.is_free})


def is_layer_of_torch(module: nn.Module) -> bool:
    """Returns whether a module is a layer of torch, which stays one event; containers of layers are cut inside."""
    lists = isinstance(module, nn.Sequential | nn.ModuleList)
    return type(module).__module__.startswith("torch.nn.") and type(module) not in _OF_LAYERS and not lists


_OF_LAYERS = (*KNOWN_LOOPS, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""The modules of torch that call several layers with weights, one after the other."""


def units_of(model: nn.Module, record: ForwardRecord, opened: Collection[str]) -> set[str]:
    """Returns the modules that code of ``opened`` modules calls, and those that only another forward may call."""
    called = {
        scope.path
        for scope in record.scopes
        if scope.path not in opened and scope.caller >= 0 and record.scopes[scope.caller].path in opened
    }
    return called | _uncalled(model, record, opened)


def _uncalled(model: nn.Module, record: ForwardRecord, opened: Collection[str]) -> set[str]:
    """Returns the largest modules that this forward does not call, of which another forward may call some.

    They lie in ``opened`` modules, or in lists and dicts of these. A module that has several names is found once, and
    not at all if the forward calls it under another name.
    """
    paths = {scope.path for scope in record.scopes}
    met = {model.get_submodule(path) for path in paths}
    around = {".".join(parts[:n]) for path in paths for parts in [path.split(".")] for n in range(len(parts))}
    uncalled = set[str]()

    def look(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            holds = type(child).forward is nn.Module.forward  # a list or dict, which is not called itself
            if inner in opened or (inner not in paths and (inner in around or holds)):
                look(child, inner)
            elif child not in met:
                met.add(child)
                uncalled.add(inner)

    look(model, "")
    return uncalled
