"""Compares modules by classes, sizes and settings, so that the analysis of one block serves all blocks like it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.objects.own_attributes import MODULE_ATTRIBUTES

_PLAIN = (int, float, bool, str, tuple, type(None))
_TOLD_BY_TEXT = (*_PLAIN, torch.dtype, torch.device, FunctionType, BuiltinFunctionType, type)


Counters = frozenset[tuple[str, str]]
"""Attributes that hold a block's index in the list of blocks, such as ``layer_idx``, as (submodule path, name)."""


def counters(blocks: Iterable[nn.Module]) -> Counters:
    """Returns the attributes whose value is the block's index in ``blocks``, in every block that has them.

    An attribute that only one block has is left out.

    >>> blocks = [nn.Linear(2, 2) for _ in range(3)]
    >>> for place, block in enumerate(blocks):
    ...     block.layer_idx, block.size = place, 0
    >>> sorted(counters(blocks))
    [('', 'layer_idx')]
    """
    counts: dict[tuple[str, str], int] = {}
    wrong: set[tuple[str, str]] = set()
    for place, block in enumerate(blocks):
        for path, module in block.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    if value == place:
                        counts[path, name] = counts.get((path, name), 0) + 1
                    else:
                        wrong.add((path, name))
    return frozenset(key for key, number in counts.items() if number > 1 and key not in wrong)


def signature(block: nn.Module, counters: Counters = frozenset()) -> tuple[str, ...]:
    """Returns a key that is equal for modules with the same submodules, classes, settings and tensor shapes.

    Settings are attributes that are numbers, strings, tuples or None, and ``training``. The key also holds dtypes,
    ``requires_grad``, which parameters are tied, how many forward hooks there are, and whether a module's ``forward``
    was replaced. The values of tensors are not part of it, nor are attributes such as lists and functions
    (:func:`held_objects`), nor the settings in ``counters``.

    >>> one, other, wide = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 4)
    >>> signature(one) == signature(other), signature(one) == signature(wide)
    (True, False)
    """
    descriptions: list[Any] = []
    number = {id(p): place for place, p in enumerate(block.parameters())}
    for path, module in block.named_modules():
        settings = sorted(
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, _PLAIN)
            and name not in MODULE_ATTRIBUTES - {"training"}
            and (path, name) not in counters
        )
        tensors = [(name, p.shape, p.dtype, p.requires_grad, number[id(p)])
                   for name, p in module._parameters.items() if p is not None]  # fmt: skip
        buffers = [(name, b.shape, b.dtype) for name, b in module._buffers.items() if b is not None]
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        has_own_forward = "forward" in vars(module)
        # the id of the class, not its name: a function may make several classes of one name
        descriptions.append((path, id(type(module)), repr(settings), tensors, buffers, hooks, has_own_forward))
    return tuple(map(repr, descriptions))


def likeness(block: nn.Module, counters: Counters = frozenset()) -> tuple[object, ...]:
    """Returns a key that is equal for modules with the same :func:`signature` and equal lists, functions and the like.

    Lists, functions and the like are the attributes that the signature leaves out (:func:`held_objects`). Lists, dicts,
    sets and objects of frozen dataclasses that hold plain values and functions are compared by their text (``repr``),
    any other object by its identity. Settings in ``counters`` (:func:`counters`) may differ.

    >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> one.act, other.act = nn.functional.relu, nn.functional.gelu
    >>> likeness(one) == likeness(other), likeness(nn.Linear(2, 2)) == likeness(nn.Linear(2, 2))
    (False, True)
    """
    attributes = (
        (path, name, _text_of(vars(block.get_submodule(path))[name]) or key)
        for (path, name), key in held_objects(block).items()
    )
    return (*signature(block, counters), *attributes)


def _text_of(value: Any) -> str:
    """Returns the ``repr`` of a list, dict, set or frozen dataclass that holds just plain values and functions, or "".

    A dataclass is described by its fields. The text begins with the ``id`` of the class. Values of other kinds give "",
    since they may differ even if their texts are equal.
    """
    kind = type(value)
    params = getattr(kind, "__dataclass_params__", None)
    if params is not None and params.frozen:
        value = {field.name: getattr(value, field.name, None) for field in fields(kind)}
    elif kind not in (list, dict, set):
        return ""
    leaves = value if isinstance(value, set) else tree_leaves(value)
    return f"{id(kind)} {value!r}" if all(isinstance(leaf, _TOLD_BY_TEXT) for leaf in leaves) else ""


def held_objects(block: nn.Module) -> Mapping[tuple[str, str], int]:
    """Returns the ``id`` of each attribute of a module and its submodules that is not a plain value, by (path, name).

    Left out are numbers, strings, tuples and None, and what ``nn.Module`` itself stores: registered parameters,
    buffers, submodules and hooks. Two modules with equal signatures (:func:`signature`) that hold the same objects,
    such as the same function, compute alike from their tensors. If this mapping or the signature changes in a call, the
    call has stored something.

    >>> layer = nn.Linear(2, 2)
    >>> layer.act = nn.functional.gelu
    >>> list(held_objects(layer))
    [('', 'act')]
    """
    return {
        (path, name): id(value)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if name not in MODULE_ATTRIBUTES and not isinstance(value, _PLAIN)
    }
