"""The grid product: one linear layer on a grid of ranks, where the *role* of an axis is the dimension that it cuts.

For Y[T,h] = X[T,k] W[k,h]::

    role   forward             backward               sends
    t      gather W            reduce-scatter dW      W
    h      gather X            reduce-scatter dX      X
    k      reduce-scatter Y    gather dY              Y

An operand may also be replicated along an axis: then there is nothing to gather, and the sum is an all-reduce.
1D column-parallel is h and row-parallel is k, with replicated activations; 2D is t and h; 3D is t, h and k. The
tensor-parallel strategies build a :class:`GridProduct` for each layer; the role decides the messages, here and nowhere
else.

T rows (samples x tokens), k features in, h features out; a weight has torch's order, (h, k)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shardwright.comm.autograd import once
from shardwright.comm.axis import Axis
from shardwright.comm.pending import Pending, done
from shardwright.operators.operand_moves import (
    MoveStep,
    OperandMove,
    gather,
    matrix,
    num_moved,
    rows_dim,
    scatter,
    steps,
    tensor,
)
from shardwright.operators.split_backward import DeferredGradients, add
from shardwright.operators.traced import TracedCall, note_traced, traced_product


class WeightFetch(NamedTuple):
    """A weight sharded along an axis that cuts the batch (role t): all-gathered on use, its gradient reduce-scattered.

    ``sizes`` are the rows that each member stores.
    """

    axis: Axis
    sizes: tuple[int, ...]


@dataclass
class PendingGradients:
    """Reduce-scatters of weight gradients that overlap with the backward of earlier layers; shared by a model's layers.

    At most ``limit`` are under way at once, because each keeps an unsharded gradient alive.
    """

    limit: int = 2
    _pending: list[tuple[Tensor, Pending[Tensor]]] = field(default_factory=list)

    def add(self, parameter: Tensor, pending: Pending[Tensor]) -> None:
        """Queues a weight gradient's reduce-scatter, and completes the oldest until at most ``limit`` are under way."""
        self._pending.append((parameter, pending))
        self._wait(self.limit)

    def finish(self, *_: Any) -> None:
        """Waits for all reduce-scatters and accumulates their results into ``grad``; hook arguments are ignored."""
        self._wait(0)

    def _wait(self, num_left: int) -> None:
        while len(self._pending) > num_left:
            parameter, pending = self._pending.pop(0)
            add(parameter, pending.wait())


class _Prefetched(NamedTuple):
    """A weight whose all-gather was started before its layer is called, and the version of the shard that was sent."""

    product: GridProduct
    version: int
    pending: Pending[Tensor]


