"""Halo exchange: convolutions, pooling and upsampling of pictures whose rows are sharded over ranks.

Each rank computes some rows of the output. It receives the input rows that these rows read and other ranks hold, the
*halo*; :mod:`~shardwright.operators.picture_rows` computes which rows these are. The concatenation of own and received
rows is not saved for the backward. Its parts are saved instead, because the own part costs no memory: the operator that
made it saves it anyway. Used by the spatial strategy.

B batch, C channels, h this rank's rows of H, W columns
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from shardwright.comm.autograd import cut_to_whole, once, partial_to_whole
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError, PlanError
from shardwright.operators.picture_rows import (
    Border,
    HaloRows,
    Resize,
    Runs,
    SlidingWindow,
    TransposedWindow,
    Upsampling,
    output_sizes,
    reading_of,
    row_ranges,
)
from shardwright.sharding.box import Range


@dataclass
class _HaloPieces:
    """The input rows that one rank's outputs read: its own, received ones, and constant rows beyond the picture."""

    dim: int
    before: int
    after: int
    fill: float
    parts: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def joined(self) -> Tensor:
        """Returns all parts, concatenated; no copy if there is one part alone."""
        first = self.parts[0]
        borders = [first.new_full(_shape(first, self.dim, rows), self.fill) for rows in (self.before, self.after)]
        parts = [*borders[: self.before > 0], *self.parts, *borders[1:][: self.after > 0]]
        return _concatenate(parts, first, self.dim)

    def saved_for(self, whole: Tensor) -> saved_tensors_hooks:
        """Returns hooks under which an operator on ``whole``, the joined parts, saves the parts instead.

        Other tensors go to the hooks that were active before, because torch calls the innermost hooks only.
        """
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack_other, unpack_other = outer or (_identity, _identity)
        # torch keeps the hooks as long as the graph, so they must hold no reference to the joined tensor
        joined_at = (whole.data_ptr(), whole.shape, whole.stride())
        self.versions = [part._version for part in self.parts]

        def pack(saved: Tensor) -> Any:
            return self if (saved.data_ptr(), saved.shape, saved.stride()) == joined_at else pack_other(saved)

        def unpack(packed: Any) -> Tensor:
            if packed is not self:
                return cast(Tensor, unpack_other(packed))
            if self.versions != [part._version for part in self.parts]:
                raise PlanError(
                    "a picture was changed in place after a layer had read it",
                    given="rows that the layer's gradient needs, changed before its backward",
                    allowed="what torch allows on one device",
                    fix="use an operation that is not in place",
                )
            joined: Tensor = self.joined()
            return joined

        return saved_tensors_hooks(pack, unpack)


def _identity(saved: Any) -> Any:
    return saved


