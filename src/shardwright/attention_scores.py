"""Attention with torch's semantics and a custom dropout of the weights, and its parts: masks and the softmax.

B batch, T tokens, S tokens that queries see, N heads, D head width
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
    is added to the scores before the softmax; with ``causal``, keys after a query's position are hidden. A query that
    sees no key gives zeros, as in torch.

    >>> q, mask = torch.ones(1, 1, 2, 4), torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
    >>> attend_dropping(q, q, q, mask, causal=False, drop=lambda weights: weights)[0, 0, :, 0]
    tensor([1., 0.])
    """
    scores_BNTS = masked(q_BNTD @ k_BNSD.mT * q_BNTD.shape[-1] ** -0.5, mask, causal=causal)
    return drop(softmax_of_seen(scores_BNTS)) @ v_BNSD


def masked(scores_BNTS: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
    """Returns attention scores with ``mask`` added; if ``causal``, keys after each query's position are hidden.

    >>> masked(torch.zeros(1, 1, 2, 2), None, causal=True)[0, 0]
    tensor([[0., -inf],
            [0., 0.]])
    """
    if causal:
        hidden_TS = torch.ones(scores_BNTS.shape[-2:], dtype=torch.bool, device=scores_BNTS.device).triu(1)
        scores_BNTS = scores_BNTS.masked_fill(hidden_TS, -torch.inf)
    return scores_BNTS if mask is None else scores_BNTS + mask


def softmax_of_seen(scores_BNTS: Tensor) -> Tensor:
    """Returns the softmax of attention scores over the keys that each query sees; zeros where it sees none.

    >>> softmax_of_seen(torch.tensor([[0.0, -torch.inf], [-torch.inf, -torch.inf]]))
    tensor([[1., 0.],
            [0., 0.]])
    """
    blind_BNT1 = (scores_BNTS == -torch.inf).all(dim=-1, keepdim=True)
    return scores_BNTS.masked_fill(blind_BNT1, 0.0).softmax(dim=-1).masked_fill(blind_BNT1, 0.0)
