"""Channel-parallel convolutions: cut by out-channels, then in-channels, like column- and row-parallel linear layers.

The first convolution of a chain holds some out-channels and the last the same in-channels; one all-reduce completes
the output. Of a grouped convolution each rank holds whole groups, whose outputs are gathered instead of summed.

B batch, C channels, S pixels
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shardwright.comm.autograd import cut_to_whole, partial_to_whole, sum_gradient
from shardwright.comm.axis import Axis
from shardwright.operators.norms import FeatureSplit
from shardwright.sharding.box import Range


@dataclass(frozen=True)
class CutConvolution:
    """One convolution on a rank that holds some of its channels: its collectives, and the channels that it reads.

    The tensor-parallel strategies build it. ``shares`` are the axes over which the input is replicated while each
    member computes its own channels; ``held`` are the in-channels of this rank's groups, in a grouped convolution.
    ``sums`` are the axes whose members hold partial sums of the output. If there are none, ``joins`` are the axes whose
    members hold some of its channels, the fastest axis first, each with every member's number of channels.
    """

    shares: tuple[Axis, ...] = ()
    held: Range | None = None
    sums: tuple[Axis, ...] = ()
    joins: tuple[FeatureSplit, ...] = ()

    def __call__(self, convolve: Callable[..., Tensor], x_BCS: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Runs ``convolve(x, weight, bias)``; returns all output channels, or this rank's if nothing sums or joins.

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
