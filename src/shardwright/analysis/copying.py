"""A copy of a model's structure, made many times while a plan is: as ``copy.deepcopy`` makes it, in half the time."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def copied(model: M, memo: dict[int, Any]) -> M:
    """A deep copy; ``memo`` gives, by the ids of the originals, what stands for them in the copy.

    Most of a module are empty dictionaries for hooks, which need no deep copy.

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
    """Whether a deep copy is one of the attributes: nobody has written how else to copy it."""
    written = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getnewargs_ex__")
    kind = type(module)
    own = [name for name in written if getattr(kind, name, None) is not getattr(nn.Module, name, None)]
    return not own and not hasattr(kind, "__slots__")


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) in (dict, OrderedDict) and not value:
        return type(value)()
    return copy.deepcopy(value, memo)


__all__ = ["copied"]
