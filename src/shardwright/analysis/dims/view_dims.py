"""Rules that relate the dims of inputs and results of operators that only move elements, such as views and slices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from shardwright.analysis.dims.dim_letters import (
    Concat,
    Dim,
    DimLetters,
    DimRule,
    Dims,
    Role,
    all_whole,
    broadcast,
    rule,
)
from shardwright.analysis.recorded.recording import RecordedCall

VIEW_RULES: dict[str, DimRule] = {}
"""Maps the name of each operator that only moves elements, such as ``view``, to a function (:data:`DimRule`) that
returns which dims of its inputs and results correspond. ``operator_dims`` includes this table."""

_rule = partial(rule, VIEW_RULES)


def _group(a: DimLetters, before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims]:
    """Returns the dims of a reshape's input and output as common letters (independent indices), from the last dim on.

    Where neither of two factors divides the other, both are needed whole.
    """
    left: list[list[int | Concat]] = [[] for _ in before]
    right: list[list[int | Concat]] = [[] for _ in after]
    rest = [(d, size) for d, size in enumerate(before) if size > 1]  # the remaining size of each dim, the fastest last
    other = [(d, size) for d, size in enumerate(after) if size > 1]
    while rest and other:
        (i, x), (j, y) = rest.pop(), other.pop()
        if x % y == 0 or y % x == 0:
            size = min(x, y)
            (letter,) = a.new(size)
            left[i].insert(0, letter)
            right[j].insert(0, letter)
            rest += [(i, x // size)] * (x > size)
            other += [(j, y // size)] * (y > size)
            continue
        # the factors overlap: the dims of both groups, up to the place where both groups end, are needed whole
        ones, others = [(i, x)], [(j, y)]
        while (p := prod(size for _, size in ones)) != (q := prod(size for _, size in others)):
            (ones if p < q else others).append((rest if p < q else other).pop())
        for dims, group in ((left, ones), (right, others)):
            for d, size in group:
                dims[d][:0] = a.new(size, Role.WHOLE)
    return tuple(map(tuple, left)), tuple(map(tuple, right))


@_rule("view", "_unsafe_view", "reshape", "_reshape_alias")
def _view(call: RecordedCall, a: DimLetters) -> Any:
    x, y = call.operands[0], call.results[0]
    if len(call.args) > 1 and isinstance(call.args[1], torch.dtype):  # the same bytes as numbers of another dtype
        lead = a.of(x.shape[:-1])
        last = a.new(x.shape[-1], Role.SAME if x.shape == y.shape else Role.WHOLE)
        return [(*lead, last)], [(*lead, last if x.shape == y.shape else a.new(y.shape[-1], Role.WHOLE))]
    if 0 in x.shape and prod(filter(None, x.shape)) != prod(filter(None, y.shape)):
        return all_whole(call, a)  # an empty batch: sizes of 0 do not show which dims correspond
    before, after = _group(a, x.shape, y.shape)
    return [before], [after]


@_rule("t", "transpose", "permute", "numpy_T", "swapaxes")
def _permute(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0]
    n, dims = len(x.shape), a.of(x.shape)
    if call.name == "permute":
        order = [d % n for d in call.args[1]]
    else:
        order = list(range(n))
        if n > 1:
            one, other = (0, 1) if call.name == "t" else (call.args[1] % n, call.args[2] % n)
            order[one], order[other] = order[other], order[one]
    return [dims], [tuple(dims[d] for d in order)]


@_rule("unsqueeze", "squeeze", "squeeze_dims")
def _squeeze(call: RecordedCall, a: DimLetters) -> Any:
    before, after = _group(a, call.operands[0].shape, call.results[0].shape)
    return [before], [after]


@_rule("expand", "broadcast_to")
def _expand(call: RecordedCall, a: DimLetters) -> Any:
    dims = a.of(call.results[0].shape)
    return [broadcast(call.operands[0].shape, dims)], [dims]


@_rule("repeat")
def _repeat(call: RecordedCall, a: DimLetters) -> Any:
    x, y = call.operands[0].shape, call.results[0].shape
    own = a.of(x)
    padded = (*(() for _ in range(len(y) - len(x))), *own)
    shape = (*(1 for _ in range(len(y) - len(x))), *x)
    times = (n // m if m else 1 for n, m in zip(y, shape, strict=True))  # a dim of size 0 may count as repeated once
    return [own], [tuple((*a.new(n), *dim) for n, dim in zip(times, padded, strict=True))]


@_rule("slice", "narrow")
def _slice(call: RecordedCall, a: DimLetters) -> Any:
    x, y = call.operands[0].shape, call.results[0].shape
    if call.name == "narrow":
        dim, start, step = call.args[1] % len(x), call.args[2], 1
    else:
        dim, start = call.argument(1, "dim", 0) % len(x), call.argument(2, "start") or 0
        step = call.argument(4, "step", 1)
    n, m = x[dim], y[dim]
    start = min(max(start + n if start < 0 else start, 0), n)
    own = list(a.of([1 if d == dim else size for d, size in enumerate(x)]))
    out = list(own)
    if step == 1:
        kept = a.piece(m)
        parts = tuple(p for p in ((a.piece(start), start), (kept, m), (a.piece(n - start - m), n - start - m)) if p[1])
        own[dim] = parts[0][0] if len(parts) == 1 else (Concat(tuple(p for p, _ in parts)),)
        out[dim] = kept
    elif n % step == 0 and m == n // step:
        kept = a.new(m)
        own[dim], out[dim] = (*kept, *a.new(step, Role.WHOLE)), kept
    else:
        own[dim], out[dim] = a.new(n, Role.WHOLE), a.new(m)
    return [tuple(own)], [tuple(out)]


@_rule("select")
def _select(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0].shape
    dim = call.args[1] % len(x)
    own = [a.new(n, Role.WHOLE if d == dim else Role.SAME) for d, n in enumerate(x)]
    return [tuple(own)], [tuple(own[:dim] + own[dim + 1 :])]


@_rule("unbind")
def _unbind(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0].shape
    dim = call.argument(1, "dim", 0) % len(x)
    own = [a.new(n, Role.WHOLE if d == dim else Role.SAME) for d, n in enumerate(x)]
    return [tuple(own)], [tuple(own[:dim] + own[dim + 1 :])] * len(call.results)


@_rule("split", "split_with_sizes", "chunk", "unsafe_split", "tensor_split")
def _split(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0].shape
    dim = call.argument(2, "dim", 0) % len(x)
    own = list(a.of([1 if d == dim else n for d, n in enumerate(x)]))
    pieces = [(a.piece(r.shape[dim]), r.shape[dim]) for r in call.results]
    outs = [(*own[:dim], piece, *own[dim + 1 :]) for piece, _ in pieces]
    own[dim] = _joined(a, [piece for piece, n in pieces if n])
    return [tuple(own)], outs


def _joined(a: DimLetters, pieces: Sequence[Dim]) -> Dim:
    """Returns a dim of pieces put end to end; if each has one element, it is a new letter (index), needed whole."""
    if len(pieces) > 1 and all(a.size(piece) == 1 for piece in pieces):
        return a.new(len(pieces), Role.WHOLE)
    return pieces[0] if len(pieces) == 1 else (Concat(tuple(pieces)),)


@_rule("cat", "concat", "concatenate")
def _cat(call: RecordedCall, a: DimLetters) -> Any:
    y = call.results[0].shape
    dim = call.argument(1, "dim", 0) % len(y)
    rest = a.of([1 if d == dim else n for d, n in enumerate(y)])
    operands: list[Dims] = []
    for v in call.operands:
        if len(v.shape) != len(y):  # torch lets an empty 1-D tensor be concatenated with tensors of any shape
            operands.append(a.of(v.shape))
        else:
            operands.append((*rest[:dim], a.piece(v.shape[dim]), *rest[dim + 1 :]))
    joined = [o[dim] for o, v in zip(operands, call.operands, strict=True) if len(v.shape) == len(y) and v.shape[dim]]
    return operands, [(*rest[:dim], _joined(a, joined), *rest[dim + 1 :])]


@_rule("stack")
def _stack(call: RecordedCall, a: DimLetters) -> Any:
    y = call.results[0].shape
    dim = call.argument(1, "dim", 0) % len(y)
    own = a.of(call.operands[0].shape)
    return [own for _ in call.operands], [(*own[:dim], a.new(y[dim], Role.WHOLE), *own[dim:])]


@_rule("constant_pad_nd", "pad")
def _pad(call: RecordedCall, a: DimLetters) -> Any:
    x, y = call.operands[0].shape, call.results[0].shape
    pads = list(call.args[1])
    own, out = [], []
    for d, (n, m) in enumerate(zip(x, y, strict=True)):
        place = len(x) - 1 - d
        low, high = (pads[2 * place], pads[2 * place + 1]) if 2 * place < len(pads) else (0, 0)
        letter = a.new(n) if low >= 0 and high >= 0 else a.new(n, Role.WHOLE)
        own.append(letter)
        if n == m:
            out.append(letter)
        elif low >= 0 and high >= 0:
            out.append((Concat(tuple(p for p, s in ((a.new(low), low), (letter, n), (a.new(high), high)) if s)),))
        else:
            out.append(a.new(m))
    return [tuple(own)], [tuple(out)]


@_rule("flip", "roll")
def _flip(call: RecordedCall, a: DimLetters) -> Any:
    x = call.operands[0].shape
    dims = call.args[1] if call.name == "flip" else (call.argument(2, "dims") or range(len(x)))
    moved = {d % len(x) for d in dims}
    own = tuple(a.new(n, Role.WHOLE if d in moved else Role.SAME) for d, n in enumerate(x))
    return [own], [own]
