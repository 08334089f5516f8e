"""Operand moves: all-gathers of an operand before a matrix product, and reduce-scatters or all-reduces after it.

A tensor is viewed as a matrix of rows (its samples' tokens) and features (its last dim). Gathering rows is one message
without a copy. Gathered features stay in panels, one for each member, so that this is one message without a copy too.
Where tokens are cut instead of samples, the matrix holds all samples of the first token, then of the next: its rows are
then contiguous for each member as well. Used by the grid product, the vocabulary operators and attention.

N rows, K features; n, k this rank's parts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function

from shardwright.comm.autograd import once, partial_to_whole, sum_gradient
from shardwright.comm.axis import Axis
from shardwright.comm.pending import Pending, done
from shardwright.errors import PlanError


class OperandMove(NamedTuple):
    """One collective for an operand along one axis, whose ranks each hold some rows, some features, or all of it.

    ``layout`` says which; "whole" is replicated. ``sizes`` returns the size that each member holds: if rows are cut,
    that of dim ``dim``, which :func:`steps` multiplies by the other dims; if features are cut, the number of features.
    For a replicated operand it returns an empty tuple. ``dim`` is the dim that is cut into rows: 0 for samples, or 1
    for tokens.
    """

    axis: Axis
    layout: Literal["rows", "features", "whole"]
    sizes: Callable[[], tuple[int, ...]] = tuple
    dim: int = 0


class MoveStep(NamedTuple):
    """One collective for an operand of known shape; ``layout`` is that of its :class:`OperandMove`.

    ``sizes`` has the number of matrix rows or features of each member, and is empty for a replicated operand.
    """

    axis: Axis
    layout: str
    sizes: tuple[int, ...]


def steps(moves: Sequence[OperandMove], shape: Sequence[int]) -> tuple[MoveStep, ...]:
    """Returns the collectives ``moves`` for an operand of this shape (samples, ..., features), sized in matrix rows.

    >>> steps([OperandMove(None, "rows", lambda: (2, 1))], (2, 10, 8))[0].sizes
    (20, 10)
    """
    rows_each = prod(_other_dims(shape, rows_dim(moves)))
    return tuple(
        MoveStep(axis, layout, tuple(n * rows_each for n in sizes()) if layout == "rows" else sizes())
        for axis, layout, sizes, _ in moves
    )


def _other_dims(shape: Sequence[int], dim: int) -> list[int]:
    """Returns the sizes of all dims but ``dim`` and the last, the features."""
    return [size for number, size in enumerate(shape[:-1]) if number != dim]


def rows_dim(moves: Sequence[OperandMove]) -> int:
    """Returns the dim that the collectives ``moves`` gather or cut as rows: 0 for samples, 1 for tokens.

    >>> rows_dim([]), rows_dim([OperandMove(None, "whole"), OperandMove(None, "rows", dim=1)])
    (0, 1)
    """
    return max((move.dim for move in moves), default=0)


def num_moved(count: int, taken: Sequence[OperandMove], given: Sequence[OperandMove]) -> int:
    """Returns the size of the dim that is cut into rows, after the all-gathers ``taken`` and then the sums ``given``.

    The dim is samples or tokens (:func:`rows_dim`), and ``count`` is its size on this rank before.
    """
    for _, layout, sizes, _ in taken:
        count = sum(sizes()) if layout == "rows" else count
    for axis, layout, sizes, _ in given:
        count = sizes()[axis.index] if layout == "rows" else count
    return count


def matrix(x: Tensor, dim: int = 0) -> Tensor:
    """Returns ``x`` (..., K) as a contiguous matrix (N, K), whose rows are ordered by ``dim`` first.

    Raises: PlanError: ``x`` is a nested tensor.
    """
    if x.is_nested:
        raise PlanError(
            "layers that ranks share take no nested tensors",
            given="a nested tensor, whose rows differ in size",
            allowed="tensors in which all rows have one size",
            fix="pad the rows and mask what is padded, or write dp in place of tp",
        )
    x = x.transpose(0, dim) if dim else x
    return x.reshape(prod(x.shape[:-1]), x.shape[-1]).contiguous()


def tensor(x_NK: Tensor, shape: Sequence[int], dim: int = 0, count: int | None = None) -> Tensor:
    """Returns a matrix made by :func:`matrix` as a tensor of ``shape`` again, with the matrix's own features.

    If ``count`` is given, it replaces the size of dim ``dim``. The tensor is detached so that torch does not treat it
    as a view: code may write in place into a Function's output.
    """
    if len(shape) == 1:
        return x_NK.view(x_NK.shape[1]).detach()
    x = x_NK.view(shape[dim] if count is None else count, *_other_dims(shape, dim), x_NK.shape[1])
    return (x.transpose(0, dim) if dim else x).detach()


def joined(panels: Sequence[Tensor]) -> Tensor:
    """Returns panels, each the features of one rank, concatenated along the features into one matrix."""
    return panels[0] if len(panels) == 1 else torch.cat(list(panels), dim=1)


def gather(x_nk: Tensor, moves: Sequence[MoveStep]) -> tuple[list[Tensor], int, Pending[Any]]:
    """All-gathers a matrix along the axis of each of ``moves`` in turn; nothing is sent where it is replicated.

    ``moves`` lists rows before features. Returns panels (each rank's features), the index of this rank's own, which can
    be read at once, and the message to wait for before the others are read.

    Raises: PlanError: rows are gathered, and the matrix does not have this rank's number of them.
    """
    panels, own, pending = [x_nk], 0, done(None)
    for axis, layout, sizes in moves:
        if layout == "whole":
            continue
        pending.wait()
        x_nk, own = joined(panels), 0
        if layout == "rows":
            _check_rows(x_nk.shape[0], sizes, axis)
            panels = [axis.all_gather(x_nk, 0, sizes)]
        else:
            panels, pending = axis.gather_parts_async(x_nk, [(x_nk.shape[0], size) for size in sizes])
            own = axis.index
    return panels, own, pending


def _check_rows(num_rows: int, sizes: Sequence[int], axis: Axis) -> None:
    if num_rows != sizes[axis.index]:
        raise PlanError(
            f"a layer whose samples '{axis.name}' cuts does not see them in dim 0",
            given=f"{num_rows} rows, where the samples of this rank have {sizes[axis.index]}",
            allowed="activations (samples, ..., features) before layers that are cut",
            fix="give parallelize(..., example=inputs), by which ranks know where the samples are, if it has none; or "
            "put the samples in dim 0, or name the layers that stay replicated: roles={'name': 'copied'}",
        )


def scatter(panels: Sequence[Tensor], moves: Sequence[MoveStep]) -> Pending[Tensor]:
    """Sums partial results along the axis of each of ``moves``: reduce-scatter where cut, all-reduce where replicated.

    It is the adjoint of :func:`gather`. ``panels`` is one matrix or, if the first move cuts features, may be the
    members' parts of it; an all-reduce overwrites the matrix. Returns the :class:`Pending` of the last message, whose
    ``wait`` gives this rank's part of the sum.
    """
    assert len(panels) == 1 or moves[0].layout == "features", "panels are the members' parts of the features"
    pending: Pending[Tensor] = done(panels[0])
    parts: Sequence[Tensor] = panels
    for axis, layout, sizes in moves:
        y = pending.wait()
        if layout == "whole":
            pending = axis.all_reduce_async(y)
        elif layout == "rows":
            pending = axis.reduce_scatter_async(y, 0, sizes)
        else:
            if parts is not panels or len(panels) == 1:  # only the first move may use the given panels
                parts = y.split(list(sizes), dim=1)
            pending = axis.reduce_scatter_parts_async(parts)
        parts = ()
    return pending


class _Move(Function):
    """The all-gathers ``taken`` and then the sums ``given`` of an operand; the backward is the adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taken: Sequence[OperandMove], given: Sequence[OperandMove]) -> Tensor:
        ctx.taken, ctx.given = steps(taken, x.shape), steps(given, x.shape)
        ctx.shape, ctx.dim = x.shape, rows_dim((*taken, *given))
        panels, _, pending = gather(matrix(x, ctx.dim), ctx.taken)
        pending.wait()
        y_nk = scatter([joined(panels)], ctx.given).wait()
        return tensor(y_nk, x.shape, ctx.dim, num_moved(x.shape[ctx.dim], taken, given))

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        panels, _, pending = gather(matrix(dy, ctx.dim), tuple(reversed(ctx.given)))
        pending.wait()
        dx_nk = scatter([joined(panels)], tuple(reversed(ctx.taken))).wait()
        return tensor(dx_nk, ctx.shape, ctx.dim), None, None


