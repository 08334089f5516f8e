"""Tells the attributes that a module keeps by itself from those that torch gives each one."""

from __future__ import annotations

from typing import Any

from torch import nn

MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes that each module has for torch: its parameters, buffers, submodules, hooks and mode."""


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes that a module has beside those that torch gives each one.

    >>> own_attributes(nn.LeakyReLU())
    {'negative_slope': 0.01, 'inplace': False}
    """
    return {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}
