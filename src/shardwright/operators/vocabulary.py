"""Embedding and cross entropy over a vocabulary that is cut along one axis or several.

B batch, T tokens, H width, V vocabulary; v this rank's part of V
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

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
    """Raises IndexError for a value that is no index of ``size`` things, as one device does.

    On an accelerator the check would wait for it, so there it is left to the device's own assertion.

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
    """Looks tokens up in a table whose rows are cut; this rank holds some from ``start`` on.

    A rank that does not hold a token's row gives zeros, so the sum over those who share the table is the row. The row
    of the token ``padding`` learns nothing from being looked up.

    Shapes: tokens (samples, ...); w_vh (V / cut, H / cut); returns (samples, ..., H / cut).
    Traffic: ``take`` of the tokens, forward; ``give`` of the rows found.
    Raises: IndexError: a token outside the whole table.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    check_inside("token", tokens, vocabulary)
    tokens = gathered_rows(tokens, take)
    local = tokens - start
    elsewhere = (local < 0) | (local >= w_vh.shape[0])
    here = padding is not None and start <= padding < start + w_vh.shape[0]
    unlearned = padding - start if padding is not None and here else None
    rows = functional.embedding(local.masked_fill(elsewhere, 0), w_vh, unlearned)
    return summed(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), give)


def gathered_rows(values: Tensor, take: Sequence[OperandMove]) -> Tensor:
    """Numbers for each token, of all members of each move: nothing flows back through them."""
    for axis, lies, sizes, dim in take:
        if lies == "rows":
            values = axis.all_gather(values, dim, sizes())
    return values


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
        top_N = logits_Nv.amax(dim=1)
        softmax_Nv = (logits_Nv - top_N.unsqueeze(1)).exp_()
        own_N = logits_Nv.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
        others = [own_N, logits_Nv.sum(dim=1)] if smoothing else [own_N]
        numbers_pN = torch.stack([top_N, softmax_Nv.sum(dim=1), *others])
        for axis in axes:
            numbers_pN = _combined(axis.all_gather(numbers_pN.unsqueeze(0)))
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


def _combined(all_ApN: Tensor) -> Tensor:
    """What the members of an axis know of each token, as one: largest logit, sum of exponentials, plain sums."""
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
    """The sum and count of ``CrossEntropy`` on logits whose classes are cut over ``axes``, from ``start`` on here.

    Each rank tells its largest logit, its sum of exponentials, the target's logit where it holds it, and with
    label smoothing the sum of its logits; from these every rank has the whole softmax. Where the logits are those of
    more samples than this rank's own, ``take`` says whose; the sum is of this rank's own.

    Shapes: logits_v (samples, ..., V / cut); targets (own samples, ...); returns a 0-d sum and a 0-d int64 count.
    Traffic: forward, one all-gather over each axis of three numbers for each token, four with label smoothing; for
        each move of ``take``, one of the targets forward and one of a number for each token backward.
    """
    if not take:
        check_same_shape("logits but for their last dim", logits_v.shape[:-1], "targets", targets.shape)
    dim = rows_dim(take)
    flat = targets.transpose(0, dim).reshape(-1) if dim else targets.reshape(-1)
    counted = flat != ignore_index
    check_inside("target", flat.masked_fill(~counted, 0), vocabulary)
    loss_N = cast(
        Tensor,
        _CutCrossEntropy.apply(  # type: ignore[no-untyped-call]
            matrix(logits_v, dim),
            flat.masked_fill(~counted, -1),
            start,
            vocabulary,
            label_smoothing,
            tuple(axes),
            steps(take, logits_v.shape),
        ),
    )
    return loss_N.masked_fill(~counted, 0.0).sum(), counted.sum()