class _Halo(Function):
    """The halo exchange: the forward sends rows to the members that read them, the backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, reading: HaloRows, into: _HaloPieces) -> Tensor:
        ctx.axis, ctx.dim, ctx.reading, ctx.before = axis, into.dim, reading, into.before
        me, dim, x = axis.index, into.dim, x.detach()
        sent = {to: _slices(x, dim, reading.held[me], reading.given(me, to)) for to in _others(axis)}
        rows_by_holder = _exchange(axis, x, dim, sent, {source: reading.given(source, me) for source in _others(axis)})
        rows_by_holder[me] = _slices(x, dim, reading.held[me], reading.given(me, me))
        into.parts = [rows_by_holder[holder].pop(0) for holder, _ in reading.pieces(me)] or [x.narrow(dim, 0, 0)]
        whole = into.joined()
        return whole.view_as(whole) if whole is into.parts[0] else whole

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        axis, dim, reading = ctx.axis, ctx.dim, ctx.reading
        me = axis.index
        dy_by_holder: dict[int, list[Tensor]] = {index: [] for index in range(axis.size)}
        start = ctx.before
        for holder, (a, b) in reading.pieces(me):
            dy_by_holder[holder].append(dy.narrow(dim, start, b - a))
            start += b - a
        sent = {to: dy_by_holder[to] for to in _others(axis)}
        received = _exchange(axis, dy, dim, sent, {source: reading.given(me, source) for source in _others(axis)})
        held = reading.held[me]
        dx = dy.new_zeros(_shape(dy, dim, held[1] - held[0]))
        for source in (me, *_others(axis)):
            gradients = dy_by_holder[me] if source == me else received[source]
            # added one by one, because several ranges may contain the same row
            for part, gradient in zip(_slices(dx, dim, held, reading.given(me, source)), gradients, strict=True):
                part.add_(gradient)
        return dx, None, None, None


def _exchange(
    axis: Axis, like: Tensor, dim: int, sent: Mapping[int, list[Tensor]], runs: Mapping[int, Runs]
) -> dict[int, list[Tensor]]:
    """Exchanges rows with other members, in one message each way, and returns the received rows by member.

    ``runs`` are the rows that each member sends here. Where there are no rows, no message is sent.
    """
    rows = {source: [stop - first for first, stop in ranges] for source, ranges in runs.items()}
    received = axis.send_and_receive_async(
        {to: _concatenate(parts, like, dim) for to, parts in sent.items()},
        {source: _shape(like, dim, sum(counts)) for source, counts in rows.items()},
        like.dtype,
    ).wait()
    return {source: list(received[source].split(counts, dim)) if counts else [] for source, counts in rows.items()}


def _others(axis: Axis) -> list[int]:
    return [index for index in range(axis.size) if index != axis.index]


def _slices(x: Tensor, dim: int, held: Range, runs: Runs) -> list[Tensor]:
    """Returns views of the rows ``runs`` of a picture, from a tensor that holds its rows ``held``."""
    return [x.narrow(dim, a - held[0], b - a) for a, b in runs]


def _concatenate(parts: Sequence[Tensor], like: Tensor, dim: int) -> Tensor:
    if not parts:
        return like.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def _shape(x: Tensor, dim: int, rows: int) -> tuple[int, ...]:
    return (*x.shape[:dim], rows, *x.shape[dim + 1 :])


def _compute(
    x: Tensor,
    axis: Axis,
    sizes: Sequence[int],
    dim: int,
    resize: Resize,
    apply: Callable[[Tensor], Tensor],
    fill: float = 0.0,
) -> Tensor:
    """Returns this rank's outputs: ``apply`` on the rows that they read, with ``fill`` outside the picture."""
    reading = reading_of(tuple(sizes), resize)
    outputs, size = row_ranges(output_sizes(sizes, resize))[axis.index], sum(sizes)
    _check_rows(x, axis, sizes, dim)
    first, stop = resize.span(outputs, size)
    num = outputs[1] - outputs[0]
    before = after = 0
    if num == 0:  # no outputs, but others need its rows: it computes one output of zeros and drops it
        before = resize.reach
    elif resize.border == "constant":
        before, after = min(max(0, -first), stop - first), min(max(0, stop - size), stop - first)
    parts = _HaloPieces(dim, before, after, fill)
    whole = cast(Tensor, _Halo.apply(x, axis, reading, parts))
    with parts.saved_for(whole):
        y = apply(whole)
    return _crop(y, dim, resize.skip(outputs, size) if num else 0, num)


def _crop(y: Tensor, dim: int, skip: int, num: int) -> Tensor:
    """Returns the ``num`` rows of ``y`` after the first ``skip``, with zeros for rows that ``y`` does not have."""
    short = skip + num - y.shape[dim]
    if skip < 0 or short > 0:
        y = functional.pad(y, (*(0,) * (2 * (y.dim() - 1 - dim)), max(0, -skip), max(0, short)))
    return y if y.shape[dim] == num else y.narrow(dim, max(0, skip), num)


def _check_rows(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int) -> None:
    if len(sizes) != axis.size or x.shape[dim] != sizes[axis.index]:
        raise LayoutError(
            f"the rows over axis '{axis.name}' differ from the given sizes",
            given=f"sizes {tuple(sizes)}, dim {dim} of {list(x.shape)} on member {axis.index} of {axis.size}",
            allowed="one size for each member, the number of its rows",
            fix="pass the result of output_sizes() for the layer before, or balanced sizes of the input",
        )


WindowSizes = int | Sequence[int]


def _each(value: WindowSizes, num_dims: int) -> list[int]:
    return [value] * num_dims if isinstance(value, int) else list(value)


