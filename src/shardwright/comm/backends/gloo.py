"""Channels over gloo, torch's backend for CPUs: used between machines, or where ranks share no memory.

gloo's own all-gather and reduce-scatter are slow for large messages. Here, in an all-gather each rank sends one message
to each other rank of the group. A reduce-scatter is an all-to-all and a local sum in the order of the group's ranks, so
that it repeats bit for bit. gloo's all-reduce is fast and is used as it is. ``benchmarks/collectives`` has the
measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.backends.group_channel import REDUCTIONS, GroupChannel
from shardwright.comm.backends.shared_sums import parts_of
from shardwright.comm.collective_call import CollectiveCall
from shardwright.comm.pending import Pending


class GlooChannel(GroupChannel):
    """One process group over gloo, with its collectives and p2p. See :class:`~shardwright.comm.channel.Channel`."""

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """All-reduces ``tensors`` in place by torch's all-reduce; several tensors are first joined in a copy."""
        self._begin(call, sum(tensor.nbytes for tensor in tensors))
        message = tensors[0] if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])
        work = dist.all_reduce(message, REDUCTIONS[op], self.group, async_op=True)

        def finish() -> None:
            if len(tensors) > 1:
                for tensor, part in zip(tensors, message.split([t.numel() for t in tensors]), strict=True):
                    tensor.copy_(part.view_as(tensor))

        return self._pending(call, [work], finish)

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """All-gathers into ``parts`` by sending this rank's part to each other member, all messages at once."""
        number = self._begin(call, sum(part.nbytes for part in parts))
        return self._pending(call, self._messages(number, [parts[index]] * len(parts), parts), lambda: None)

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """Reduce-scatters into ``out`` by an all-to-all of the parts and a local sum in the order of the members."""
        number = self._begin(call, sum(tensor.nbytes for tensor in tensors))
        parts = parts_of(tensors, sizes)
        received = [out if i == self.index else torch.empty_like(out) for i in range(len(parts))]
        works = self._messages(number, parts, received)

        def finish() -> Tensor:
            received[self.index] = parts[self.index]  # parts are kept until now: they were being sent
            torch.add(received[0], received[1], out=out)
            for term in received[2:]:
                out.add_(term)
            return out

        return self._pending(call, works, finish)

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """Runs an all-to-all: sends ``parts[i]`` to member i, and fills ``outs[i]`` with the tensor of member i."""
        number = self._begin(call, sum(part.nbytes for part in parts))
        outs[self.index].copy_(parts[self.index])
        return self._pending(call, self._messages(number, parts, outs), lambda: outs)

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Sends a copy of ``tensor`` to member ``to``, so that the sender does not wait for the receiver."""
        self._begin(call, tensor.nbytes, meets=False)
        message = tensor.clone()  # gloo's isend completes only when the receiver has called
        self.transport.keep(dist.isend(message, group=self.group, group_dst=self._place(to), tag=0), message)
        return Pending(lambda: None)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Starts to fill ``tensor`` with the next message from member ``source``, by torch's receive."""
        self._begin(call, tensor.nbytes, meets=False)
        work = dist.irecv(tensor, group=self.group, group_src=self._place(source), tag=0)
        return self._pending(call, [work], lambda: tensor)

    def _messages(self, number: int, parts: list[Tensor], received: list[Tensor]) -> list[Any]:
        """Sends ``parts[i]`` to member i and receives ``received[i]`` from it, all at once."""
        others = [i for i in range(len(self.ranks)) if i != self.index]
        tag = 1 + number % 2**20  # a tag of its own: messages of other calls may be in flight
        group, places = self.group, {i: self._place(i) for i in others}
        sources, targets = ([i for i in others if tensors[i].numel()] for tensors in (received, parts))
        works = [dist.irecv(received[i], group=group, group_src=places[i], tag=tag) for i in sources]
        return works + [dist.isend(parts[i], group=group, group_dst=places[i], tag=tag) for i in targets]
