"""Who may call a layer that is cut: the code that was followed when the cut was found to be right, and no other.

::

    class AE(nn.Module):                      # a pair, as its own forward has it ...
        def encode(self, x): return relu(self.up(x))
        def forward(self, x): return self.down(self.encode(x))

    z = self.ae.encode(x)                     # ... and somebody who looks inside: a part of the features
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from shardwright.analysis.structure import CONTAINERS, LayerChain, trace


class AllowedCallers(NamedTuple):
    """Where calls of a layer come from: ``owner``'s forward was followed; in it the code of ``callers`` calls it."""

    owner: str
    callers: frozenset[str]

    @staticmethod
    def of(owner: str) -> AllowedCallers:
        """A layer that its owner's own code calls."""
        return AllowedCallers(owner, frozenset([owner]))

    def is_caller(self, running: Sequence[str], containers: Collection[str]) -> bool:
        """Whether a call is from here, by the modules whose forwards are running, the outermost first.

        A container passes on the calls of whoever calls it.

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
    """Where the calls of a chain's layers come from, and of the dropouts between them, which know of the cut.

    >>> from shardwright.analysis.structure import find_chains
    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    >>> chain_callers(model, *find_chains(model))["0"]
    Home(owner='', callers=frozenset({''}))
    """
    if chain.owner is None:
        return {}
    drops = [path for path in chain.between if isinstance(model.get_submodule(path), nn.Dropout)]
    return dict.fromkeys((*chain.columns, chain.row, *drops), AllowedCallers.of(chain.owner))


def plain_containers(model: nn.Module) -> frozenset[str]:
    """The modules that only hold others."""
    return frozenset(path for path, module in model.named_modules() if type(module) in CONTAINERS)


def called_elsewhere(model: nn.Module, allowed_callers: Mapping[str, AllowedCallers]) -> set[str]:
    """The layers that some code, as far as it can be followed, calls from elsewhere than their home.

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
    containers, found, unseen = plain_containers(model), set[str](), set[str]()
    above = {path for home in allowed_callers.values() for path in _above(home.owner)} - containers
    for path in sorted(above, key=lambda each: -len(list(_above(each)))):  # the innermost first
        prefix = f"{path}." if path else ""
        inside = {
            layer: home
            for layer, home in allowed_callers.items()
            if home.owner.startswith(prefix) and home.owner != path
            if not unseen.intersection(each for each in _above(home.owner) if each.startswith(prefix))
        }
        opened = {
            each.removeprefix(prefix)
            for home in inside.values()
            for caller in home.callers | {home.owner}
            for each in (*_above(caller), caller)
            if each.startswith(prefix) and each != path
        }
        graph = trace(model.get_submodule(path), opened=opened) if inside else None
        if graph is None:
            unseen.add(path)
            continue
        for node in graph.nodes:
            home = inside.get(f"{prefix}{node.target}") if node.op == "call_module" else None
            if home is None:
                continue
            running = [path, *(f"{prefix}{each}" for each in node.meta["within"])]
            if not home.is_caller(running, containers):
                found.add(f"{prefix}{node.target}")
    return found


def _above(path: str) -> Iterator[str]:
    """The modules around one, the model first.

    >>> list(_above("a.b.c"))
    ['', 'a', 'a.b']
    """
    parts = path.split(".") if path else []
    return (".".join(parts[:number]) for number in range(len(parts)))
