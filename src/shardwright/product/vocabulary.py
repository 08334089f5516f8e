"""Embedding and cross entropy over a vocabulary that is cut along one axis.

B batch, T tokens, H width, V vocabulary; v this rank's part of V
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardwright.comm import Axis, partial_to_whole
from shardwright.models.losses import check_same_shape


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


def cut_embedding(tokens_BT: Tensor, w_vH: Tensor, start: int, vocabulary: int, tp: Axis) -> Tensor:
    """Looks tokens up in a table whose rows are cut over ``tp``; this rank holds them from ``start`` on.

    A rank that does not hold a token's row gives zeros, so the sum over ``tp`` is the row.

    Shapes: tokens_BT (...); w_vH (V / tp, H); returns (..., H), equal on every rank of ``tp``.
    Traffic: forward, one all-reduce of the output over ``tp``; backward, none.
    Raises: IndexError: a token outside the whole table.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    check_inside("token", tokens_BT, vocabulary)
    local = tokens_BT - start
    elsewhere = (local < 0) | (local >= w_vH.shape[0])
    rows_BTH = functional.embedding(local.masked_fill(elsewhere, 0), w_vH)
    return partial_to_whole(rows_BTH.masked_fill(elsewhere.unsqueeze(-1), 0.0), tp)


class _CutCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        targets_N: Tensor,
        start: int,
        vocabulary: int,
        smoothing: float,
        tp: Axis,
    ) -> Tensor:
        local = targets_N - start
        here = (local >= 0) & (local < logits_Nv.shape[1])
        local = local.masked_fill(~here, 0)
        top_N = logits_Nv.amax(dim=1)
        softmax_Nv = (logits_Nv - top_N.unsqueeze(1)).exp_()
        own_N = logits_Nv.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
        numbers = [top_N, softmax_Nv.sum(dim=1), own_N] + ([logits_Nv.sum(dim=1)] if smoothing else [])
        all_pKN = tp.all_gather(torch.stack(numbers).unsqueeze(0))
        whole_top_N = all_pKN[:, 0].amax(dim=0)
        whole_sum_N = (all_pKN[:, 1] * (all_pKN[:, 0] - whole_top_N).exp()).sum(dim=0)
        loss_N = whole_sum_N.log() + whole_top_N - (1 - smoothing) * all_pKN[:, 2].sum(dim=0)
        if smoothing:
            loss_N -= smoothing / vocabulary * all_pKN[:, 3].sum(dim=0)
        softmax_Nv.mul_(((top_N - whole_top_N).exp() / whole_sum_N).unsqueeze(1))
        ctx.save_for_backward(softmax_Nv, local, here)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return loss_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        softmax_Nv, local, here = ctx.saved_tensors
        gradient_Nv = softmax_Nv - ctx.smoothing / ctx.vocabulary if ctx.smoothing else softmax_Nv.clone()
        hit = here.to(softmax_Nv.dtype) * (ctx.smoothing - 1)
        gradient_Nv.scatter_add_(1, local.unsqueeze(1), hit.unsqueeze(1))
        return gradient_Nv.mul_(grad_N.unsqueeze(1)), None, None, None, None, None


def cut_cross_entropy(
    logits_v: Tensor,
    targets: Tensor,
    start: int,
    vocabulary: int,
    tp: Axis,
    *,
    ignore_index: int,
    label_smoothing: float,
) -> tuple[Tensor, Tensor]:
    """The sum and count of ``CrossEntropy`` on logits whose classes are cut over ``tp``, from ``start`` on here.

    Each rank tells its largest logit, its sum of exponentials, the target's logit where it holds it, and with
    label smoothing the sum of its logits; from these every rank has the whole softmax.

    Shapes: logits_v (..., V / tp); targets (...); returns a 0-d sum and a 0-d int64 count.
    Traffic: forward, one all-gather over ``tp`` of three numbers for each token, four with label smoothing;
        backward, none.
    """
    check_same_shape("logits but for their last dim", logits_v.shape[:-1], "targets", targets.shape)
    flat = targets.reshape(-1)
    counted = flat != ignore_index
    check_inside("target", flat.masked_fill(~counted, 0), vocabulary)
    loss_N = cast(
        Tensor,
        _CutCrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits_v.reshape(-1, logits_v.shape[-1]),
            flat.masked_fill(~counted, -1),
            start,
            vocabulary,
            label_smoothing,
            tp,
        ),
    )
    return loss_N.masked_fill(~counted, 0.0).sum(), counted.sum()
