"""What one call of ``nn.MultiheadAttention`` moves: its arguments may be left out, shared, or of several shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten


class AttentionCall(NamedTuple):
    """One call of ``nn.MultiheadAttention``: what the tensors that it moves look like, for one sample.

    ``inputs``: of each different input its tokens, features, and whether a gradient flows back. ``padding``: the
    elements of the mask of keys. ``mask``: those of a mask of each sample, ``shared_mask`` those of one for all whose
    gradient is wanted. ``weights``: those of the weights that are given back. ``scores``: those of one head. What
    ``_learns``, or ``learn``, has a gradient; scores have one of the projections' weights, too.
    """

    num_samples: int
    inputs: tuple[tuple[int, int, bool], ...]
    padding: int = 0
    padding_learns: bool = False
    mask: int = 0
    mask_learns: bool = False
    shared_mask: int = 0
    weights: int = 0
    weights_learn: bool = False
    scores: int = 0
    scores_learn: bool = False

    def shape(self, width: int) -> tuple[int, int, int]:
        """The queries' shape and the output's, samples first."""
        return self.num_samples, self.inputs[0][0], width


def attention_call(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> AttentionCall:
    """The call with these arguments.

    >>> import torch
    >>> attention, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.zeros(3, 5, 4)
    >>> call = attention_call(attention, x, x, x)
    >>> call.num_samples, call.inputs, call.weights, call.scores
    (3, ((5, 4, False),), 25, 25)
    """
    batched = query.dim() == 3
    tokens = int(module.batch_first and batched)
    if is_causal and key_padding_mask is None and not need_weights:
        attn_mask = None  # the hint replaces it
    inputs = {id(x): (x.shape[tokens], x.shape[-1], x.requires_grad) for x in (query, key, value)}
    num_scores = query.shape[tokens] * key.shape[tokens]
    by_sample = attn_mask is not None and attn_mask.dim() == 3
    learns = attn_mask is not None and attn_mask.requires_grad
    padding_learns = key_padding_mask is not None and key_padding_mask.requires_grad
    heads = 1 if average_attn_weights else module.num_heads
    return AttentionCall(
        query.shape[1 - tokens] if batched else 1,
        tuple(inputs.values()),
        padding=key.shape[tokens] if key_padding_mask is not None else 0,
        padding_learns=padding_learns,
        mask=module.num_heads * num_scores if by_sample else 0,
        mask_learns=learns,
        shared_mask=num_scores if learns and not by_sample else 0,
        weights=heads * num_scores if need_weights else 0,
        scores=num_scores,
        scores_learn=learns or padding_learns or query.requires_grad or key.requires_grad,
    )


def leads_to(value: Tensor, results: Any) -> bool:
    """Whether a gradient flows from the results back to ``value``, which was made on the way.

    >>> import torch
    >>> one = torch.ones(1, requires_grad=True) * 2
    >>> leads_to(one, {"sum": one + 1}), leads_to(one, one.detach())
    (True, False)
    """
    waiting = [each.grad_fn for each in tree_flatten(results)[0] if isinstance(each, Tensor)]
    seen: set[Any] = set()
    while waiting:
        function = waiting.pop()
        if function is not None and function not in seen:
            seen.add(function)
            waiting += [before for before, _ in function.next_functions]
    return value.grad_fn in seen
