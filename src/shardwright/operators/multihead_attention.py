"""Tensor-parallel ``nn.MultiheadAttention``, sharded by heads or inside a head, with torch's weights, masks, dropout.

B samples, L queries, S keys, E width, N heads, D head width; n, d this rank's shards of N and D
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.attention_scores import attend_dropping, masked, softmax_of_seen
from shardwright.comm.autograd import cut_to_shared, partial_to_whole, sum_gradient
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.keyed_dropout import keyed_dropout_of
from shardwright.operators.linear import GridProduct, WeightFetch, weight_of
from shardwright.operators.operand_moves import OperandMove, give, take


@dataclass(frozen=True)
class HeadShard:
    """This rank's heads of an attention layer, and the collectives that computing them needs.

    ``take`` has the collectives of each distinct input: it is all-gathered where it is sharded; where it is whole on
    every rank, only its gradient is all-reduced. ``give`` sums the attention weights if the caller wants them, and
    ``fetch`` all-gathers a projection's rows, by the weight's name. ``together`` computes queries, keys and values in
    one sharded matrix product, for self-attention whose three weights are one parameter. ``shares`` is the axis of the
    ranks that share one head, if there are fewer heads than ranks: each holds some of its elements, and a score is the
    sum over these ranks.
    """

    heads: tuple[int, ...]
    take: tuple[OperandMove, ...] = ()
    give: tuple[OperandMove, ...] = ()
    fetch: Mapping[str, Sequence[WeightFetch]] = field(default_factory=dict)
    together: GridProduct | None = None
    shares: Axis | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that share a head, or shares none.

        Of several ranks with equal attention weights, only the first adds them to the returned sum.
        """
        return self.shares is None or self.shares.index == 0

    @property
    def rows(self) -> tuple[OperandMove, ...]:
        """The all-gathers of samples among the input's collectives, by which masks of each sample are gathered too."""
        return tuple(move for move in self.take if move.layout == "rows")


