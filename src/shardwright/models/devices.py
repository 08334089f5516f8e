"""Code that moves activations to devices itself: where ranks are devices, they stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

MOVES = {"cpu": Tensor.cpu, "cuda": Tensor.cuda, "to": Tensor.to}
"""Methods of a tensor that move it; ``to`` may change its dtype as well, and then does that alone."""


def without_device(args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of ``Tensor.to`` but the device; None where nothing else was asked for.

    >>> without_device(("cuda:1",), {}), without_device((torch.float16,), {})
    (None, ((torch.float16,), {}))
    >>> without_device(("cuda:1", torch.float16), {"non_blocking": True})
    ((torch.float16,), {})
    """
    rest = tuple(arg for arg in args if isinstance(arg, Tensor | fx.Proxy | fx.Node | torch.dtype))
    kept = {name: value for name, value in named.items() if name in ("dtype", "other", "memory_format")}
    return (rest, kept) if rest or kept else None


def stay_put(graph: fx.Graph) -> None:
    """Takes all moves to devices out of a trace."""
    for node in list(graph.nodes):
        if node.op != "call_method" or node.target not in MOVES:
            continue
        rest = without_device(tuple(node.args[1:]), node.kwargs) if node.target == "to" else None
        if rest is None:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        else:
            node.args, node.kwargs = (node.args[0], *rest[0]), rest[1]


class StaysPut(TorchFunctionMode):
    """While it is on, tensors are moved to no device.

    >>> with StaysPut():
    ...     torch.ones(1).to("meta").cuda().device
    device(type='cpu')
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func not in MOVES.values():
            return func(*args, **named)
        rest = without_device(tuple(args[1:]), named) if func is Tensor.to else None
        return args[0] if rest is None else func(args[0], *rest[0], **rest[1])