def halo_convolution(
    x_BChW: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    sizes: Sequence[int],
    *,
    dim: int = 2,
    stride: WindowSizes = 1,
    padding: WindowSizes = 0,
    padding_after: WindowSizes | None = None,
    padding_mode: str = "zeros",
    dilation: WindowSizes = 1,
    groups: int = 1,
) -> Tensor:
    """Computes a convolution of a picture with sharded rows, by halo exchange; each rank computes some output rows.

    It serves inputs too large for one device. A window may reach over the rows of several members. The picture is
    padded at its own borders only, by ``padding_mode``: with ``padding`` rows and columns before the first, and with
    ``padding_after``, by default as many, after the last. The gradients of ``weight`` and ``bias`` are partial sums
    over ``axis``.

    Shapes: x_BChW (B, C, sizes[index], W), or with one or three dims of pixels, sharded along ``dim``; ``weight`` and
        ``bias`` as in torch, unsharded; returns this rank's rows of the output, in balanced shares
        (:func:`~.picture_rows.output_sizes`).
    Traffic: forward, to each member that reads rows of this rank one message of these rows; backward, the gradients of
        the same rows the other way.
    Raises: LayoutError: ``sizes`` differ from the rows held, or the window is larger than the picture. PlanError: in
        the backward, if rows that it needs were changed in place.
    Source: Dryden et al. 2019, arXiv:1903.06681 (spatial parallelism with halo exchange).

    >>> from shardwright import Mesh, run_on_threads
    >>> x, weight = torch.arange(10.0).view(1, 1, 5, 2), torch.ones(1, 1, 3, 1)
    >>> def share(axes):
    ...     mine = x[:, :, :3] if axes["tp"].index == 0 else x[:, :, 3:]
    ...     return halo_convolution(mine, weight, None, axes["tp"], (3, 2), padding=(1, 0))
    >>> whole = torch.cat(run_on_threads(Mesh(tp=2), share), dim=2)
    >>> torch.equal(whole, torch.nn.functional.conv2d(x, weight, padding=(1, 0)))
    True
    """
    num_dims = x_BChW.dim() - 2
    strides, befores, dilations = (_each(value, num_dims) for value in (stride, padding, dilation))
    afters = befores[:] if padding_after is None else _each(padding_after, num_dims)
    cut = dim - 2
    border = cast(Border, "constant" if padding_mode == "zeros" else padding_mode)
    window = SlidingWindow(weight.shape[dim], strides[cut], befores[cut], dilations[cut], afters[cut], border)
    befores[cut] = afters[cut] = 0  # along the cut dim the joined rows contain the borders
    around = [size for pair in zip(reversed(befores), reversed(afters), strict=True) for size in pair]
    apart = any(around) and (border != "constant" or befores != afters)
    convolve = getattr(functional, f"conv{num_dims}d")

    def apply(x: Tensor) -> Tensor:
        if apart:
            x = functional.pad(x, around, mode=border)
        y: Tensor = convolve(x, weight, bias, strides, [0] * num_dims if apart else befores, dilations, groups)
        return y

    return _compute(x_BChW, axis, sizes, dim, window, apply)


def halo_transposed_convolution(
    x_BChW: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    sizes: Sequence[int],
    *,
    dim: int = 2,
    stride: WindowSizes = 1,
    padding: WindowSizes = 0,
    output_padding: WindowSizes = 0,
    dilation: WindowSizes = 1,
    groups: int = 1,
) -> Tensor:
    """Computes a transposed convolution of a picture with sharded rows; each rank computes some output rows.

    The gradients of ``weight`` and ``bias`` are partial sums over ``axis``.

    Shapes, traffic, errors: as :func:`halo_convolution`, with ``weight`` in the order of torch's ``conv_transpose`` and
        the output rows of a :class:`~.picture_rows.TransposedWindow`.

    >>> from shardwright import Mesh, run_on_threads
    >>> x, weight = torch.arange(5.0).view(1, 1, 5), torch.tensor([[[1.0, 10.0]]])
    >>> def share(axes):
    ...     mine = x.split([3, 2], dim=2)[axes["tp"].index]
    ...     return halo_transposed_convolution(mine, weight, None, axes["tp"], (3, 2), stride=2)
    >>> torch.cat(run_on_threads(Mesh(tp=2), share), dim=2)
    tensor([[[ 0.,  0.,  1., 10.,  2., 20.,  3., 30.,  4., 40.]]])
    """
    num_dims, cut = x_BChW.dim() - 2, dim - 2
    strides, paddings, mores, dilations = (
        _each(value, num_dims) for value in (stride, padding, output_padding, dilation)
    )
    spread = TransposedWindow(weight.shape[dim], strides[cut], paddings[cut], dilations[cut], mores[cut])
    paddings[cut] = mores[cut] = 0
    convolve = getattr(functional, f"conv_transpose{num_dims}d")

    def apply(x: Tensor) -> Tensor:
        y: Tensor = convolve(x, weight, None, strides, paddings, mores, groups, dilations)
        return y

    y = _compute(x_BChW, axis, sizes, dim, spread, apply)
    return y if bias is None else y + bias.view(-1, *(1,) * num_dims)


