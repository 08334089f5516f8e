"""Tells which modules are alike: of the same code, sizes and settings, so that what is found of one holds for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_PLAIN = (int, float, bool, str, tuple, type(None))
_OF_MODULES = frozenset(vars(nn.Module()))


def signature(block: nn.Module) -> tuple[str, ...]:
    """Returns what two modules must have alike so that they do the same: classes, settings, shapes, ties, hooks.

    >>> one, other, wide = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 4)
    >>> signature(one) == signature(other), signature(one) == signature(wide)
    (True, False)
    """
    found: list[Any] = []
    number = {id(p): place for place, p in enumerate(block.parameters())}
    for path, module in block.named_modules():
        settings = sorted(
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, _PLAIN) and name not in _OF_MODULES - {"training"}
        )
        tensors = [(name, p.shape, p.dtype, p.requires_grad, number[id(p)])
                   for name, p in module.named_parameters(recurse=False)]  # fmt: skip
        buffers = [(name, b.shape, b.dtype) for name, b in module.named_buffers(recurse=False)]
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        own = "forward" in vars(module)
        # two classes may have one name, as those that a function makes: a class is itself alone
        found.append((path, id(type(module)), repr(settings), tensors, buffers, hooks, own))
    return tuple(map(repr, found))


def likeness(block: nn.Module) -> object:
    """Returns what two modules must have alike to be taken for one another: :func:`signature`, and what they hold.

    Lists, dicts and sets are compared by what they hold, other objects are themselves alone.

    >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> one.act, other.act = nn.functional.relu, nn.functional.gelu
    >>> likeness(one) == likeness(other), likeness(nn.Linear(2, 2)) == likeness(nn.Linear(2, 2))
    (False, True)
    """
    held = {
        (path, name): repr(value)
        if isinstance(value := vars(block.get_submodule(path))[name], list | dict | set)
        else key
        for (path, name), key in held_objects(block).items()
    }
    return signature(block), held


def held_objects(block: nn.Module) -> Mapping[tuple[str, str], int]:
    """Returns the identity of every attribute of a module and its children that is no setting, module or tensor.

    Modules of one :func:`signature` that hold the same objects, such as one function, do the same. If the mapping, or
    the signature, is another one after a call, the call has kept something.

    >>> layer = nn.Linear(2, 2)
    >>> layer.act = nn.functional.gelu
    >>> list(held_objects(layer))
    [('', 'act')]
    """
    return {
        (path, name): id(value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_MODULES and not isinstance(value, _PLAIN)
    }
