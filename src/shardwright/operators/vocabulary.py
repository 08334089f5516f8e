"""Vocabulary-parallel embedding and cross entropy: the vocabulary is sharded along one axis or several.

The logits are never gathered: the members exchange three or four numbers for each token, as in Megatron.

N tokens, H width, V vocabulary; v this rank's shard of V; p numbers for each token, A members of an axis
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardwright.comm.autograd import once
from shardwright.comm.axis import Axis
from shardwright.models.losses import check_same_shape
from shardwright.operators.operand_moves import MoveStep, OperandMove, matrix, rows_dim, steps
from shardwright.operators.operand_moves import give as summed


def check_inside(what: str, values: Tensor, size: int) -> None:
    """Raises IndexError if a token or class in ``values`` is not from 0 to ``size`` - 1, as torch does on one device.

    On an accelerator reading the values would synchronize, so there the check is an assertion on the device.

    >>> check_inside("token", torch.tensor([3, 9]), 8)
    Traceback (most recent call last):
    IndexError: token 9 is outside 0 to 7
    """
    if not values.numel():
        return
    if values.device.type != "cpu":
        torch._assert_async(((values >= 0) & (values < size)).all())
        return
    low, high = (int(value) for value in values.aminmax())
    if low < 0 or high >= size:
        raise IndexError(f"{what} {low if low < 0 else high} is outside 0 to {size - 1}")


def cut_embedding(
    tokens: Tensor,
    w_vh: Tensor,
    start: int,
    vocabulary: int,
    take: Sequence[OperandMove],
    give: Sequence[OperandMove],
    padding: int | None = None,
) -> Tensor:
    """Looks up tokens in an embedding table whose rows are sharded; this rank's rows begin at token ``start``.

    The unsharded table has ``vocabulary`` rows. A rank that does not hold a token's row contributes zeros, so the sum
    over the ranks that share the table is that row. Looking up the token ``padding`` gives its row no gradient.

    Shapes: tokens (samples, ...); w_vh (V / cut, H / cut); returns (samples, ..., H / cut).
    Traffic: ``take`` of the tokens, forward; ``give`` of the looked-up rows.
    Raises: IndexError: a token outside the unsharded table (on an accelerator, an assertion on the device).
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    check_inside("token", tokens, vocabulary)
    for axis, layout, sizes, dim in take:
        if layout == "rows":
            tokens = axis.all_gather(tokens, dim, sizes())
    local = tokens - start
    elsewhere = (local < 0) | (local >= w_vh.shape[0])
    is_padded = padding is not None and start <= padding < start + w_vh.shape[0]
    local_padding = padding - start if padding is not None and is_padded else None
    rows = functional.embedding(local.masked_fill(elsewhere, 0), w_vh, local_padding)
    return summed(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), give)


class _CutCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        targets_N: Tensor,
        start: int,
        vocabulary: int,
        smoothing: float,
        axes: tuple[Axis, ...],
        take: tuple[MoveStep, ...],
    ) -> Tensor:
        for axis, _, sizes in take:
            targets_N = axis.all_gather(targets_N, 0, sizes)
        local = targets_N - start
        here = (local >= 0) & (local < logits_Nv.shape[1])
        local = local.masked_fill(~here, 0)
        # Each member's numbers for a token: largest logit, sum of exponentials relative to it, then sums that just
        # add up: the target's logit (zero where another member holds it) and, for label smoothing, all logits.
        top_N = logits_Nv.amax(dim=1)
        softmax_Nv = (logits_Nv - top_N.unsqueeze(1)).exp_()
        target_N = logits_Nv.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
        sums = [target_N, logits_Nv.sum(dim=1)] if smoothing else [target_N]
        numbers_pN = torch.stack([top_N, softmax_Nv.sum(dim=1), *sums])
        for axis in axes:
            numbers_pN = _combine(axis.all_gather(numbers_pN.unsqueeze(0)))
        loss_N = numbers_pN[1].log() + numbers_pN[0] - (1 - smoothing) * numbers_pN[2]
        if smoothing:
            loss_N -= smoothing / vocabulary * numbers_pN[3]
        softmax_Nv.mul_(((top_N - numbers_pN[0]).exp() / numbers_pN[1]).unsqueeze(1))
        ctx.save_for_backward(softmax_Nv, local, here)
        ctx.smoothing, ctx.vocabulary, ctx.take = smoothing, vocabulary, take
        for axis, _, sizes in reversed(take):
            loss_N = loss_N.split(list(sizes))[axis.index]
        return loss_N.contiguous()

    @staticmethod
    @once
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        softmax_Nv, local, here = ctx.saved_tensors
        for axis, _, sizes in ctx.take:
            grad_N = axis.all_gather(grad_N, 0, sizes)
        gradient_Nv = softmax_Nv - ctx.smoothing / ctx.vocabulary if ctx.smoothing else softmax_Nv.clone()
        hit = here.to(softmax_Nv.dtype) * (ctx.smoothing - 1)
        gradient_Nv.scatter_add_(1, local.unsqueeze(1), hit.unsqueeze(1))
        return gradient_Nv.mul_(grad_N.unsqueeze(1)), None, None, None, None, None, None


def _combine(all_ApN: Tensor) -> Tensor:
    """Returns each token's numbers combined over all members: largest logit, sum of exponentials, and plain sums."""
    top_N = all_ApN[:, 0].amax(dim=0)
    exponentials_N = (all_ApN[:, 1] * (all_ApN[:, 0] - top_N).exp()).sum(dim=0)
    return torch.cat((top_N.unsqueeze(0), exponentials_N.unsqueeze(0), all_ApN[:, 2:].sum(dim=0)))


def cut_cross_entropy(
    logits_v: Tensor,
    targets: Tensor,
    start: int,
    vocabulary: int,
    axes: Sequence[Axis],
    *,
    ignore_index: int,
    label_smoothing: float,
    take: Sequence[OperandMove] = (),
) -> tuple[Tensor, Tensor]:
    """Computes the cross entropy of each token, from logits whose classes are sharded over ``axes``.

    A token whose target is ``ignore_index`` has a loss of 0 and does not count. This rank's classes, of ``vocabulary``
    in all, begin at ``start``. The ranks exchange their largest logit, their sum of exponentials, the target's logit
    and, with label smoothing, the sum of their logits; from these each computes its shard of the softmax. If the logits
    are of more samples than this rank's own, ``take`` gathers the targets too; the losses are of this rank's own
    samples.

    Shapes: logits_v (samples, ..., V / cut); targets (own samples, ...); returns (tokens) and a 0-d int64 count.
    Traffic: forward, one all-gather over each axis of three numbers for each token, four with label smoothing; for
        each gather of ``take``, one of the targets forward and one of a number for each token backward.
    Raises: IndexError: a target outside of the classes (on an accelerator, an assertion on the device). PlanError:
        without ``take``, targets of another shape than the logits without their last dim.
    """
    if not take:
        check_same_shape("logits but for their last dim", logits_v.shape[:-1], "targets", targets.shape)
    dim = rows_dim(take)
    flat = targets.transpose(0, dim).reshape(-1) if dim else targets.reshape(-1)
    counted = flat != ignore_index
    check_inside("target", flat.masked_fill(~counted, 0), vocabulary)
    logits_Nv, targets_N = matrix(logits_v, dim), flat.masked_fill(~counted, -1)
    moves = steps(take, logits_v.shape)
    loss_N: Tensor = _CutCrossEntropy.apply(
        logits_Nv, targets_N, start, vocabulary, label_smoothing, tuple(axes), moves
    )
    return loss_N.masked_fill(~counted, 0.0), counted.sum()
