"""torch's ``nn.MultiheadAttention`` on some of its heads or a part of one, with torch's weights, masks and dropout.

B samples, L queries, S keys, E width, N heads, D head width; n, d this rank's parts of N and D
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.attention_scores import attend_dropping, masked, softmax_of_seen
from shardwright.comm.autograd import cut_to_shared, partial_to_whole, sum_gradient
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.operators.linear import GridProduct, WeightFetch
from shardwright.operators.operand_moves import OperandMove, give, take
from shardwright.rng import keyed_dropout_of


@dataclass(frozen=True)
class SomeHeads:
    """What one rank computes of an attention, and the messages that it takes.

    ``heads`` are this rank's; ``take`` brings each different input, and ``give`` the weights where they are asked for;
    ``fetch`` brings a projection's rows, by the weight's name. ``together`` does both for queries, keys and values of
    one input, whose weights are one. ``shares`` are the ranks that have one head together, each some of its elements,
    where there are fewer heads than ranks: a score is the sum of their terms.
    """

    heads: tuple[int, ...]
    take: tuple[OperandMove, ...] = ()
    give: tuple[OperandMove, ...] = ()
    fetch: Mapping[str, Sequence[WeightFetch]] = field(default_factory=dict)
    together: GridProduct | None = None
    shares: Axis | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for those that share its head, where each of them knows the same."""
        return self.shares is None or self.shares.index == 0

    @property
    def rows(self) -> tuple[OperandMove, ...]:
        """The moves that gather samples: what is known of each sample goes along."""
        return tuple(move for move in self.take if move.lies == "rows")


class _Masks(NamedTuple):
    merged: Tensor | None
    causal: bool


