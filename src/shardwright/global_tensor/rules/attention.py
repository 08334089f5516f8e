"""Sharding rule of scaled dot-product attention (torch's fused CPU kernel): samples and heads may be split.

The sequence may not be split, and heads only if queries, keys and values have equally many.
"""

from __future__ import annotations

from typing import Any

from shardwright.global_tensor.rules.call import Letter, OperatorCall, ShardingDecision, Way, decide

_SPLIT = frozenset({"query", "key", "value", "grad_out", "out", "logsumexp"})


def _attention(call: OperatorCall) -> ShardingDecision:
    # with fewer heads of keys than of queries (grouped queries) equal slices of heads would not match
    heads = {call.shapes[call.place(name) or 0][1] for name in ("query", "key", "value")}
    ways: list[Way] = []
    for dim in (0, 1) if len(heads) == 1 else (0,):
        cut: dict[str, Letter] = {name: dim for name in call.names if name in _SPLIT}
        if (place := call.place("attn_mask")) is not None:  # split as well, unless it is broadcast along the dim
            shape, size = call.shapes[place], call.shapes[call.place("query") or 0][dim]
            own = dim - (4 - len(shape))
            cut["attn_mask"] = own if own >= 0 and shape[own] == size and size > 1 else "B"
        ways.append((call.letters(**cut), (dim,) * len(call.outputs)))
    return decide(call, ways)


RULES: dict[str, Any] = dict.fromkeys(
    ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"), _attention
)
