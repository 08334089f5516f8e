"""Sharding rules of convolutions, pooling and resizing: samples and channels may be split, spatial dims may not.

The channels of a grouped convolution may not be split either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.global_tensor.rules.call import OperatorCall, ShardingDecision, Way, check_dtypes, decide


def _batched(call: OperatorCall) -> bool:
    return len(call.shapes[0]) == len(call.arg("stride")) + 2


def _convolution(call: OperatorCall) -> ShardingDecision:
    """The rule that splits samples, output channels, or input channels (partial sums); groups are not split."""
    check_dtypes(call)
    if not _batched(call):
        return decide(call, [])
    ways: list[Way] = [(call.letters(input=0), (0,))]
    if call.arg("groups") == 1:
        into, out = (0, 1) if call.arg("transposed") else (1, 0)
        ways.append((call.letters(weight=out, bias=0), (1,)))
        if call.shapes[0][1] % call.placement.size == 0:  # torch refuses empty slices of channels
            ways.append((call.letters(input=1, weight=into, bias="P"), ("P",)))
    return decide(call, ways)


def _convolution_backward(call: OperatorCall) -> ShardingDecision:
    if not _batched(call):
        return decide(call, [])
    ways: list[Way] = [(call.letters(grad_output=0, input=0), (0, "P", "P"))]
    if call.arg("groups") == 1:
        into, out = (0, 1) if call.arg("transposed") else (1, 0)
        ways.append((call.letters(grad_output=1, weight=out), ("P", out, 0)))
        if call.shapes[call.place("input") or 0][1] % call.placement.size == 0:  # as above
            ways.append((call.letters(input=1, weight=into), (1, into, "B")))
    return decide(call, ways, _run_backward)


def _run_backward(call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if call.arg("bias_sizes") and call.outputs[2] is not None:
        args = call.with_arg("bias_sizes", list(decision.local_shape_of(call, 2)), args)
    return call.func(*args, **kwargs)


def _pooling(num_space: int) -> Callable[[OperatorCall], ShardingDecision]:
    """Returns the rule that splits any dim before the spatial ones, in all tensors alike."""

    def rule(call: OperatorCall) -> ShardingDecision:
        before = len(call.shapes[0]) - num_space
        return decide(call, [((d,) * len(call.tensors), (d,) * len(call.outputs)) for d in range(before)])

    return rule


def _unfold(call: OperatorCall) -> ShardingDecision:
    """The rule of ``im2col`` and ``col2im``: splits samples if the input is batched."""
    is_batched = len(call.shapes[0]) == (4 if call.name == "im2col" else 3)
    return decide(call, [((0,), (0,))] if is_batched else [])


def _resize(call: OperatorCall) -> ShardingDecision:
    """The rule of ``upsample_*``: splits samples or channels."""

    def run(call: OperatorCall, decision: ShardingDecision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if call.name.endswith("_backward"):
            # the argument ``input_size`` becomes the size of this rank's part of the forward's input
            args = call.with_arg("input_size", list(decision.local_shape_of(call)), args)
        return call.func(*args, **kwargs)

    return decide(call, [((0,), (0,)), ((1,), (1,))], run)


_RESIZES = (
    *(f"upsample_{way}" for way in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"{way}{dims}d" for way in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)),
    *(f"_upsample_{way}_aa" for way in ("bilinear2d", "bicubic2d")),
)

_POOLS = (
    "max_pool{}d_with_indices", "avg_pool{}d", "_adaptive_avg_pool{}d", "adaptive_max_pool{}d", "reflection_pad{}d",
    "replication_pad{}d",
)  # fmt: skip
_POOLS_1D = (
    "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "reflection_pad1d", "reflection_pad1d_backward",
    "replication_pad1d", "replication_pad1d_backward",
)  # fmt: skip

RULES: dict[str, Any] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("im2col", "col2im"), _unfold),
    **dict.fromkeys((f"{name}{end}" for name in _RESIZES for end in ("", "_backward")), _resize),
    **dict.fromkeys(_POOLS_1D, _pooling(1)),
    **{f"{name.format(n)}{end}": _pooling(n) for n in (2, 3) for name in _POOLS for end in ("", "_backward")},
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), _pooling(3)),
}