def take(x: Tensor, moves: Sequence[OperandMove]) -> Tensor:
    """All-gathers an operand along the axis of each of ``moves``, for ranks that each compute their own part from it.

    Only matrix products may follow: the gradient that they return is overwritten in place.

    Shapes: x (samples, ..., features); returns it with the rows (samples or tokens) and features of all members.
    Traffic: forward, one all-gather for each move of rows or features; backward, a reduce-scatter for each of these
        and an all-reduce for each move of a whole operand.
    """
    cuts = tuple(move for move in moves if move.layout != "whole")
    for move in moves:
        if move.layout == "whole":
            x = sum_gradient(x, move.axis, overwrite=True)
    return cast(Tensor, _Move.apply(x, cuts, ())) if cuts else x


def give(y: Tensor, moves: Sequence[OperandMove]) -> Tensor:
    """Sums partial results along the axis of each of ``moves``: reduce-scatter where cut, all-reduce where replicated.

    Use it on partial sums, such as the products of a sharded contraction. Returns this rank's part of the sum; ``y``
    may be overwritten.

    Traffic: forward, one reduce-scatter for each move of rows or features, an all-reduce for each whole one;
        backward, an all-gather for each move of rows or features.
    """
    if any(move.layout != "whole" for move in moves):
        return cast(Tensor, _Move.apply(y, (), moves))
    for move in moves:
        y = partial_to_whole(y, move.axis)
    return y
