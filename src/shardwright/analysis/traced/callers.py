"""Allowed callers of a sharded layer: only the code that was traced when the layer was found to be shardable.

A column-parallel layer returns a shard of the features. The traced code is known to expect a shard. Other code is not,
so a layer that is called from elsewhere stays whole::

    class AE(nn.Module):                      # up and down form a pair in AE's own forward ...
        def encode(self, x): return relu(self.up(x))
        def forward(self, x): return self.down(self.encode(x))

    z = self.ae.encode(x)                     # ... but this caller would get a shard of the features
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import nn

from shardwright.analysis.traced.kept_traces import kept
from shardwright.analysis.traced.structure import CONTAINERS, LayerChain, trace


class AllowedCallers(NamedTuple):
    """The modules whose code may call a sharded layer.

    A call is allowed if it comes from one of ``callers`` while the forward of ``owner`` runs. ``owner`` is the module
    whose traced code showed that the layer can be sharded.
    """

    owner: str
    callers: frozenset[str]

    @staticmethod
    def of(owner: str) -> AllowedCallers:
        """Returns an :class:`AllowedCallers` that allows calls from the code of the module ``owner`` alone."""
        return AllowedCallers(owner, frozenset([owner]))

    def is_caller(self, running: Sequence[str], containers: Collection[str]) -> bool:
        """Returns whether a call of the layer is allowed while the forwards of the modules ``running`` are active.

        ``running`` lists module names, outermost first. A module in ``containers`` has no code of its own, so the
        module around it counts as the caller.

        >>> allowed = AllowedCallers.of("mlp")
        >>> allowed.is_caller(["", "mlp", "mlp.layers"], {"mlp.layers"}), allowed.is_caller([""], ())
        (True, False)
        """
        if self.owner not in running:
            return False
        for path in reversed(running):
            if path in self.callers:
                return True
            if path not in containers:
                return False
        return False


def chain_callers(model: nn.Module, chain: LayerChain) -> dict[str, AllowedCallers]:
    """Returns the allowed callers of each layer in a column- and row-parallel chain, by layer name.

    Dropouts between the layers are included. The result is empty for a chain that the user named.

    >>> from shardwright.analysis.traced.structure import find_chains
    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    >>> chain_callers(model, *find_chains(model))["0"]
    AllowedCallers(owner='', callers=frozenset({''}))
    """
    if chain.owner is None:
        return {}
    drops = [path for path in chain.between if isinstance(model.get_submodule(path), nn.Dropout)]
    return dict.fromkeys((*chain.columns, chain.row, *drops), AllowedCallers.of(chain.owner))


def plain_containers(model: nn.Module) -> frozenset[str]:
    """Returns the names of the modules that only hold other modules, such as ``nn.Sequential``."""
    return frozenset(path for path, module in model.named_modules() if type(module) in CONTAINERS)


def called_elsewhere(model: nn.Module, allowed_callers: Mapping[str, AllowedCallers]) -> set[str]:
    """Returns the names of the layers in ``allowed_callers`` that are also called by code that may not call them.

    To find such calls, the modules around a layer's owner are traced. The owner is the module whose code showed that
    the layer can be sharded. Code that cannot be traced is skipped.

    >>> layers = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> class Looking(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layers = layers
    ...     def forward(self, x):
    ...         return self.layers(x) + self.layers[0](x).mean()
    >>> sorted(called_elsewhere(Looking(), {name: AllowedCallers.of("layers") for name in ("layers.0", "layers.2")}))
    ['layers.0']
    """
    containers, layers, untraceable = plain_containers(model), set[str](), set[str]()
    around = {path for allowed in allowed_callers.values() for path in _ancestors(allowed.owner)} - containers
    for path in sorted(around, key=lambda ancestor: -len(list(_ancestors(ancestor)))):  # innermost first
        prefix = f"{path}." if path else ""
        # an untraceable module hides its calls from traces of the modules around it
        inside = {
            layer: allowed
            for layer, allowed in allowed_callers.items()
            if allowed.owner.startswith(prefix) and allowed.owner != path
            if not untraceable.intersection(
                ancestor for ancestor in _ancestors(allowed.owner) if ancestor.startswith(prefix)
            )
        }
        opened = {
            name.removeprefix(prefix)
            for allowed in inside.values()
            for caller in allowed.callers | {allowed.owner}
            for name in (*_ancestors(caller), caller)
            if name.startswith(prefix) and name != path
        }
        way = frozenset(opened)
        graph = kept(model.get_submodule(path), partial(trace, opened=way), way) if inside else None
        if graph is None:
            untraceable.add(path)
            continue
        for node in graph.nodes:
            allowed = inside.get(f"{prefix}{node.target}") if node.op == "call_module" else None
            running = [path, *(f"{prefix}{name}" for name in node.meta.get("within", ()))]
            if allowed is not None and not allowed.is_caller(running, containers):
                layers.add(f"{prefix}{node.target}")
    return layers


def _ancestors(path: str) -> Iterator[str]:
    """Returns the names of the modules around one: of "a.b.c" these are "", "a" and "a.b"."""
    parts = path.split(".") if path else []
    return (".".join(parts[:number]) for number in range(len(parts)))
