"""BatchNorm of a sharded batch: ranks all-gather counts, means and M2, so that all use the global batch's statistics.

M2 is the sum of squared differences from the mean. Squares are never subtracted from squares, so uneven and empty
shards come out as on one device. Channels may be sharded as well, which needs no message.

N samples, C channels (dim 1), S all other dims; A members of an axis
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwright.analysis.traced.batch_norms import uses_batch
from shardwright.analysis.traced.structure import BATCH_NORMS, kind_of
from shardwright.comm.autograd import once
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.forward_stack import Forward, Rung, wrap
from shardwright.sharding.tensor_shard import tag, tagged


def _broadcast(values_C: Tensor, x: Tensor) -> Tensor:
    """Returns one value for each channel, reshaped to broadcast with ``x``."""
    return values_C.view(-1, *(1,) * (x.dim() - 2))


def _statistics(x_NCS: Tensor, axes: Sequence[Axis]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the count, mean and M2 of each channel over all members."""
    num_channels = x_NCS.shape[1]
    num_local = x_NCS.numel() // num_channels
    count = x_NCS.new_full((), num_local)
    if num_local:
        var_C, mean_C = torch.var_mean(x_NCS, (0, *range(2, x_NCS.dim())), correction=0)
        m2_C = var_C * num_local
    else:
        mean_C = m2_C = x_NCS.new_zeros(num_channels)
    for axis in axes:
        gathered = axis.all_gather(torch.cat((count.view(1), mean_C, m2_C)).unsqueeze(0))
        counts_A1, means_AC, m2s_AC = gathered.split([1, num_channels, num_channels], dim=1)
        count = counts_A1.sum()
        weights_A1 = counts_A1 / count.clamp(min=1)
        mean_C = (weights_A1 * means_AC).sum(dim=0)
        mean_C = mean_C + (weights_A1 * (means_AC - mean_C)).sum(dim=0)  # once more, to add the digits lost to rounding
        m2_C = m2s_AC.sum(dim=0) + (counts_A1 * (means_AC - mean_C).square()).sum(dim=0)
    return count, mean_C, m2_C


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_C: Tensor | None, b_C: Tensor | None, eps: float, axes: tuple[Axis, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_NCS = x.to(torch.promote_types(x.dtype, torch.float32))
        count, mean_C, m2_C = _statistics(x_NCS, axes)
        var_C = m2_C / count.clamp(min=1)
        ctx.save_for_backward(x, w_C, count, mean_C, (var_C + eps).rsqrt())
        ctx.axes = axes
        ctx.mark_non_differentiable(count, mean_C, m2_C)
        y_NCS = functional.batch_norm(x_NCS, mean_C, var_C, w_C, b_C, False, 0.0, eps)
        return y_NCS.to(x.dtype), count, mean_C, m2_C

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, w_C, count, mean_C, scale_C = ctx.saved_tensors
        dy_NCS = dy.to(mean_C.dtype)
        normed_NCS = (x.to(mean_C.dtype) - _broadcast(mean_C, x)) * _broadcast(scale_C, x)
        dims = (0, *range(2, x.dim()))
        sums_2C = torch.stack((dy_NCS.sum(dims), (dy_NCS * normed_NCS).sum(dims)))
        db_C = sums_2C[0].clone() if ctx.needs_input_grad[2] else None
        dw_C = sums_2C[1].clone() if ctx.needs_input_grad[1] else None
        dx = None
        if ctx.needs_input_grad[0]:
            for axis in ctx.axes:
                sums_2C = axis.all_reduce(sums_2C)
            mean_dy_C, mean_both_C = sums_2C / count.clamp(min=1)
            dx_NCS = dy_NCS - _broadcast(mean_dy_C, x) - normed_NCS.mul_(_broadcast(mean_both_C, x))
            dx = dx_NCS.mul_(_broadcast(scale_C if w_C is None else scale_C * w_C, x)).to(x.dtype)
        return dx, dw_C, db_C, None, None


def shared_batch_norm(
    x: Tensor, w_C: Tensor | None, b_C: Tensor | None, *, eps: float, axes: Sequence[Axis]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes BatchNorm with statistics over all samples on the ranks of ``axes``.

    Returns the output and, for the running statistics, the number of values in a channel and each channel's mean and
    M2 (the sum of squared differences from the mean). The gradients of ``w_C`` and ``b_C`` are partial sums over the
    axes.

    Shapes: x (N here, C, ...); w_C, b_C (C,); returns like x, (), (C,), (C,).
    Traffic: for each axis, forward one all-gather of 2 C + 1 numbers of each member; backward, where x needs a
        gradient, one all-reduce of 2 C numbers.
    Source: Ioffe, Szegedy 2015, arXiv:1502.03167; Chan, Golub, LeVeque 1983, "Algorithms for Computing the Sample
        Variance" (combining means and M2).

    >>> from shardwright import Mesh, run_on_threads
    >>> x = torch.tensor([[1.0], [2.0], [6.0]])
    >>> def share(axes):
    ...     mine = x[:2] if axes["dp"].index == 0 else x[2:]
    ...     return shared_batch_norm(mine, None, None, eps=1e-5, axes=[axes["dp"]])[0]
    >>> whole = torch.cat(run_on_threads(Mesh(dp=2), share))
    >>> torch.allclose(whole, torch.nn.functional.batch_norm(x, None, None, training=True))
    True
    """
    return cast(
        tuple[Tensor, Tensor, Tensor, Tensor],
        _BatchNorm.apply(x, w_C, b_C, eps, tuple(axes)),
    )


def shared_group_norm(
    x_NCS: Tensor, num_groups: int, w_C: Tensor | None, b_C: Tensor | None, *, eps: float, axes: Sequence[Axis]
) -> Tensor:
    """Computes GroupNorm of pictures whose pixels are sharded over ``axes``, with statistics over all pixels.

    The gradients of ``w_C`` and ``b_C`` are partial sums over the axes.

    Shapes: x_NCS (N, C, this rank's pixels); w_C, b_C (C,); returns like x.
    Traffic: for each axis, where there are samples, forward one all-gather of 2 N G + 1 numbers of each member for G
        groups; backward, where x needs a gradient, one all-reduce of 2 N G numbers.

    >>> from shardwright import Mesh, run_on_threads
    >>> x = torch.arange(24.0).view(2, 4, 3).sin()
    >>> def share(axes):
    ...     return shared_group_norm(x.split([1, 2], 2)[axes["tp"].index], 2, None, None, eps=1e-5, axes=[axes["tp"]])
    >>> whole = torch.cat(run_on_threads(Mesh(tp=2), share), dim=2)
    >>> torch.allclose(whole, torch.nn.functional.group_norm(x, 2))
    True
    """
    if not len(x_NCS):
        return functional.group_norm(x_NCS, num_groups, w_C, b_C, eps)
    x_1GS = x_NCS.reshape(1, len(x_NCS) * num_groups, -1)  # each group of each sample is a channel of its own
    y_NCS = shared_batch_norm(x_1GS, None, None, eps=eps, axes=axes)[0].view(x_NCS.shape)
    if w_C is not None:
        y_NCS = y_NCS * _broadcast(w_C, x_NCS)
    return y_NCS if b_C is None else y_NCS + _broadcast(b_C, x_NCS)


@dataclass
class _SharedForward:
    """The forward of one BatchNorm whose samples are sharded over ``axes``; each strategy adds its own axes."""

    module: Any
    axes: tuple[Axis, ...] = ()

    def __call__(self, input: Tensor) -> Tensor:
        module, buffers = self.module, self.module._buffers
        module._check_input_dim(input)
        wide = torch.promote_types(
            input.dtype, torch.float32
        )  # the dtype of statistics, even if layers compute in bf16
        affine = (module._parameters[name] for name in ("weight", "bias"))
        w_C, b_C = (None if parameter is None else parameter.to(wide) for parameter in affine)
        mean_C, var_C = buffers.get("running_mean"), buffers.get("running_var")
        if not uses_batch(module):
            mean_C, var_C = (None if buffer is None else buffer.to(wide) for buffer in (mean_C, var_C))
            return functional.batch_norm(input, mean_C, var_C, w_C, b_C, False, 0.0, module.eps)
        y, count, batch_mean_C, m2_C = shared_batch_norm(input, w_C, b_C, eps=module.eps, axes=self.axes)
        _check_count(input, count)
        if module.training and module.track_running_stats and mean_C is not None and var_C is not None:
            weight = self._count_batch()
            # as torch's own update, which no backward of an earlier call takes for a change of what it has saved
            with torch.no_grad(), _unsafe_preserve_version_counter((mean_C, var_C)):
                mean_C.lerp_(batch_mean_C.to(mean_C.dtype), weight)
                var_C.lerp_((m2_C / (count - 1)).to(var_C.dtype), weight)
        return y

    def _count_batch(self) -> float:
        """Counts this batch in the module's buffer and returns its weight in the running statistics."""
        tracked: Tensor | None = self.module._buffers.get("num_batches_tracked")
        if tracked is not None:
            tracked.add_(1)
        if self.module.momentum is not None:
            return float(self.module.momentum)
        return 1.0 / float(tracked) if tracked is not None and tracked.device.type != "meta" else 0.0


def _check_count(input: Tensor, count: Tensor) -> None:
    """Raises PlanError if the global batch has only one value for each channel; members have equal counts."""
    if input.numel() <= input.shape[1] and count.device.type != "meta" and float(count) == 1:
        raise PlanError(
            "BatchNorm needs more than one value of each channel",
            given=f"a batch of one sample, {list(input.shape)} on this rank",
            allowed="two samples or more, or channels of more than one pixel",
            fix="use a larger batch, or LayerNorm",
        )


@dataclass
class _SharedNormCode:
    """The forward of a subclass of a BatchNorm: its own code, whose batch norm takes statistics over ``axes``."""

    inner: Forward
    axes: tuple[Axis, ...]

    def __call__(self, *args: Any, **named: Any) -> Any:
        with _BatchNormMode(self.axes):
            return self.inner(*args, **named)


class _BatchNormMode(TorchFunctionMode):
    """Computes each ``functional.batch_norm`` with statistics over ``axes``; shards of channels have their own."""

    def __init__(self, axes: tuple[Axis, ...]) -> None:
        super().__init__()
        self.axes = axes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not functional.batch_norm:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self._normed(*args, **(kwargs or {}))

    def _normed(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        wide = torch.promote_types(input.dtype, torch.float32)
        w_C, b_C = (None if parameter is None else parameter.to(wide) for parameter in (weight, bias))
        part = tagged(input)
        if training:
            y, count, mean_C, m2_C = shared_batch_norm(input, w_C, b_C, eps=eps, axes=self.axes)
            _check_count(input, count)
            if running_mean is not None and running_var is not None:
                with torch.no_grad(), _unsafe_preserve_version_counter((running_mean, running_var)):
                    running_mean.lerp_(mean_C.to(running_mean.dtype), momentum)
                    running_var.lerp_((m2_C / (count - 1)).to(running_var.dtype), momentum)
        else:
            y = functional.batch_norm(input, running_mean, running_var, w_C, b_C, False, 0.0, eps)
        if part is not None:
            assert all(cut is None for dim, cut in enumerate(part.cuts) if dim != 1), "statistics are of whole channels"
            tag(y, part)
        return y


def sharing(module: nn.Module, inner: Forward, axes: Sequence[Axis], *, always: bool = False) -> Forward:
    """Returns a forward for the BatchNorm ``module`` that takes statistics over all ranks of ``axes``.

    ``inner`` is the module's present forward. If it takes statistics over axes already, these are kept; otherwise it is
    returned itself if no axis has several ranks, unless ``always`` is set or the module is an ``nn.SyncBatchNorm``. The
    new forward does not call ``inner``. Most callers use :func:`share_statistics`, which installs the forward too.
    """
    added = inner.axes if isinstance(inner, _SharedForward) else ()
    shared = tuple(axis for axis in axes if axis.size > 1)
    replaces = shared or added or always or isinstance(module, nn.SyncBatchNorm)
    return _SharedForward(module, (*added, *shared)) if replaces else inner


def _sharing_inside(axes: Sequence[Axis], inner: Forward) -> Forward:
    before, own = (inner.axes, inner.inner) if isinstance(inner, _SharedNormCode) else ((), inner)
    return _SharedNormCode(own, (*before, *(axis for axis in axes if axis.size > 1)))


def share_statistics(
    modules: Iterable[nn.Module], axes: Sequence[Axis], *, always: bool = False, by: str = "core"
) -> None:
    """Makes each BatchNorm normalize by statistics over all ranks of ``axes``, besides the axes of earlier calls.

    ``always`` replaces the forward even if all ``axes`` have one member: for a BatchNorm that refuses reads of its
    parameters, or whose weights have a narrower dtype than its statistics. ``nn.SyncBatchNorm`` is always replaced,
    because it would use every process of the run. The code of a subclass runs as it is, except for its call of
    ``functional.batch_norm``. ``by`` is the name of the strategy, for ``run.explain``. The new
    forward raises PlanError if it takes statistics of a global batch with only one value for each channel.

    >>> from shardwright import Mesh, run_on_threads
    >>> def mean(axes):
    ...     norm = nn.BatchNorm1d(1, momentum=1.0)
    ...     share_statistics([norm], [axes["dp"]])
    ...     share_statistics([norm], [axes["tp"]])
    ...     norm(torch.full((2, 1), 2.0 * axes["dp"].index + axes["tp"].index))
    ...     return norm.running_mean.item()
    >>> run_on_threads(Mesh(dp=2, tp=2), mean)
    [1.5, 1.5, 1.5, 1.5]
    """
    shared = [axis.name for axis in axes if axis.size > 1]
    what = f"statistics over {' '.join(shared)}" if shared else "statistics of this rank's samples and channels"
    for module in modules:
        if kind_of(module) not in BATCH_NORMS:
            if shared or always:
                wrap(module, Rung.STATISTICS, what, by=by, around=partial(_sharing_inside, axes))
            continue
        is_shared = isinstance(vars(module).get("forward"), _SharedForward)
        if shared or (not is_shared and (always or isinstance(module, nn.SyncBatchNorm))):
            around = partial(sharing, module, axes=axes, always=always)
            wrap(module, Rung.STATISTICS, what, by=by, around=around, replaces=True)
