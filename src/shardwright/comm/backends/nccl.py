"""Channels over NCCL, torch's backend for NVIDIA GPUs.

The code follows these rules of NCCL:

- A communicator runs its calls one after the other, and the first one blocks the host until all members have called it.
  So each group's communicator is created with the group, while all members take part.
- Single sends and receives of two ranks have a communicator of their own, one queue for both directions: a receive
  posted early delays a later send, and two ranks that do so deadlock. So messages that go up the axis and messages that
  go down have a group each, and :meth:`NcclChannel.connect` creates their communicators, pair after pair.
- ``wait`` blocks the stream and not the host, and reports no lost rank: :class:`Watchdog` does.
- Integers of 16 bits have no NCCL type: they are sent as bytes, and summed in 32 bits.

Source: NVIDIA, NCCL user guide, "Group calls" and "Using multiple communicators concurrently"; torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.backends.group_channel import REDUCTIONS, GroupChannel, GroupTransport
from shardwright.comm.channel import Message
from shardwright.comm.collective_call import CollectiveCall
from shardwright.comm.pending import Pending
from shardwright.errors import CommunicationError

T = TypeVar("T")

_WITHOUT_TYPE = (torch.int16, torch.uint16)


class NcclChannel(GroupChannel):
    """One process group over NCCL, with its collectives and p2p. See :class:`~shardwright.comm.channel.Channel`."""

    def __init__(
        self, transport: GroupTransport, ranks: tuple[int, ...], begin: Callable[..., int], device: torch.device
    ) -> None:
        super().__init__(transport, ranks, begin)
        self.device = device
        self._is_ordered = list(ranks) == sorted(ranks)
        self._connected: set[int] = set()

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """All-reduces ``tensors`` in place; several go as one grouped call, without a copy that joins them."""
        self._begin(call, sum(tensor.nbytes for tensor in tensors))
        operands = [_summable(tensor) for tensor in tensors]
        if len(operands) == 1:
            works = [dist.all_reduce(operands[0], REDUCTIONS[op], self.group, async_op=True)]
        else:
            with dist.distributed_c10d._coalescing_manager(self.group, async_ops=True) as together:
                for tensor in operands:
                    dist.all_reduce(tensor, REDUCTIONS[op], self.group)
            works = list(together.works)

        def finish() -> None:
            for tensor, operand in zip(tensors, operands, strict=True):
                if operand.dtype != tensor.dtype and not tensor.is_complex():
                    tensor.copy_(operand)

        return self._pending(call, works, finish)

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """All-gathers into ``parts``: by one NCCL call if these are consecutive slices of one tensor, of equal size.

        Otherwise, or if the ranks of the group are not in ascending order, it uses torch's all-gather into a list.
        """
        self._begin(call, sum(part.nbytes for part in parts))
        views = [_movable(part) for part in parts]
        whole = _joined(views) if self._is_ordered else None
        if whole is not None:
            work = _torch("all_gather_single", "all_gather_into_tensor")(whole, views[index], self.group, async_op=True)
        else:
            work = dist.all_gather(self._ordered(views), views[index], self.group, async_op=True)
        return self._pending(call, [work], lambda: None)

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """Reduce-scatters ``tensors`` into ``out`` by torch's own call; several are first joined in a copy."""
        self._begin(call, sum(tensor.nbytes for tensor in tensors))
        whole = tensors[0] if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])
        operand, result = _summable(whole.view(-1)), _summable(out)
        if len(set(sizes)) == 1 and self._is_ordered:
            work = _torch("reduce_scatter_single", "reduce_scatter_tensor")(
                result, operand, group=self.group, async_op=True
            )
        else:
            numbers = 1 + whole.is_complex()  # real numbers in one element
            parts = self._ordered(list(operand.split([numbers * size for size in sizes])))
            work = dist.reduce_scatter(result, parts, group=self.group, async_op=True)

        def finish() -> Tensor:
            return out if result.dtype == out.dtype or out.is_complex() else out.copy_(result)

        return self._pending(call, [work], finish)

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """Sends ``parts`` and fills ``outs`` by torch's all-to-all, which is one group of sends and receives."""
        self._begin(call, sum(part.nbytes for part in parts))
        sources, targets = ([_movable(tensor) for tensor in tensors] for tensors in (parts, outs))
        work = dist.all_to_all(self._ordered(targets), self._ordered(sources), group=self.group, async_op=True)
        return self._pending(call, [work], lambda: outs)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Broadcasts: overwrites ``tensor`` with that of member ``source``, by torch's broadcast."""
        pending = super().broadcast(call, _movable(tensor), source)
        return Pending(lambda: (pending.wait(), tensor)[1])

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Sends a copy of ``tensor`` to member ``to``, so that the sender may overwrite its own at once.

        Raises: CommunicationError: :meth:`connect` has not connected the two members.
        """
        self._begin(call, tensor.nbytes, meets=False)
        message, group = _movable(tensor.clone()), self._group_between(call, to, to > self.index)
        work = dist.isend(message, group=group, group_dst=self._place(to))
        self.transport.watch(call, self.ranks, [work])
        self.transport.keep(work, message)
        return Pending(lambda: None)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Starts to fill ``tensor`` with the next message from member ``source``, by torch's receive.

        Raises: CommunicationError: :meth:`connect` has not connected the two members.
        """
        self._begin(call, tensor.nbytes, meets=False)
        group = self._group_between(call, source, source < self.index)
        work = dist.irecv(_movable(tensor), group=group, group_src=self._place(source))
        return self._pending(call, [work], lambda: tensor)

    def send_and_receive(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending[None]:
        """Starts all messages as one NCCL group, in which no message waits for another.

        Returns a handle whose ``wait`` returns when everything has arrived.
        """
        operations = []
        for make, messages in ((dist.isend, sends), (dist.irecv, receives)):
            for call, tensor, member in messages:
                self._begin(call, tensor.nbytes, meets=False)
                peer = self._place(member)
                operations.append(dist.P2POp(make, _movable(tensor), group=self.group, group_peer=peer))
        works = list(dist.batch_isend_irecv(operations))
        for message in sends:
            self.transport.keep(works[-1], message.tensor)
        return self._pending([*sends, *receives][0].call, works, lambda: None)

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Creates NCCL's communicators for p2p messages between each pair of members, one for each direction.

        All members pass the same pairs of (lower, higher) member. It must be called before the first :meth:`send` or
        :meth:`receive` of a pair. The members of each new pair send each other one number, which is not recorded.
        """
        up, down = (self.transport.group(self.ranks, name) for name in ("up", "down"))
        for low, high in pairs:
            other = low if self.index == high else high
            if self.index not in (low, high) or other in self._connected:
                continue
            for group, sender in ((up, low), (down, high)):
                nothing = torch.zeros(1, device=self.device)
                if sender == self.index:
                    dist.send(nothing, group=group, group_dst=self._place(other))
                else:
                    dist.recv(nothing, group=group, group_src=self._place(other))
            self._connected.add(other)

    def _group_between(self, call: CollectiveCall, member: int, upwards: bool) -> Any:
        """Returns the process group for messages between this member and another, in one direction."""
        if member not in self._connected:
            raise CommunicationError(
                f"{call}: nothing connects members {self.index} and {member}",
                given="the first message between them",
                allowed="pairs that axis.connect has connected: NCCL makes what a message needs on both sides at once",
                fix="call axis.connect with the pairs on every rank first, or send with send_and_receive_async",
            )
        return self.transport.group(self.ranks, "up" if upwards else "down")

    def _ordered(self, parts: list[Tensor]) -> list[Tensor]:
        """Returns the members' tensors in the order of the process group's ranks."""
        return parts if self._is_ordered else [parts[i] for i in sorted(range(len(parts)), key=self.ranks.__getitem__)]

    def _pending(self, call: CollectiveCall, works: Sequence[Any], result: Callable[[], T]) -> Pending[T]:
        watched, pending = self.transport.watch(call, self.ranks, works), super()._pending(call, works, result)

        def finish() -> T:
            value = pending.wait()
            watched.waited(self.device)
            return value

        return Pending(finish)


def _torch(name: str, before: str) -> Callable[..., Any]:
    """Returns a function of ``torch.distributed`` by its name since torch 2.13, or by its name ``before`` that."""
    function: Callable[..., Any] = getattr(dist, name if hasattr(dist, name) else before)
    return function


def _movable(tensor: Tensor) -> Tensor:
    """Returns the tensor's memory as a dtype that NCCL can send, such as uint8 for int16. It must not be summed."""
    if tensor.is_complex():
        return torch.view_as_real(tensor).view(-1)
    return tensor.view(-1).view(torch.uint8) if tensor.dtype in _WITHOUT_TYPE else tensor


def _summable(tensor: Tensor) -> Tensor:
    """Returns the tensor in a dtype that NCCL can sum: a view of its memory, or a copy in int32."""
    if tensor.is_complex():
        return torch.view_as_real(tensor).view(-1)
    return tensor.to(torch.int32) if tensor.dtype in _WITHOUT_TYPE else tensor


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns the tensor of which the parts are equal, consecutive slices, or None if they are not."""
    first, *rest = parts
    storage = first.untyped_storage().data_ptr()
    if any(part.untyped_storage().data_ptr() != storage for part in rest):  # adjacent by chance
        return None
    ends = [first.data_ptr() + i * first.nbytes for i in range(1, len(parts))]
    alike = all(part.numel() == first.numel() for part in rest)
    if not alike or [part.data_ptr() for part in rest] != ends:
        return None
    return first.as_strided((len(parts) * first.numel(),), (1,))
