"""torch's attention on the meta device as the machine at hand computes it, and not in single products.

On the meta device torch picks the way that keeps all weights, whatever a CPU or a GPU would do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwright.rng import with_names


class NativeAttentionOnMeta(TorchFunctionMode):
    """While it is on, attention without weights to drop keeps queries, keys, values, output and one number a query.

    >>> q = torch.empty(1, 2, 3, 4, device="meta", requires_grad=True)
    >>> with NativeAttentionOnMeta():
    ...     y = functional.scaled_dot_product_attention(q, q, q)
    >>> type(y.grad_fn).__name__
    'ScaledDotProductFlashAttentionForCpuBackward0'
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            return _attend(*args, **named)
        if func is functional.multi_head_attention_forward:  # torch asks no mode of what a function calls itself
            return with_names(func, scaled_dot_product_attention=_attend)(*args, **named)
        return func(*args, **named)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    fused = q.is_meta and q.dim() == 4 and dropout_p == 0 and min(q.numel(), k.numel()) > 0
    if not fused or q.shape[-1] != v.shape[-1] or (attn_mask is not None and attn_mask.requires_grad):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype)
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    y: Tensor = found[0]
    return y
