"""Ranks that are not there: every call returns at once, with tensors of the right shapes and no meaning.

On the meta device one rank's whole run can be rehearsed like this, to see what it holds and hands on, before anything
is rented.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from shardwright.comm.axis import Channel, CollectiveCall, Pending, done
from shardwright.comm.backends.block_sizes import INLINE_BYTES, Blocks
from shardwright.comm.recorder import Recorder
from shardwright.comm.world import World

T = TypeVar("T")


@dataclass
class _Readers:
    """When the other ranks have read this one's blocks, as late as ranks can be that run the same code.

    A rank that began a call had ended what this rank ended before it began the same one: more is not known of it. So a
    block is free at the end of a call that began after its own has ended, if all of its readers are in it. Of what was
    sent, each message that comes back says that one more was read.
    """

    blocks: Blocks | None
    _now: int = 0
    _ended: list[tuple[int, int, set[int]]] = field(default_factory=list)  # when, the block, who may still read it

    def begin(self, messages: Iterable[tuple[int, Sequence[int]]]) -> tuple[int, list[tuple[int, set[int]]]]:
        """Takes blocks for messages of so many bytes to these ranks; returns what :meth:`end` wants to know."""
        self._now += 1
        taken = [
            (self.blocks.take(num_bytes, len(to)), set(to))
            for num_bytes, to in messages
            if self.blocks is not None and num_bytes > INLINE_BYTES
        ]
        return self._now, taken

    def end(self, begun: tuple[int, list[tuple[int, set[int]]]], others: Collection[int]) -> None:
        """A call with these others is over."""
        began, taken = begun
        for ended, place, readers in self._ended:
            if ended < began:
                self._read(place, readers, others)
        self._ended = [each for each in self._ended if each[2]]
        self._now += 1
        self._ended += [(self._now, place, readers) for place, readers in taken]

    def answered(self, by: int) -> None:
        """A message came from this rank."""
        for _, place, readers in self._ended:
            if by in readers:
                self._read(place, readers, [by])
                break
        self._ended = [each for each in self._ended if each[2]]

    def _read(self, place: int, readers: set[int], who: Collection[int]) -> None:
        for _ in readers.intersection(who):
            assert self.blocks is not None, "a block was taken"
            self.blocks.release(place)
        readers.difference_update(who)


@dataclass(frozen=True)
class FakeChannel:
    """A group of which this rank alone is there. See :class:`~shardwright.comm.axis.Channel`."""

    readers: _Readers
    ranks: tuple[int, ...]
    index: int

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """Leaves the tensors as they are."""
        return self._all(None, tensors, [tensors])

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """Leaves the others' parts as they are."""
        return self._all(None, parts, [[parts[index]]])

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """This rank's share, of no meaning; what is summed was copied where the others read it."""
        return self._all(out, [], [tensors])

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """The others' parts, of no meaning."""
        to = [(part.nbytes, [rank]) for part, rank in zip(parts, self.ranks, strict=True) if rank in self._others]
        return self._pending(outs, parts, self.readers.begin(to))

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """The tensor as it is."""
        return self._all(tensor, [], [[tensor]] if source == self.index else [])

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Nobody receives it."""
        self.readers.end(self.readers.begin([(tensor.nbytes, [self.ranks[to]])]), ())
        return done(None)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """A message of no meaning."""

        def finish() -> Tensor:
            self.readers.answered(self.ranks[source])
            return tensor

        return Pending(finish)

    def subset(self, indices: tuple[int, ...]) -> Channel:
        """Some of those who are not there."""
        return FakeChannel(self.readers, tuple(self.ranks[i] for i in indices), indices.index(self.index))

    @property
    def _others(self) -> tuple[int, ...]:
        return self.ranks[: self.index] + self.ranks[self.index + 1 :]

    def _all(self, result: T, kept: list[Tensor], messages: Sequence[Sequence[Tensor]]) -> Pending[T]:
        """A call in which each message goes to all others."""
        sizes = [(sum(tensor.nbytes for tensor in message), self._others) for message in messages]
        return self._pending(result, kept, self.readers.begin(sizes))

    def _pending(self, result: T, kept: list[Tensor], begun: tuple[int, list[tuple[int, set[int]]]]) -> Pending[T]:
        """A call that is over at once, and keeps what it was given as long as one that is not."""

        def finish() -> T:
            self.readers.end(begun, self._others)
            return (result, kept)[0]

        return Pending(finish)


@dataclass
class FakeTransport:
    """One rank of a world without others."""

    rank: int
    blocks: Blocks | None = None
    kind: str = "ghosts"

    def __post_init__(self) -> None:
        self._readers = _Readers(self.blocks)

    def channel(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Channel]:
        """See :class:`~shardwright.comm.world.Transport`."""
        return {
            place: FakeChannel(self._readers, ranks, ranks.index(self.rank))
            for place, ranks in enumerate(groups)
            if self.rank in ranks
        }

    def close(self) -> None:
        """Nobody waits."""


def fake_world(rank: int, size: int, device: torch.device | None = None, *, blocks: Blocks | None = None) -> World:
    """The world as ``rank`` would see it, with nobody else in it; on the meta device unless another is given.

    ``blocks`` counts the shared memory that its messages would take.

    >>> world = fake_world(rank=1, size=4)
    >>> world.everyone().all_gather(torch.empty(2, 3, device="meta")).shape
    torch.Size([8, 3])
    """
    return World(rank, size, device or torch.device("meta"), FakeTransport(rank, blocks), Recorder())


__all__ = ["fake_world"]
