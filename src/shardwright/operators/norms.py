"""LayerNorm and RMSNorm of sharded features: for each token the ranks exchange its statistics, two numbers or one.

Squares are never subtracted from squares: at a mean of 1,000 that loses every digit. Means and sums of squared
differences (M2) are combined instead.

N tokens, F features; f this rank's shard of F; p partial sums, one or two for each token
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwright.analysis.traced.structure import is_exactly
from shardwright.comm.autograd import once
from shardwright.comm.axis import Axis

FeatureSplit = tuple[Axis, tuple[int, ...]]
"""An axis that shards the features, and the number of features of each of its members."""


def _statistics(x_Nf: Tensor, splits: Sequence[FeatureSplit]) -> tuple[Tensor, Tensor]:
    """Returns each token's mean over all features, and its sum of squared differences from that mean."""
    mean_N = x_Nf.mean(dim=1)
    mean_N = mean_N + (x_Nf - mean_N.unsqueeze(1)).mean(dim=1)  # adds digits that rounding of a large mean lost
    m2_N = (x_Nf - mean_N.unsqueeze(1)).square().sum(dim=1)
    for axis, counts in splits:
        statistics_A2N = axis.all_gather(torch.stack((mean_N, m2_N)).unsqueeze(0))
        means_AN, m2s_AN = statistics_A2N[:, 0], statistics_A2N[:, 1]
        counts_A1: Tensor | int = counts[0]
        if len(set(counts)) > 1:  # made on the device, to avoid a blocking copy from the host
            counts_A1 = torch.cat([x_Nf.new_full((1, 1), count) for count in counts])
        # averages differences from the first mean, which loses fewer digits than averaging the means
        mean_N = means_AN[0] + ((means_AN - means_AN[0]) * counts_A1).sum(dim=0) / sum(counts)
        m2_N = m2s_AN.sum(dim=0) + ((means_AN - mean_N).square() * counts_A1).sum(dim=0)
    return mean_N, m2_N


