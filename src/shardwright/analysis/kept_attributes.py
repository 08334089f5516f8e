"""Tells which attributes of modules a forward has changed, by which one call may tell another one something."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from shardwright.analysis.operator_results import tensors_of

_PLAIN = (bool, int, float, str, type(None))


def kept_attributes(module: nn.Module) -> Mapping[tuple[str, str], object]:
    """Returns what modules keep in attributes, by module name inside of ``module`` and attribute name, to be compared.

    It has plain values, the ids of tensors, also of those in lists and dicts, and the lengths of these.

    >>> layer = nn.ReLU()
    >>> before = kept_attributes(layer)
    >>> layer.calls = 1
    >>> changed_attributes(before, kept_attributes(layer))
    [('', 'calls')]
    """
    found: dict[tuple[str, str], object] = {}
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if isinstance(value, Tensor):
                found[path, name] = id(value)
            elif isinstance(value, _PLAIN):
                found[path, name] = value
            elif isinstance(value, list | dict | set) and not name.startswith("_"):
                found[path, name] = len(value), *map(id, tensors_of(value if isinstance(value, list | dict) else []))
    return found


def changed_attributes(
    before: Mapping[tuple[str, str], object], now: Mapping[tuple[str, str], object]
) -> list[tuple[str, str]]:
    """Returns the module and attribute names of what is new or another value in ``now``, both of the same module."""
    return [key for key, value in now.items() if key not in before or before[key] != value]
