"""Convolutions whose channels lie cut over ranks.

The first convolution of a chain holds some out-channels, the last the same in-channels, and one sum makes the output
whole; groups are dealt whole, and what comes out of them is joined instead of summed.

B batch, C channels, S pixels
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shardwright.comm.autograd import cut_to_whole, partial_to_whole, sum_gradient
from shardwright.comm.axis import Axis
from shardwright.operators.norms import Split
from shardwright.sharding.box import Range

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
