"""Tells which attributes of modules a forward has changed, by which one call may tell another one something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes that each module has for torch: its parameters, buffers, submodules, hooks and mode."""


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes that a module has beside those that torch gives each one.

    >>> own_attributes(nn.LeakyReLU())
    {'negative_slope': 0.01, 'inplace': False}
    """
    return {name: value for name, value in vars(module).items() if name not in _OF_TORCH}


def kept_attributes(module: nn.Module) -> Mapping[tuple[str, str], object]:
    """Returns what modules keep in attributes, by module name inside of ``module`` and attribute name, to be compared.

    A plain value is compared by itself; anything else is another one if it is another object, or holds others.

    >>> layer = nn.ReLU()
    >>> before = kept_attributes(layer)
    >>> layer.calls = 1
    >>> changed_attributes(before, kept_attributes(layer))
    [('', 'calls')]
    """
    return {
        (path, name): value if isinstance(value, _PLAIN) else (id(value), *map(id, _held(value)))
        for path, each in module.named_modules()
        for name, value in own_attributes(each).items()
    }


def _held(value: Any) -> list[Any]:
    if isinstance(value, list | tuple | set):
        return [*value]
    return [*value.values()] if isinstance(value, dict) else [*getattr(value, "__dict__", {}).values()]


def changed_attributes(
    before: Mapping[tuple[str, str], object], now: Mapping[tuple[str, str], object]
) -> list[tuple[str, str]]:
    """Returns the module and attribute names of what is new or another value in ``now``, both of the same module."""
    return [key for key, value in now.items() if key not in before or before[key] != value]