def multihead(
    module: nn.MultiheadAttention,
    part: SomeHeads,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What the module gives: its arguments and results are those of its own forward, whose weights are cut by heads.

    Shapes: query (B, L, E) or as the module takes it; in_proj_weight (3 n d, E), out_proj.weight (E, n d).
    Traffic: ``take`` of each different input, and of masks of each sample where it gathers samples; ``fetch`` of each
        projection; the out-projection's own; ``give`` of the weights, B*L*S elements, or N times as many, if asked for;
        over ``shares`` an all-reduce of the scores, B*L*S elements, forward, and one of their gradient.
    Raises: PlanError: samples that are not in a dim of their own.
    """
    batched = query.dim() == 3
    if part.rows and not batched:
        raise PlanError(
            "attention without samples cannot gather them",
            given=f"a query of shape {list(query.shape)}, on a layout that cuts samples here",
            allowed="(samples, tokens, features)",
            fix="give it a dim of samples, or keep the layer 'copied' with roles",
        )
    q_BnLd, k_BnSd, v_BnSd = (_heads(x, len(part.heads)) for x in _project(module, part, query, key, value))
    masks = _masks(module, part, query.dtype, key_padding_mask, attn_mask, causal=is_causal, need_weights=need_weights)
    y_BnLd, weights = _attend(module, part.shares, q_BnLd, k_BnSd, v_BnSd, masks, need_weights=need_weights)
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


def _heads(x: Tensor, num_heads: int) -> Tensor:
    by_head: Tensor = x.unflatten(-1, (num_heads, -1))
    return by_head.transpose(1, 2)


def _project(
    module: nn.MultiheadAttention, part: SomeHeads, query: Tensor, key: Tensor, value: Tensor
) -> Sequence[Tensor]:
    """Queries, keys and values of this rank's heads, side by side."""
    own = module._parameters
    weight, bias = own["in_proj_weight"], own["in_proj_bias"]
    if part.together is not None and weight is not None and query is key and key is value:
        return part.together(_samples_first(module, query), weight, bias).chunk(3, dim=-1)
    different = {id(x): x for x in (query, key, value)}
    entered = {number: take(_samples_first(module, x), part.take) for number, x in different.items()}
    if weight is not None:
        weights = _fetched(module, part, "in_proj_weight").chunk(3)
    else:
        weights = tuple(_fetched(module, part, f"{name}_proj_weight") for name in "qkv")
    biases: Sequence[Tensor | None] = (None, None, None) if bias is None else bias.chunk(3)
    inputs = [entered[id(x)] for x in (query, key, value)]
    return [functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]


def _fetched(module: nn.MultiheadAttention, part: SomeHeads, name: str) -> Tensor:
    weight = module._parameters[name]
    assert weight is not None
    fetched: Tensor = weight
    for axis, sizes in part.fetch.get(name, ()):
        fetched = cut_to_shared(fetched, axis, 0, sizes)
    return fetched


def _masks(
    module: nn.MultiheadAttention,
    part: SomeHeads,
    dtype: torch.dtype,
    padding: Tensor | None,
    mask: Tensor | None,
    *,
    causal: bool,
    need_weights: bool,
) -> _Masks:
    """What is added to this rank's scores, as torch merges it: ``causal`` is a hint that its mask is that."""
    if causal and mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    if causal and padding is None and not need_weights:
        return _Masks(None, causal=True)
    merged = None
    if mask is not None:
        merged = _shared(_added(mask, dtype), part)
        if merged.dim() == 3:  # samples and heads in one dim
            by_sample = merged.unflatten(0, (-1, module.num_heads))
            by_sample = take(by_sample.flatten(1), part.rows).unflatten(1, by_sample.shape[1:])
            merged = by_sample[:, list(part.heads)]
    if padding is not None:
        padding_BS = _shared(_added(padding, dtype), part)
        padding_BS = take(padding_BS if padding_BS.dim() == 2 else padding_BS.unsqueeze(0), part.rows)
        padding_B11S = padding_BS[:, None, None]
        merged = padding_B11S if merged is None else merged + padding_B11S
    if merged is not None and merged.requires_grad and not part.is_first:
        merged = merged.view_as(merged)  # not a leaf, which would keep the hook
        merged.register_hook(torch.zeros_like)  # those that share a head have the same gradient: one gives it
    return _Masks(merged, causal=False)


def _shared(mask: Tensor, part: SomeHeads) -> Tensor:
    """A mask that all members see and each uses for its heads: its gradient, if there is one, is their sum."""
    for move in part.take:
        if move.lies == "whole" and mask.requires_grad:
            mask = sum_gradient(mask, move.axis)
    return mask


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add; of bools, True hides."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)


def _attend(
    module: nn.MultiheadAttention,
    shares: Axis | None,
    q_BnLd: Tensor,
    k_BnSd: Tensor,
    v_BnSd: Tensor,
    masks: _Masks,
    *,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    drop = keyed_dropout_of(module)
    if not need_weights and shares is None:
        if drop is not None:
            return attend_dropping(q_BnLd, k_BnSd, v_BnSd, masks.merged, causal=masks.causal, drop=drop), None
        attend = functional.scaled_dot_product_attention
        return attend(q_BnLd, k_BnSd, v_BnSd, masks.merged, is_causal=masks.causal), None
    terms_BnLS = q_BnLd @ k_BnSd.mT * module.head_dim**-0.5
    scores_BnLS = masked(_summed(terms_BnLS, shares), masks.merged, causal=masks.causal)
    weights_BnLS = scores_BnLS.softmax(dim=-1) if need_weights else softmax_of_seen(scores_BnLS)  # as torch's two ways
    weights_BnLS = weights_BnLS if drop is None else drop(weights_BnLS)
    if shares is not None:
        weights_BnLS = sum_gradient(weights_BnLS, shares)  # each weighs its own elements of the values
    return weights_BnLS @ v_BnSd, weights_BnLS if need_weights else None


def _summed(terms: Tensor, shares: Axis | None) -> Tensor:
    return terms if shares is None else partial_to_whole(terms, shares)


def _whole_weights(weights_BnLS: Tensor, part: SomeHeads, num_heads: int, *, average: bool) -> Tensor:
    """The weights of all heads, or their mean, for this rank's own samples."""
    if not part.is_first:
        weights_BnLS = weights_BnLS * 0  # a term of the sum that is not there, and takes part in the backward
    if average:
        return give(weights_BnLS.sum(dim=1) / num_heads, part.give)
    shape = (weights_BnLS.shape[0], num_heads, *weights_BnLS.shape[2:])
    index = torch.tensor(part.heads, device=weights_BnLS.device)
    return give(weights_BnLS.new_zeros(shape).index_copy(1, index, weights_BnLS), part.give)
