"""A deep copy of a model's structure in half the time of ``copy.deepcopy``; planning makes many."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def copied(model: M, memo: dict[int, Any]) -> M:
    """Returns a deep copy of ``model``, faster than ``deepcopy``, whose ``memo`` (ids of objects to copies) it takes.

    Most of a module's attributes are empty dicts for hooks, which are copied here directly.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> other = copied(model, {id(p): p for p in model.parameters()})
    >>> other[0] is model[0], other[0].weight is model[0].weight
    (False, True)
    """
    plain = [module for module in model.modules() if id(module) not in memo and _is_plain(module)]
    for module in plain:
        memo[id(module)] = object.__new__(type(module))
    for module in plain:
        memo[id(module)].__dict__.update((name, _copied(value, memo)) for name, value in vars(module).items())
    return copy.deepcopy(model, memo)


def _is_plain(module: nn.Module) -> bool:
    """Whether a deep copy of the module is a deep copy of its attributes: its class customises no copying."""
    protocol = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs_ex__")
    kind = type(module)
    customised = any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in protocol)
    return not customised and not hasattr(kind, "__slots__")


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) in (dict, OrderedDict) and not value:
        return type(value)()
    return copy.deepcopy(value, memo)
