"""An all-reduce in two levels: through shared memory inside a node, over sockets between nodes.

Each rank sums one part of the tensor over its node, all-reduces this part with one rank of each other node, and shares
the result with its node::

    ranks 0 1 on one node, 2 3 on another; A B: the halves of the tensor
    reduce-scatter in memory        0: A of 0+1     1: B of 0+1     2: A of 2+3     3: B of 2+3
    all-reduce over sockets         0 and 2: A of all               1 and 3: B of all
    all-gather in memory            0 1: A B                        2 3: A B

So each part crosses between nodes once, however many ranks a node has, and messages inside a node do not use its
network. Sums are taken in the order of the members inside, and by gloo between: they are equal on all ranks, and repeat
bit for bit.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.backends.block_sizes import INLINE_BYTES
from shardwright.comm.backends.group_channel import GroupChannel, lost_partner
from shardwright.comm.backends.message_blocks import MessageExchange
from shardwright.comm.backends.shared_memory import SharedChannel
from shardwright.comm.backends.shared_sums import scatter_back
from shardwright.comm.channel import Channel
from shardwright.comm.collective_call import CollectiveCall
from shardwright.comm.pending import Pending
from shardwright.mesh import balanced


def has_two_levels(ranks: Sequence[int], nodes: Mapping[int, Any]) -> bool:
    """Returns whether these ranks are on two or more nodes with equally many ranks, at least two, on each.

    >>> nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    >>> has_two_levels([0, 1, 2, 3], nodes), has_two_levels([0, 1, 2], nodes), has_two_levels([0, 2], nodes)
    (True, False, False)
    """
    counts = set(Counter(nodes[rank] for rank in ranks).values())
    return len({nodes[rank] for rank in ranks}) > 1 and len(counts) == 1 and min(counts) > 1


class TwoLevels:
    """Runs the all-reduces of one group in two levels, in a thread of this rank, while the rank computes.

    The first level is inside the node, the second between nodes. Calls run one after the other. The thread has
    connections of its own to the ranks of its node, because two threads cannot read from one connection.
    """

    def __init__(
        self, rank: int, ranks: tuple[int, ...], nodes: Mapping[int, Any], exchange: MessageExchange,
        group_of: Callable[[tuple[int, ...], str], Any],
    ) -> None:  # fmt: skip
        by_node: dict[Any, list[int]] = {}
        for member in ranks:
            by_node.setdefault(nodes[member], []).append(member)
        here = tuple(by_node[nodes[rank]])
        self.rank, self.ranks, self.exchange, self.index = rank, ranks, exchange, here.index(rank)
        self.size = len(here)
        across = tuple(members[self.index] for members in by_node.values())
        self.group = group_of(across, f"two levels of {'-'.join(map(str, ranks))}")
        calls = itertools.count()  # not the recorder's: the whole all-reduce is recorded once
        self.local = SharedChannel(exchange, here, 0, lambda *_, **__: next(calls), lambda _: None)
        self._tasks: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="all-reduces between nodes", daemon=True)
        self._thread.start()

    def start(self, call: CollectiveCall, tensors: list[Tensor]) -> Pending[None]:
        """Starts an all-reduce (sum) of ``tensors``, in place, over all ranks of the group."""
        future: Future[None] = Future()
        self._tasks.put((lambda: self._reduce(call, tensors), future))
        return Pending(future.result)

    def close(self) -> None:
        """Ends the thread, waiting at most a second for it, and closes its connections."""
        self._tasks.put(None)
        self._thread.join(timeout=1.0)  # it may wait for a rank that has failed, and ends with the process then
        self.exchange.close()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            work, future = task
            try:
                work()
            except BaseException as failure:  # whatever it is: the rank that waits for the result raises it
                future.set_exception(failure)
            else:
                future.set_result(None)

    def _reduce(self, call: CollectiveCall, tensors: list[Tensor]) -> None:
        flat = tensors[0].view(-1) if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])
        sizes = [b - a for a, b in pairwise(balanced(flat.numel(), self.size))]
        parts = list(flat.split(sizes))
        mine = self.local.reduce_scatter(call, torch.empty_like(parts[self.index]), [flat], sizes).wait()
        try:
            dist.all_reduce(mine, group=self.group)
        except RuntimeError as failure:
            raise lost_partner(call, self.ranks, self.rank, failure) from failure
        parts[self.index].copy_(mine)
        self.local.all_gather(call, parts, self.index).wait()
        if len(tensors) > 1:
            scatter_back(flat, tensors)


class TwoLevelChannel(Channel):
    """A process group over several nodes: large sums are all-reduced in two levels, other calls go over gloo.

    See :class:`~shardwright.comm.channel.Channel` for the methods.
    """

    def __init__(self, sockets: GroupChannel, levels: TwoLevels, begin: Callable[..., int]) -> None:
        self.sockets, self.levels, self._begin = sockets, levels, begin

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """All-reduces ``tensors`` in place: sums in two levels; maxima, and messages of a few KB, over gloo alone."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if op != "sum" or num_bytes <= INLINE_BYTES:
            return self.sockets.all_reduce(call, tensors, op)
        self._begin(call, num_bytes)
        return self.levels.start(call, tensors)

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """All-gathers over gloo, by :meth:`GlooChannel.all_gather`, without a second level."""
        return self.sockets.all_gather(call, parts, index)

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """Reduce-scatters over gloo, by :meth:`GlooChannel.reduce_scatter`, without a second level."""
        return self.sockets.reduce_scatter(call, out, tensors, sizes)

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """Runs an all-to-all over gloo, by :meth:`GlooChannel.all_to_all`, without a second level."""
        return self.sockets.all_to_all(call, outs, parts)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Broadcasts ``tensor`` from member ``source`` over gloo, without a second level."""
        return self.sockets.broadcast(call, tensor, source)

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Sends ``tensor`` to member ``to`` over gloo, without waiting for the receiver."""
        return self.sockets.send(call, tensor, to)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Starts to fill ``tensor`` with the next message from member ``source``, over gloo."""
        return self.sockets.receive(call, tensor, source)

    def subset(self, indices: tuple[int, ...]) -> Channel:
        """Returns a channel over the members ``indices`` of this group, on the backend that suits their nodes."""
        return self.sockets.subset(indices)
