"""Collectives between processes of one machine, through memory that they share.

A sender copies its tensor into a block of shared memory and sends the index of the block over a local socket; the other
members read the block. So a call costs one copy and one read, where a network stack costs many::

    rank 0   tensor --copy--> block  --"block 3"-->  rank 1   tensor += block 3   --"read"-->  the block is free

Starting a call copies and sends, and never waits; ``wait`` reads. Messages of a few KB travel in the socket itself.
Blocks have no names: their descriptors are passed over the sockets, so nothing is left behind when a rank is killed,
and a rank that dies is noticed at once because its socket closes.

Sums are taken in the order of the members, so that they are equal on all and repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwright.comm.backends.block_sizes import INLINE_BYTES
from shardwright.comm.backends.message_blocks import (
    POST,
    LateError,
    LostError,
    MessageExchange,
    OtherSizeError,
    ReceivedMessage,
)
from shardwright.comm.backends.shared_sums import SharedAllReduce, combine, parts_of, scatter_back
from shardwright.comm.channel import Channel
from shardwright.comm.collective_call import DEBUG, FIX_LOST, CollectiveCall
from shardwright.comm.failures import LostPartnerError
from shardwright.comm.pending import Pending
from shardwright.errors import CommunicationError

T = TypeVar("T")

Begin = Callable[..., int]
"""A function that records and checks a call and returns its number; see ``ProcessTransport.call_starter``."""


class SharedChannel(Channel):
    """One process group in shared memory, with collectives and p2p. See :class:`~shardwright.comm.channel.Channel`."""

    def __init__(
        self, exchange: MessageExchange, ranks: tuple[int, ...], number: int, begin: Begin, subset: Callable[..., Any]
    ) -> None:
        self.exchange, self.ranks, self.number = exchange, ranks, number
        self.index = ranks.index(exchange.rank)
        self.others = [rank for rank in ranks if rank != exchange.rank]
        self._begin, self._subset = begin, subset
        self._num_sent: dict[int, int] = {}
        self._num_received: dict[int, int] = {}
        exchange.connect(ranks)

    def subset(self, indices: tuple[int, ...]) -> Any:
        """Returns a channel over the members ``indices`` of this group."""
        return self._subset(tuple(self.ranks[i] for i in indices))

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """All-reduces ``tensors`` in place, through shared memory.

        If there are more than two members and the message is larger than 4 KiB, each member sums one part of it
        (:class:`SharedAllReduce`). Otherwise each member sums everything.
        """
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        number = self._begin(call, num_bytes)
        if len(self.ranks) > 2 and num_bytes > INLINE_BYTES:
            place = self._post(call, number, tensors, self.others, num_bytes - num_bytes // len(self.ranks))
            with self._naming(call):
                under_way = SharedAllReduce(self.exchange, self.ranks, (self.number, number), tensors, op, place)
            return self._pending(call, under_way.finish)
        # Two members may add in any order, since a + b is b + a to the last bit. With more members, each adds all terms
        # in the order of the members.
        mine = torch.cat([tensor.view(-1) for tensor in tensors]) if len(self.ranks) > 2 else None
        self._post(call, number, tensors, self.others)

        def finish() -> None:
            if mine is None:
                self._combine_with(self.others[0], number, tensors, op)
                return
            total = torch.empty_like(mine)
            for position, rank in enumerate(self.ranks):
                term = mine if position == self.index else self._read(rank, number, mine)[0]
                total.copy_(term) if position == 0 else combine(total, term, op)
            scatter_back(total, tensors)

        return self._pending(call, finish)

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """All-gathers into ``parts``: posts this rank's part in shared memory, and copies the other members' parts."""
        number = self._begin(call, sum(part.nbytes for part in parts))
        self._post(call, number, [parts[index]], self.others)

        def finish() -> None:
            for position, rank in enumerate(self.ranks):
                if position != index:
                    self._copy(rank, number, parts[position])

        return self._pending(call, finish)

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """Reduce-scatters into ``out``: posts ``tensors`` in shared memory, and sums this rank's part over all members.

        The part begins at the same element in all members' tensors.
        """
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        number = self._begin(call, num_bytes)
        before = sum(sizes[: self.index]) * out.element_size()
        place = self._post(call, number, tensors, self.others, num_bytes - out.nbytes)
        if place < 0:
            mine = parts_of(tensors, sizes)[self.index].clone()
        else:  # this part is in the block too, so the tensors may be freed
            self.exchange.block_sizes.hold(place)
            mine = self.exchange.blocks[place].bytes[before : before + out.nbytes].view(out.dtype)

        messages = []

        def term(position: int) -> Tensor:
            if position == self.index:
                return mine.to(out.device)
            part, message = self._read(self.ranks[position], number, out, before, num_bytes)
            messages.append(message)
            return part.to(out.device)

        def finish() -> Tensor:
            torch.add(term(0), term(1), out=out)
            for position in range(2, len(self.ranks)):
                out.add_(term(position))
            for message in messages:
                self.exchange.done_reading(*message)
            if place >= 0:
                self.exchange.block_sizes.release(place)
            return out

        return self._pending(call, finish)

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """Runs an all-to-all: posts ``parts[i]`` in shared memory for member i, and reads ``outs`` from the others."""
        number = self._begin(call, sum(part.nbytes for part in parts))
        for position, rank in enumerate(self.ranks):
            if position != self.index:
                self._post(call, number, [parts[position]], [rank])
        outs[self.index].copy_(parts[self.index])

        def finish() -> list[Tensor]:
            for position, rank in enumerate(self.ranks):
                if position != self.index:
                    self._copy(rank, number, outs[position])
            return outs

        return self._pending(call, finish)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Broadcasts: member ``source`` posts its tensor in shared memory, and the other members copy it."""
        number = self._begin(call, tensor.nbytes)
        if source == self.index:
            self._post(call, number, [tensor], self.others)
            return Pending(lambda: tensor)
        return self._pending(call, lambda: self._copy(self.ranks[source], number, tensor))

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Sends ``tensor`` to member ``to`` through shared memory, without waiting for the receiver."""
        self._begin(call, tensor.nbytes, meets=False)
        number = self._num_sent.get(to, 0)
        self._num_sent[to] = number + 1
        self._post(call, number | 2**63, [tensor], [self.ranks[to]])  # the top bit keeps p2p and collectives apart
        return Pending(lambda: None)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Starts to fill ``tensor`` with the next message from member ``source``; ``wait`` copies it."""
        self._begin(call, tensor.nbytes, meets=False)
        number = self._num_received.get(source, 0)
        self._num_received[source] = number + 1
        return self._pending(call, lambda: self._copy(self.ranks[source], number | 2**63, tensor))

    def _combine_with(self, rank: int, number: int, tensors: list[Tensor], op: str) -> None:
        """Adds the only other member's tensors to ``tensors``, or takes the maximum of both."""
        posted = self._receive(rank, number, sum(tensor.nbytes for tensor in tensors))
        theirs = self.exchange.peer_bytes(rank, posted).view(tensors[0].dtype)
        parts = [p.view_as(t) for t, p in zip(tensors, theirs.split([t.numel() for t in tensors]), strict=True)]
        if op == "sum":
            torch._foreach_add_(tensors, parts)
        else:
            for tensor, part in zip(tensors, parts, strict=True):
                combine(tensor, part, op)
        self.exchange.done_reading(rank, posted)

    def _receive(self, rank: int, number: int, num_bytes: int) -> ReceivedMessage:
        """Waits for a member's message; raises OtherSizeError unless it has ``num_bytes``."""
        posted = self.exchange.receive(rank, POST, self.number, number)
        if posted.num_bytes != num_bytes:
            raise OtherSizeError(f"rank {rank} sent {posted.num_bytes} bytes where {num_bytes} are expected")
        return posted

    def _read(
        self, rank: int, number: int, like: Tensor, offset: int = 0, num_bytes: int | None = None
    ) -> tuple[Tensor, Any]:
        """Returns a part of a member's message, as a tensor of ``like``'s shape, and the arguments of ``done_reading``.

        The part begins at byte ``offset``. ``num_bytes`` is the size of the whole message, if ``like`` is a part of it.
        """
        posted = self._receive(rank, number, like.nbytes if num_bytes is None else num_bytes)
        part = self.exchange.peer_bytes(rank, posted)[offset : offset + like.nbytes]
        return part.view(like.dtype).view(like.shape), (rank, posted)

    def _copy(self, rank: int, number: int, out: Tensor) -> Tensor:
        if out.numel():
            part, message = self._read(rank, number, out)
            out.copy_(part)
            self.exchange.done_reading(*message)
        else:
            self._receive(rank, number, 0)
        return out

    def _post(
        self, call: CollectiveCall, number: int, tensors: Sequence[Tensor], to: Sequence[int], sent: int | None = None
    ) -> int:
        with self._naming(call):
            return self.exchange.post(self.number, number, tensors, to, sent)

    def _pending(self, call: CollectiveCall, finish: Callable[[], T]) -> Pending[T]:
        def checked() -> T:
            with self._naming(call):
                return finish()

        return Pending(checked)

    @contextmanager
    def _naming(self, call: CollectiveCall) -> Iterator[None]:
        """Returns a context in which the loss or timeout of another rank raises an error that names the call."""
        try:
            yield
        except (LostError, LateError) as failure:
            raise LostPartnerError(
                f"{call} did not complete",
                given=f"rank {self.exchange.rank} of ranks {', '.join(map(str, self.ranks))}; {failure}",
                allowed="the same call on each of these ranks",
                fix=FIX_LOST,
            ) from failure
        except OtherSizeError as failure:
            raise CommunicationError(
                f"ranks disagree on {call}",
                given=str(failure),
                allowed="calls in the same order and of the same shapes on every rank",
                fix="give every rank the same model and batches of one size, run.shard's; a call below "
                f"`if world.rank == 0`: call it on every rank; {DEBUG} names the call",
            ) from failure
