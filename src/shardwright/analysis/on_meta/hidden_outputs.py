"""Finds the tensors that a model returns inside of objects which torch's tree functions do not look into.

A forward may return a dataclass, a dict of its own class, or a ``torch.distributions`` object. The loss reads the
tensors inside. If the model is cut over stages or ranks, these tensors have to be found too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwright.analysis.calls.autograd_graph import leaves_behind
from shardwright.analysis.on_meta.operator_results import tensors_of
from shardwright.errors import PlanError

_DEEPEST = 6
"""How many levels of nested objects, lists and dicts are searched for tensors."""

_ELSE = (str, bytes, int, float, complex, type, nn.Module, torch.Generator, torch.dtype, torch.device, ModuleType,
         FunctionType, BuiltinFunctionType, MethodType)  # fmt: skip
"""The classes of values that are not searched for tensors."""


class HiddenTensor(NamedTuple):
    """A tensor found in an object: the object's class, the tensor, and a function that replaces it in the object.

    The function is None where the tensor cannot be replaced, as in a tuple.
    """

    holder: type
    tensor: Tensor
    replace: Callable[[Tensor], None] | None


def hidden_tensors(tree: Any) -> list[HiddenTensor]:
    """Returns the tensors of a nested output that are inside of objects which torch's pytree does not look into.

    >>> from types import SimpleNamespace
    >>> output = torch.ones(1), SimpleNamespace(y=torch.ones(2), name="y")
    >>> [(each.holder.__name__, len(each.tensor)) for each in hidden_tensors(output)]
    [('SimpleNamespace', 2)]
    """
    leaves = [leaf for leaf in tree_leaves(tree) if not (leaf is None or isinstance(leaf, (Tensor, *_ELSE)))]
    seen: set[int] = set()
    return [entry for leaf in leaves for entry in _inside(leaf, type(leaf), seen, 0)]


def unseen_outputs(outputs: Any) -> list[HiddenTensor]:
    """Returns the hidden tensors of an output that the loss needs.

    If the output has no visible tensors, these are all hidden ones. Else they are the hidden tensors that depend on a
    parameter on which no visible output depends, so that only they can train it. The cached keys and values of an
    attention are left out, because the logits beside them depend on the same parameters.
    """
    hidden, visible = hidden_tensors(outputs), [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if not hidden or not visible:
        return hidden
    parameters = leaves_behind(visible)
    return [
        entry
        for entry in hidden
        if entry.tensor.grad_fn is not None and not leaves_behind([entry.tensor]) <= parameters
    ]


def checked_loss(loss: Callable[[Any, Any], Any], output: Any, targets: Any, where: str, *, all_of: bool) -> Any:
    """Returns the loss of an output and targets, which under a layout's part ``where`` may be parts of the whole ones.

    Raises: PlanError: the loss reads a hidden tensor on the meta device, whose values another stage has, or, with
        ``all_of``, any hidden tensor.
    """
    hidden = {id(entry.tensor): entry for entry in hidden_tensors(output) if all_of or entry.tensor.is_meta}
    if not hidden:
        return loss(output, targets)
    failure, loss_value = None, None
    with _Reads() as reads:
        try:
            loss_value = loss(output, targets)
        except Exception as error:  # the user's loss may raise anything, also because it lacks a hidden tensor
            failure = error
    read = next((hidden[tensor_id] for tensor_id in reads.tensors if tensor_id in hidden), None)
    if read is not None:
        raise refused_output(read.holder, where) from failure
    if failure is not None:
        raise failure
    return loss_value


class _Reads(TorchFunctionMode):
    """A torch function mode that collects the ids of the tensor arguments of all functions but reads of shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _ASKS:
            self.tensors.update(dict.fromkeys(map(id, tensors_of((args, kwargs or {})))))
        return func(*args, **(kwargs or {}))


_ASKS = frozenset(("__get__", "size", "dim", "numel", "__len__", "is_floating_point", "stride"))
"""The names of functions that ask for a tensor's shape and the like; ``__get__`` reads attributes such as ``shape``."""


def refused_output(holder: type, where: str) -> PlanError:
    """Returns the error for an output with tensors in an object of class ``holder`` under a layout's part ``where``."""
    register = "register_dataclass" if is_dataclass(holder) else "register_pytree_node"
    arguments = holder.__name__ if is_dataclass(holder) else f"{holder.__name__}, flatten, unflatten"
    return PlanError(
        "the loss needs tensors that the model returns inside of an object, into which the layout does not look",
        given=f"{holder.__name__} in the model's output, under {where}",
        allowed="tensors, tuples, lists, dicts, and classes that torch's pytree knows, as outputs of transformers are",
        fix=f"return a dict or a tuple, or tell torch of the class once: torch.utils._pytree.{register}({arguments})",
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
    """Yields each value that an object holds, with a function that puts a tensor in its place (None if it cannot)."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], str | int | float):
        return  # may be a long list of tokens
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        put = value.__setitem__ if isinstance(value, MutableMapping | list) else None
        yield from ((entry, put and partial(put, key)) for key, entry in pairs)
    elif isinstance(value, set | frozenset | deque):
        yield from ((member, None) for member in value)
    for name, item in [*getattr(value, "__dict__", {}).items()]:
        yield item, partial(value.__dict__.__setitem__, name)
    for name in (name for kind in type(value).__mro__ for name in _slots(kind)):
        with suppress(AttributeError):  # a slot that is empty
            yield getattr(value, name), partial(object.__setattr__, value, name)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
