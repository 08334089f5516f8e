"""Linear layers whose weight is cut along one axis.

B batch, T tokens, H width, F feed-forward width; f this rank's part of F
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shardwright.comm import Axis, partial_to_whole, sum_gradient
from shardwright.errors import PlanError, explain


class _RowLinear(Function):
    """One member's term carries the bias, so that no pass over the output adds it; its gradient is everyone's."""

    @staticmethod
    def forward(ctx: Any, x_BTf: Tensor, w_Hf: Tensor, bias_H: Tensor, tp: Axis) -> Tensor:
        ctx.save_for_backward(x_BTf, w_Hf)
        return tp.all_reduce(functional.linear(x_BTf, w_Hf, bias_H if tp.index == 0 else None))

    @staticmethod
    def backward(ctx: Any, dy_BTH: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x_BTf, w_Hf = ctx.saved_tensors
        dy_NH = dy_BTH.reshape(-1, dy_BTH.shape[-1])
        needs_x, needs_w, needs_bias, _ = ctx.needs_input_grad
        dx = (dy_NH @ w_Hf).view(x_BTf.shape) if needs_x else None
        dw = dy_NH.T @ x_BTf.reshape(-1, x_BTf.shape[-1]) if needs_w else None
        return dx, dw, dy_NH.sum(0) if needs_bias else None, None


def row_linear(x_BTf: Tensor, w_Hf: Tensor, bias_H: Tensor | None, tp: Axis) -> Tensor:
    """Multiplies by a weight whose input features are cut over ``tp``.

    Every rank holds one slice of the contraction, so its product is one term of a sum.

    Shapes: x_BTf (..., F / tp); w_Hf (H, F / tp), the order of ``nn.Linear.weight``; bias_H (H,);
        returns (..., H), equal on every rank of ``tp``.
    Traffic: forward, one all-reduce of the output over ``tp``; backward, none.
    Raises: PlanError: the last dims of ``x_BTf`` and ``w_Hf`` differ.
    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3.

    >>> import torch
    >>> from shardwright import Mesh, run_on_threads
    >>> ones = torch.ones(1, 1, 3)
    >>> run_on_threads(Mesh(tp=2), lambda axes: row_linear(ones, ones[0], None, axes["tp"]).item())
    [6.0, 6.0]
    """
    if x_BTf.shape[-1] != w_Hf.shape[-1]:
        raise PlanError(
            explain(
                "the input and the weight have different numbers of features",
                given=f"input {tuple(x_BTf.shape)}, weight {tuple(w_Hf.shape)}",
                allowed="equal last dims",
                fix="cut both over the same axis by the same ranges",
            )
        )
    if bias_H is None:
        return partial_to_whole(functional.linear(x_BTf, w_Hf), tp)
    return cast(Tensor, _RowLinear.apply(x_BTf, w_Hf, bias_H, tp))  # type: ignore[no-untyped-call]


def enter(module: nn.Module, tp: Axis) -> None:
    """From here on each rank computes its own features: the gradient of what ``module`` takes in is their sum.

    Traffic: backward, one all-reduce of the input, however many cut layers share it.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (sum_gradient(args[0], tp, overwrite=True), *args[1:]), named
        name, x = next(iter(named.items()))
        return args, {**named, name: sum_gradient(x, tp, overwrite=True)}

    module.register_forward_pre_hook(hook, with_kwargs=True)
