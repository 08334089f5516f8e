"""A cut weight is for its own layer: whoever else reads it during a forward would compute with a part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.analysis.callers import AllowedCallers
from shardwright.analysis.structure import GUARDED, kind_of
from shardwright.errors import PlanError
from shardwright.forward_stack import Forward, Rung, wrap


@dataclass
class Forwarding:
    """Whether the whole model's forward is under way."""

    active: bool = False

    def watch(self, model: nn.Module) -> None:
        """Follows the forwards of ``model``."""

        def begin(*_: Any) -> None:
            self.active = True

        def end(*_: Any) -> None:
            self.active = False

        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end, always_call=True)


@dataclass
class Running:
    """The modules whose forwards are under way, the outermost first.

    ``containers`` pass on the calls of others. ``apart`` are the modules whose code a pipeline runs call by call, in
    place of their forwards; empty without one. ``by`` is the strategy whose cut layers are kept.
    """

    containers: Collection[str] = ()
    apart: Collection[str] = ()
    by: str = "core"
    _paths: list[str] = field(default_factory=list)

    def follow(self, module: nn.Module, path: str) -> None:
        """Takes part in what ``path`` runs."""

        def around(forward: Forward) -> Forward:
            @wraps(forward)
            def run(*args: Any, **named: Any) -> Any:
                self._paths.append(path)
                try:
                    return forward(*args, **named)
                finally:
                    self._paths.pop()

            return run

        wrap(module, Rung.FOLLOWED, "notes that it runs", by=self.by, around=around)

    def keep(self, module: nn.Module, path: str, home: AllowedCallers) -> None:
        """Makes it an error to call the module from elsewhere than its home.

        >>> class Pair(nn.Sequential):
        ...     pass
        >>> pair, running = Pair(nn.Linear(2, 4), nn.Linear(4, 2)), Running()
        >>> running.follow(pair, "pair")
        >>> running.keep(pair[0], "pair.0", AllowedCallers.of("pair"))
        >>> pair(torch.ones(2)).shape
        torch.Size([2])
        >>> pair[0](torch.ones(2))
        Traceback (most recent call last):
        shardwright.errors.PlanError: 'pair.0' is cut, and what calls it is not the code that was followed to cut it
          given:   a call from outside the model's forward
          allowed: calls from the forward of 'pair'
          fix:     keep it whole: --role pair.0=copied, or roles={"pair.0": "copied"}
        """

        def around(forward: Forward) -> Forward:
            @wraps(forward)
            def run(*args: Any, **named: Any) -> Any:
                if not self._is_home(home):
                    raise _called_elsewhere(path, home, self._paths)
                return forward(*args, **named)

            return run

        callers = ", ".join(each or "the model" for each in sorted(home.callers))
        wrap(module, Rung.CALLERS, f"called by {callers} alone", by=self.by, around=around)

    def _is_home(self, home: AllowedCallers) -> bool:
        if home.is_caller(self._paths, self.containers):
            return True
        # a backward computes single modules again; a pipeline runs the calls of a module without it
        again = torch._C._current_graph_task_id() != -1
        if not again and home.owner not in self.apart:
            return False
        named = [path for path in self._paths if path not in self.containers]
        return named[-1] in home.callers if named else again or not home.callers.isdisjoint(self.apart)


def _called_elsewhere(path: str, home: AllowedCallers, running: list[str]) -> PlanError:
    def spelled(name: str) -> str:
        return f"'{name}'" if name else "the model"

    callers = {home.owner} if home.owner in home.callers else home.callers
    return PlanError(
        f"'{path}' is cut, and what calls it is not the code that was followed to cut it",
        given=f"a call from {spelled(running[-1])}" if running else "a call from outside the model's forward",
        allowed=f"calls from the forward of {', '.join(map(spelled, sorted(callers)))}",
        fix=f'keep it whole: --role {path}=copied, or roles={{"{path}": "copied"}}',
    )


def guard(module: nn.Module, path: str, forwarding: Forwarding, readable: Collection[str] = ()) -> None:
    """Makes reading the module's parameters an error during a forward; its own forward must not use attributes.

    Functional tying, ``F.linear(x, model.token.weight)``, is what this finds. Those that are ``readable`` may be looked
    at all the same.

    >>> layer, forwarding = nn.Linear(2, 2), Forwarding()
    >>> guard(layer, "head", forwarding)
    >>> layer.weight.shape
    torch.Size([2, 2])
    >>> forwarding.active = True
    >>> layer.weight
    Traceback (most recent call last):
    shardwright.errors.PlanError: 'head.weight' is cut, and something other than its own layer reads it
      given:   an attribute read during the forward
      allowed: calling 'head'; one parameter in two layers: head.weight = token.weight
      fix:     call the layer, or assign the parameter to the layer that shares it
    """

    def reader(name: str) -> property:
        def read(self: nn.Module) -> Tensor | None:
            if forwarding.active:
                raise PlanError(
                    f"'{path}.{name}' is cut, and something other than its own layer reads it",
                    given="an attribute read during the forward",
                    allowed=f"calling '{path}'; one parameter in two layers: head.weight = token.weight",
                    fix="call the layer, or assign the parameter to the layer that shares it",
                )
            return self._parameters[name]

        return property(read)

    kind = type(module)
    held = [name for name, parameter in module._parameters.items() if parameter is not None]
    names: dict[str, Any] = {name: reader(name) for name in held if name not in readable}
    module.__class__ = type(kind.__name__, (kind,), {**names, GUARDED: kind_of(module), "__module__": kind.__module__})
