"""How an operand moves along an axis before or after a product: gathered, or summed and cut.

A tensor is seen as a matrix of rows (its samples' tokens) and features (its last dim). Gathering rows is one message
without a copy; features stay in panels, one for each member, so that gathering them is one too. Where sequences are cut
and not samples, the rows of the matrix are all samples of the first token, then of the next, so that it is one as well.

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
from shardwright.comm.axis import Axis, Pending, done
from shardwright.errors import PlanError


class OperandMove(NamedTuple):
    """An operand and one axis: its rows or its features lie cut along it, or it lies whole on every member.

    ``sizes`` gives what each member holds: samples where rows are cut (tokens are counted when it runs), features
    where these are, nothing of a whole operand. ``dim`` is where rows are cut: 0, or 1 for the tokens of a sequence.
    """

    axis: Axis
    lies: Literal["rows", "features", "whole"]
    sizes: Callable[[], tuple[int, ...]] = tuple
    dim: int = 0


class MoveStep(NamedTuple):
    """A move with the sizes of one call."""

    axis: Axis
    lies: str
    sizes: tuple[int, ...]


def steps(moves: Sequence[OperandMove], shape: Sequence[int]) -> tuple[MoveStep, ...]:
    """The moves of an operand of this shape (samples, ..., features): sizes of rows count all that a row's place holds.

    >>> from shardwright import Mesh, run_on_threads
    >>> def sizes(axes):
    ...     return steps([OperandMove(axes["tp"], "rows", lambda: (2, 1))], (2, 10, 8))[0].sizes
    >>> run_on_threads(Mesh(tp=2), sizes)
    [(20, 10), (20, 10)]
    """
    each = prod(_others(shape, rows_dim(moves)))
    return tuple(
        MoveStep(axis, lies, tuple(n * each for n in sizes()) if lies == "rows" else sizes())
        for axis, lies, sizes, _ in moves
    )


def _others(shape: Sequence[int], dim: int) -> list[int]:
    """The dims beside that of the rows and the features."""
    return [size for number, size in enumerate(shape[:-1]) if number != dim]


def rows_dim(moves: Sequence[OperandMove]) -> int:
    """The dim whose places are the rows: that of the samples, unless these moves cut or gather tokens.

    >>> rows_dim([]), rows_dim([OperandMove(None, "whole"), OperandMove(None, "rows", dim=1)])
    (0, 1)
    """
    return max((move.dim for move in moves), default=0)


def num_moved(count: int, taken: Sequence[OperandMove], given: Sequence[OperandMove] = ()) -> int:
    """How many rows a member has, of ``count``, once these moves have gathered them and these others cut them."""
    for _, lies, sizes, _ in taken:
        count = sum(sizes()) if lies == "rows" else count
    for axis, lies, sizes, _ in given:
        count = sizes()[axis.index] if lies == "rows" else count
    return count


def matrix(x: Tensor, dim: int = 0) -> Tensor:
    """``x`` (..., K) as a contiguous matrix (N, K), whose rows follow each other along ``dim``."""
    x = x.transpose(0, dim) if dim else x
    return x.reshape(prod(x.shape[:-1]), x.shape[-1]).contiguous()


def tensor(x_NK: Tensor, shape: Sequence[int], dim: int = 0, count: int | None = None) -> Tensor:
    """A matrix as a tensor of this shape but for its features, with ``count`` rows along ``dim``.

    Detached, so that torch does not take it for a view: a Function may give no view to code that writes into it.
    """
    if len(shape) == 1:
        return x_NK.view(x_NK.shape[1]).detach()
    x = x_NK.view(shape[dim] if count is None else count, *_others(shape, dim), x_NK.shape[1])
    return (x.transpose(0, dim) if dim else x).detach()


def joined(panels: Sequence[Tensor]) -> Tensor:
    """The panels side by side."""
    return panels[0] if len(panels) == 1 else torch.cat(list(panels), dim=1)


def gather(x_nk: Tensor, moves: Sequence[MoveStep]) -> tuple[list[Tensor], int, Pending[Any]]:
    """Gathers over each move in turn; moves of features come last.

    Returns panels of features, the number of the one that can be read at once, and what to wait for before the
    others are. Moves of whole operands do nothing.
    """
    panels, own, pending = [x_nk], 0, done(None)
    for axis, lies, sizes in moves:
        if lies == "whole":
            continue
        pending.wait()
        x_nk, own = joined(panels), 0
        if lies == "rows":
            _check_rows(x_nk.shape[0], sizes, axis)
            panels = [axis.all_gather(x_nk, 0, sizes)]
        else:
            panels, pending = axis.gather_parts_async(x_nk, [(x_nk.shape[0], size) for size in sizes])
            own = axis.index
    return panels, own, pending


def _check_rows(num_rows: int, sizes: Sequence[int], axis: Axis) -> None:
    """Raises PlanError unless there are as many rows here as this member's samples have tokens."""
    if num_rows != sizes[axis.index]:
        raise PlanError(
            f"a layer whose samples '{axis.name}' cuts does not see them in dim 0",
            given=f"{num_rows} rows, where the samples of this rank have {sizes[axis.index]}",
            allowed="activations (samples, ..., features) before layers that are cut",
            fix="put the samples in dim 0, or say which layers stay whole: roles={'name': 'copied'}",
        )


