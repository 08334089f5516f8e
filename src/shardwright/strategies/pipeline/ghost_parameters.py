"""Meta tensors in place of other stages' parameters, so that code between modules can read shapes and dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from shardwright.analysis.traced.structure import has_hooks, owners
from shardwright.plan.event_stages import EventStages


class GhostParameters:
    """The parameters of a rank's model, with meta tensors in place of those that other pipeline stages hold.

    Code between modules runs on every stage, and finds all parameters here without a collective. A strategy such as
    ZeRO-3 may all-gather a parameter when it is read as a module's attribute. Two things still read parameters in this
    way: :meth:`fetch`, before a call on this stage that needs them, and the forward of each module, for its own.
    """

    def __init__(self, model: nn.Module, stages: EventStages) -> None:
        self._missing: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._plain: list[tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, str]]] = []
        self._stores: dict[str, tuple[dict[str, Any], str]] = {}
        whole, names = stages.model, defaultdict[nn.Module, dict[str, str]](dict)
        for _, module, own, name in owners(whole):
            names[module][name] = own
        self.opened = [model.get_submodule(path) for path in stages.opened if not has_hooks(whole.get_submodule(path))]
        """The modules whose code runs on every stage and on which the user has put no hooks.

        The caller runs them without the hooks that strategies have put on them.
        """
        for path, module in model.named_modules():
            theirs = whole.get_submodule(path)._parameters
            held = dict(dict.items(module._parameters))
            missing = {
                name: p
                for name, p in theirs.items()
                if p is not None and (held.get(name) is None or _is_empty(held[name], p))
            }
            if path in stages.units or path in stages.opened:
                plain = {**held, **missing}
                self._plain.append((module, module._parameters, plain, names[whole.get_submodule(path)]))
            else:
                self._missing += [(module._parameters, name, p) for name, p in missing.items()]
        for _, module, own, name in owners(model):
            self._stores.setdefault(name, (module._parameters, own))

    @contextmanager
    def standing_in(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        """Returns a context in which all parameters of the model can be read; those of other stages are meta tensors.

        ``others`` are tensors, such as gathered weights, that are read in place of the parameters of these names.
        """
        before = [(store, name, dict.get(store, name)) for store, name, _ in self._missing]
        for module, _, plain, names in self._plain:
            instead = {names[name]: others[name] for name in others.keys() & names.keys()}
            vars(module)["_parameters"] = {**plain, **instead} if instead else plain
        for store, name, parameter in self._missing:
            dict.__setitem__(store, name, parameter)
        try:
            yield
        finally:
            for module, own, _, _ in self._plain:
                vars(module)["_parameters"] = own
            for store, name, held in before:
                dict.__setitem__(store, name, held)

    def fetch(self, names: Iterable[str]) -> None:
        """Reads the parameters that a function takes or the model returns, so that ZeRO unshards them first."""
        for name in names:
            if name in self._stores:
                store, own = self._stores[name]
                store[own]


def _is_empty(held: Any, whole: nn.Parameter) -> bool:
    return bool(held.numel() == 0 and whole.numel() > 0)
