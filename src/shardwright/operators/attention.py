"""Tensor-parallel attention: which heads, and which elements of a head, each rank holds, and attention on these shards.

With p ranks and N heads, each rank holds whole heads if p <= N; else a head belongs to several ranks, each of which
holds some of its elements. The tensor-parallel strategies use these functions to place and to compute attention::

    N = 4, p = 2     rank of each head   0 0 | 1 1
    N = 2, p = 5     head of each rank   0 0 0 | 1 1       head 0 is cut into 3 parts, head 1 into 2

B batch, T tokens, S tokens that queries see, N query heads, M key and value heads, D head width;
d, t this rank's shard of D and T
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from shardwright.comm.autograd import cut_to_shared, partial_to_whole, sum_gradient
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError
from shardwright.mesh import balanced
from shardwright.models.attention import Attention, hidden_keys
from shardwright.operators.operand_moves import OperandMove
from shardwright.sharding.box import balanced_ranges

Attends = Attention | nn.MultiheadAttention
"""An attention module with ``num_heads`` heads of ``head_dim`` elements: this library's, or torch's."""


def query_heads(attention: Attends, tp: int) -> tuple[tuple[int, ...], ...]:
    """Returns the query heads that each of ``tp`` ranks computes: one or more whole heads, or part of a shared one.

    >>> query_heads(Attention(8, 4), 3), query_heads(nn.MultiheadAttention(8, 2), 3)
    (((0, 1), (2,), (3,)), ((0,), (0,), (1,)))
    """
    if tp <= attention.num_heads:
        return tuple(tuple(range(a, b)) for ((a, b),) in balanced_ranges(attention.num_heads, tp))
    groups = balanced(tp, attention.num_heads)
    return tuple((h,) for h in range(attention.num_heads) for _ in range(groups[h], groups[h + 1]))


def head_slices(attention: Attends, tp: int) -> tuple[tuple[int, int], ...]:
    """Returns, for each of ``tp`` ranks, the range (start, stop) of elements that it holds of each of its heads.

    With rotary embedding the range counts pairs of elements.

    Raises: LayoutError: there are more ranks than elements (or such pairs) in all heads together.

    >>> head_slices(Attention(8, 2), 2), head_slices(Attention(8, 2), 3)
    (((0, 4), (0, 4)), ((0, 2), (2, 4), (0, 4)))
    """
    halves = _num_halves(attention)
    size = attention.head_dim // halves
    if tp <= attention.num_heads:
        return ((0, size),) * tp
    if tp > size * attention.num_heads:
        raise LayoutError(
            "more tp ranks than the attention can use",
            given=f"tp={tp}, {attention.num_heads} heads of {attention.head_dim} elements"
            + (", rotated in pairs" if halves > 1 else ""),
            allowed=f"tp from 1 to {size * attention.num_heads}",
            fix=f"set tp={size * attention.num_heads}, or move the other ranks to 'dp'",
        )
    groups = balanced(tp, attention.num_heads)
    return tuple(part for a, b in pairwise(groups) for part in pairwise(balanced(size, b - a)))


def kv_heads(attention: Attention, heads: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the key and value heads that the query heads ``heads`` use in grouped-query attention."""
    group = attention.num_heads // attention.num_kv_heads
    return tuple(range(heads[0] // group, heads[-1] // group + 1))


def head_rows(attention: Attends, heads: tuple[int, ...], part: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Returns the row ranges of a q, k or v projection's weight that compute elements ``part`` of each of ``heads``.

    >>> head_rows(Attention(8, 2), (1,), (0, 2)), head_rows(Attention(8, 2, rotary=True), (1,), (0, 1))
    (((4, 6),), ((4, 5), (6, 7)))
    """
    halves = _num_halves(attention)
    half = attention.head_dim // halves
    starts = (head * attention.head_dim + number * half for head in heads for number in range(halves))
    return tuple((start + part[0], start + part[1]) for start in starts)


def _num_halves(attention: Attends) -> int:
    """Returns 2 if rotary embedding rotates pairs of elements, one from each half of the head, else 1."""
    return 2 if isinstance(attention, Attention) and attention.rotary is not None else 1


def attend_inside(attention: Attention, tp: Axis, q_BNTd: Tensor, k_BNSd: Tensor, v_BNSd: Tensor) -> Tensor:
    """Computes attention whose head dim is sharded over ``tp``: scores are partial sums, completed by an all-reduce.

    A score is a dot product over the head, so each rank has one term of it; the softmax needs the sum. The attention
    weights are then equal on every rank, and weigh this rank's elements of the values.

    Shapes: q_BNTd (B, N, T, D / tp); k_BNSd, v_BNSd (B, N, S, D / tp); returns (B, N, T, D / tp).
    Traffic: forward, one all-reduce of the scores, B*N*T*S elements, over ``tp``; backward, one of as many elements,
        the gradient of the attention weights.

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
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    take: Sequence[OperandMove],
    num_seen: Callable[[], int],
    q_BNtD: Tensor,
    k_BMtD: Tensor,
    v_BMtD: Tensor,
) -> Tensor:
    """Computes attention of this rank's tokens of a sharded sequence; all-gathers the other ranks' keys and values.

    ``attend`` computes attention from queries, keys and values; ``take`` are the all-gathers along the axes that shard
    the sequence. The queries see the first ``num_seen()`` tokens of the sequence; in causal attention this rank's own
    tokens are the last of these.

    Shapes: q_BNtD (B, N, t, D); k_BMtD, v_BMtD (B, M, t, D); returns (B, N, t, D).
    Traffic: for each of ``take``, forward one all-gather of keys and values together, 2*B*M*D elements for each token
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
    """Computes grouped-query attention with unequal groups: query head n uses key-value head ``kv_of_head[n]``.

    Shapes: q_BNTD (B, N, T, D); k_BMTD, v_BMTD (B, M, T, D); returns (B, N, T, D). Traffic: none.
    """
    index = torch.tensor(list(kv_of_head), device=q_BNTD.device)
    return type(attention).attend(attention, q_BNTD, k_BMTD[:, index], v_BMTD[:, index])