def scatter(panels: Sequence[Tensor], moves: Sequence[MoveStep]) -> Pending[Tensor]:
    """Sums over each move in turn and keeps this member's part: what gathering did, backwards.

    ``panels`` are the parts of the first move where that cuts features, and else one. The last message is under way
    when this returns.
    """
    assert len(panels) == 1 or moves[0].lies == "features", "panels are the members' parts of the features"
    pending: Pending[Tensor] = done(panels[0])
    parts: Sequence[Tensor] = panels
    for axis, lies, sizes in moves:
        y = pending.wait()
        if lies == "whole":
            pending = axis.all_reduce_async(y)
        elif lies == "rows":
            pending = axis.reduce_scatter_async(y, 0, sizes)
        else:
            if parts is not panels or len(panels) == 1:
                parts = y.split(list(sizes), dim=1)
            pending = axis.reduce_scatter_parts_async(parts)
        parts = ()
    return pending


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: tuple[OperandMove, ...]) -> Tensor:
        ctx.moves, ctx.shape, ctx.dim = steps(moves, x.shape), x.shape, rows_dim(moves)
        panels, _, pending = gather(matrix(x, ctx.dim), ctx.moves)
        pending.wait()
        return tensor(joined(panels), x.shape, ctx.dim, num_moved(x.shape[ctx.dim], moves))

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dx_nk = scatter([matrix(dy, ctx.dim)], tuple(reversed(ctx.moves))).wait()
        return tensor(dx_nk, ctx.shape, ctx.dim), None


class _Give(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, moves: tuple[OperandMove, ...]) -> Tensor:
        ctx.moves, ctx.shape, ctx.dim = steps(moves, y.shape), y.shape, rows_dim(moves)
        y_nk = scatter([matrix(y, ctx.dim)], ctx.moves).wait()
        return tensor(y_nk, y.shape, ctx.dim, num_moved(y.shape[ctx.dim], (), moves))

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        panels, _, pending = gather(matrix(dy, ctx.dim), tuple(reversed(ctx.moves)))
        pending.wait()
        return tensor(joined(panels), ctx.shape, ctx.dim), None


def take(x: Tensor, moves: Sequence[OperandMove]) -> Tensor:
    """The operand gathered over each move, for members that each go on with their own share of the work.

    What follows must be matrix products alone: the gradient that they give is overwritten.

    Shapes: x (samples, ..., features); returns it with the samples and features of all members.
    Traffic: forward, one all-gather for each move of rows or features; backward, a reduce-scatter for each of these
        and an all-reduce for each move of a whole operand.
    """
    cuts = tuple(move for move in moves if move.lies != "whole")
    for move in moves:
        if move.lies == "whole":
            x = sum_gradient(x, move.axis, overwrite=True)
    return cast(Tensor, _Take.apply(x, cuts)) if cuts else x  # type: ignore[no-untyped-call]


def give(y: Tensor, moves: Sequence[OperandMove]) -> Tensor:
    """The sum of the members' terms, each keeping its part of what a move cuts.

    Traffic: forward, one reduce-scatter for each move of rows or features, an all-reduce for each whole one;
        backward, an all-gather for each move of rows or features.
    """
    if any(move.lies != "whole" for move in moves):
        return cast(Tensor, _Give.apply(y, tuple(moves)))  # type: ignore[no-untyped-call]
    for move in moves:
        y = partial_to_whole(y, move.axis)
    return y
