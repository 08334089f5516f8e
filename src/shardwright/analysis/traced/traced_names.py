"""Replaces the names ``torch`` and ``isinstance`` in code that is traced, so that it accepts proxies.

``torch.ones(x.shape[0])`` must become a node of the graph, although no argument is a tensor proxy. And ``isinstance(x,
Tensor)`` must be true for a proxy ``x`` of a tensor. The replacement infers the class of the value from the graph. If
it cannot, it raises: the trace would follow one branch where the real run may take the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from shardwright.function_copies import with_names

MAKERS = frozenset(("arange", "empty", "eye", "full", "linspace", "ones", "zeros"))
"""Functions of ``torch`` that create a tensor from plain numbers."""
NUMBERS = frozenset(("dim", "ndimension", "numel", "nelement"))
TUPLES = frozenset(("chunk", "split", "tensor_split", "unbind"))
UNKNOWN = frozenset(("item", "tolist", "topk", "sort", "max", "min", "median", "mode", "kthvalue", "stride", "unique"))
"""Functions and methods whose result's class depends on their arguments or values."""
TENSORS_OF_TENSORS = frozenset(("T", "mT", "H", "mH", "data", "real", "imag"))
NO_TENSOR = "no_tensor"
"""A key of the ``meta`` dict of an fx placeholder node: set if the argument is known to be no tensor."""

ResultClass = Callable[[str], type | None]
"""A function from a module's name to the class of its output, or None if that is unknown."""


class _Torch:
    """Replaces the module ``torch`` in traced code, so that tensors can be made from sizes that are proxies."""

    def __init__(self, tracer: fx.proxy.TracerBase | None, result_class: ResultClass) -> None:
        self._tracer, self._result_class = tracer, result_class

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch, name)
        if name == "is_tensor":
            return lambda value: _isinstance(self._result_class, value, Tensor)
        tracer = self._tracer
        if name not in MAKERS or tracer is None:
            return function

        def make(*args: Any, **named: Any) -> Any:
            if any(isinstance(leaf, fx.Proxy) for leaf in tree_flatten((args, named))[0]):
                return tracer.create_proxy("call_function", function, args, named)
            return function(*args, **named)

        return make


def traceable_forward(
    module: nn.Module, result_class: ResultClass, tracer: fx.proxy.TracerBase | None = None
) -> Callable[..., Any]:
    """Returns a module's forward in which ``torch`` and ``isinstance`` accept proxies, so that it can be traced.

    ``result_class`` gives the class of a submodule's result by its name. ``tracer`` is needed if the code makes tensors
    from sizes that are proxies. The forward of torch's own modules is returned as it is. In the returned function,
    ``isinstance`` raises TypeError for a proxy whose class the graph does not show.
    """
    function = getattr(module.forward, "__func__", None)
    if not isinstance(function, FunctionType) or type(module).__module__.startswith("torch."):
        return module.forward
    names: dict[str, Any] = {}
    if "torch" in function.__code__.co_names and function.__globals__.get("torch") is torch:
        names["torch"] = _Torch(tracer, result_class)
    if "isinstance" in function.__code__.co_names and "isinstance" not in function.__globals__:
        names["isinstance"] = partial(_isinstance, result_class)
    return MethodType(with_names(function, **names), module) if names else module.forward


def _isinstance(result_class: ResultClass, value: Any, kinds: Any) -> bool:
    if not isinstance(value, fx.Proxy):
        return isinstance(value, kinds)
    kind = class_of(value.node, result_class)
    if kind is None:
        raise TypeError(f"the trace does not show the class of '{value.node}'")
    return issubclass(kind, kinds)


def class_of(node: fx.Node, result_class: ResultClass) -> type | None:
    """Returns the class of the value that a traced node computes, or None if the graph does not show it.

    ``result_class`` gives the class of a submodule's result by its name.

    >>> graph = fx.Tracer().trace(nn.Sequential(nn.Flatten()))
    >>> [class_of(node, lambda path: Tensor).__name__ for node in graph.nodes if node.op != "output"]
    ['Tensor', 'Tensor']
    """
    if node.op == "placeholder":
        return None if node.meta.get(NO_TENSOR) else Tensor
    if node.op == "call_module":
        return result_class(str(node.target))
    if node.op == "get_attr":
        return Tensor
    name = _function_name(node)
    argument = node.args[1] if len(node.args) > 1 else None
    if name == "getattr":
        kind = Tensor if argument in TENSORS_OF_TENSORS else torch.Size if argument == "shape" else None
        return int if argument == "ndim" else kind
    if name in NUMBERS or name in TUPLES or name in UNKNOWN:
        return int if name in NUMBERS else tuple if name in TUPLES else None
    if name == "size":
        return torch.Size if argument is None and not node.kwargs else int
    operands = [class_of(operand, result_class) for operand in node.all_input_nodes]
    if name == "getitem":
        base = node.args[0]
        of_size = int if isinstance(argument, int) else None  # the class of a slice's result is unknown
        is_tuple = isinstance(base, fx.Node) and base.op != "call_module" and _function_name(base) in TUPLES
        of_tuple = Tensor if is_tuple else None
        return {Tensor: Tensor, torch.Size: of_size, tuple: of_tuple}.get(operands[0] or type(None))
    if node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator" and Tensor not in operands:
        return int if set(operands) == {int} and name not in ("truediv", "pow") else None
    return Tensor


def _function_name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")


def class_of_result(module: nn.Module, read: Callable[[nn.Module], fx.Graph | None]) -> type | None:
    """Returns the class of a module's output, or None if it is unknown.

    It is known for torch's modules, and is otherwise inferred from the module's graph, which ``read`` returns.

    >>> class_of_result(nn.Linear(1, 1), lambda _: None), class_of_result(nn.LSTM(1, 1), lambda _: None)
    (<class 'torch.Tensor'>, <class 'tuple'>)
    """
    if type(module).__module__.startswith("torch.nn."):
        returns_tuple = isinstance(module, nn.RNNBase | nn.LSTMCell | nn.MultiheadAttention)
        if returns_tuple or getattr(module, "return_indices", False):  # the latter for max pooling
            return tuple
        return None if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss) else Tensor
    graph = read(module)
    if graph is None:
        return None
    (output,) = (node for node in graph.nodes if node.op == "output")
    result = output.args[0]
    if not isinstance(result, fx.Node):
        return type(result)
    return class_of(result, lambda path: class_of_result(module.get_submodule(path), read))
