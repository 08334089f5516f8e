"""Changes of how a tensor lies along one axis, each with the change that its gradient makes.

A tensor lies *whole* (equal on every member), *partial* (the whole is the sum) or *cut* along a dim. The
gradient of a whole tensor is whole where all members go on to do the same work with it, and partial where each
does its own share.

| function | forward | backward |
|---|---|---|
| :func:`partial_to_whole` | all-reduce | nothing |
| :func:`sum_gradient` | nothing | all-reduce |
| :func:`whole_to_cut` | slice | all-gather |
| :func:`cut_to_whole` | all-gather | slice |
| :func:`cut_to_shared` | all-gather | reduce-scatter |
| :func:`partial_to_cut` | reduce-scatter | all-gather |
| :func:`cut_to_cut` | all-to-all | all-to-all |

Each message is the size that the name says: the whole tensor for all-reduce, all-gather and reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function

from shardwright.comm.axis import Axis
from shardwright.errors import PlanError

P = ParamSpec("P")
R = TypeVar("R")


def once(backward: Callable[P, R]) -> Callable[P, R]:
    """A backward that sends or keeps what autograd does not see, and so cannot be differentiated: it says so."""

    @wraps(backward)
    def checked(*args: P.args, **named: P.kwargs) -> R:
        if torch.is_grad_enabled():  # in a backward: create_graph
            raise PlanError(
                "a gradient's own gradient does not go through layers that ranks share",
                given="a backward with create_graph=True",
                allowed="gradients of the first order",
                fix="leave out create_graph, or leave whole what it goes through: dp4, or roles={'name': 'copied'}",
            )
        return backward(*args, **named)

    return checked


def _run(function: type[Function], *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))


class _PartialToWhole(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.mark_dirty(x)
        return axis.all_reduce(x)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _SumGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, overwrite: bool) -> Tensor:
        ctx.axis, ctx.overwrite = axis, overwrite
        return x.view_as(x)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        if not ctx.overwrite:
            dy = dy.clone()  # autograd may hand the same tensor to others
        axis: Axis = ctx.axis
        return axis.all_reduce(dy), None, None


class _WholeToCut(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return x.narrow(dim, sum(sizes[: axis.index]), sizes[axis.index]).clone()

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_gather(dy, ctx.dim, ctx.sizes), None, None, None


class _CutToWhole(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...], partial: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes, ctx.partial = axis, dim, sizes, partial
        return axis.all_gather(x, dim, sizes).detach()  # no view: the code that follows may write into it

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.partial:
            return ctx.axis.reduce_scatter(dy, ctx.dim, ctx.sizes), None, None, None, None
        return dy.split(list(ctx.sizes), ctx.dim)[ctx.axis.index], None, None, None, None


class _PartialToCut(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return axis.reduce_scatter(x, dim, sizes).detach()

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.all_gather(dy, ctx.dim, ctx.sizes), None, None, None


class _CutToCut(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, give: tuple[int, ...], take: tuple[int, ...], a: int, b: int
    ) -> Tensor:
        ctx.axis, ctx.give, ctx.take, ctx.a, ctx.b = axis, give, take, a, b
        return _exchange(x, axis, give, take, a, b)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return _exchange(dy, ctx.axis, ctx.take, ctx.give, ctx.b, ctx.a), None, None, None, None, None


def _exchange(x: Tensor, axis: Axis, give: tuple[int, ...], take: tuple[int, ...], a: int, b: int) -> Tensor:
    parts = x.split(list(give), b)
    shapes = []
    for size in take:
        shape = list(parts[axis.index].shape)
        shape[a] = size
        shapes.append(shape)
    return torch.cat(axis.all_to_all(parts, shapes), dim=a)


def partial_to_whole(x: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis of each member's term, on every member. Overwrites ``x``.

    Traffic: forward, one all-reduce of ``x``; backward, none.

    >>> from shardwright.comm.launch import run_on_threads
    >>> from shardwright.mesh import Mesh
    >>> run_on_threads(Mesh(tp=2), lambda axes: partial_to_whole(torch.ones(1) * 3, axes["tp"]).item())
    [6.0, 6.0]
    """
    return _run(_PartialToWhole, x, axis) if axis.size > 1 else x


def sum_gradient(x: Tensor, axis: Axis, *, overwrite: bool = False) -> Tensor:
    """``x`` itself, for members that each go on with their own share of the work: its gradient is their sum.

    ``overwrite`` sums in place: for an ``x`` that goes into matrix products alone, whose gradients are nobody
    else's.

    Traffic: forward, none; backward, one all-reduce of ``x``.
    """
    return _run(_SumGradient, x, axis, overwrite) if axis.size > 1 else x


def whole_to_cut(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """This member's part of ``dim``. Traffic: forward, none; backward, one all-gather of ``x``."""
    return _run(_WholeToCut, x, axis, dim, tuple(sizes)) if axis.size > 1 else x


def cut_to_whole(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts joined along ``dim``, for members that all go on with the same work.

    Traffic: forward, one all-gather of the whole; backward, none.
    """
    return _run(_CutToWhole, x, axis, dim, tuple(sizes), False) if axis.size > 1 else x


def cut_to_shared(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """The parts joined along ``dim``, for members that each go on with their own share of the work.

    Traffic: forward, one all-gather of the whole; backward, one reduce-scatter of it.
    """
    return _run(_CutToWhole, x, axis, dim, tuple(sizes), True) if axis.size > 1 else x


def partial_to_cut(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """The sum of the members' terms, each member keeping its part of ``dim``.

    Traffic: forward, one reduce-scatter of the whole; backward, one all-gather of it.
    """
    return _run(_PartialToCut, x, axis, dim, tuple(sizes)) if axis.size > 1 else x


def cut_to_cut(
    x: Tensor, axis: Axis, *, from_dim: int, from_sizes: Sequence[int], to_dim: int, to_sizes: Sequence[int]
) -> Tensor:
    """The same whole, cut along ``to_dim`` instead of ``from_dim``.

    Traffic: forward and backward, one all-to-all of this member's part.
    """
    if axis.size == 1:
        return x
    return _run(_CutToCut, x, axis, tuple(to_sizes), tuple(from_sizes), from_dim, to_dim)
