"""Code that moves activations to devices itself: where ranks are devices, they stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

MOVES = {"cpu": Tensor.cpu, "cuda": Tensor.cuda, "to": Tensor.to}
"""Methods of a tensor that move it; ``to`` may change its dtype as well, and then does that alone."""


def without_device(args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of ``Tensor.to`` but the device; None where nothing else was asked for.

    >>> without_device(("cuda:1",), {}), without_device((torch.float16,), {})
    (None, ((torch.float16,), {}))
    >>> without_device(("cuda:1", torch.float16), {"non_blocking": True})
    ((torch.float16,), {})
    """
    rest = tuple(arg for arg in args if isinstance(arg, Tensor | fx.Node | torch.dtype))
    kept = {name: value for name, value in named.items() if name in ("dtype", "other", "memory_format")}
    return (rest, kept) if rest or kept else None


def ignore_device_moves(graph: fx.Graph) -> None:
    """Takes all moves to devices that the code names out of a trace; to where another value is they stay."""
    for node in list(graph.nodes):
        moved = node.args[0] if node.op == "call_method" and node.target in MOVES else None
        if not isinstance(moved, fx.Node):
            continue
        rest = without_device(tuple(node.args[1:]), node.kwargs) if node.target == "to" else None
        if rest is None:
            node.replace_all_uses_with(moved)
            graph.erase_node(node)
        else:
            node.args, node.kwargs = (moved, *rest[0]), rest[1]


class IgnoresDeviceMoves(TorchFunctionMode):
    """While it is on, whatever is moved is moved to one device, and what lies elsewhere comes to what lies there.

    What code makes without naming a device lies on the CPU, and keeps its values until it meets the others.

    >>> with IgnoresDeviceMoves(torch.device("cpu")):
    ...     torch.ones(1).to("meta").cuda().device
    device(type='cpu')
    >>> with IgnoresDeviceMoves(torch.device("meta")):
    ...     torch.arange(3).tolist(), (torch.empty(3, device="meta") + torch.zeros(3)).device
    ([0, 1, 2], device(type='meta'))
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._on_meta: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func not in MOVES.values():
            return self._together(func, args, named)
        rest = without_device(tuple(args[1:]), named) if func is Tensor.to else None
        here = args[0].to(self._device)
        return here if rest is None else here.to(*rest[0], **rest[1])

    def _together(self, func: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        kinds = {leaf.device.type for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)}
        if len(kinds) > 1 and self._device.type in kinds:
            args, named = tree_map_only(Tensor, self._moved, (args, named))
        return func(*args, **named)

    def _moved(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; on meta one that is used again is one again, as it would be where it lies."""
        if self._device.type != "meta" or tensor.is_meta or tensor.requires_grad:
            return tensor.to(self._device)
        if tensor not in self._on_meta:
            self._on_meta[tensor] = tensor.to(self._device)
        return self._on_meta[tensor]
