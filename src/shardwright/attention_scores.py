"""Computes scaled dot-product attention as torch does, but with a custom dropout of the attention weights.

The mask and the softmax are functions of their own, for code that needs the weights.

B batch, T query tokens, S key tokens, N heads, D head width
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Dropout = Callable[[Tensor], Tensor]


def attend_dropping(
    q_BNTD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, mask: Tensor | None, *, causal: bool, drop: Dropout
) -> Tensor:
    """Returns the output (B, N, T, D) of ``scaled_dot_product_attention`` with a custom dropout of its weights.

    ``drop`` takes the attention weights (B, N, T, S) after the softmax, and returns them with dropout applied. ``mask``
    is a floating-point tensor, broadcastable to (B, N, T, S), that is added to the scores before the softmax. A boolean
    mask is not supported. With ``causal``, keys after a query's position are hidden, also where there is a mask. The
    output of a query whose keys are all hidden is zero, as in torch.

    >>> q, mask = torch.ones(1, 1, 2, 4), torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
    >>> attend_dropping(q, q, q, mask, causal=False, drop=lambda weights: weights)[0, 0, :, 0]
    tensor([1., 0.])
    """
    scores_BNTS = masked(q_BNTD @ k_BNSD.mT * q_BNTD.shape[-1] ** -0.5, mask, causal=causal)
    weights_BNTS = drop(softmax_of_seen(scores_BNTS))
    return weights_BNTS.to(v_BNSD.dtype) @ v_BNSD  # a float32 mask has made the weights wider than the values


def masked(scores_BNTS: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Returns attention scores with the floating-point ``mask`` added; None adds nothing.

    If ``causal``, the scores of keys after each query's position become -inf.

    >>> masked(torch.zeros(1, 1, 2, 2), None, causal=True)[0, 0]
    tensor([[0., -inf],
            [0., 0.]])
    """
    if causal:
        hidden_TS = torch.ones(scores_BNTS.shape[-2:], dtype=torch.bool, device=scores_BNTS.device).triu(1)
        scores_BNTS = scores_BNTS.masked_fill(hidden_TS, -torch.inf)
    return scores_BNTS if mask is None else scores_BNTS + mask


def softmax_of_seen(scores_BNTS: Tensor) -> Tensor:
    """Returns the softmax of attention scores over the keys; zeros for a query whose scores are all -inf.

    torch's own softmax gives NaN for such a query.

    >>> softmax_of_seen(torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]]))
    tensor([[1., 0.],
            [0., 0.]])
    """
    blind_BNT1 = (scores_BNTS == -torch.inf).all(dim=-1, keepdim=True)
    return scores_BNTS.masked_fill(blind_BNT1, 0.0).softmax(dim=-1).masked_fill(blind_BNT1, 0.0)