@dataclass
class WeightPrefetch:
    """Prefetches weights: while one layer multiplies, the all-gather of the next layer's weight is under way.

    The next layer is taken from the previous forward, as long as this one calls its layers in the same order. All ranks
    run the same code, so they predict the same layer. A wrong prediction is waited for and dropped, at the latest when
    the forward ends, so that no product sees a weight from before the optimizer's step. Only forwards of the watched
    model count, and not what a backward recomputes. ``always`` is for pipeline stages, which run modules without the
    model's forward: there the strategy calls :meth:`finish` after each action.
    """

    always: bool = False
    _in_forward: bool = False
    _orders: dict[GridProduct, tuple[GridProduct, ...]] = field(default_factory=dict)
    """The calls of an earlier forward, keyed by its first call."""
    _calls: list[GridProduct] = field(default_factory=list)
    _as_before: bool = True
    _prefetched: _Prefetched | None = None

    def watch(self, model: nn.Module) -> None:
        """Registers hooks on ``model``, so that weights are prefetched within its forwards only."""

        def begin(*_: Any) -> None:
            self.finish()
            self._in_forward = True

        model.register_forward_pre_hook(begin)
        model.register_forward_hook(self.finish, always_call=True)

    def fetch(self, product: GridProduct, w_hk: Tensor) -> Pending[Tensor]:
        """Returns the pending all-gather of a layer's weight, and starts the all-gather of the layer expected next."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward or not (self._in_forward or self.always):
            return _start_fetch(w_hk, product)
        order = self._orders.get(self._calls[0] if self._calls else product, ())
        number = len(self._calls)
        self._calls.append(product)
        self._as_before = self._as_before and number < len(order) and order[number] is product
        prefetched, self._prefetched = self._prefetched, None
        # The weight may also have been written to since: then what was sent is stale.
        if prefetched is not None and (prefetched.product is not product or prefetched.version != w_hk._version):
            prefetched.pending.wait()
            prefetched = None
        pending = prefetched.pending if prefetched is not None else _start_fetch(w_hk, product)
        if self._as_before and number + 1 < len(order):
            following = order[number + 1]
            assert following.weight is not None, "a product with a fetch has a weight"
            w_hk = following.weight()
            if w_hk.untyped_storage().nbytes() >= w_hk.nbytes:  # else ZeRO has resharded it, and unshards it later
                self._prefetched = _Prefetched(following, w_hk._version, _start_fetch(w_hk, following))
        return pending

    def finish(self, *_: Any) -> None:
        """Ends a forward: remembers its order of layers to predict the next one, and drops an unused prefetch."""
        if self._prefetched is not None:
            self._prefetched.pending.wait()
        if self._calls:
            self._orders[self._calls[0]] = tuple(self._calls)
        self._prefetched, self._calls, self._as_before, self._in_forward = None, [], True, False


@dataclass(frozen=True, eq=False)
class GridProduct:
    """One linear layer Y = X W on a grid of ranks: the collectives for X, Y and W, from the innermost cut outwards.

    ``take`` all-gathers X, rows before features; ``give`` sums Y, features before rows; ``fetch`` all-gathers W.
    ``bias_here`` is true on the one member that adds the bias, of those that hold terms of the same output. ``keep``
    saves gathered operands for the backward, which otherwise re-gathers them. ``overlap`` lets messages overlap with
    matrix products. ``prefetch``, which a model's layers share, gathers this layer's ``weight()`` while the layer
    before multiplies. ``pending_gradients``, shared too, completes the reduce-scatters of the gradients of fetched
    weights. ``deferred`` keeps the weight gradient's computation for the ``W`` action of a split backward. ``traced``
    is the call that compiled code makes instead.
    """

    take: tuple[OperandMove, ...] = ()
    give: tuple[OperandMove, ...] = ()
    fetch: tuple[WeightFetch, ...] = ()
    bias_here: bool = True
    keep: bool = True
    overlap: bool = True
    pending_gradients: PendingGradients = field(default_factory=PendingGradients)
    prefetch: WeightPrefetch | None = None
    deferred: DeferredGradients | None = None
    weight: Callable[[], Tensor] | None = None
    traced: TracedCall | None = None

    @property
    def dim(self) -> int:
        """The dim of the input X that is cut into rows: 0 for samples, 1 for tokens."""
        return rows_dim((*self.take, *self.give))

    def __call__(self, x: Tensor, w_hk: Tensor, bias_h: Tensor | None) -> Tensor:
        """Computes X W^T plus the bias, W in torch's order (h, k).

        Shapes: x (samples, ..., k / cut); w_hk and bias_h this rank's shards; returns (samples, ..., h / cut).
        Traffic: see the module's table.
        """
        if not self.take and not self.give and not self.fetch:
            return functional.linear(x, w_hk, bias_h)
        # A compiler drops calls whose results are not used, and the gradient of a gathered weight is no result of the
        # backward. So without an input gradient such a call runs uncompiled.
        if (
            self.traced is not None
            and torch.compiler.is_dynamo_compiling()
            and (not self.fetch or x.requires_grad or not w_hk.requires_grad)
        ):
            num_out = sum(self.fetch[-1].sizes) if self.fetch else w_hk.shape[0]
            kept = (self.keep and self.traced.gathers, self.keep and bool(self.fetch))
            return traced_product(self.traced, x, w_hk, bias_h, num_out, kept, fetched=bool(self.fetch))
        return cast(Tensor, _GridLinear.apply(x, w_hk, bias_h, self, (w_hk,)))


class _GridLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_hk: Tensor, bias_h: Tensor | None, product: GridProduct, owner: tuple[Tensor]
    ) -> Tensor:
        ctx.product, ctx.owner, ctx.x_shape = product, owner[0], x.shape
        prefetch = product.prefetch if product.fetch and product.overlap else None
        weight = prefetch.fetch(product, w_hk) if prefetch is not None else _start_fetch(w_hk, product)
        ctx.take, ctx.give = steps(product.take, x.shape), steps(product.give, x.shape)
        x_nk = matrix(x, product.dim)
        panels, own, pending = gather(x_nk, ctx.take)
        if not product.overlap:
            pending.wait()
        whole_w_hk = weight.wait()
        # if the first sum reduce-scatters features, Y is computed in panels, one for each member
        cuts_features = bool(product.give) and product.give[0].layout == "features"
        out_sizes = product.give[0].sizes() if cuts_features else (whole_w_hk.shape[0],)
        ys = _multiply(panels, own, pending, whole_w_hk, bias_h if product.bias_here else None, out_sizes)
        y_nh = scatter(ys, ctx.give).wait()
        if product.keep:
            ctx.save_for_backward(whole_w_hk, *panels)
        else:
            ctx.save_for_backward(w_hk, x_nk)
        return tensor(y_nh, x.shape, product.dim, num_moved(x.shape[product.dim], product.take, product.give))

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        product: GridProduct = ctx.product
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        w_hk, *panels = ctx.saved_tensors
        # All gathers start here in one order on every rank; products then overlap with those still under way.
        weight: Pending[Tensor] = done(w_hk) if product.keep or not needs_x else _start_fetch(w_hk, product)
        dys, _, pending = gather(matrix(dy, product.dim), tuple(reversed(ctx.give)))
        pending.wait()
        deferred = product.deferred if needs_w and product.deferred and product.deferred.accepts(ctx.owner) else None
        regathered: Pending[Any] | None = None
        if not product.keep and needs_w and deferred is None:
            panels, _, regathered = gather(panels[0], ctx.take)
            if not product.overlap:
                regathered.wait()
        pending_dx: Pending[Tensor] | None = None
        if needs_x:
            joins_features = bool(ctx.take) and ctx.take[-1].layout == "features"
            dxs = _input_gradient(dys, weight.wait(), ctx.take[-1].sizes if joins_features else (w_hk.shape[1],))
            pending_dx = scatter(dxs, tuple(reversed(ctx.take)))
            if not product.overlap:
                pending_dx.wait()
        dw = None
        if regathered is not None:
            regathered.wait()
        if deferred is not None:
            deferred.append(partial(_accumulate_weight_gradient, ctx.owner, dys, panels, ctx.take, product))
        elif needs_w:
            dw = _weight_gradient(dys, panels)
            if product.fetch:
                _send_weight_gradient(dw, ctx.owner, product)
                dw = None
        dbias = torch.cat([dy_j.sum(0) for dy_j in dys]) if needs_bias else None
        dx = tensor(pending_dx.wait(), ctx.x_shape, product.dim) if pending_dx is not None else None
        return dx, dw, dbias, None, None


def compilable(layer: nn.Module, product: GridProduct) -> GridProduct:
    """Returns ``product``, the matrix product of ``layer`` and its collectives, in a form that compiled code can call.

    That form is a copy, whose call is registered on ``layer`` (:func:`~.traced.note_traced`). A product that gathers
    features or reduce-scatters over them is returned unchanged.
    """
    if any(move.layout == "features" for move in (*product.take, *product.give)):
        return product

    def run(x: Tensor, w_hk: Tensor, bias_h: Tensor | None) -> list[Tensor]:
        saved: list[Tensor] = []
        ctx = SimpleNamespace(save_for_backward=lambda *tensors: saved.extend(tensors))
        y = _GridLinear.forward(ctx, x, w_hk, bias_h, copy, (w_hk,))
        whole_w_hk, *panels = saved
        return [y, *panels[: copy.keep and call.gathers], *([whole_w_hk] if copy.keep and copy.fetch else [])]

    def reverse(
        dy: Tensor, operand: Tensor, w_hk: Tensor, shape: torch.Size, kept: bool, needs: Sequence[bool]
    ) -> list[Tensor]:
        assert copy.weight is not None, "the product of a layer has a weight"
        ctx = SimpleNamespace(product=copy, owner=copy.weight(), x_shape=shape, needs_input_grad=needs)
        ctx.take, ctx.give = steps(copy.take, shape), steps(copy.give, shape)
        ctx.saved_tensors = w_hk, operand if kept else matrix(operand, copy.dim)
        gradients = _GridLinear.backward(ctx, dy)[:3]
        return [dy.new_empty(0) if gradient is None else gradient for gradient in gradients]

    call = TracedCall(product.take, product.give, run, reverse)
    copy = replace(product, traced=note_traced(layer, call))
    return copy


def _start_fetch(w_hk: Tensor, product: GridProduct) -> Pending[Tensor]:
    """Gathers the weight's rows over the axes of role t; the last message is still under way."""
    pending: Pending[Tensor] = done(w_hk)
    for axis, sizes in product.fetch:
        pending = axis.all_gather_async(pending.wait(), 0, sizes)
    return pending


