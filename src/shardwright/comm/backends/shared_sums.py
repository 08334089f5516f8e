"""The all-reduce of more than two ranks of one machine in shared memory: each rank sums one part of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardwright.comm.backends.message_blocks import POST, SUMMED, MessageExchange, ReceivedMessage
from shardwright.mesh import balanced


@dataclass(eq=False)
class SharedAllReduce:
    """An all-reduce under way in shared memory: each rank sums one part of the tensor, then copies all ranks' parts.

    ``key`` is the channel and the number of the call, ``op`` is "sum" or "max", and ``place`` is the index of the
    shared-memory block into which this rank has copied its ``tensors``. A rank sums its part as soon as the tensors of
    all ranks are there, whichever call the rank waits in, so calls may be waited for in any order.
    """

    exchange: MessageExchange
    ranks: tuple[int, ...]
    key: tuple[int, int]  # the channel and the number of the call
    tensors: list[Tensor]
    op: str
    place: int

    def __post_init__(self) -> None:
        exchange, ranks, tensors, key, place = self.exchange, self.ranks, self.tensors, self.key, self.place
        self.others = [rank for rank in ranks if rank != exchange.rank]
        size, first = sum(tensor.numel() for tensor in tensors), tensors[0]
        self.own = exchange.blocks[place].bytes[: size * first.element_size()].view(first.dtype)
        cuts = balanced(size, len(ranks))
        self.parts = {rank: slice(cuts[i], cuts[i + 1]) for i, rank in enumerate(ranks)}
        self.posted: dict[int, ReceivedMessage] = {}
        self.blocks: dict[int, Tensor] = {}
        exchange.block_sizes.hold(place)  # until finish(): the others may have read it long before
        exchange.when_posted[key] = self.try_own_part
        self.try_own_part()

    def try_own_part(self) -> None:
        """Sums this rank's part of the tensor over the blocks of all ranks, if all are there, and tells the others.

        It does nothing if a block is still missing, or if the part was summed before.
        """
        exchange, key = self.exchange, self.key
        if self.posted or not all((rank, POST, *key) in exchange.received for rank in self.others):
            return
        self.posted = {rank: exchange.received.pop((rank, POST, *key)) for rank in self.others}
        dtype = self.own.dtype
        self.blocks = {rank: exchange.peer_bytes(rank, posted).view(dtype) for rank, posted in self.posted.items()}
        self.blocks[exchange.rank] = self.own
        mine = self.parts[exchange.rank]
        total = self.blocks[self.ranks[0]][mine].clone()
        for rank in self.ranks[1:]:
            combine(total, self.blocks[rank][mine], self.op)
        self.own[mine].copy_(total)
        for rank in self.others:
            exchange.notify(rank, SUMMED, *key, read=total.nbytes)

    def _has_posted(self, rank: int) -> bool:
        return bool(self.posted) or (rank, POST, *self.key) in self.exchange.received

    def finish(self) -> None:
        """Waits until every rank of the group has summed its part, and copies all parts into this rank's tensors.

        Raises: LostError or LateError: another rank has ended, or is too late.
        """
        exchange = self.exchange
        for rank in self.others:
            exchange.wait_until(partial(self._has_posted, rank), [rank])
        # one tensor takes the parts from the blocks; several are filled from this rank's block, once it has all
        target = self.tensors[0].view(-1) if len(self.tensors) == 1 else self.own
        for rank, part in self.parts.items():
            if rank != exchange.rank:
                exchange.receive(rank, SUMMED, *self.key)
            if rank != exchange.rank or target is not self.own:
                target[part].copy_(self.blocks[rank][part])
        if target is self.own:
            scatter_back(self.own, self.tensors)
        del exchange.when_posted[self.key]
        exchange.block_sizes.release(self.place)
        for rank, posted in self.posted.items():
            exchange.done_reading(rank, posted)


def combine(total: Tensor, term: Tensor, op: str) -> None:
    """Adds ``term`` to ``total`` in place if ``op`` is "sum", or else takes the elementwise maximum, also in place."""
    term = term.to(total.device)
    total.add_(term) if op == "sum" else torch.maximum(total, term, out=total)


def scatter_back(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copies consecutive slices of a flat tensor into several tensors, in order."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def parts_of(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Cuts flat tensors, joined end to end, into parts of these numbers of elements.

    A part inside one tensor is a view of it, and a part that spans several is a copy.

    >>> [part.tolist() for part in parts_of([torch.arange(3), torch.arange(3, 5)], [1, 0, 4])]
    [[0], [], [1, 2, 3, 4]]
    """
    places = list(pairwise(accumulate((tensor.numel() for tensor in tensors), initial=0)))
    parts = []
    for low, high in pairwise(accumulate(sizes, initial=0)):
        pairs = zip(tensors, places, strict=True)
        inside = [tensor[max(low - a, 0) : high - a] for tensor, (a, b) in pairs if max(a, low) < min(b, high)]
        parts.append(inside[0] if len(inside) == 1 else torch.cat([tensors[0][:0], *inside]))
    return parts
