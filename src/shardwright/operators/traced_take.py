"""All-gathers a module's input once for several of its layers, in compiled and in uncompiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.forward_stack import Forward
from shardwright.operators.operand_moves import OperandMove, gather, matrix, num_moved, scatter, steps, take, tensor
from shardwright.operators.traced import TracedCall, note_traced, traced_take


def gathering(module: nn.Module, moves: Sequence[OperandMove], *, compiles: bool) -> Callable[[Forward], Forward]:
    """Returns a wrapper for a module's forward that all-gathers the first argument along the axes of ``moves``.

    If ``compiles`` is set and no move gathers features, it works in compiled code too; the collective is then
    registered on ``module`` (:func:`~.traced.note_traced`).

    Traffic: that of :func:`~.operand_moves.take`.
    """
    known = compiles and all(move.layout != "features" for move in moves)
    call = note_traced(module, _take_call(tuple(moves))) if known else None

    def taken(x: Tensor) -> Tensor:
        if torch.compiler.is_dynamo_compiling() and call is not None:
            return traced_take(call, x)
        return take(x, moves)

    def around(forward: Forward) -> Forward:
        @wraps(forward)
        def entered(*args: Any, **named: Any) -> Any:
            if args:
                return forward(taken(args[0]), *args[1:], **named)
            name, x = next(iter(named.items()))
            return forward(**{**named, name: taken(x)})

        return entered

    return around


def _take_call(moves: tuple[OperandMove, ...]) -> TracedCall:
    cuts = tuple(move for move in moves if move.layout == "rows")

    def run(x: Tensor) -> list[Tensor]:
        panels, _, pending = gather(matrix(x, call.dim), steps(cuts, x.shape))
        pending.wait()
        return [tensor(panels[0], x.shape, call.dim, num_moved(x.shape[call.dim], cuts, ()))]

    def reverse(dy: Tensor, shape: torch.Size) -> list[Tensor]:
        dx_nk = scatter([matrix(dy, call.dim)], tuple(reversed(steps(cuts, shape)))).wait()
        dx = tensor(dx_nk, shape, call.dim)
        for move in moves:
            if move.layout == "whole":
                dx = move.axis.all_reduce(dx.clone())
        return [dx]

    call = TracedCall(moves, (), run, reverse)
    return call