def multihead(
    module: nn.MultiheadAttention,
    part: HeadShard,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Computes ``nn.MultiheadAttention`` with weights sharded by heads; arguments and results are those of its forward.

    Shapes: query (B, L, E) or another that the module accepts; in_proj_weight (3 n d, E), out_proj.weight (E, n d).
    Traffic: the collectives of ``part``: ``take`` of each distinct input, and of each sample's masks where it gathers
        samples; ``fetch`` of each projection; ``together`` in place of both for self-attention, if it is set; ``give``
        of the weights, if they are wanted: B*L*S elements, or N times as many; over ``shares`` an all-reduce of the
        scores, B*L*S elements, forward, and one of the attention weights' gradient, as many, backward; for a whole
        input of ``take`` an all-reduce of the gradient of each mask that needs one. The out-projection adds its own.
    Raises: PlanError: unbatched inputs where the layout cuts samples. RuntimeError: ``is_causal`` without
        ``attn_mask``, as in torch.
    """
    batched = query.dim() == 3
    if part.rows and not batched:
        raise PlanError(
            "attention without a dim of samples cannot gather samples",
            given=f"a query of shape {list(query.shape)}, in a layout that cuts samples here",
            allowed="(samples, tokens, features)",
            fix="add a dim of samples, or keep the layer 'copied' with roles",
        )
    projected = _project(module, part, query, key, value)
    q_BnLd, k_BnSd, v_BnSd = (x.unflatten(-1, (len(part.heads), -1)).transpose(1, 2) for x in projected)
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    causal = is_causal and key_padding_mask is None and not need_weights  # then torch makes its own causal mask
    mask = None if causal else _merged_mask(module, part, query.dtype, key_padding_mask, attn_mask)
    y_BnLd, weights = _attend(
        module, part.shares, q_BnLd, k_BnSd, v_BnSd, mask, causal=causal, need_weights=need_weights
    )
    y_BLE = cast(Tensor, module.out_proj(y_BnLd.transpose(1, 2).flatten(2)))
    if weights is not None:
        weights = _whole_weights(weights, part, module.num_heads, average=average_attn_weights)
        weights = weights if batched else weights.squeeze(0)
    if not batched:
        return y_BLE.squeeze(0), weights
    return (y_BLE if module.batch_first else y_BLE.transpose(0, 1).contiguous()), weights


def _samples_first(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x.unsqueeze(0)
    return x if module.batch_first else x.transpose(0, 1)


def _project(
    module: nn.MultiheadAttention, part: HeadShard, query: Tensor, key: Tensor, value: Tensor
) -> Sequence[Tensor]:
    """Returns the queries, keys and values of this rank's heads, each (B, L or S, n d)."""
    weight, bias = module._parameters["in_proj_weight"], module._parameters["in_proj_bias"]
    if part.together is not None and weight is not None and query is key and key is value:
        return part.together(_samples_first(module, query), weight, bias).chunk(3, dim=-1)
    distinct = {id(x): x for x in (query, key, value)}  # a tensor that comes twice is gathered once
    gathered = {key: take(_samples_first(module, x), part.take) for key, x in distinct.items()}
    if weight is not None:
        weights = _fetch(module, part, "in_proj_weight").chunk(3)
    else:
        weights = tuple(_fetch(module, part, f"{name}_proj_weight") for name in "qkv")
    biases: Sequence[Tensor | None] = (None, None, None) if bias is None else bias.chunk(3)
    inputs = [gathered[id(x)] for x in (query, key, value)]
    return [functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]


def _fetch(module: nn.MultiheadAttention, part: HeadShard, name: str) -> Tensor:
    weight = weight_of(module, name)
    for axis, sizes in part.fetch.get(name, ()):
        weight = cut_to_shared(weight, axis, 0, sizes)
    return weight


def _merged_mask(
    module: nn.MultiheadAttention, part: HeadShard, dtype: torch.dtype, padding: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """Merges the masks as torch does, and returns the numbers to add to the scores of this rank's heads, or None."""
    merged = None
    if mask is not None:
        merged = _to_added(mask, dtype, part)
        if merged.dim() == 3:  # dim 0 is samples x heads: gather samples, then pick heads
            by_sample = merged.unflatten(0, (-1, module.num_heads))
            by_sample = take(by_sample.flatten(1), part.rows).unflatten(1, by_sample.shape[1:])
            merged = by_sample[:, list(part.heads)]
    if padding is not None:
        padding_BS = _to_added(padding, dtype, part)
        padding_BS = take(padding_BS if padding_BS.dim() == 2 else padding_BS.unsqueeze(0), part.rows)
        padding_B11S = padding_BS[:, None, None]
        merged = padding_B11S if merged is None else merged + padding_B11S
    if merged is not None and merged.requires_grad and not part.is_first:
        merged = merged.view_as(merged)  # a new tensor: a hook on the user's leaf would remain
        merged.register_hook(torch.zeros_like)  # ranks that share a head have equal gradients: one contributes it
    return merged


def _to_added(mask: Tensor, dtype: torch.dtype, part: HeadShard) -> Tensor:
    """Returns a mask as numbers to add to scores; its gradient is summed over the members that use it."""
    if not mask.is_floating_point():
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)  # True hides
    for move in part.take:
        if move.layout == "whole" and mask.requires_grad:
            mask = sum_gradient(mask, move.axis)
    return mask


def _attend(
    module: nn.MultiheadAttention,
    shares: Axis | None,
    q_BnLd: Tensor,
    k_BnSd: Tensor,
    v_BnSd: Tensor,
    mask: Tensor | None,
    *,
    causal: bool,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    drop = keyed_dropout_of(module)
    if not need_weights and shares is None:
        if drop is not None:
            return attend_dropping(q_BnLd, k_BnSd, v_BnSd, mask, causal=causal, drop=drop), None
        attend = functional.scaled_dot_product_attention
        return attend(q_BnLd, k_BnSd, v_BnSd, mask, is_causal=causal), None
    scores_BnLS = q_BnLd @ k_BnSd.mT * module.head_dim**-0.5
    if shares is not None:
        scores_BnLS = partial_to_whole(scores_BnLS, shares)
    scores_BnLS = masked(scores_BnLS, mask, causal=causal)
    # as in torch, a query that sees no key gets NaN if the caller wants weights, and else zeros
    weights_BnLS = scores_BnLS.softmax(dim=-1) if need_weights else softmax_of_seen(scores_BnLS)
    weights_BnLS = weights_BnLS if drop is None else drop(weights_BnLS)
    if shares is not None:
        weights_BnLS = sum_gradient(weights_BnLS, shares)  # each rank weighs its own elements of the values
    return weights_BnLS @ v_BnSd, weights_BnLS if need_weights else None


def _whole_weights(weights_BnLS: Tensor, part: HeadShard, num_heads: int, *, average: bool) -> Tensor:
    """Returns the attention weights of all heads, or their mean, for this rank's own samples."""
    if not part.is_first:
        weights_BnLS = weights_BnLS * 0  # 0 in the sum; still in the graph, since its backward sends
    if average:
        return give(weights_BnLS.sum(dim=1) / num_heads, part.give)
    shape = (weights_BnLS.shape[0], num_heads, *weights_BnLS.shape[2:])
    index = torch.tensor(part.heads, device=weights_BnLS.device)
    return give(weights_BnLS.new_zeros(shape).index_copy(1, index, weights_BnLS), part.give)
