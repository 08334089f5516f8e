"""One linear layer on a grid of ranks: every axis has a *role*, the dimension of the product that it cuts.

For Y[T,h] = X[T,k] W[k,h]::

    role   forward             backward               pays for
    t      gather W            reduce-scatter dW      W
    h      gather X            reduce-scatter dX      X
    k      reduce-scatter Y    gather dY              Y

An operand that an axis does not cut may also lie copied along it: then there is nothing to gather, and the sum is an
all-reduce. 1D columns are h and rows are k with copied activations; 2D is t and h; 3D is t, h and k.

T rows (samples x tokens), k features in, h features out; a weight has torch's order, (h, k)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from shardwright.comm.autograd import once
from shardwright.comm.axis import Axis, Pending, done
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
from shardwright.operators.split_backward import Leaves, add


class WeightFetch(NamedTuple):
    """A weight whose dim 0 lies cut along an axis that computes with all of it: gathered before, summed after."""

    axis: Axis
    sizes: tuple[int, ...]


@dataclass
class Later:
    """Weight gradients on their way: put in place while the backward of the layers before goes on.

    ``ahead`` is how many may be under way at once: each keeps a whole weight's gradient alive.
    """

    ahead: int = 2
    _waiting: list[Callable[[], None]] = field(default_factory=list)

    def add(self, parameter: Tensor, pending: Pending[Tensor]) -> None:
        """Adds what ``pending`` gives to the parameter's gradient, soon."""

        def put() -> None:
            add(parameter, pending.wait())

        self._waiting.append(put)
        while len(self._waiting) > self.ahead:
            self._waiting.pop(0)()

    def finish(self, *_: Any) -> None:
        """Waits for all."""
        while self._waiting:
            self._waiting.pop(0)()


class _Early(NamedTuple):
    """A weight on its way before its layer is called, and the version of what was sent."""

    product: GridProduct
    version: int
    pending: Pending[Tensor]


@dataclass
class Ahead:
    """Weights fetched before they are needed: while one layer multiplies, the next one's is on its way.

    The next is that of the forward before, as long as this one goes the same way; all ranks run the same code, so they
    find the same. What was fetched for nothing is waited for and dropped, at the latest when the forward ends: no
    product sees a weight from before the optimizer's step. Only the forwards that it is told of are looked at, not what
    is computed again in a backward; ``always`` is for a model in stages, whose forwards are told of when they end.
    """

    always: bool = False
    _open: bool = False
    _known: dict[GridProduct, tuple[GridProduct, ...]] = field(default_factory=dict)
    """The calls of a forward, by the first."""
    _calls: list[GridProduct] = field(default_factory=list)
    _same: bool = True
    _early: _Early | None = None

    def watch(self, model: nn.Module) -> None:
        """Follows the forwards of ``model``."""

        def begin(*_: Any) -> None:
            self.finish()
            self._open = True

        model.register_forward_pre_hook(begin)
        model.register_forward_hook(self.finish, always_call=True)

    def fetch(self, product: GridProduct, w_hk: Tensor) -> Pending[Tensor]:
        """The weight of ``product``, and the start of the one that comes after it."""
        if not (self._open or self.always) or torch._C._current_graph_task_id() != -1:  # the latter: in a backward
            return _start_fetch(w_hk, product)
        known = self._known.get(self._calls[0] if self._calls else product, ())
        number = len(self._calls)
        self._calls.append(product)
        self._same = self._same and number < len(known) and known[number] is product
        early, self._early = self._early, None
        if early is not None and (early.product is not product or early.version != w_hk._version):
            early.pending.wait()
            early = None
        pending = early.pending if early is not None else _start_fetch(w_hk, product)
        if self._same and number + 1 < len(known):
            self._start(known[number + 1])
        return pending

    def _start(self, following: GridProduct) -> None:
        assert following.weight is not None, "a product that fetches knows its weight"
        w_hk = following.weight()
        if w_hk.untyped_storage().nbytes() >= w_hk.nbytes:  # one that a strategy has dropped comes back later
            self._early = _Early(following, w_hk._version, _start_fetch(w_hk, following))

    def finish(self, *_: Any) -> None:
        """A forward has ended: keeps its calls for the next, and nothing else."""
        if self._early is not None:
            self._early.pending.wait()
        if self._calls:
            self._known[self._calls[0]] = tuple(self._calls)
        self._early, self._calls, self._same, self._open = None, [], True, False


@dataclass(frozen=True, eq=False)
class GridProduct:
    """How one linear layer runs on this rank: moves of X and Y, fetches of W, from the innermost cut outwards.

    ``take`` lists rows before features, ``give`` features before rows. ``bias_here``: of the members that hold terms
    of one output, one adds the bias. ``keep`` holds gathered operands for the backward, which otherwise gathers them
    again. ``overlap`` lets a message travel while something is multiplied. ``ahead``, which a model's layers share,
    fetches this layer's ``weight()`` while the layer before multiplies. ``leaves`` takes the weight's gradient where it
    is wanted later.
    """

    take: tuple[OperandMove, ...] = ()
    give: tuple[OperandMove, ...] = ()
    fetch: tuple[WeightFetch, ...] = ()
    bias_here: bool = True
    keep: bool = True
    overlap: bool = True
    later: Later = field(default_factory=Later)
    ahead: Ahead | None = None
    leaves: Leaves | None = None
    weight: Callable[[], Tensor] | None = None

    @property
    def dim(self) -> int:
        """The dim whose places are the rows: of samples, or of tokens."""
        return rows_dim((*self.take, *self.give))

    def __call__(self, x: Tensor, w_hk: Tensor, bias_h: Tensor | None) -> Tensor:
        """X times W, transposed as torch stores it, plus the bias.

        Shapes: x (samples, ..., k / cut); w_hk and bias_h this rank's parts; returns (samples, ..., h / cut).
        Traffic: see the module's table.
        """
        if not self.take and not self.give and not self.fetch:
            return functional.linear(x, w_hk, bias_h)
        return cast(Tensor, _GridLinear.apply(x, w_hk, bias_h, self, (w_hk,)))  # type: ignore[no-untyped-call]


