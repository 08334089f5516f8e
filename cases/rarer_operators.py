"""Operators that fewer models use, so that every rule is met by the sweep; see operators.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from cases.operators import OPERATORS, Operator, X, integers

LINE, PICTURE, CUBE = (3, 4, 6), (3, 2, 5, 4), (2, 2, 4, 3, 4)


def resized(mode, **options):
    return lambda x: F.interpolate(x, scale_factor=2, mode=mode, **options)


def padded(mode, widths):
    return lambda x: F.pad(x, widths, mode=mode)


RARER = [
    Operator("linear_resize", resized("linear"), (LINE,)),
    Operator("nearest_1d", resized("nearest"), (LINE,)),
    Operator("nearest_3d", resized("nearest"), (CUBE,)),
    Operator("nearest_exact_1d", resized("nearest-exact"), (LINE,)),
    Operator("nearest_exact_2d", resized("nearest-exact"), (PICTURE,)),
    Operator("nearest_exact_3d", resized("nearest-exact"), (CUBE,)),
    Operator("trilinear", resized("trilinear", align_corners=True), (CUBE,)),
    Operator("bicubic", resized("bicubic"), (PICTURE,)),
    Operator("bilinear_smooth", lambda x: F.interpolate(x, (3, 2), mode="bilinear", antialias=True), (PICTURE,)),
    Operator("bicubic_smooth", lambda x: F.interpolate(x, (3, 2), mode="bicubic", antialias=True), (PICTURE,)),
    Operator("channel_shuffle", lambda x: F.channel_shuffle(x, 2), ((3, 4, 3, 2),)),
    Operator("pad_reflected_2d", padded("reflect", (1, 2, 2, 1)), (PICTURE,)),
    Operator("pad_reflected_3d", padded("reflect", (1, 1, 1, 0, 2, 1)), (CUBE,)),
    Operator("pad_repeated_1d", padded("replicate", (1, 2)), (LINE,)),
    Operator("pad_repeated_2d", padded("replicate", (1, 2, 0, 1)), (PICTURE,)),
    Operator("pad_repeated_3d", padded("replicate", (1, 1, 2, 0, 0, 1)), (CUBE,)),
    Operator("avg_pool_1d", lambda x: F.avg_pool1d(x, 2), (LINE,)),
    Operator("avg_pool_3d", lambda x: F.avg_pool3d(x, 2), (CUBE,)),
    Operator("max_pool_3d", lambda x: F.max_pool3d(x, 2), (CUBE,)),
    Operator("adaptive_avg_pool_1d", lambda x: F.adaptive_avg_pool1d(x, 3), (LINE,)),
    Operator("adaptive_avg_pool_2d", lambda x: F.adaptive_avg_pool2d(x, (2, 3)), (PICTURE,)),
    Operator("adaptive_avg_pool_3d", lambda x: F.adaptive_avg_pool3d(x, 2), (CUBE,)),
    Operator("adaptive_max_pool_1d", lambda x: F.adaptive_max_pool1d(x, 3), (LINE,)),
    Operator("adaptive_max_pool_2d", lambda x: F.adaptive_max_pool2d(x, (2, 3)), (PICTURE,)),
    Operator("adaptive_max_pool_3d", lambda x: F.adaptive_max_pool3d(x, 2), (CUBE,)),
    Operator("huber", F.huber_loss, (X, X)),
    Operator("soft_margin", lambda x, y: F.soft_margin_loss(x, y.detach().sign()), (X, X)),
    Operator("fused_rms_norm", lambda x, w: torch.ops.aten._fused_rms_norm(x, (6,), w, 1e-5)[0], (X, (6,))),
    Operator("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), (X, (5, 1))),
    Operator("argmin", lambda x: x.argmin(0), (X,)),
    Operator("amin", lambda x: x.amin(0), (X,)),
    Operator("least_and_most", lambda x: torch.aminmax(x, dim=1), (X,)),
    Operator("cummin", lambda x: x.cummin(1), (X,)),
    Operator("logcumsumexp", lambda x: x.logcumsumexp(0), (X,)),
    Operator("kth_value", lambda x: x.kthvalue(2, 1), (X,)),
    Operator("median", lambda x: x.median(1), (X,)),
    Operator("nanmedian", lambda x: x.nanmedian(0), (X,)),
    Operator("mode", lambda x: x.mode(1), (integers(0, 3, 5, 6),)),
    Operator("count_nonzero", lambda x: x.count_nonzero(0), (integers(0, 3, 5, 6),)),
    Operator("deviation_and_mean", lambda x: torch.std_mean(x, 1), (X,)),
    Operator("variance_and_mean", lambda x: torch.var_mean(x, 0), (X,)),
    Operator("norm_of_order", lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 3, [1]), (X,)),
    Operator("vdot", torch.vdot, ((6,), (6,))),
    Operator("triu", lambda x: x.triu(1), (X,)),
    Operator("index_copy", lambda x, i, s: x.index_copy(1, i, s), (X, integers(0, 1, 1), (5, 1))),
    Operator("index_copy_in_place", lambda x, i, s: (x * 1).index_copy_(1, i, s), (X, integers(0, 6, 1), (5, 1))),
    Operator("index_add_in_place", lambda x, i, s: (x * 1).index_add_(1, i, s), (X, integers(0, 6, 3), (5, 3))),
    Operator("index_fill_in_place", lambda x, i: (x * 1).index_fill_(1, i, 2.0), (X, integers(0, 6, 3))),
    Operator("scatter_add_in_place", lambda x, i, s: (x * 1).scatter_add_(1, i, s), (X, integers(0, 6, 5, 3), (5, 3))),
    Operator(
        "scatter_reduce_in_place",
        lambda x, i, s: (x * 1).scatter_reduce_(1, i, s, "amin"), (X, integers(0, 6, 5, 3), (5, 3)),
    ),
    Operator(
        "put", lambda x, i, s: torch.ops.aten._index_put_impl_(x * 1, [i], s, True), (X, integers(0, 5, 3), (3, 6))
    ),
    Operator(
        "put_unsafely",
        lambda x, i, s: torch.ops.aten._unsafe_index_put(x, [i], s, True), (X, integers(0, 5, 3), (3, 6)), True,
    ),
    Operator("unsafe_split", lambda x: torch.unsafe_split(x, 2, 1), (X,)),
    Operator("unsafe_split_sizes", lambda x: torch.unsafe_split_with_sizes(x, [2, 4], 1), (X,)),
    Operator("full_like", lambda x: torch.full_like(x, 2.0), (X,)),
    Operator("new_full", lambda x: x.new_full((4, 3), 2.0), (X,)),
    Operator("new_ones", lambda x: x.new_ones((4, 3)), (X,)),
    Operator("empty_like", lambda x: torch.empty_like(x).zero_(), (X,)),
    Operator("alias", lambda x: torch.ops.aten.alias(x), (X,)),
    Operator("lift_fresh", lambda x: torch.ops.aten.lift_fresh(x), (X,)),
    Operator("reshape_alias", lambda x: torch.ops.aten._reshape_alias(x, (10, 3), (3, 1)), (X,)),
    Operator("positive", torch.positive, (X,)),
    Operator("hardtanh", lambda x: F.hardtanh(x, -0.5, 0.5), (X,)),
    Operator("hardsigmoid", F.hardsigmoid, (X,)),
    Operator("hardshrink", F.hardshrink, (X,)),
    Operator("elu", F.elu, (X,)),
    Operator("fill", lambda x: torch.fill(x, 3.0), (X,)),
]  # fmt: skip

EVERY = (*OPERATORS, *RARER)
