"""Runs torch's layers (convolutions, pools, group norms) on feature maps whose rows are sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.analysis.traced.convolution_chains import CONVOLUTIONS
from shardwright.comm.axis import Axis
from shardwright.operators.batch_norm import shared_group_norm
from shardwright.operators.halo import (
    halo_convolution,
    halo_enlarge,
    halo_pool,
    halo_transposed_convolution,
    mean_of_rows,
)
from shardwright.operators.picture_rows import SlidingWindow, Upsampling, output_sizes, row_ranges
from shardwright.strategies.spatial.maps import AVERAGE_POOLS, MAX_POOLS, TRANSPOSED, MapStep


def compute(
    module: Any, step: MapStep, x: Tensor, axis: Axis, sizes: Sequence[int], forward: Callable[..., Any]
) -> Tensor:
    """Returns this rank's rows of a layer's output; the mean of an adaptive pool is returned whole.

    ``x`` has this rank's rows of the input (dim 2), and ``sizes`` gives the number of input rows on each rank. ``step``
    is the traced call, with the rows that each output row reads; ``forward`` is the module's own forward. All ranks of
    the axis call it.

    Traffic: that of the operator of :mod:`shardwright.operators` that it calls.
    """
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if isinstance(module, CONVOLUTIONS):
        paddings = module._reversed_padding_repeated_twice  # of the last dim first, before and after
        return halo_convolution(
            x, weight, bias, axis, sizes, stride=module.stride, padding=paddings[-2::-2], groups=module.groups,
            padding_after=paddings[::-1][::2], padding_mode=module.padding_mode, dilation=module.dilation,
        )  # fmt: skip
    if isinstance(module, TRANSPOSED):
        return halo_transposed_convolution(
            x, weight, bias, axis, sizes, stride=module.stride, groups=module.groups,
            output_padding=module.output_padding, dilation=module.dilation,
            padding=module.padding,  # type: ignore[arg-type]
        )  # fmt: skip
    if isinstance(module, MAX_POOLS):
        return _max_pool(module, step, x, axis, sizes)
    if isinstance(module, AVERAGE_POOLS):
        return _average_pool(module, step, x, axis, sizes)
    if isinstance(step.resize, Upsampling):
        return halo_enlarge(x, forward, axis, sizes, factor=step.resize.factor, margin=step.resize.margin)
    if step.kind == "mean":
        return mean_of_rows(x, forward, axis, sum(sizes))
    return shared_group_norm(x, step.num_groups or x.shape[1], weight, bias, eps=module.eps, axes=[axis])


def _settings(module: Any, num_dims: int, *names: str) -> list[list[int]]:
    values = [getattr(module, name) for name in names]
    return [list(value) if isinstance(value, tuple | list) else [value] * num_dims for value in values]


def _pooled(
    pool: Callable[..., Tensor], step: MapStep, x: Tensor, axis: Axis, sizes: Sequence[int], fill: float
) -> Tensor:
    window = step.resize
    assert isinstance(window, SlidingWindow), "a pool has a window"
    return halo_pool(
        x, pool, axis, sizes, kernel=window.kernel, stride=window.stride, padding=window.padding,
        dilation=window.dilation, ceil=window.ceil, fill=fill,
    )  # fmt: skip


def _max_pool(module: Any, step: MapStep, x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    num_dims = x.dim() - 2
    kernels, strides, paddings, dilations = _settings(module, num_dims, "kernel_size", "stride", "padding", "dilation")
    pool = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}[num_dims]
    rest = (kernels, strides, [0, *paddings[1:]], dilations, module.ceil_mode)
    return _pooled(lambda rows: pool(rows, *rest), step, x, axis, sizes, -inf)


def _average_pool(module: Any, step: MapStep, x: Tensor, axis: Axis, sizes: Sequence[int]) -> Tensor:
    num_dims = x.dim() - 2
    kernels, strides, paddings = _settings(module, num_dims, "kernel_size", "stride", "padding")
    pool: Any = {1: functional.avg_pool1d, 2: functional.avg_pool2d, 3: functional.avg_pool3d}[num_dims]
    divisor = getattr(module, "divisor_override", None)
    rest = (kernels, strides, [0, *paddings[1:]], module.ceil_mode, module.count_include_pad)
    pool = partial(pool, divisor_override=divisor) if num_dims > 1 else pool
    y = _pooled(lambda rows: pool(rows, *rest), step, x, axis, sizes, 0.0)
    if divisor is not None:
        return y
    assert isinstance(step.resize, SlidingWindow), "a pool has a window"
    outputs = row_ranges(output_sizes(sizes, step.resize))[axis.index]
    # halo_pool always divides by the number of rows of the whole kernel, but windows at the edges have fewer rows
    counts = [_num_rows(step.resize, row, sum(sizes), module.count_include_pad) for row in range(*outputs)]
    if all(count == kernels[0] for count in counts):
        return y
    factors = torch.tensor([kernels[0] / count for count in counts], dtype=y.dtype, device=y.device)
    return y * factors.view(-1, *(1,) * (num_dims - 1))


def _num_rows(window: SlidingWindow, output: int, size: int, padding_counts: bool) -> int:
    """Returns the number of rows that an average pool divides by: the picture's, and the padding's if it counts."""
    first, stop = window.span((output, output + 1))
    low, high = (-window.padding, size + window.padding) if padding_counts else (0, size)
    return min(stop, high) - max(first, low)
