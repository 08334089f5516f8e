"""Computes what torch's random functions return, from numbers that are hashed from a key (:class:`KeyedNumbers`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.analysis.calls.draw_calls import DrawCall
from shardwright.attention_scores import attend_dropping
from shardwright.runtime.keyed_numbers import KeyedNumbers

ALPHA = -1.7580993408473766
"""The value of a dropped element in ``alpha_dropout``, before all are scaled and shifted: the infimum of SELU."""


def _drop(call: DrawCall, x: Tensor, numbers: KeyedNumbers) -> Tensor:
    p, shape = call["p"], list(x.shape)
    if "alpha" in call.name:
        whole = 2 if call.name.startswith("feature") else len(shape)
    else:
        whole = len(shape)
        batched = {"dropout1d": 3, "dropout2d": 4, "dropout3d": 5}.get(call.name)
        if batched is not None:
            whole = 1 if len(shape) == batched - 1 and call.name != "dropout2d" else 2
        elif call.name.startswith("feature"):
            whole = 2
    like = x if whole == len(shape) else [*shape[:whole], *(1,) * (len(shape) - whole)]
    if "alpha" in call.name:
        keep = numbers.kept(like, p).to(x.dtype)
        scale = 0.0 if p == 1 else ((1 - p) * (1 + p * ALPHA**2)) ** -0.5
        result = x * (keep * scale) + ((1 - keep) * ALPHA * scale - scale * ALPHA * p)
    else:
        result = x * numbers.factors(like, p, x.dtype)
    return x.copy_(result) if call.get("inplace") or call.name.endswith("_") else result


def _fill(call: DrawCall, x: Tensor, numbers: KeyedNumbers) -> Tensor:
    dtype = x.dtype
    made: Tensor
    if call.name == "bernoulli_":
        made = numbers.bernoulli(x, call["p"])
    elif call.name == "uniform_":
        made = numbers.uniform(x, dtype) * (call["to"] - call["from"]) + call["from"]
    elif call.name == "normal_":
        made = numbers.normal(x, dtype) * call["std"] + call["mean"]
    elif call.name == "exponential_":
        made = numbers.exponential(x) / call["lambd"]
    else:
        most = 2 ** (24 if dtype.is_floating_point else 8 if dtype.itemsize == 1 else 31)
        made = numbers.integers(x, call.get("from", 0), call.get("to", most))
    return x.copy_(made.to(dtype).detach())  # as in torch, what x was computed from gets a gradient of zeros


def _like(call: DrawCall, x: Tensor, numbers: KeyedNumbers) -> Tensor:
    made = torch.empty(list(x.shape), dtype=call.get("dtype", x.dtype), device=call.get("device", x.device))
    return _filled(call, made, numbers)


def _new(call: DrawCall, x: None, numbers: KeyedNumbers) -> Tensor:
    return _filled(call, call.empty(), numbers)


def _filled(call: DrawCall, made: Tensor, numbers: KeyedNumbers) -> Tensor:
    shape, dtype = list(made.shape), made.dtype
    values: Tensor
    if call.name == "randperm":
        values = numbers.words(shape).argsort(stable=True)
    elif call.name.startswith("randint"):
        values = numbers.integers(shape, int(call.get("low", 0)), int(call["high"]))
    elif call.name.startswith("randn") or call.name == "normal":
        values = numbers.normal(shape, dtype)
    else:
        values = numbers.uniform(shape, dtype)
    return values.to(dtype).requires_grad_(bool(call.get("requires_grad", False)))


def _bernoulli(call: DrawCall, x: Tensor, numbers: KeyedNumbers) -> Tensor:
    return numbers.bernoulli(x, call.get("p", x)).to(x.dtype)


def _normal(call: DrawCall, x: Tensor | None, numbers: KeyedNumbers) -> Tensor:
    if x is None:
        return _filled(call, call.empty(), numbers).mul_(call["std"]).add_(call["mean"])
    shape = torch.broadcast_shapes(*(value.shape for value in (call["mean"], call["std"]) if isinstance(value, Tensor)))
    values: Tensor = numbers.normal(list(shape), x.dtype) * call["std"] + call["mean"]
    drawn: Tensor = (call["mean"] + call["std"]).copy_(values.detach())  # as in torch, both have a gradient of zeros
    return drawn


def _multinomial(call: DrawCall, x: Tensor, numbers: KeyedNumbers) -> Tensor:
    count = int(call["num_samples"])
    if count > 1 and not call.get("replacement"):  # without replacement: the events that come first, at these rates
        times = numbers.exponential(list(x.shape)) / x.double()
        return times.topk(count, dim=-1, largest=False).indices
    sums = x.double().cumsum(-1)
    at = numbers.positive([*x.shape[:-1], count]) * sums[..., -1:]
    return torch.searchsorted(sums, at, right=True).clamp(max=x.shape[-1] - 1)


def _gumbel(call: DrawCall, x: Tensor, numbers: KeyedNumbers) -> Tensor:
    dim = int(call["dim"])
    noise = numbers.exponential(x).log().neg().to(x.dtype)
    soft: Tensor = ((x + noise) / call["tau"]).softmax(dim)
    if not call.get("hard"):
        return soft
    hard = torch.zeros_like(soft).scatter_(dim, soft.max(dim, keepdim=True).indices, 1.0)
    return hard - soft.detach() + soft


def _rrelu(call: DrawCall, x: Tensor, numbers: KeyedNumbers) -> Tensor:
    slopes = numbers.uniform(x, x.dtype) * (call["upper"] - call["lower"]) + call["lower"]
    result = torch.where(x > 0, x, x * slopes)
    return x.copy_(result) if call.get("inplace") else result


def _attend(call: DrawCall, q: Tensor, numbers: KeyedNumbers) -> Tensor:
    k, v, mask, p, scale = call["key"], call["value"], call["attn_mask"], call["dropout_p"], call["scale"]
    if call.get("enable_gqa"):
        k, v = (tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], -3) for tensor in (k, v))
    if scale is not None:
        q = q * (scale * q.shape[-1] ** 0.5)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)

    def drop(weights: Tensor) -> Tensor:
        return weights * numbers.factors(weights, p, weights.dtype)

    return attend_dropping(q, k, v, mask, causal=bool(call["is_causal"]), drop=drop)


def _recur(call: DrawCall, x: Tensor, numbers: KeyedNumbers) -> tuple[Tensor, ...]:
    """Runs the layers of a recurrent network one by one, with keyed dropout between them."""
    layers, states = int(call["num_layers"]), call["hx"]
    ways = 2 if call["bidirectional"] else 1
    params_per_layer = len(call["params"]) // layers
    starts = states if isinstance(states, tuple | list) else (states,)
    ends: list[list[Tensor]] = [[] for _ in starts]
    for layer in range(layers):
        layer_states = tuple(state[layer * ways : (layer + 1) * ways] for state in starts)
        x, *last = call.function(
            x, layer_states if isinstance(states, tuple | list) else layer_states[0],
            call["params"][layer * params_per_layer : (layer + 1) * params_per_layer],
            call["has_biases"], 1, 0.0, call["training"], call["bidirectional"], call["batch_first"],
        )  # fmt: skip
        for end, state in zip(ends, last, strict=True):
            end.append(state)
        if layer < layers - 1:
            x = x * numbers.factors(x, call["dropout"], x.dtype)
            numbers.key += "+"
    return (x, *(torch.cat(end) for end in ends))


KEYED_RESULTS: Mapping[str, Callable[[DrawCall, Any, KeyedNumbers], Any]] = {
    "drop": _drop, "fill": _fill, "like": _like, "new": _new, "bernoulli": _bernoulli, "normal": _normal,
    "multinomial": _multinomial, "gumbel": _gumbel, "rrelu": _rrelu, "attend": _attend, "recur": _recur,
}  # fmt: skip
"""Computes a call's result by its ``kind``, from its numbers; the second argument is the tensor for which it draws."""