class _CutNorm(Function):
    """LayerNorm of sharded features if ``centered``, else RMSNorm, which has no mean and no bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_f: Tensor | None,
        b_f: Tensor | None,
        eps: float,
        size: int,
        splits: tuple[FeatureSplit, ...],
        centered: bool,
    ) -> Tensor:
        x_Nf = x.reshape(-1, x.shape[-1]).to(torch.promote_types(x.dtype, torch.float32))
        if centered:
            mean_N, squares_N = _statistics(x_Nf, splits)
            x_Nf = x_Nf - mean_N.unsqueeze(1)
        else:
            squares_N = x_Nf.square().sum(dim=1)
            for axis, _ in splits:
                squares_N = axis.all_reduce(squares_N)
        scale_N = (squares_N / size + eps).rsqrt_()
        # in place only if the features were centered: otherwise x_Nf may be the layer's input
        normed_Nf = x_Nf.mul_(scale_N.unsqueeze(1)) if centered else x_Nf * scale_N.unsqueeze(1)
        ctx.save_for_backward(normed_Nf, scale_N, w_f)
        ctx.size, ctx.splits, ctx.dtype, ctx.centered = size, splits, x.dtype, centered
        y_Nf = normed_Nf if w_f is None else normed_Nf * w_f
        y_Nf = y_Nf if b_f is None else y_Nf + b_f
        # later code may write into the output, so it must be neither a view nor the tensor saved for the backward
        y_Nf = y_Nf.clone() if y_Nf is normed_Nf and x.dtype == y_Nf.dtype else y_Nf.to(x.dtype)
        return y_Nf.view(x.shape).detach()

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        normed_Nf, scale_N, w_f = ctx.saved_tensors
        dy_Nf = dy.reshape(normed_Nf.shape).to(normed_Nf.dtype)
        g_Nf = dy_Nf if w_f is None else dy_Nf * w_f
        terms = [(g_Nf * normed_Nf).sum(dim=1)]
        if ctx.centered:
            terms.append(g_Nf.sum(dim=1))
        sums_pN = torch.stack(terms)
        for axis, _ in ctx.splits:
            sums_pN = axis.all_reduce(sums_pN)
        means_pN1 = (sums_pN / ctx.size).unsqueeze(2)
        if ctx.centered:
            g_Nf = g_Nf - means_pN1[1]
        dx_Nf = (g_Nf - normed_Nf * means_pN1[0]) * scale_N.unsqueeze(1)
        dw_f = (dy_Nf * normed_Nf).sum(dim=0) if ctx.needs_input_grad[1] else None
        db_f = dy_Nf.sum(dim=0) if ctx.needs_input_grad[2] else None
        return dx_Nf.to(ctx.dtype).view(dy.shape), dw_f, db_f, None, None, None, None


def cut_layer_norm(
    x_f: Tensor, w_f: Tensor | None, b_f: Tensor | None, *, eps: float, size: int, splits: Sequence[FeatureSplit]
) -> Tensor:
    """Computes LayerNorm over ``size`` features sharded over ranks, which all-gather each token's statistics.

    ``splits`` are the axes that shard the features, each with the number of features of every member.

    Shapes: x_f (..., F / cut); w_f, b_f (F / cut,); returns like x_f.
    Traffic: for each axis, forward one all-gather of two numbers for each token and member, backward one all-reduce
        of two numbers for each token.
    Source: Chan, Golub, LeVeque 1983, "Algorithms for Computing the Sample Variance" (combining means and M2).

    >>> from shardwright import Mesh, run_on_threads
    >>> x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    >>> def half(axes):
    ...     tp = axes["tp"]
    ...     mine = x[:, 2 * tp.index :][:, :2]
    ...     return cut_layer_norm(mine, None, None, eps=0.0, size=4, splits=[(tp, (2, 2))])
    >>> whole = torch.cat(run_on_threads(Mesh(tp=2), half), dim=1)
    >>> torch.allclose(whole, torch.nn.functional.layer_norm(x, (4,), eps=0.0))
    True
    """
    return cast(Tensor, _CutNorm.apply(x_f, w_f, b_f, eps, size, tuple(splits), True))


def cut_rms_norm(
    x_f: Tensor, w_f: Tensor | None, *, eps: float | None, size: int, splits: Sequence[FeatureSplit]
) -> Tensor:
    """Computes RMSNorm over ``size`` features sharded over ranks, which all-reduce each token's sum of squares.

    ``splits`` are the axes that shard the features, each with the number of features of every member. An ``eps`` of
    None stands for the machine epsilon of the input's dtype, as in torch.

    Shapes: x_f (..., F / cut); w_f (F / cut,); returns like x_f.
    Traffic: for each axis, forward and backward one all-reduce of one number for each token.
    Source: Zhang, Sennrich 2019, arXiv:1910.07467.
    """
    eps = torch.finfo(x_f.dtype).eps if eps is None else eps
    return cast(Tensor, _CutNorm.apply(x_f, w_f, None, eps, size, tuple(splits), False))


class FeatureNorm(NamedTuple):
    """A class of norms over features, the last dim, which ranks may shard: what runs it, and what it combines.

    To add a class of norms, add its entry to :data:`FEATURE_NORMS`; plans, prices and runs read it there.
    """

    run: Callable[[Any, Tensor, int, Sequence[FeatureSplit]], Tensor]
    """A function of (module, this rank's shard, number of all features, splits) that returns the normalized shard."""
    combines: Literal["all_gather", "all_reduce"]
    """The collective over each axis in the forward that combines the shards' statistics into those of all features."""
    num_statistics: int
    """The numbers of each token in that collective, on each rank."""
    num_sums: int
    """The numbers of each token that the backward all-reduces over each axis."""

    def num_features(self, module: nn.Module) -> int | None:
        """Returns the number of features that a module normalizes over; None if these are in several dims."""
        shape: Sequence[int] = module.normalized_shape  # type: ignore[assignment]
        return shape[0] if len(shape) == 1 else None


def _layer_norm(module: Any, x_f: Tensor, size: int, splits: Sequence[FeatureSplit]) -> Tensor:
    own = module._parameters  # read directly: attribute reads may be guarded
    return cut_layer_norm(x_f, own["weight"], own["bias"], eps=module.eps, size=size, splits=splits)


def _rms_norm(module: Any, x_f: Tensor, size: int, splits: Sequence[FeatureSplit]) -> Tensor:
    return cut_rms_norm(x_f, module._parameters["weight"], eps=module.eps, size=size, splits=splits)


FEATURE_NORMS: Mapping[type[nn.Module], FeatureNorm] = {
    nn.LayerNorm: FeatureNorm(_layer_norm, "all_gather", num_statistics=2, num_sums=2),
    nn.RMSNorm: FeatureNorm(_rms_norm, "all_reduce", num_statistics=1, num_sums=1),
}
"""The norms over features that ranks may shard, by class."""


def feature_norm_of(module: nn.Module | None) -> type[nn.Module] | None:
    """Returns the class in :data:`FEATURE_NORMS` whose forward a module runs unchanged and without hooks, or None.

    >>> feature_norm_of(nn.RMSNorm(4)), feature_norm_of(nn.Linear(4, 4))
    (<class 'torch.nn.modules.normalization.RMSNorm'>, None)
    """
    return next((kind for kind in FEATURE_NORMS if is_exactly(module, kind)), None)