def halo_pool(
    x_BChW: Tensor,
    pool: Callable[[Tensor], Tensor],
    axis: Axis,
    sizes: Sequence[int],
    *,
    kernel: int,
    stride: int | None = None,
    padding: int = 0,
    dilation: int = 1,
    ceil: bool = False,
    fill: float = 0.0,
    dim: int = 2,
) -> Tensor:
    """Pools a picture with sharded rows, by halo exchange: each rank computes a balanced share of the output's rows.

    ``pool`` is the pooling without padding along ``dim``; the other arguments are its settings along ``dim``, with
    ``stride`` by default the kernel, and ``fill`` the padding's value. Nothing is sent if each rank holds exactly the
    rows that its outputs read, as where the stride is the kernel and all ranks hold equally many multiples of it.

    Shapes, traffic, errors: as :func:`halo_convolution`, without weights.

    >>> from shardwright import Mesh, run_on_threads
    >>> x = torch.arange(8.0).view(1, 1, 8)
    >>> def share(axes):
    ...     mine = x.split([3, 5], dim=2)[axes["tp"].index]
    ...     return halo_pool(mine, torch.nn.MaxPool1d(2), axes["tp"], (3, 5), kernel=2).tolist()
    >>> run_on_threads(Mesh(tp=2), share)
    [[[[1.0, 3.0]]], [[[5.0, 7.0]]]]
    """
    window = SlidingWindow(kernel, kernel if stride is None else stride, padding, dilation, ceil=ceil)
    return _compute(x_BChW, axis, sizes, dim, window, pool, fill)


def halo_enlarge(
    x_BChW: Tensor,
    enlarge: Callable[[Tensor], Tensor],
    axis: Axis,
    sizes: Sequence[int],
    *,
    factor: int,
    margin: int = 0,
    dim: int = 2,
) -> Tensor:
    """Upsamples a picture with sharded rows, by halo exchange: each rank computes a balanced share of output rows.

    ``enlarge`` computes ``factor`` rows for each row, from it and ``margin`` rows on either side, and replicates the
    first and the last row of its input beyond the borders.

    Shapes, traffic, errors: as :func:`halo_convolution`, without weights.

    >>> from shardwright import Mesh, run_on_threads
    >>> x, twice = torch.arange(3.0).view(1, 1, 3), torch.nn.Upsample(scale_factor=2)
    >>> def share(axes):
    ...     mine = x.split([2, 1], dim=2)[axes["tp"].index]
    ...     return halo_enlarge(mine, twice, axes["tp"], (2, 1), factor=2).tolist()
    >>> run_on_threads(Mesh(tp=2), share)
    [[[[0.0, 0.0, 1.0]]], [[[1.0, 2.0, 2.0]]]]
    """
    return _compute(x_BChW, axis, sizes, dim, Upsampling(factor, margin), enlarge)


def whole_rows(x_BChW: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 2) -> Tensor:
    """Returns the whole of a picture with sharded rows, all-gathered over ``axis``.

    All ranks must continue with the same work on it: the backward keeps this rank's rows of the gradient.

    Traffic: forward, one all-gather of the whole picture; backward, none.
    """
    whole = cut_to_whole(x_BChW, axis, dim, sizes)
    # a copy, because the gathered picture is a view, and later code may write into the result
    return whole.clone(memory_format=torch.contiguous_format) if axis.size > 1 else whole


def mean_of_rows(x_BChW: Tensor, pool: Callable[[Tensor], Tensor], axis: Axis, num_rows: int, dim: int = 2) -> Tensor:
    """Average-pools a picture with sharded rows to one row, by an all-reduce; ``pool`` averages this rank's rows.

    ``num_rows`` is the number of rows of the whole picture. Every rank must hold at least one. All ranks must continue
    with the same work on the result.

    Traffic: forward, one all-reduce of the output; backward, none.
    """
    return partial_to_whole(pool(x_BChW) * (x_BChW.shape[dim] / num_rows), axis)