def _send_weight_gradient(dw_hk: Tensor, parameter: Tensor, product: GridProduct) -> None:
    """Reduce-scatters the gradient over the axes of role t; only the last message overlaps with what follows."""
    *before, (axis, sizes) = reversed(product.fetch)
    for earlier, cuts in before:
        dw_hk = earlier.reduce_scatter(dw_hk, 0, cuts)
    pending = axis.reduce_scatter_async(dw_hk, 0, sizes)
    if not product.overlap:
        pending.wait()
    product.pending_gradients.add(parameter, pending)


def _accumulate_weight_gradient(
    parameter: Tensor, dys: Sequence[Tensor], panels: Sequence[Tensor], take: tuple[MoveStep, ...], product: GridProduct
) -> None:
    """Computes and accumulates a weight gradient that the ``I`` action of a split backward has deferred."""
    if not product.keep:
        panels, _, regathered = gather(panels[0], take)
        regathered.wait()
    dw_hk = _weight_gradient(dys, panels)
    if product.fetch:
        _send_weight_gradient(dw_hk, parameter, product)
    else:
        add(parameter, dw_hk)


def _multiply(
    panels: Sequence[Tensor],
    own: int,
    pending: Pending[Any],
    w_hk: Tensor,
    bias_h: Tensor | None,
    out_sizes: Sequence[int],
) -> list[Tensor]:
    """Returns the output in panels; this rank's own panel of the input is multiplied while the others are received."""
    starts = [sum(panel.shape[1] for panel in panels[:i]) for i in range(len(panels))]
    ws = w_hk.split(list(out_sizes))
    biases = bias_h.split(list(out_sizes)) if bias_h is not None else [None] * len(ws)
    ys: list[Tensor] = []
    for i in (own, *(i for i in range(len(panels)) if i != own)):
        x_nk, first = panels[i], i == own
        if not first:
            pending.wait()
        for j, w in enumerate(ws):
            part = w[:, starts[i] : starts[i] + x_nk.shape[1]]
            if first:
                ys.append(functional.linear(x_nk, part, biases[j]))
            else:
                ys[j].addmm_(x_nk, part.T)
    pending.wait()
    return ys