class _GridLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_hk: Tensor, bias_h: Tensor | None, product: GridProduct, owner: tuple[Tensor]
    ) -> Tensor:
        ctx.product, ctx.owner, ctx.x_shape = product, owner[0], x.shape
        ahead = product.ahead if product.fetch and product.overlap else None
        weight = ahead.fetch(product, w_hk) if ahead is not None else _start_fetch(w_hk, product)
        ctx.take, ctx.give = steps(product.take, x.shape), steps(product.give, x.shape)
        x_nk = matrix(x, product.dim)
        panels, own, pending = gather(x_nk, ctx.take)
        if not product.overlap:
            pending.wait()
        whole_w_hk = weight.wait()
        out_sizes = _out_sizes(product.give, whole_w_hk)
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
        kept = product.keep or not needs_x
        weight: Pending[Tensor] = done(w_hk) if kept else _start_fetch(w_hk, product)
        dys, _, pending = gather(matrix(dy, product.dim), tuple(reversed(ctx.give)))
        pending.wait()
        again: Pending[Any] | None = None
        later = needs_w and product.leaves is not None and product.leaves.takes(ctx.owner)
        if not product.keep and needs_w and not later:
            panels, _, again = gather(panels[0], ctx.take)
            if not product.overlap:
                again.wait()
        arriving: Pending[Tensor] | None = None
        if needs_x:
            dxs = _input_gradient(dys, weight.wait(), _in_sizes(ctx.take, w_hk))
            arriving = scatter(dxs, tuple(reversed(ctx.take)))
            if not product.overlap:
                arriving.wait()
        dw = None
        if again is not None:
            again.wait()
        if later:
            assert product.leaves is not None, "asked above"
            product.leaves.leave(partial(_make_weight_gradient, ctx.owner, dys, panels, ctx.take, product))
        elif needs_w:
            dw = _weight_gradient(dys, panels)
            if product.fetch:
                _send_weight_gradient(dw, ctx.owner, product)
                dw = None
        dbias = torch.cat([dy_j.sum(0) for dy_j in dys]) if needs_bias else None
        dx = tensor(arriving.wait(), ctx.x_shape, product.dim) if arriving is not None else None
        return dx, dw, dbias, None, None


def _start_fetch(w_hk: Tensor, product: GridProduct) -> Pending[Tensor]:
    """The weight with the rows that the axes of role t cut away; the last message is under way."""
    pending: Pending[Tensor] = done(w_hk)
    for axis, sizes in product.fetch:
        pending = axis.all_gather_async(pending.wait(), 0, sizes)
    return pending


def _send_weight_gradient(dw_hk: Tensor, parameter: Tensor, product: GridProduct) -> None:
    """Sums the gradient over those who multiplied other rows with it, each keeping its part."""
    *before, (axis, sizes) = reversed(product.fetch)
    for earlier, cuts in before:
        dw_hk = earlier.reduce_scatter(dw_hk, 0, cuts)
    pending = axis.reduce_scatter_async(dw_hk, 0, sizes)
    if not product.overlap:
        pending.wait()
    product.later.add(parameter, pending)


def _make_weight_gradient(
    parameter: Tensor, dys: Sequence[Tensor], panels: Sequence[Tensor], take: tuple[MoveStep, ...], product: GridProduct
) -> None:
    """What the backward left for later, put in place."""
    if not product.keep:
        panels, _, again = gather(panels[0], take)
        again.wait()
    dw_hk = _weight_gradient(dys, panels)
    if product.fetch:
        _send_weight_gradient(dw_hk, parameter, product)
    else:
        add(parameter, dw_hk)


def _out_sizes(give: Sequence[OperandMove], w_hk: Tensor) -> list[int]:
    """The widths of the output's panels: the members' parts, where the first sum cuts features."""
    if give and give[0].lies == "features":
        return list(give[0].sizes())
    return [w_hk.shape[0]]


def _in_sizes(take: Sequence[MoveStep], w_hk: Tensor) -> list[int]:
    """The widths of the input's panels: the members' parts, where the last gather joins features."""
    return list(take[-1].sizes) if take and take[-1].lies == "features" else [w_hk.shape[1]]


def _multiply(
    panels: Sequence[Tensor],
    own: int,
    pending: Pending[Any],
    w_hk: Tensor,
    bias_h: Tensor | None,
    out_sizes: Sequence[int],
) -> list[Tensor]:
    """The output's panels; this rank's own panel of the input is multiplied while the others arrive."""
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
    """The module's weight, read past what watches over those who read it."""
    weight = module._parameters.get(name)
    assert weight is not None
    return weight
