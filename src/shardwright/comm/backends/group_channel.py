"""The base class of channels over a ``torch.distributed`` process group, for gloo and for NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.channel import Channel
from shardwright.comm.collective_call import FIX_LOST, CollectiveCall
from shardwright.comm.failures import LostPartnerError
from shardwright.comm.pending import Pending
from shardwright.formatting import first_line

T = TypeVar("T")

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Watched(Protocol):
    """A collective call that a watchdog checks for a timeout: over NCCL, ``wait`` blocks only the GPU's stream."""

    def waited(self, device: torch.device) -> None:
        """Drops torch's handles of the call, which keep its tensors alive.

        Call it when the current stream of ``device`` has been made to wait for the call.
        """


class GroupTransport(Protocol):
    """Creates a rank's ``torch.distributed`` groups, keeps tensors of unfinished sends alive and detects timeouts."""

    rank: int

    def group(self, ranks: tuple[int, ...], name: str = "") -> Any:
        """Returns the ``torch.distributed`` group over ``ranks``, which they create at their first call.

        So all of them must make that call. ``name`` distinguishes groups over the same ranks.
        """

    def channel_of(self, ranks: tuple[int, ...]) -> Channel:
        """Returns a new channel over ``ranks``; all of them must create their channels in the same order."""

    def keep(self, work: Any, message: Tensor) -> None:
        """Keeps a sent tensor alive until the send ``work`` is done, even if the channel is freed before that."""

    def watch(self, call: CollectiveCall, ranks: tuple[int, ...], works: Sequence[Any]) -> Watched:
        """Lets a watchdog follow a call, so that this rank ends with an error if the call is not done in time.

        ``works`` are torch's handles of the call.
        """


class GroupChannel(Channel):
    """The methods of :class:`~shardwright.comm.channel.Channel` that are the same for gloo and NCCL.

    A subclass for each of torch's backends adds the other collectives.
    """

    def __init__(self, transport: GroupTransport, ranks: tuple[int, ...], begin: Callable[..., int]) -> None:
        self.transport, self.ranks, self._begin = transport, ranks, begin
        self.index = ranks.index(transport.rank)
        self.group = transport.group(ranks) if len(ranks) > 1 else None
        ordered = sorted(ranks)
        self._places = [ordered.index(rank) for rank in ranks]

    def subset(self, indices: tuple[int, ...]) -> Channel:
        """Returns a channel over the members ``indices`` of this group."""
        return self.transport.channel_of(tuple(self.ranks[i] for i in indices))

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Broadcasts: overwrites ``tensor`` with that of member ``source``, by torch's broadcast."""
        self._begin(call, tensor.nbytes)
        work = dist.broadcast(tensor, group=self.group, group_src=self._place(source), async_op=True)
        return self._pending(call, [work], lambda: tensor)

    def _place(self, index: int) -> int:
        """Returns a member's rank in torch's process group, whose ranks are in ascending order."""
        return self._places[index]

    def _pending(self, call: CollectiveCall, works: Sequence[Any], result: Callable[[], T]) -> Pending[T]:
        def finish() -> T:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as failure:
                raise lost_partner(call, self.ranks, self.transport.rank, failure) from failure
            return result()

        return Pending(finish)


def lost_partner(call: CollectiveCall, ranks: Sequence[int], rank: int, failure: object) -> LostPartnerError:
    """Returns the error to raise for a call that did not complete, because another rank stopped or never made the call.

    ``failure`` is torch's error, or a text about the timeout; ``rank`` is this rank, and ``ranks`` are the group's.
    """
    return LostPartnerError(
        f"{call} did not complete",
        given=f"rank {rank} of ranks {', '.join(map(str, ranks))}; torch reports: {first_line(failure)}",
        allowed="the same call on each of these ranks",
        fix=FIX_LOST,
    )
