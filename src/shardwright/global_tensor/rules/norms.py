"""Normalisations: samples may be cut; what the statistics are taken over may not. Batch norm is refused when cut."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwright.global_tensor.rules.call import Call, Decision, Way, decide


def _layer_norm(call: Call) -> Decision:
    """``native_layer_norm``, ``_fused_rms_norm``: every dim before the normalised ones."""
    before = len(call.shapes[0]) - len(call.arg("normalized_shape"))
    ways: list[Way] = [(call.letters(input=dim), (dim,) * len(call.outputs)) for dim in range(before)]
    return decide(call, ways)


def _layer_norm_backward(call: Call) -> Decision:
    before = len(call.shapes[0]) - len(call.arg("normalized_shape"))
    names = [a.name for a in call.func._schema.arguments if a.name not in ("weight", "bias")]
    ways: list[Way] = []
    for dim in range(before):
        cut = {name: dim for name in names if call.place(name) is not None}
        ways.append((call.letters(**cut), (dim, *("P",) * (len(call.outputs) - 1))))
    return decide(call, ways)


def _group_norm(call: Call) -> Decision:
    return decide(call, [(call.letters(input=0), (0, 0, 0))], _with_samples)


def _group_norm_backward(call: Call) -> Decision:
    cut = call.letters(grad_out=0, input=0, mean=0, rstd=0)
    return decide(call, [(cut, (0, "P", "P"))], _with_samples)


def _with_samples(call: Call, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    samples = next(x for x in args if isinstance(x, Tensor)).shape[0]
    return call.func(*call.with_arg("N", samples, args), **kwargs)


RULES = {
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _layer_norm_backward),
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
}
