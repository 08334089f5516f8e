"""Attention on some of the heads, on a part of one, or of some of the queries.

B batch, T tokens, S tokens that queries see, N query heads, M key and value heads, D head width;
d, t this rank's part of D and T
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardwright.comm.autograd import cut_to_shared, partial_to_whole, sum_gradient
from shardwright.comm.axis import Axis
from shardwright.models.attention import Attention, hidden_keys
from shardwright.operators.operand_moves import OperandMove

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values in, what the queries see out."""


def attend_inside(attention: Attention, tp: Axis, q_BNTd: Tensor, k_BNSd: Tensor, v_BNSd: Tensor) -> Tensor:
    """Attention cut inside the head: each rank holds some elements of the head's queries, keys and values.

    A score is a dot product over the head, so each rank has one term of it; the softmax needs the sum. The
    weights that follow are whole on every rank and mix this rank's elements of the values.

    Shapes: q_BNTd (B, N, T, D / tp); k_BNSd, v_BNSd (B, N, S, D / tp); returns (B, N, T, D / tp).
    Traffic: forward, one all-reduce of the scores, B*N*T*S elements, over ``tp``; backward, one of their gradient.

    >>> from shardwright import Mesh, run_on_threads
    >>> x, whole = torch.randn(1, 1, 3, 4), Attention(4, 1, causal=False)
    >>> def half(axes):
    ...     mine = x[..., axes["tp"].index * 2 :][..., :2]
    ...     return attend_inside(whole, axes["tp"], mine, mine, mine)
    >>> torch.allclose(torch.cat(run_on_threads(Mesh(tp=2), half), -1), whole.attend(x, x, x), atol=1e-6)
    True
    """
    scores_BNTS = partial_to_whole(q_BNTd @ k_BNSd.mT * attention.scale, tp)
    if attention.causal:
        scores_BNTS = scores_BNTS.masked_fill(hidden_keys(q_BNTd, k_BNSd), -torch.inf)
    weights_BNTS = attention.attention_dropout(scores_BNTS.softmax(dim=-1))
    return sum_gradient(weights_BNTS, tp) @ v_BNSd


def attend_gathered(
    attend: Attend,
    take: Sequence[OperandMove],
    num_seen: Callable[[], int],
    q_BNtD: Tensor,
    k_BMtD: Tensor,
    v_BMtD: Tensor,
) -> Tensor:
    """Attention of a run of a sequence's tokens: the keys and values of the others are gathered.

    ``num_seen`` tokens, from the sequence's first on, are seen; where attention is causal these end with the queries'.

    Shapes: q_BNtD (B, N, t, D); k_BMtD, v_BMtD (B, M, t, D); returns (B, N, t, D).
    Traffic: for each move, forward one all-gather of keys and values together, 2*B*M*D elements for each token
        gathered; backward, one reduce-scatter of their gradients.

    >>> from shardwright import Mesh, run_on_threads
    >>> x, whole = torch.randn(1, 1, 5, 4), Attention(4, 1)
    >>> def some(axes):
    ...     tp, parts = axes["tp"], x.split([3, 2], dim=2)
    ...     mine, move = parts[tp.index], OperandMove(tp, "rows", lambda: (3, 2), dim=1)
    ...     return attend_gathered(whole.attend, [move], lambda: (3, 5)[tp.index], mine, mine, mine)
    >>> torch.allclose(torch.cat(run_on_threads(Mesh(tp=2), some), -2), whole.attend(x, x, x), atol=1e-6)
    True
    """
    kv_2BMSD = torch.stack((k_BMtD, v_BMtD))
    for axis, _, sizes, _ in take:
        kv_2BMSD = cut_to_shared(kv_2BMSD, axis, -2, sizes())
    k_BMSD, v_BMSD = kv_2BMSD[..., : num_seen(), :].unbind()
    return attend(q_BNtD, k_BMSD, v_BMSD)


def attend_selected(
    attention: Attention, kv_of_head: Sequence[int], q_BNTD: Tensor, k_BMTD: Tensor, v_BMTD: Tensor
) -> Tensor:
    """Attention where query head n uses the key and value head ``kv_of_head[n]``: shares of any size.

    Shapes: q_BNTD (B, N, T, D); k_BMTD, v_BMTD (B, M, T, D); returns (B, N, T, D). Traffic: none.
    """
    index = torch.tensor(list(kv_of_head), device=q_BNTD.device)
    return type(attention).attend(attention, q_BNTD, k_BMTD[:, index], v_BMTD[:, index])
