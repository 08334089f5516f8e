"""Convolutions whose channels, or whose pixels, lie cut over ranks.

Channels: the first convolution of a chain holds some out-channels, the last the same in-channels, and one sum makes
the output whole; groups are dealt whole, and what comes out of them is joined instead of summed.

Pixels: each rank holds some rows of the picture and fetches the *halo*, the rows of others that its windows reach::

    rank 0   | 0 1 2 3 4 |            kernel 3, padding 1: rank 1 computes rows 5 to 9,
    rank 1           4 | 5 6 7 8 9 | 10      and fetches rows 4 and 10
    rank 2                       9 | 10 11 12 |

B batch, C channels, h this rank's rows of H, W columns
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from shardwright.boxes import Range
from shardwright.comm import Axis, cut_to_whole, once, partial_to_whole, sum_gradient
from shardwright.errors import LayoutError, explain
from shardwright.mesh import balanced
from shardwright.product.norms import Split

# ---- channels cut

Convolve = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A convolution of an input with a weight and a bias: the module's own, with its stride and padding."""


@dataclass(frozen=True)
class CutConvolution:
    """How one convolution runs on a rank that holds some of its channels.

    ``shares`` are the axes over which the input is whole, each member going on with its own channels; ``held`` are the
    in-channels of this rank's groups, where there are groups. ``sums`` are the axes whose members hold terms of the
    output, ``joins`` those whose members hold some of its channels, the fastest axis first.
    """

    shares: tuple[Axis, ...] = ()
    held: Range | None = None
    sums: tuple[Axis, ...] = ()
    joins: tuple[Split, ...] = ()

    def __call__(self, convolve: Convolve, x_BCS: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The output: whole, or this rank's channels of it.

        Traffic: forward, for each axis of ``sums`` one all-reduce of the output, of ``joins`` one all-gather; backward,
            for each axis of ``shares`` one all-reduce of the input's gradient, if it needs one.
        """
        for axis in self.shares:
            x_BCS = sum_gradient(x_BCS, axis, overwrite=True)
        if self.held is not None:
            x_BCS = x_BCS.narrow(1, self.held[0], self.held[1] - self.held[0])
        if not self.sums:
            y_BCS = convolve(x_BCS, weight, bias)
            for axis, sizes in self.joins:
                y_BCS = cut_to_whole(y_BCS, axis, 1, sizes)
            return y_BCS
        y_BCS = convolve(x_BCS, weight, None)
        for axis in self.sums:
            y_BCS = partial_to_whole(y_BCS, axis)
        if bias is not None:  # after the sum, so that it is added once
            y_BCS = y_BCS + bias.view(-1, *(1,) * (y_BCS.dim() - 2))
        return y_BCS


# ---- pixels cut


class Window(NamedTuple):
    """What one output reads along one dim: a kernel's reach, the steps between outputs, zeros outside."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def reach(self) -> int:
        """From the first row that an output reads to the row after the last."""
        return self.dilation * (self.kernel - 1) + 1

    def num_outputs(self, size: int) -> int:
        """How many outputs so many rows have.

        >>> Window(3).num_outputs(5), Window(3, stride=2, padding=1).num_outputs(5)
        (3, 3)
        """
        return (size + 2 * self.padding - self.reach) // self.stride + 1

    def rows(self, outputs: Range) -> Range:
        """The rows that these outputs read; below zero, and from the last one on, they are padding.

        >>> Window(3, padding=1).rows((0, 2)), Window(3, padding=1).rows((2, 2))
        ((-1, 3), (0, 0))
        """
        first, stop = outputs
        if first == stop:
            return 0, 0
        return first * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.reach


def output_sizes(sizes: Sequence[int], window: Window) -> tuple[int, ...]:
    """How many outputs each member computes: balanced, so some other number than its rows may call for.

    Raises: LayoutError: the window is larger than the picture.

    >>> output_sizes((4, 3, 3), Window(3)), output_sizes((4, 3, 3), Window(2, stride=2))
    ((3, 3, 2), (2, 2, 1))
    """
    num_outputs = window.num_outputs(sum(sizes))
    if num_outputs < 1:
        raise LayoutError(
            explain(
                "the window is larger than the picture",
                given=f"{sum(sizes)} rows and {window}",
                allowed=f"{window.reach - 2 * window.padding} rows or more",
                fix="use a smaller kernel or dilation, or more padding",
            )
        )
    return tuple(b - a for a, b in pairwise(balanced(num_outputs, len(sizes))))


def _ranges(sizes: Sequence[int]) -> tuple[Range, ...]:
    return tuple(pairwise(accumulate(sizes, initial=0)))


def _common(a: Range, b: Range) -> Range:
    """The rows in both; none where they do not meet."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


class _Halo(Function):
    """Rows as they lie, to the rows that each member needs: forward fetched, backward the gradients given back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, dim: int, held: tuple[Range, ...], needed: tuple[Range, ...]
    ) -> Tensor:
        ctx.axis, ctx.dim, ctx.held, ctx.needed = axis, dim, held, needed
        me = axis.index
        for to in _others(axis):
            axis.send_async(_take(x, dim, held[me], _common(held[me], needed[to])), to)
        parts = {me: _take(x, dim, held[me], _common(held[me], needed[me]))}
        for source in _others(axis):
            parts[source] = axis.receive(_shape(x, dim, _common(held[source], needed[me])), x.dtype, source)
        return torch.cat([parts[i] for i in range(axis.size)], dim)

    @staticmethod
    @once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        axis, dim, held, needed = ctx.axis, ctx.dim, ctx.held, ctx.needed
        me = axis.index
        for to in _others(axis):
            axis.send_async(_take(dy, dim, needed[me], _common(held[to], needed[me])), to)
        dx = dy.new_zeros(_shape(dy, dim, held[me]))
        own = _common(held[me], needed[me])
        _take(dx, dim, held[me], own).copy_(_take(dy, dim, needed[me], own))
        for source in _others(axis):
            rows = _common(held[me], needed[source])
            _take(dx, dim, held[me], rows).add_(axis.receive(_shape(dy, dim, rows), dy.dtype, source))
        return dx, None, None, None, None


