"""A channel for tensors on an accelerator over a backend that sends host memory only: gloo, or shared memory.

Every message is copied to the host and back, and the host waits for the copies. Use it where ranks share a GPU, so that
NCCL cannot serve them: in tests, and to try a layout out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwright.comm.channel import Channel
from shardwright.comm.collective_call import CollectiveCall
from shardwright.comm.pending import Pending

T = TypeVar("T")


@dataclass(frozen=True)
class ChannelThroughHost(Channel):
    """A process group that copies accelerator tensors to host memory and sends these copies through ``channel``.

    See :class:`~shardwright.comm.channel.Channel` for the methods.
    """

    channel: Channel

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """All-reduces ``tensors`` through copies in host memory; ``wait`` copies the results back."""
        hosts = [_copied(tensor) for tensor in tensors]
        return _returning(self.channel.all_reduce(call, hosts, op), tensors, hosts, None)

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """All-gathers through a copy of this member's part in host memory; ``wait`` fills the other ``parts``."""
        hosts = [_copied(part) if i == index else _empty_like(part) for i, part in enumerate(parts)]
        pending = self.channel.all_gather(call, hosts, index)
        # this member's own part stays as it is: autograd may have saved it, and would refuse one that was written to
        others, received = ([tensor for i, tensor in enumerate(tensors) if i != index] for tensors in (parts, hosts))
        return _returning(pending, others, received, None)

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """Reduce-scatters copies of ``tensors`` in host memory; ``wait`` copies this member's sum to ``out``."""
        host = _empty_like(out)
        pending = self.channel.reduce_scatter(call, host, [_copied(tensor) for tensor in tensors], sizes)
        return _returning(pending, [out], [host], out)

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """Runs an all-to-all on copies of ``parts`` in host memory; ``wait`` copies the received tensors back."""
        hosts = [_empty_like(out) for out in outs]
        pending = self.channel.all_to_all(call, hosts, [_copied(part) for part in parts])
        return _returning(pending, outs, hosts, outs)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Broadcasts a copy of ``tensor`` in host memory; ``wait`` copies the result to ``tensor``."""
        host = _copied(tensor)
        return _returning(self.channel.broadcast(call, host, source), [tensor], [host], tensor)

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Sends a copy of ``tensor`` in host memory to member ``to``."""
        return self.channel.send(call, _copied(tensor), to)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Starts to receive from member ``source`` into host memory; ``wait`` copies the message to ``tensor``."""
        host = _empty_like(tensor)
        return _returning(self.channel.receive(call, host, source), [tensor], [host], tensor)

    def subset(self, indices: tuple[int, ...]) -> Channel:
        """Returns a channel over the members ``indices`` of this group, which copies through host memory too."""
        channel = self.channel.subset(indices)  # one that the transport made goes through the host already
        return channel if isinstance(channel, ChannelThroughHost) else ChannelThroughHost(channel)

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Creates the connections of ``channel`` for p2p messages between these pairs of members."""
        self.channel.connect(pairs)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


def _returning(pending: Pending[Any], tensors: Sequence[Tensor], hosts: Sequence[Tensor], result: T) -> Pending[T]:
    """Returns a :class:`Pending` whose ``wait`` copies the received host tensors into ``tensors``."""

    def finish() -> T:
        pending.wait()
        for tensor, host in zip(tensors, hosts, strict=True):
            tensor.copy_(host)
        return result

    return Pending(finish)
