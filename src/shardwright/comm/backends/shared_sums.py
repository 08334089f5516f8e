"""A sum of many members under way, through blocks of memory that they share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardwright.comm.backends.message_blocks import POST, SUMMED, MessageExchange, Posted
from shardwright.mesh import balanced


class Sum:
    """A sum of many members under way: each sums one part over all blocks, into its own; then each takes all parts.

    A member sums its part as soon as it hears that all have posted, whichever call it waits in, so calls may be
    waited for in any order.
    """

    def __init__(
        self,
        exchange: MessageExchange,
        ranks: tuple[int, ...],
        key: tuple[int, int],
        tensors: list[Tensor],
        op: str,
        place: int,
    ) -> None:
        self.exchange, self.ranks, self.key = exchange, ranks, key
        self.tensors, self.op = tensors, op
        self.others = [rank for rank in ranks if rank != exchange.rank]
        size, first = sum(tensor.numel() for tensor in tensors), tensors[0]
        self.own = exchange.blocks[place].bytes[: size * first.element_size()].view(first.dtype)
        cuts = balanced(size, len(ranks))
        self.parts = {rank: slice(cuts[i], cuts[i + 1]) for i, rank in enumerate(ranks)}
        self.posted: dict[int, Posted] = {}
        self.blocks: dict[int, Tensor] = {}
        self.place = place
        exchange.hold(place)  # the others may be done with it long before this member is
        exchange.when_posted[key] = self.try_own_part
        self.try_own_part()

    def try_own_part(self) -> None:
        """Sums this member's part, once all have posted."""
        exchange, key = self.exchange, self.key
        if self.posted or not all((rank, POST, *key) in exchange.said for rank in self.others):
            return
        self.posted = {rank: exchange.said.pop((rank, POST, *key)) for rank in self.others}
        dtype = self.own.dtype
        self.blocks = {rank: exchange.their_block(rank, said).view(dtype) for rank, said in self.posted.items()}
        self.blocks[exchange.rank] = self.own
        mine = self.parts[exchange.rank]
        total = self.blocks[self.ranks[0]][mine].clone()
        for rank in self.ranks[1:]:
            combine(total, self.blocks[rank][mine], self.op)
        self.own[mine].copy_(total)
        for rank in self.others:
            exchange.tell(rank, SUMMED, *key, read=total.nbytes)

    def _has_posted(self, rank: int) -> bool:
        return bool(self.posted) or (rank, POST, *self.key) in self.exchange.said

    def finish(self) -> None:
        """Waits for everyone's part and takes them all."""
        exchange = self.exchange
        for rank in self.others:
            exchange.wait_until(partial(self._has_posted, rank), [rank])
        # one tensor takes the parts where they lie; several are filled from the own block, once it has all of them
        target = self.tensors[0].view(-1) if len(self.tensors) == 1 else self.own
        for rank, part in self.parts.items():
            if rank != exchange.rank:
                exchange.hear(rank, SUMMED, *self.key)
            if rank != exchange.rank or target is not self.own:
                target[part].copy_(self.blocks[rank][part])
        if target is self.own:
            scatter_back(self.own, self.tensors)
        del exchange.when_posted[self.key]
        exchange.release(self.place)
        for rank, said in self.posted.items():
            exchange.done_reading(rank, said)


def combine(total: Tensor, term: Tensor, op: str) -> None:
    """Adds a term to a total in place, or takes the larger."""
    term = term.to(total.device)
    total.add_(term) if op == "sum" else torch.maximum(total, term, out=total)


def scatter_back(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copies a flat tensor into several."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def parts_of(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """What flat tensors hold, end to end, in parts of these sizes: copied where a part lies in several of them.

    >>> [part.tolist() for part in parts_of([torch.arange(3), torch.arange(3, 5)], [1, 0, 4])]
    [[0], [], [1, 2, 3, 4]]
    """
    places = list(pairwise(accumulate((tensor.numel() for tensor in tensors), initial=0)))
    found = []
    for low, high in pairwise(accumulate(sizes, initial=0)):
        pairs = zip(tensors, places, strict=True)
        inside = [tensor[max(low - a, 0) : high - a] for tensor, (a, b) in pairs if max(a, low) < min(b, high)]
        found.append(inside[0] if len(inside) == 1 else torch.cat([tensors[0][:0], *inside]))
    return found