def _others(axis: Axis) -> list[int]:
    return [index for index in range(axis.size) if index != axis.index]


def _take(x: Tensor, dim: int, lies: Range, rows: Range) -> Tensor:
    """Some rows of a tensor that has those of ``lies``: a view."""
    return x.narrow(dim, rows[0] - lies[0] if rows[0] < rows[1] else 0, rows[1] - rows[0])


def _shape(x: Tensor, dim: int, rows: Range) -> tuple[int, ...]:
    return (*x.shape[:dim], rows[1] - rows[0], *x.shape[dim + 1 :])


def _windows(
    x: Tensor, axis: Axis, sizes: Sequence[int], dim: int, window: Window, apply: Callable[[Tensor], Tensor]
) -> Tensor:
    """``apply`` on the rows that this rank's outputs read, zeros outside the picture; one output for each window."""
    outputs = _ranges(output_sizes(sizes, window))
    _check_rows(x, axis, sizes, dim)
    wanted, size = [window.rows(each) for each in outputs], sum(sizes)
    needed = tuple(_common((0, size), rows) for rows in wanted)
    if axis.size > 1:
        x = cast(Tensor, _Halo.apply(x, axis, dim, _ranges(sizes), needed))  # type: ignore[no-untyped-call]
    first, stop = wanted[axis.index]
    idle = first == stop  # it still gives others its rows: it computes one output of zeros and drops it
    before = window.reach if idle else min(max(0, -first), stop - first)
    after = min(max(0, stop - size), stop - first)
    if before or after:
        x = functional.pad(x, (*(0,) * (2 * (x.dim() - 1 - dim)), before, after))
    y = apply(x)
    return y.narrow(dim, 0, 0) if idle else y


def _check_rows(x: Tensor, axis: Axis, sizes: Sequence[int], dim: int) -> None:
    if len(sizes) != axis.size or x.shape[dim] != sizes[axis.index]:
        raise LayoutError(
            explain(
                f"the rows over axis '{axis.name}' are not those of the sizes given",
                given=f"sizes {tuple(sizes)}, dim {dim} of {list(x.shape)} on member {axis.index} of {axis.size}",
                allowed="one size for each member, that of its own rows",
                fix="pass what output_sizes() gave for the layer before, or balanced sizes of the input",
            )
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
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """A convolution of a picture whose rows lie cut: each rank computes a balanced share of the output's rows.

    For inputs too large for one device. A window may reach over several members; zeros are padded at the picture's own
    borders only. The gradients of ``weight`` and ``bias`` are terms of a sum over ``axis``.

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
    strides, paddings, dilations = (_each(value, num_dims) for value in (stride, padding, dilation))
    cut = dim - 2
    window = Window(weight.shape[dim], strides[cut], paddings[cut], dilations[cut])
    paddings[cut] = 0  # at the borders alone
    convolve = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[num_dims]

    def apply(x: Tensor) -> Tensor:
        y: Tensor = convolve(x, weight, bias, strides, paddings, dilations, groups)
        return y

    return _windows(x_BChW, axis, sizes, dim, window, apply)


def halo_pool(
    x_BChW: Tensor,
    pool: Callable[[Tensor], Tensor],
    axis: Axis,
    sizes: Sequence[int],
    *,
    kernel: int,
    stride: int | None = None,
    dim: int = 2,
) -> Tensor:
    """A pooling of a picture whose rows lie cut: each rank computes a balanced share of the output's rows.

    ``pool`` pools what it is given, without padding; ``kernel`` and ``stride`` are its own along ``dim``, stride the
    kernel when left out. Where the cuts are multiples of a stride that is the kernel, nothing is sent.

    Shapes: as :func:`halo_convolution`, with ``Window(kernel, stride)``.
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
    return _windows(x_BChW, axis, sizes, dim, Window(kernel, kernel if stride is None else stride), pool)
