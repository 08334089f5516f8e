"""Tells the attributes that a module's own code has set from those that torch gives every module."""

from __future__ import annotations

from typing import Any

from torch import nn

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes that torch gives every module: parameters, buffers, submodules, hooks and the training mode."""


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module other than those that torch gives every module.

    >>> own_attributes(nn.LeakyReLU())
    {'negative_slope': 0.01, 'inplace': False}
    """
    return {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}
