"""Operators on pictures whose rows lie cut: each rank computes some rows of the output, and fetches those it reads.

Which rows these are is in :mod:`shardwright.operators.picture_rows`. What is joined from own and fetched rows is not
kept for the backward: the parts are, and the own part is kept anyway by the operator that made it.

B batch, C channels, h this rank's rows of H, W columns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    Enlarged,
    Reading,
    Resize,
    Runs,
    SlidingWindow,
    Spread,
    output_sizes,
    reading_of,
    row_ranges,
)
from shardwright.sharding.box import Range


@dataclass
class _Parts:
    """What one rank's outputs are computed from: its own rows, those fetched, and constant rows at the borders."""

    dim: int
    before: int
    after: int
    fill: float
    parts: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def joined(self) -> Tensor:
        """All of it, one after the other: a copy, unless there is one part alone."""
        first = self.parts[0]
        borders = [first.new_full(_shape(first, self.dim, rows), self.fill) for rows in (self.before, self.after)]
        parts = [*borders[: self.before > 0], *self.parts, *borders[1:][: self.after > 0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def keeping(self, whole: Tensor) -> saved_tensors_hooks:
        """While an operator runs on ``whole``: the parts are saved in its place.

        Of the rest those decide who asked before: torch asks the innermost alone.
        """
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack_rest, unpack_rest = outer or (_same, _same)
        known = (whole.data_ptr(), whole.shape, whole.stride())  # torch keeps the hooks: they must not hold the whole
        self.versions = [part._version for part in self.parts]

        def pack(saved: Tensor) -> Any:
            return self if (saved.data_ptr(), saved.shape, saved.stride()) == known else pack_rest(saved)

        def unpack(kept: Any) -> Tensor:
            if kept is not self:
                return cast(Tensor, unpack_rest(kept))
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


def _same(saved: Any) -> Any:
    return saved


class _Halo(Function):
    """Rows as they lie, to the rows that each member reads: forward fetched, backward the gradients given back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, reading: Reading, into: _Parts) -> Tensor:
        ctx.axis, ctx.dim, ctx.reading, ctx.before = axis, into.dim, reading, into.before
        me, x = axis.index, x.detach()
        for to in _others(axis):
            axis.send_async(_join(_cut(x, into.dim, reading.held[me], reading.given(me, to)), x, into.dim), to)
        found = {me: _cut(x, into.dim, reading.held[me], reading.given(me, me))}
        for source in _others(axis):
            rows = [b - a for a, b in reading.given(source, me)]
            found[source] = list(
                axis.receive(_shape(x, into.dim, sum(rows)), x.dtype, source).split(rows, into.dim) if rows else ()
            )
        into.parts = [found[holder].pop(0) for holder, _ in reading.pieces(me)] or [x.narrow(into.dim, 0, 0)]
        whole = into.joined()
        return whole.view_as(whole) if whole is into.parts[0] else whole

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        axis, dim, reading = ctx.axis, ctx.dim, ctx.reading
        me = axis.index
        found: dict[int, list[Tensor]] = {index: [] for index in range(axis.size)}
        start = ctx.before
        for holder, (a, b) in reading.pieces(me):
            found[holder].append(dy.narrow(dim, start, b - a))
            start += b - a
        for to in _others(axis):
            axis.send_async(_join(found[to], dy, dim), to)
        held = reading.held[me]
        dx = dy.new_zeros(_shape(dy, dim, held[1] - held[0]))
        for source in (me, *_others(axis)):
            runs = reading.given(me, source)
            rows = [b - a for a, b in runs]
            if source != me and rows:
                found[me] = list(axis.receive(_shape(dy, dim, sum(rows)), dy.dtype, source).split(rows, dim))
            for part, gradient in zip(_cut(dx, dim, held, runs), found[me] if rows else (), strict=True):
                part.add_(gradient)
        return dx, None, None, None


def _others(axis: Axis) -> list[int]:
    return [index for index in range(axis.size) if index != axis.index]


def _cut(x: Tensor, dim: int, lies: Range, runs: Runs) -> list[Tensor]:
    """Some rows of a tensor that has those of ``lies``: views."""
    return [x.narrow(dim, a - lies[0], b - a) for a, b in runs]


def _join(parts: Sequence[Tensor], like: Tensor, dim: int) -> Tensor:
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
    """``apply`` on the rows that this rank's outputs read, ``fill`` outside the picture; these outputs of it."""
    reading = reading_of(tuple(sizes), resize)
    outputs, size = row_ranges(output_sizes(sizes, resize))[axis.index], sum(sizes)
    _check_rows(x, axis, sizes, dim)
    first, stop = resize.span(outputs, size)
    num = outputs[1] - outputs[0]
    before = after = 0
    if num == 0:  # it still gives others its rows: it computes one output of zeros and drops it
        before = resize.reach
    elif resize.border == "constant":
        before, after = min(max(0, -first), stop - first), min(max(0, stop - size), stop - first)
    parts = _Parts(dim, before, after, fill)
    whole = cast(Tensor, _Halo.apply(x, axis, reading, parts))  # type: ignore[no-untyped-call]
    with parts.keeping(whole):
        y = apply(whole)
    return _crop(y, dim, resize.skip(outputs, size) if num else 0, num)


def _crop(y: Tensor, dim: int, skip: int, num: int) -> Tensor:
    """So many rows after the first ``skip``; zeros where there are none."""
    short = skip + num - y.shape[dim]
    if skip < 0 or short > 0:
        y = functional.pad(y, (*(0,) * (2 * (y.dim() - 1 - dim)), max(0, -skip), max(0, short)))
    return y if y.shape[dim] == num else y.narrow(dim, max(0, skip), num)


def _check_rows(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int) -> None:
    if len(sizes) != axis.size or x.shape[dim] != sizes[axis.index]:
        raise LayoutError(
            f"the rows over axis '{axis.name}' are not those of the sizes given",
            given=f"sizes {tuple(sizes)}, dim {dim} of {list(x.shape)} on member {axis.index} of {axis.size}",
            allowed="one size for each member, that of its own rows",
            fix="pass what output_sizes() gave for the layer before, or balanced sizes of the input",
        )


Sizes = int | Sequence[int]


def _each(value: Sizes, num_dims: int) -> list[int]:
    return [value] * num_dims if isinstance(value, int) else list(value)


def halo_convolution(
    x_BChW: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: Axis,
    sizes: Sequence[int],
    *,
    dim: int = 2,
    stride: Sizes = 1,
    padding: Sizes = 0,
    padding_after: Sizes | None = None,
    padding_mode: str = "zeros",
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution of a picture whose rows lie cut: each rank computes a balanced share of the output's rows.

    For inputs too large for one device. A window may reach over several members; the picture is padded at its own
    borders only, as ``padding_mode`` says, with ``padding_after`` behind it where that is not what is before it. The
    gradients of ``weight`` and ``bias`` are terms of a sum over ``axis``.

    Shapes: x_BChW (B, C, sizes[index], W), or with one or three dims of pixels, cut along ``dim``; ``weight`` and
        ``bias`` as torch has them, whole; returns the rows ``output_sizes(sizes, window)[index]`` of the output.
    Traffic: forward, one send to each member that reads rows of this one, of these rows, and one receive from each
        whose rows this one reads; backward, the gradients of the same rows the other way.
    Raises: LayoutError: the sizes are not those of the rows held, or the window is larger than the picture.
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
    befores[cut] = afters[cut] = 0  # at the borders alone
    around = [size for pair in zip(reversed(befores), reversed(afters), strict=True) for size in pair]
    apart = any(around) and (border != "constant" or befores != afters)
    convolve = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[num_dims]

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
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """A transposed convolution of a picture whose rows lie cut: each rank a balanced share of the output's rows.

    Shapes, traffic, errors: as :func:`halo_convolution`; which rows are read, ``Spread`` says.

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
    spread = Spread(weight.shape[dim], strides[cut], paddings[cut], dilations[cut], mores[cut])
    paddings[cut] = mores[cut] = 0
    convolve = {
        1: functional.conv_transpose1d,
        2: functional.conv_transpose2d,
        3: functional.conv_transpose3d,
    }[num_dims]

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
    """A pooling of a picture whose rows lie cut: each rank computes a balanced share of the output's rows.

    ``pool`` pools what it is given, without padding along ``dim``; the other settings are its own there, stride the
    kernel when left out, and ``fill`` is what it finds outside the picture. Where the cuts are multiples of a stride
    that is the kernel, nothing is sent.

    Shapes: as :func:`halo_convolution`, with ``SlidingWindow(kernel, stride, padding)``.
    Traffic: as :func:`halo_convolution`.
    Raises: LayoutError: as :func:`halo_convolution`.

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
    """An enlargement of a picture whose rows lie cut: each rank computes a balanced share of the output's rows.

    ``enlarge`` makes ``factor`` rows of each, looking at ``margin`` rows on either side and repeating the first and the
    last row of what it is given.

    >>> from shardwright import Mesh, run_on_threads
    >>> x, twice = torch.arange(3.0).view(1, 1, 3), torch.nn.Upsample(scale_factor=2)
    >>> def share(axes):
    ...     mine = x.split([2, 1], dim=2)[axes["tp"].index]
    ...     return halo_enlarge(mine, twice, axes["tp"], (2, 1), factor=2).tolist()
    >>> run_on_threads(Mesh(tp=2), share)
    [[[[0.0, 0.0, 1.0]]], [[[1.0, 2.0, 2.0]]]]
    """
    return _compute(x_BChW, axis, sizes, dim, Enlarged(factor, margin), enlarge)


def whole_rows(x_BChW: Tensor, axis: Axis, sizes: Sequence[int], dim: int = 2) -> Tensor:
    """The whole picture, for members that all go on with the same work.

    Traffic: forward, one all-gather of the whole; backward, none.
    """
    whole = cut_to_whole(x_BChW, axis, dim, sizes)
    return whole.clone(memory_format=torch.contiguous_format) if axis.size > 1 else whole  # else a view, not to change


def mean_of_rows(x_BChW: Tensor, pool: Callable[[Tensor], Tensor], axis: Axis, num_rows: int, dim: int = 2) -> Tensor:
    """A pooling to one row of a picture whose rows lie cut: ``pool`` takes the mean of the rows that it is given.

    Traffic: forward, one all-reduce of the output; backward, none.
    """
    return partial_to_whole(pool(x_BChW) * (x_BChW.shape[dim] / num_rows), axis)
