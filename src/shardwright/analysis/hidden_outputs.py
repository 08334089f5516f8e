"""Finds the tensors that a model returns inside of objects which torch's tree functions do not look into.

A forward may return a dataclass, a dict of its own class, or a ``torch.distributions`` object. Its loss reads the
tensors inside, so where stages or ranks have parts of a model they have to be found there too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.autograd_graph import nodes_behind
from shardwright.errors import PlanError

_DEEPEST = 4
"""How many objects, one in the other, are looked into."""

_ELSE = (str, bytes, int, float, complex, type, nn.Module, torch.Generator, torch.dtype, torch.device, ModuleType,
         FunctionType, BuiltinFunctionType, MethodType)  # fmt: skip
"""What is no container of a model's outputs."""


class HiddenTensor(NamedTuple):
    """A tensor in an object: the object's class, and what puts another tensor in its place, if that is possible."""

    holder: type
    tensor: Tensor
    replace: Callable[[Tensor], None] | None


def hidden_tensors(tree: Any) -> list[HiddenTensor]:
    """Returns the tensors in the objects of a nested output that are neither tensors nor known to torch's pytree.

    >>> from types import SimpleNamespace
    >>> output = torch.ones(1), SimpleNamespace(y=torch.ones(2), name="y")
    >>> [(each.holder.__name__, len(each.tensor)) for each in hidden_tensors(output)]
    [('SimpleNamespace', 2)]
    """
    leaves = [leaf for leaf in tree_leaves(tree) if not (leaf is None or isinstance(leaf, (Tensor, *_ELSE)))]
    seen: set[int] = set()
    return [each for leaf in leaves for each in _inside(leaf, type(leaf), seen, 0)]


def unseen_outputs(outputs: Any) -> list[HiddenTensor]:
    """Returns the hidden tensors that a loss may read and that lead to none of the visible outputs.

    A cache of keys and values leads to the logits beside it, and is not among them.
    """
    found = [each for each in hidden_tensors(outputs) if each.tensor.grad_fn is not None]
    if not found:
        return []
    behind = set(nodes_behind(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)))
    return [each for each in found if each.tensor.grad_fn not in behind]


def refused_output(holder: type, where: str) -> PlanError:
    """Returns the error for an output with tensors in an object of class ``holder`` under a layout's part ``where``."""
    register = "register_dataclass" if is_dataclass(holder) else "register_pytree_node"
    given = holder.__name__ if is_dataclass(holder) else f"{holder.__name__}, flatten, unflatten"
    return PlanError(
        "the model returns tensors inside of an object that the layout does not look into",
        given=f"{holder.__name__} in the model's output, under {where}",
        allowed="tensors, tuples, lists, dicts, and classes that torch's pytree knows, as outputs of transformers are",
        fix=f"return a dict or a tuple, or tell torch of the class once: torch.utils._pytree.{register}({given})",
    )


def _inside(value: Any, holder: type, seen: set[int], depth: int) -> Iterator[HiddenTensor]:
    if id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    for item, replace in _items(value):
        if isinstance(item, Tensor):
            yield HiddenTensor(holder, item, replace)
        elif not (item is None or isinstance(item, _ELSE)):
            yield from _inside(item, holder, seen, depth + 1)


def _items(value: Any) -> Iterator[tuple[Any, Callable[[Tensor], None] | None]]:
    """Yields what an object holds, each with what puts another value in its place."""
    if isinstance(value, Mapping | list | tuple):
        each_item = value.items() if isinstance(value, Mapping) else enumerate(value)
        put = value.__setitem__ if isinstance(value, MutableMapping | list) else None
        yield from ((each, put and partial(put, key)) for key, each in each_item)
    elif isinstance(value, set | frozenset):
        yield from ((each, None) for each in value)
    names = [*getattr(value, "__dict__", ()), *(name for kind in type(value).__mro__ for name in _slots(kind))]
    for name in names:
        if hasattr(value, name):
            yield getattr(value, name), partial(object.__setattr__, value, name)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