def _input_gradient(dys: Sequence[Tensor], w_hk: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Returns dY W in panels of these widths, one for each member that the input's features are cut over."""
    ws = w_hk.split([dy.shape[1] for dy in dys])
    start, dxs = 0, []
    for width in widths:
        dx = None
        for dy, w in zip(dys, ws, strict=True):
            part = w[:, start : start + width].conj()
            dx = dy @ part if dx is None else dx.addmm_(dy, part)
        assert dx is not None
        dxs.append(dx)
        start += width
    return dxs


def _weight_gradient(dys: Sequence[Tensor], panels: Sequence[Tensor]) -> Tensor:
    """Returns dY^T X, each pair of panels multiplied into its block of one tensor, without a copy."""
    if len(dys) == len(panels) == 1:
        return dys[0].T @ panels[0].conj()
    dw = dys[0].new_empty(sum(dy.shape[1] for dy in dys), sum(panel.shape[1] for panel in panels))
    row = 0
    for dy in dys:
        column = 0
        for panel in panels:
            torch.mm(dy.T, panel.conj(), out=dw[row : row + dy.shape[1], column : column + panel.shape[1]])
            column += panel.shape[1]
        row += dy.shape[1]
    return dw


def weight_of(module: nn.Module, name: str = "weight") -> Tensor:
    """Returns the parameter ``name`` of a module, even where :func:`~.weight_guard.guard` refuses an attribute read."""
    weight = module._parameters.get(name)
    assert weight is not None
    return weight
