"""Convolutions and pooling: samples and channels may be cut, space may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.global_tensor.rules.call import Decision, OperatorCall, Way, check_dtypes, decide


def _batched(call: OperatorCall) -> bool:
    return len(call.shapes[0]) == len(call.arg("stride")) + 2


def _convolution(call: OperatorCall) -> Decision:
    """Samples; output channels; input channels, whose products are terms of a sum. Groups are not cut."""
    check_dtypes(call)
    if not _batched(call):
        return decide(call, [])
    ways: list[Way] = [(call.letters(input=0), (0,))]
    if call.arg("groups") == 1:
        into, out = (0, 1) if call.arg("transposed") else (1, 0)
        ways.append((call.letters(weight=out, bias=0), (1,)))
        if call.shapes[0][1] % call.placement.size == 0:  # torch convolves no empty slice
            ways.append((call.letters(input=1, weight=into, bias="P"), ("P",)))
    return decide(call, ways)


def _convolution_backward(call: OperatorCall) -> Decision:
    if not _batched(call):
        return decide(call, [])
    ways: list[Way] = [(call.letters(grad_output=0, input=0), (0, "P", "P"))]
    if call.arg("groups") == 1:
        into, out = (0, 1) if call.arg("transposed") else (1, 0)
        ways.append((call.letters(grad_output=1, weight=out), ("P", out, 0)))
        if call.shapes[call.place("input") or 0][1] % call.placement.size == 0:  # torch finds no gradient without input
            ways.append((call.letters(input=1, weight=into), (1, into, "B")))
    return decide(call, ways, _backward_here)


def _backward_here(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if call.arg("bias_sizes") and call.outputs[2] is not None:
        args = call.with_arg("bias_sizes", list(decision.local_shape_of(call, 2)), args)
    return call.func(*args, **kwargs)


def _pooled(num_space: int) -> Callable[[OperatorCall], Decision]:
    """Every dim before the space, in all tensors alike."""

    def rule(call: OperatorCall) -> Decision:
        before = len(call.shapes[0]) - num_space
        return decide(call, [((d,) * len(call.tensors), (d,) * len(call.outputs)) for d in range(before)])

    return rule


def _windows(call: OperatorCall) -> Decision:
    """``im2col``, ``col2im``: samples, where there are any."""
    is_batched = len(call.shapes[0]) == (4 if call.name == "im2col" else 3)
    return decide(call, [((0,), (0,))] if is_batched else [])


def _resized(call: OperatorCall) -> Decision:
    """``upsample_*``: samples and channels; the backward is told the size of its input."""

    def resized(call: OperatorCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call.name.endswith("_backward"):
            args = call.with_arg("input_size", list(decision.local_shape_of(call)), args)
        return call.func(*args, **kwargs)

    return decide(call, [((0,), (0,)), ((1,), (1,))], resized)


_RESIZED = (
    *(f"upsample_{way}" for way in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"{way}{dims}d" for way in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)),
    *(f"_upsample_{way}_aa" for way in ("bilinear2d", "bicubic2d")),
)

_POOLS = {
    1: (
        "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "reflection_pad1d", "reflection_pad1d_backward",
        "replication_pad1d", "replication_pad1d_backward",
    ),
    2: (
        "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d", "adaptive_max_pool2d_backward",
        "reflection_pad2d", "reflection_pad2d_backward", "replication_pad2d", "replication_pad2d_backward",
    ),
    3: (
        "max_pool3d_with_indices", "max_pool3d_with_indices_backward", "avg_pool3d", "avg_pool3d_backward",
        "_adaptive_avg_pool3d", "_adaptive_avg_pool3d_backward", "adaptive_max_pool3d", "adaptive_max_pool3d_backward",
        "reflection_pad3d", "reflection_pad3d_backward", "replication_pad3d", "replication_pad3d_backward",
        "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    ),
}  # fmt: skip

RULES: dict[str, Any] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("im2col", "col2im"), _windows),
    **dict.fromkeys((f"{name}{end}" for name in _RESIZED for end in ("", "_backward")), _resized),
    **{name: _pooled(num) for num, names in _POOLS.items() for name in names},
}
