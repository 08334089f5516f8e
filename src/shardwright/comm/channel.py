"""``Channel``: what a backend implements, one rank's end of a process group; an ``Axis`` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from shardwright.comm.collective_call import CollectiveCall
from shardwright.comm.pending import Pending


class Message(NamedTuple):
    """One of several p2p messages: its call, the tensor to send or to fill, and the other rank's index in the group."""

    call: CollectiveCall
    tensor: Tensor
    member: int


class Channel(Protocol):
    """One rank's end of a process group on one backend: collectives and p2p messages, all asynchronous.

    A member is a rank of the group, numbered from 0. A channel records what it sends, and raises CommunicationError if
    it finds that ranks make different calls. It is called through :class:`~shardwright.comm.axis.Axis`,
    which passes contiguous, detached tensors. All members make the same collective calls, in the same order.
    """

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """All-reduces ``tensors``, all of one dtype, in place and as one message, by sum or maximum (``op``)."""

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """All-gathers: fills ``parts[i]`` with the part of member i; ``parts[index]`` holds this member's own."""

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """Reduce-scatters (sums) ``tensors``, flat and joined end to end: ``out`` gets this member's part of the sum.

        ``sizes`` are the numbers of elements of all members' parts. ``wait`` returns ``out``.
        """

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """All-to-all: sends ``parts[i]`` to member i, and fills ``outs[i]`` with the tensor that member i sends.

        ``wait`` returns ``outs``.
        """

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Broadcasts: overwrites ``tensor`` with the tensor of member ``source``; ``wait`` returns ``tensor``."""

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Sends ``tensor`` to member ``to`` without waiting for the receiver; ``tensor`` may be changed at once."""

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Starts to fill ``tensor`` with the next message from member ``source``; ``wait`` returns ``tensor``."""

    def subset(self, indices: tuple[int, ...]) -> Channel:
        """Returns a new channel over the members ``indices`` of this group; these all call it, and no others."""

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Creates the connections for p2p messages between pairs of members, if the backend needs that.

        All members call it, with the same pairs, before the first :meth:`send` or :meth:`receive`.
        """
        del pairs  # nothing, unless the backend says more

    def send_and_receive(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending[None]:
        """Starts several p2p messages to and from other members at once, so that no message waits for another.

        ``wait`` returns when the tensors of ``receives`` are filled.
        """
        for call, tensor, to in sends:
            self.send(call, tensor, to)
        pending = [self.receive(call, tensor, source) for call, tensor, source in receives]

        def finish() -> None:
            for receive in pending:
                receive.wait()

        return Pending(finish)
