"""Makes some of torch's layers accept empty batches, for ranks that get no sample of a small batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwright.analysis.traced.structure import runs_as
from shardwright.forward_stack import Forward, Rung, wrap

NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
CALL = inspect.signature(nn.MultiheadAttention.forward)


def support_empty_batches(model: nn.Module) -> None:
    """Makes torch's pixel shuffles, instance norms and ``nn.MultiheadAttention`` in ``model`` accept empty batches.

    Their forwards are wrapped, in place, and the backward works too.

    >>> import torch
    >>> model, none = nn.PixelShuffle(2), torch.zeros(0, 8, 3, 3, requires_grad=True)
    >>> support_empty_batches(model)
    >>> model(none).sum().backward()
    >>> model(none).shape, none.grad.shape
    (torch.Size([0, 2, 6, 6]), torch.Size([0, 8, 3, 3]))
    """
    for module in model.modules():
        if isinstance(module, nn.PixelShuffle) and runs_as(module, nn.PixelShuffle):
            _replace(module, partial(_shuffle, module.upscale_factor, 1))
        elif isinstance(module, nn.PixelUnshuffle) and runs_as(module, nn.PixelUnshuffle):
            _replace(module, partial(_shuffle, 1, module.downscale_factor))
        elif any(runs_as(module, kind) for kind in NORMS):
            _replace(module, lambda forward, input: forward(input) if input.numel() else input.clone())
        elif type(module) is nn.MultiheadAttention:
            _replace(module, _attend)


def _replace(module: nn.Module, replacement: Callable[..., Any]) -> None:
    """Makes the module call ``replacement(forward, ...)`` in place of its ``forward(...)``."""
    wrap(module, Rung.NO_SAMPLES, "accepts empty batches", by="core", around=partial(partial, replacement))


def _shuffle(larger: int, smaller: int, forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    if input.numel():
        return forward(input)
    *others, channels, height, width = input.shape
    channels = channels * smaller**2 // larger**2
    return input.reshape(*others, channels, height * larger // smaller, width * larger // smaller)


def _attend(forward: Forward, *args: Any, **named: Any) -> Any:
    """Runs torch's attention; for an empty batch without the masks of each sample, on which torch fails."""
    bound = CALL.bind(None, *args, **named)
    if bound.arguments["query"].numel():
        return forward(*args, **named)
    bound.arguments["key_padding_mask"] = None
    mask = bound.arguments.get("attn_mask")
    if mask is not None and mask.dim() == 3:
        bound.arguments |= {"attn_mask": None, "is_causal": False}
    return forward(*bound.args[1:], **bound.kwargs)
