"""What a model's code does with its weights itself, outside of its layers: nodes of a trace, not the values of then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map


class ShowsReads(TorchFunctionMode):
    """While it is on, a function of ``weights`` that gives tensors becomes a node; a shape or a dtype stays a value.

    >>> tracer = fx.proxy.GraphAppendingTracer(fx.Graph())
    >>> weight = torch.ones(2, 3)
    >>> with ShowsReads(tracer, [weight]):
    ...     weight.shape[0], type(weight.sum()).__name__
    (2, 'Proxy')
    """

    def __init__(self, tracer: fx.proxy.TracerBase, weights: Collection[Tensor]) -> None:
        super().__init__()
        self._tracer = tracer
        self._ids = {id(weight) for weight in weights}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        given = tree_flatten((args, named))[0]
        if any(isinstance(each, fx.Proxy) for each in given) or not any(id(each) in self._ids for each in given):
            return func(*args, **named)  # a proxy makes the node itself
        shapes_only = func(*tree_map(_without_values, args), **tree_map(_without_values, named))
        if not any(isinstance(each, Tensor) for each in tree_flatten(shapes_only)[0]):
            return func(*args, **named)
        return self._tracer.create_proxy("call_function", func, args, named)


def _without_values(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value
