"""Names that mean something else while code is read: ``torch`` makes tensors of unknown sizes, ``isinstance`` is told.

Asked what it is, a value of a trace would say that it is one. So the code asks here, and what is not known is an error:
one of two branches would be read, and the other might be what runs.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from shardwright.rng import with_names

MAKERS = frozenset(("arange", "empty", "eye", "full", "linspace", "ones", "zeros"))
"""What makes a tensor of numbers alone: nothing in a call says that a trace is under way."""
NUMBERS = frozenset(("dim", "ndimension", "numel", "nelement"))
TUPLES = frozenset(("chunk", "split", "tensor_split", "unbind"))
UNKNOWN = frozenset(("item", "tolist", "topk", "sort", "max", "min", "median", "mode", "kthvalue", "stride", "unique"))
"""What gives a tensor or something else, as its arguments or values say."""
TENSORS_OF_TENSORS = frozenset(("T", "mT", "H", "mH", "data", "real", "imag"))
NO_TENSOR = "no_tensor"
"""In the ``meta`` of an argument's node: it is given something else than a tensor."""

Gives = Callable[[str], type | None]
"""The class of what a module gives, by its name; None where nobody knows."""


class _Making:
    """``torch``, but that tensors are made of sizes and devices that a trace does not know yet."""

    def __init__(self, tracer: fx.proxy.TracerBase | None, gives: Gives) -> None:
        self._tracer, self._gives = tracer, gives

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name == "is_tensor":
            return lambda value: _isinstance(self._gives, value, Tensor)
        tracer = self._tracer
        if name not in MAKERS or tracer is None:
            return found

        def make(*args: Any, **named: Any) -> Any:
            known = not any(isinstance(each, fx.Proxy) for each in tree_flatten((args, named))[0])
            return found(*args, **named) if known else tracer.create_proxy("call_function", found, args, named)

        return make


def standing_in(module: nn.Module, gives: Gives, tracer: fx.proxy.TracerBase | None = None) -> Callable[..., Any]:
    """The module's forward; where it names torch or isinstance, these are others that know of a trace.

    With a ``tracer`` tensors may be made of what the trace does not know yet.
    """
    function = getattr(module.forward, "__func__", None)
    if not isinstance(function, FunctionType) or type(module).__module__.startswith("torch."):
        return module.forward
    names: dict[str, Any] = {}
    if "torch" in function.__code__.co_names and function.__globals__.get("torch") is torch:
        names["torch"] = _Making(tracer, gives)
    if "isinstance" in function.__code__.co_names and "isinstance" not in function.__globals__:
        names["isinstance"] = partial(_isinstance, gives)
    return MethodType(with_names(function, **names), module) if names else module.forward


def _isinstance(gives: Gives, value: Any, kinds: Any) -> bool:
    if not builtins.isinstance(value, fx.Proxy):
        return builtins.isinstance(value, kinds)
    kind = class_of(value.node, gives)
    if kind is None:
        raise TypeError(f"a trace does not know what '{value.node}' is")
    return issubclass(kind, kinds)


def class_of(node: fx.Node, gives: Gives) -> type | None:
    """The class of a value of a trace; None where a trace does not show it.

    >>> tracer = fx.Tracer()
    >>> graph = tracer.trace(nn.Sequential(nn.Flatten()))
    >>> [class_of(node, gives=lambda path: Tensor).__name__ for node in graph.nodes if node.op != "output"]
    ['Tensor', 'Tensor']
    """
    if node.op == "placeholder":
        return None if node.meta.get(NO_TENSOR) else Tensor
    if node.op == "call_module":
        return gives(str(node.target))
    if node.op == "get_attr":
        return Tensor
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    own = node.args[1] if len(node.args) > 1 else None
    if name == "getattr":
        found = Tensor if own in TENSORS_OF_TENSORS else torch.Size if own == "shape" else None
        return int if own == "ndim" else found
    if name in NUMBERS or name in TUPLES or name in UNKNOWN:
        return int if name in NUMBERS else tuple if name in TUPLES else None
    if name == "size":
        return torch.Size if own is None and not node.kwargs else int
    before = [class_of(each, gives) for each in node.all_input_nodes]
    if name == "getitem":
        of_size = int if builtins.isinstance(own, int) else None
        base = node.args[0]
        of_tuple = Tensor if builtins.isinstance(base, fx.Node) and _makes_tensors(base) else None
        return {Tensor: Tensor, torch.Size: of_size, tuple: of_tuple}.get(before[0] or type(None))
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator" and Tensor not in before:
        return int if set(before) == {int} and name not in ("truediv", "pow") else None
    return Tensor


def _makes_tensors(node: fx.Node) -> bool:
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    return node.op != "call_module" and name in TUPLES


def class_given(module: nn.Module, read: Callable[[nn.Module], fx.Graph | None]) -> type | None:
    """The class of what a module gives, from its kind or its code.

    >>> class_given(nn.Linear(1, 1), lambda _: None), class_given(nn.LSTM(1, 1), lambda _: None)
    (<class 'torch.Tensor'>, <class 'tuple'>)
    """
    if type(module).__module__.startswith("torch.nn."):
        return tuple if builtins.isinstance(module, nn.RNNBase | nn.LSTMCell | nn.MultiheadAttention) else Tensor
    graph = read(module)
    if graph is None:
        return None
    (output,) = (node for node in graph.nodes if node.op == "output")
    given = output.args[0]
    if not builtins.isinstance(given, fx.Node):
        return type(given)
    return class_of(given, lambda path: class_given(module.get_submodule(path), read))
