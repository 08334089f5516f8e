"""A cut weight is for its own layer: whoever else reads it during a forward would compute with a part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwright.errors import PlanError, explain


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
                    explain(
                        f"'{path}.{name}' is cut, and something other than its own layer reads it",
                        given="an attribute read during the forward",
                        allowed=f"calling '{path}'; one parameter in two layers: head.weight = token.weight",
                        fix="call the layer, or assign the parameter to the layer that shares it",
                    )
                )
            return self._parameters[name]

        return property(read)

    kind = type(module)
    held = [name for name, parameter in module._parameters.items() if parameter is not None]
    names = {name: reader(name) for name in held if name not in readable}
    module.__class__ = type(kind.__name__, (kind,), names)
