"""Autograd functions that change how a tensor is sharded along one axis: Megatron's ``f`` and ``g``, and relatives.

A tensor is *whole* (equal on every rank of the axis), *partial* (the whole is the sum over the ranks) or *cut* along a
dim. The gradient of a whole tensor is whole if all ranks then do the same work with the tensor, and partial if each
does a share of the work.

| function | forward | backward |
|---|---|---|
| :func:`partial_to_whole` | all-reduce | nothing |
| :func:`sum_gradient` | nothing | all-reduce |
| :func:`whole_to_cut` | slice | all-gather |
| :func:`cut_to_whole` | all-gather | slice |
| :func:`cut_to_shared` | all-gather | reduce-scatter |
| :func:`cut_to_gathered` | nothing | slice |

The payload of each message is the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import Function

from shardwright.comm.axis import Axis
from shardwright.errors import PlanError

P = ParamSpec("P")
R = TypeVar("R")


def once(backward: Callable[P, R]) -> Callable[P, R]:
    """Like torch's ``once_differentiable``, for a backward that communicates: PlanError under ``create_graph=True``.

    The collectives cannot be differentiated twice. In code that ``torch.compile`` traces, nothing is checked.
    """

    @wraps(backward)
    def checked(*args: P.args, **named: P.kwargs) -> R:
        # Gradients are enabled in a backward only under create_graph. A compiler traces with gradients enabled too, but
        # refuses second derivatives itself.
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
            raise PlanError(
                "a gradient of a gradient does not go through layers that ranks share",
                given="a backward with create_graph=True",
                allowed="gradients of the first order",
                fix="leave out create_graph, or do not shard the layers: write dp in place of tp, or "
                "roles={'LAYER': 'copied'}",
            )
        return backward(*args, **named)

    return checked


def no_exchange_inside_transform(layer: str) -> PlanError:
    """Returns the error for a collective inside of a transform such as ``torch.vmap``, which wraps the tensors."""
    return PlanError(
        "ranks cannot exchange tensors inside of a transform",
        given=f"{layer}, called in a function that torch.vmap or torch.func transforms",
        allowed="in such a function layers that each rank computes whole",
        fix="call the layer outside of the transform, or do not shard it: write dp in place of tp, or "
        "roles={'LAYER': 'copied'}",
    )


def outside_transforms() -> AbstractContextManager[Any]:
    """Returns a context that suspends the transforms of ``torch.func``, such as ``vmap``, in which the caller runs.

    Operators then run on plain tensors, and results are plain. Tensors that a transform has wrapped, which are those
    made of the transformed function's arguments, cannot be used in it.
    """
    is_inside = torch._C._functorch.peek_interpreter_stack() is not None
    return temporarily_clear_interpreter_stack() if is_inside else nullcontext()


def refuses_hooks(error: RuntimeError) -> bool:
    """Returns whether torch raised an error for a ``torch.func`` gradient beside active hooks on saved tensors."""
    return "support saved tensor hooks" in str(error)


def _run(function: type[Function], *args: Any) -> Tensor:
    """Runs an autograd function of this module; transforms such as ``torch.vmap`` are suspended meanwhile.

    Raises: PlanError: the transform has wrapped the tensor, so that ranks cannot exchange it.
    """
    if torch.compiler.is_dynamo_compiling() or torch._C._functorch.peek_interpreter_stack() is None:
        return cast(Tensor, function.apply(*args))
    if torch._C._functorch.is_functorch_wrapped_tensor(args[0]):
        raise no_exchange_inside_transform("a layer that ranks share")
    with temporarily_clear_interpreter_stack():
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
            dy = dy.clone()  # autograd may pass the same tensor to other backwards
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


class _CutToGathered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Tensor, axis: Axis, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.index, ctx.dim, ctx.sizes = axis.index, dim, sizes
        return whole.detach()

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        return dy.split(list(ctx.sizes), ctx.dim)[ctx.index], None, None, None, None


def partial_to_whole(x: Tensor, axis: Axis) -> Tensor:
    """All-reduces the partial sums ``x`` in place, and returns the sum (Megatron's ``g``).

    The backward passes the gradient on unchanged.

    Traffic: forward, one all-reduce of ``x``; backward, none.

    >>> from shardwright.comm.launch import run_on_threads
    >>> from shardwright.mesh import Mesh
    >>> run_on_threads(Mesh(tp=2), lambda axes: partial_to_whole(torch.ones(1) * 3, axes["tp"]).item())
    [6.0, 6.0]
    """
    return _run(_PartialToWhole, x, axis) if axis.size > 1 else x


def sum_gradient(x: Tensor, axis: Axis, *, overwrite: bool = False) -> Tensor:
    """Returns ``x`` unchanged and all-reduces its gradient in the backward (Megatron's ``f``).

    Use it on a replicated input of column-parallel layers. With ``overwrite`` the gradient is summed in place, not in a
    copy. That is safe only if nothing but matrix products uses the result: then nothing else reads the gradient.

    Traffic: forward, none; backward, one all-reduce of a gradient of the size of ``x``.
    """
    return _run(_SumGradient, x, axis, overwrite) if axis.size > 1 else x


def whole_to_cut(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Returns a copy of this rank's slice of a replicated ``x`` along ``dim``; ``sizes`` are the lengths of all slices.

    The backward joins the gradients of the ranks' slices. On an axis of one rank, ``x`` itself is returned.

    Traffic: forward, none; backward, one all-gather of a gradient of the size of ``x``.
    """
    return _run(_WholeToCut, x, axis, dim, tuple(sizes)) if axis.size > 1 else x


def cut_to_whole(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Returns the whole tensor, all-gathered from the ranks' slices ``x``, for ranks that all do the same work with it.

    The gradient of the whole is then equal on all ranks, and the backward returns this rank's slice of it. For ranks
    that each do a share of the work, use :func:`cut_to_shared`. ``sizes`` are the lengths of the slices along ``dim``,
    in the order of the ranks.

    Traffic: forward, one all-gather of the whole; backward, none.
    Raises: CommunicationError: as :meth:`Axis.all_gather`, for ``sizes`` that do not fit.
    """
    return _run(_CutToWhole, x, axis, dim, tuple(sizes), False) if axis.size > 1 else x


def cut_to_shared(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Returns the whole tensor, all-gathered from the ranks' slices ``x``, for ranks that each do a share of the work.

    An example is the input of a column-parallel layer under sequence parallelism. The gradient of the whole is then a
    partial sum on each rank, and the backward reduce-scatters it. ``sizes`` are the lengths of the slices along
    ``dim``, in the order of the ranks.

    Traffic: forward, one all-gather of the whole; backward, one reduce-scatter of a gradient of its size.
    Raises: CommunicationError: as :meth:`Axis.all_gather`, for ``sizes`` that do not fit.
    """
    return _run(_CutToWhole, x, axis, dim, tuple(sizes), True) if axis.size > 1 else x


def cut_to_gathered(x: Tensor, whole: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
    """Returns ``whole`` so that its gradient reaches ``x``, this rank's slice of it, and without another all-gather.

    Use it for a tensor that :func:`cut_to_shared` has all-gathered already, where every rank does the same work with
    it: each rank's slice of the gradient is then complete.

    Traffic: none.
    """
    return _run(_CutToGathered, x, whole, axis, dim, tuple(sizes)) if axis.size > 1 else x
