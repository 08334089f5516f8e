"""Custom torch operators for collectives and dropout inside of compiled code, which the compiler does not look into.

A compiler that traced into Python objects, such as a product or an axis, would compile once for each of them. So
compiled code is given a tensor, the *key*, by which the operator finds the object when it runs::

    compiled once      y = product(x, w, bias, key) ; gelu ; ...        the same for blocks alike, on every rank
    given to a call    key: the number of the block's own product; its shape says how many rows all ranks have

Uncompiled code never calls these operators: ``torch.compiler.is_dynamo_compiling()`` is true only while a compiler
traces the code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from math import prod
from threading import Lock
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function

from shardwright.comm.autograd import once
from shardwright.operators.operand_moves import OperandMove, num_moved, rows_dim

_NUMBERS = count()
_CALLS: WeakValueDictionary[int, TracedCall] = WeakValueDictionary()
_ATTRIBUTE = "_traced_calls"


class TracedCall:
    """A call with collectives, or of dropout, in a compiled block. In compiled code the tensor ``key`` stands for it.

    ``taken`` are the moves (collectives) before the computation and ``given`` those after it. ``run`` computes the
    results and ``reverse`` the gradients, collectives included; neither returns a tensor that is one of its arguments.
    """

    def __init__(
        self,
        taken: Sequence[OperandMove],
        given: Sequence[OperandMove],
        run: Callable[..., list[Tensor]],
        reverse: Callable[..., list[Tensor]],
    ) -> None:
        self.taken, self.given, self.run, self.reverse = tuple(taken), tuple(given), run, reverse
        self.dim = rows_dim((*self.taken, *self.given))
        self.gathers = any(move.layout == "rows" for move in self.taken)
        self.moves_rows = self.gathers or any(move.layout == "rows" for move in self.given)
        number = next(_NUMBERS)
        _CALLS[number] = self
        self.key = self._number = torch.tensor(number)

    def refresh(self) -> None:
        """Sets the shape of ``key`` to (rows on all ranks, rows of this rank's result) of the current batch.

        Rows are samples, or tokens where the call moves tokens; the first number is 0 if the call gathers no rows. A
        compiler lets shapes vary, so that compiled code sees the sizes without compiling again. If the call neither
        gathers nor cuts rows, ``key`` stays as it is. A compiled block calls this method before each of its forwards.
        """
        if self.moves_rows:
            whole = num_moved(0, self.taken, ())
            shape = (whole, num_moved(whole, (), self.given))
            if tuple(self.key.shape) != shape:
                self.key = self._number.expand(shape)


def note_traced(module: nn.Module, call: TracedCall) -> TracedCall:
    """Registers on ``module`` a call that its compiled code makes, for :func:`traced_calls`, and returns the call."""
    vars(module).setdefault(_ATTRIBUTE, []).append(call)
    return call


def traced_calls(block: nn.Module) -> tuple[TracedCall, ...]:
    """Returns the collectives and dropouts that :func:`note_traced` has registered on a block and the modules in it."""
    return tuple(call for module in block.modules() for call in vars(module).get(_ATTRIBUTE, ()))


def traced_product(
    call: TracedCall, x: Tensor, w_hk: Tensor, bias_h: Tensor | None, num_out: int, kept: tuple[bool, bool],
    *, fetched: bool,
) -> Tensor:  # fmt: skip
    """Computes a linear layer with its collectives in compiled code.

    Outside of compiled code :class:`~.linear.GridProduct` does the same. ``num_out`` is the number of output features
    on this rank. ``kept`` says whether the gathered operand and the gathered weight are kept for the backward. A
    ``fetched`` weight is all-gathered by the call, which also accumulates the weight's gradient, past autograd.
    """
    settings = (call.dim, call.moves_rows, num_out, *kept)
    needs = (x.requires_grad, w_hk.requires_grad, bias_h is not None and bias_h.requires_grad)
    returned = (needs[0], needs[1] and not fetched, needs[2])
    return cast(Tensor, _Product.apply(x, w_hk, bias_h, call.key, settings, needs, returned))


def traced_take(call: TracedCall, x: Tensor) -> Tensor:
    """Returns an operand all-gathered along its rows, in compiled code; unchanged if ``call`` gathers no rows.

    The backward runs the collectives that sum the gradient: a reduce-scatter where rows were gathered, and an
    all-reduce where the operand is replicated.
    """
    return cast(Tensor, _GatheredOperand.apply(x, call.key, call.dim, call.gathers))


def traced_factors(call: TracedCall, x: Tensor, p: float) -> Tensor:
    """Returns the factors by which dropout with probability ``p`` multiplies ``x``, in compiled code.

    They are equal to those of uncompiled code.
    """
    return cast(Tensor, torch.ops.shardwright.factors(x.detach(), call.key, p))


def drops_twice(graph: torch.fx.GraphModule) -> bool:
    """Returns whether the code of ``graph`` calls one dropout twice, or any dropout in a part that is checkpointed.

    Such code must not be compiled: each call has a mask of its own, and a compiler may reorder the calls, or repeat
    those of a checkpointed part in the backward.
    """
    parts = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    keys = [[n.args[1] for n in part.graph.nodes if n.target is torch.ops.shardwright.factors] for part in parts]
    return len({*keys[0]}) < len(keys[0]) or any(keys[1:])


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_hk: Tensor, bias_h: Tensor | None, key: Tensor,
        settings: tuple[int, bool, int, bool, bool], needs: tuple[bool, bool, bool], returned: tuple[bool, bool, bool],
    ) -> Tensor:  # fmt: skip
        *_, keeps_x, keeps_w = settings
        outputs = torch.ops.shardwright.product(x, w_hk, bias_h, key, *settings)
        ctx.save_for_backward(outputs[1] if keeps_x else x, outputs[-1] if keeps_w else w_hk, w_hk, key)
        ctx.shape, ctx.kept, ctx.needs, ctx.returned, ctx.num_out = x.shape, keeps_x, needs, returned, settings[2]
        return cast(Tensor, outputs[0])

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        operand, whole_w, w_hk, key = ctx.saved_tensors
        shapes = (ctx.shape, w_hk.shape, (ctx.num_out,))
        sizes = [list(shape) if is_returned else [0] for shape, is_returned in zip(shapes, ctx.returned, strict=True)]
        gradients = torch.ops.shardwright.product_backward(
            dy, operand, whole_w, key, ctx.shape, ctx.kept, ctx.needs, *sizes
        )
        dx, dw, dbias = (
            gradient if is_returned else None for gradient, is_returned in zip(gradients, ctx.returned, strict=True)
        )
        return dx, dw, dbias, None, None, None, None


class _GatheredOperand(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: Tensor, dim: int, gathers: bool) -> Tensor:
        ctx.save_for_backward(key)
        ctx.shape = x.shape
        return cast(Tensor, torch.ops.shardwright.take(x, key, dim)) if gathers else x.view_as(x)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (key,) = ctx.saved_tensors
        return torch.ops.shardwright.take_backward(dy, key, ctx.shape), None, None, None


def _call_of(key: Tensor) -> TracedCall:
    return _CALLS[int(key.as_strided((), ()))]


def _apart(results: list[Tensor]) -> list[Tensor]:
    """Returns the results contiguous, as compiled code expects them."""
    return [result.contiguous() for result in results]


def _product(
    x: Tensor, w: Tensor, bias: Tensor | None, key: Tensor, dim: int, moves: bool, num_out: int, keep_x: bool,
    keep_w: bool,
) -> list[Tensor]:  # fmt: skip
    return _apart(_call_of(key).run(x, w, bias))


def _product_shapes(
    x: Tensor, w: Tensor, bias: Tensor | None, key: Tensor, dim: int, moves: bool, num_out: int, keep_x: bool,
    keep_w: bool,
) -> list[Tensor]:  # fmt: skip
    shape = [*x.shape[:-1], num_out]
    if moves:
        shape[dim] = key.shape[1]
    others = prod(size for number, size in enumerate(x.shape[:-1]) if number != dim)
    kept = [x.new_empty((key.shape[0] * others, x.shape[-1]))] if keep_x else []
    return [x.new_empty(shape), *kept, *([w.new_empty((num_out, w.shape[1]))] if keep_w else [])]


def _product_backward(
    dy: Tensor, operand: Tensor, w: Tensor, key: Tensor, shape: Sequence[int], kept: bool, needs: Sequence[bool],
    *sizes: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    return _apart(_call_of(key).reverse(dy, operand, w, torch.Size(shape), kept, needs))


def _product_backward_shapes(
    dy: Tensor, operand: Tensor, w: Tensor, key: Tensor, shape: Sequence[int], kept: bool, needs: Sequence[bool],
    *sizes: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    return [dy.new_empty(size) for size in sizes]


def _take(x: Tensor, key: Tensor, dim: int) -> Tensor:
    return _apart(_call_of(key).run(x))[0]


def _take_shape(x: Tensor, key: Tensor, dim: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], key.shape[0], *x.shape[dim + 1 :]])


def _take_backward(dy: Tensor, key: Tensor, shape: Sequence[int]) -> Tensor:
    return _apart(_call_of(key).reverse(dy, torch.Size(shape)))[0]


def _take_backward_shape(dy: Tensor, key: Tensor, shape: Sequence[int]) -> Tensor:
    return dy.new_empty(shape)


def _factors(x: Tensor, key: Tensor, p: float) -> Tensor:
    return _apart(_call_of(key).run(x, p))[0]


def _factors_shape(x: Tensor, key: Tensor, p: float) -> Tensor:
    return x.new_empty(x.shape)


_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "product(Tensor x, Tensor w, Tensor? bias, Tensor key, int dim, bool moves, int num_out, bool keep_x, bool keep_w)"
    " -> Tensor[]": (_product, _product_shapes),
    "product_backward(Tensor dy, Tensor operand, Tensor w, Tensor key, SymInt[] shape, bool kept, bool[] needs,"
    " SymInt[] dx, SymInt[] dw, SymInt[] dbias) -> Tensor[]": (_product_backward, _product_backward_shapes),
    "take(Tensor x, Tensor key, int dim) -> Tensor": (_take, _take_shape),
    "take_backward(Tensor dy, Tensor key, SymInt[] shape) -> Tensor": (_take_backward, _take_backward_shape),
    "factors(Tensor x, Tensor key, float p) -> Tensor": (_factors, _factors_shape),
}  # fmt: skip


_LIBRARIES: list[torch.library.Library] = []
_LOCK = Lock()


def define_operators() -> None:
    """Registers the custom operators with torch, once: their computations, and their result shapes for a compiler."""
    with _LOCK:
        if _LIBRARIES:
            return
        library = torch.library.Library("shardwright", "FRAGMENT")
        for schema, (run, shapes) in _OPERATORS.items():
            name = schema.partition("(")[0]
            # The tag keeps a backward from repeating a dropout's call. Code that calls a dropout twice is not compiled
            # (drops_twice).
            library.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if name == "factors" else ())
            library.impl(name, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"shardwright::{name}", shapes, lib=library)
        _LIBRARIES.append(library)
