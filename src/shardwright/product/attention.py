"""Attention on some of the heads, or on a part of one.

B batch, T tokens, N query heads, M key and value heads, D head width; d this rank's part of D
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.comm import Axis, partial_to_whole, sum_gradient
from shardwright.models.attention import Attention


def attend_inside(attention: Attention, tp: Axis, q_BNTd: Tensor, k_BNTd: Tensor, v_BNTd: Tensor) -> Tensor:
    """Attention cut inside the head: each rank holds some elements of the head's queries, keys and values.

    A score is a dot product over the head, so each rank has one term of it; the softmax needs the sum. The
    weights that follow are whole on every rank and mix this rank's elements of the values.

    Shapes: q_BNTd, k_BNTd, v_BNTd (B, N, T, D / tp); returns (B, N, T, D / tp).
    Traffic: forward, one all-reduce of the scores, B*N*T*T elements, over ``tp``; backward, one of their gradient.

    >>> from shardwright import Mesh, run_on_threads
    >>> x, whole = torch.randn(1, 1, 3, 4), Attention(4, 1, causal=False)
    >>> def half(axes):
    ...     mine = x[..., axes["tp"].index * 2 :][..., :2]
    ...     return attend_inside(whole, axes["tp"], mine, mine, mine)
    >>> torch.allclose(torch.cat(run_on_threads(Mesh(tp=2), half), -1), whole.attend(x, x, x), atol=1e-6)
    True
    """
    scores_BNTT = partial_to_whole(q_BNTd @ k_BNTd.mT * attention.scale, tp)
    if attention.causal:
        hidden_TT = torch.ones(scores_BNTT.shape[-2:], dtype=torch.bool, device=scores_BNTT.device).triu(1)
        scores_BNTT = scores_BNTT.masked_fill(hidden_TT, -torch.inf)
    weights_BNTT = attention.attention_dropout(scores_BNTT.softmax(dim=-1))
    return sum_gradient(weights_BNTT, tp) @ v_BNTd


def attend_selected(
    attention: Attention, kv_of_head: Sequence[int], q_BNTD: Tensor, k_BMTD: Tensor, v_BMTD: Tensor
) -> Tensor:
    """Attention where query head n uses the key and value head ``kv_of_head[n]``: shares of any size.

    Shapes: q_BNTD (B, N, T, D); k_BMTD, v_BMTD (B, M, T, D); returns (B, N, T, D). Traffic: none.
    """
    index = torch.tensor(list(kv_of_head), device=q_BNTD.device)
    return type(attention).attend(attention, q_BNTD, k_BMTD[:, index], v_BMTD[:, index])
