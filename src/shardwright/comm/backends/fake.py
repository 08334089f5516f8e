"""The fake backend: one rank runs alone, and calls return at once, with tensors of the right shapes and no real values.

On the meta device it serves to rehearse one rank's step without the other ranks, to compute memory and traffic. Calls
are recorded as a real backend records them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from shardwright.comm.backends.block_sizes import INLINE_BYTES, Blocks
from shardwright.comm.channel import Channel
from shardwright.comm.collective_call import CollectiveCall
from shardwright.comm.pending import Pending, done
from shardwright.comm.recorder import Recorder
from shardwright.comm.world import World

T = TypeVar("T")


@dataclass
class _BlockReaders:
    """Models when other ranks release this rank's blocks: as late as is possible for ranks that run the same code.

    All that is known of another rank is this: when it begins a call, it has ended all calls that this rank ended before
    it began the same call. So a block is surely free at the end of a later call, if that call began after the block's
    own call had ended and all of the block's readers take part in it. A block that was sent p2p is free when a message
    arrives from its reader: each message frees one.
    """

    blocks: Blocks | None
    _now: int = 0
    _ended: list[tuple[int, int, set[int]]] = field(default_factory=list)  # when, the block, its readers

    def begin(self, messages: Iterable[tuple[int, Sequence[int]]]) -> tuple[int, list[tuple[int, set[int]]]]:
        """Takes blocks for messages of (bytes, reading ranks); returns the state that :meth:`end` needs."""
        self._now += 1
        taken = [
            (self.blocks.take(num_bytes, len(to)), set(to))
            for num_bytes, to in messages
            if self.blocks is not None and num_bytes > INLINE_BYTES
        ]
        return self._now, taken

    def end(self, begun: tuple[int, list[tuple[int, set[int]]]], others: Collection[int]) -> None:
        """Ends a call of this rank and the ranks ``others``, and frees the blocks that these must have read by then."""
        began, taken = begun
        for ended, place, readers in self._ended:
            if ended < began:  # members have read what was sent in calls that ended before
                self._read(place, readers, others)
        self._ended = [block for block in self._ended if block[2]]
        self._now += 1
        self._ended += [(self._now, place, readers) for place, readers in taken]

    def answered(self, by: int) -> None:
        """Frees the oldest block that rank ``by`` had to read, because a message came from it."""
        for _, place, readers in self._ended:
            if by in readers:
                self._read(place, readers, [by])
                break
        self._ended = [block for block in self._ended if block[2]]

    def _read(self, place: int, readers: set[int], ranks: Collection[int]) -> None:
        for _ in readers.intersection(ranks):
            assert self.blocks is not None, "a block was taken"
            self.blocks.release(place)
        readers.difference_update(ranks)


@dataclass(frozen=True)
class FakeChannel(Channel):
    """A process group of which only this rank exists: calls send nothing, but are recorded as real calls are.

    See :class:`~shardwright.comm.channel.Channel` for the methods.
    """

    readers: _BlockReaders
    recorder: Recorder
    ranks: tuple[int, ...]
    index: int

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """Records the call and sends nothing: ``tensors`` keep their values."""
        self._note(call, tensors)
        return self._all(call, None, tensors, [tensors])

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """Records the call and sends nothing: the other members' ``parts`` keep the values that they have."""
        self._note(call, parts)
        return self._all(call, None, parts, [[parts[index]]])

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """Records the call and sends nothing: ``out`` keeps its values.

        ``tensors`` may be freed at once, because a real rank would have copied them into a shared-memory block.
        """
        self._note(call, tensors)
        return self._all(call, out, [], [tensors])

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """Records the call and sends nothing: ``outs`` keep the values that they have."""
        self._note(call, parts)
        to = [(part.nbytes, [rank]) for part, rank in zip(parts, self.ranks, strict=True) if rank in self._others]
        return self._pending(call, outs, parts, self.readers.begin(to))

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Records the call and sends nothing: ``tensor`` keeps its values."""
        self._note(call, [tensor])
        return self._all(call, tensor, [], [[tensor]] if source == self.index else [])

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Records the message and sends nothing, but counts a shared-memory block if a real message would take one."""
        self._note(call, [tensor])
        self.readers.end(self.readers.begin([(tensor.nbytes, [self.ranks[to]])]), ())
        return done(None)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Records the message and receives nothing: ``tensor`` keeps the values that it has."""
        self._note(call, [tensor])

        def finish() -> Tensor:
            self.readers.answered(self.ranks[source])
            return tensor

        return Pending(finish)

    def subset(self, indices: tuple[int, ...]) -> Channel:
        """Returns a fake channel over the members ``indices`` of this group."""
        return FakeChannel(
            self.readers, self.recorder, tuple(self.ranks[i] for i in indices), indices.index(self.index)
        )

    def _note(self, call: CollectiveCall, tensors: Iterable[Tensor]) -> None:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        self.recorder.note(call, num_bytes)
        if self.recorder.follower is not None:
            self.recorder.follower.began(call, num_bytes, self.ranks)

    @property
    def _others(self) -> tuple[int, ...]:
        return self.ranks[: self.index] + self.ranks[self.index + 1 :]

    def _all(
        self, call: CollectiveCall, result: T, kept: list[Tensor], messages: Sequence[Sequence[Tensor]]
    ) -> Pending[T]:
        """Returns the :class:`Pending` of a call in which each message goes to all other members."""
        sizes = [(sum(tensor.nbytes for tensor in message), self._others) for message in messages]
        return self._pending(call, result, kept, self.readers.begin(sizes))

    def _pending(
        self, call: CollectiveCall, result: T, kept: list[Tensor], begun: tuple[int, list[tuple[int, set[int]]]]
    ) -> Pending[T]:
        """Returns the :class:`Pending` of a call, which keeps the call's tensors alive until ``wait`` is called."""

        def finish() -> T:
            if self.recorder.follower is not None:
                self.recorder.follower.awaited(call)
            self.readers.end(begun, self._others)
            return (result, kept)[0]

        return Pending(finish)


class FakeTransport:
    """Creates the fake process groups (channels) of the one rank that runs in a fake world."""

    kind = "fake"

    def __init__(self, rank: int, blocks: Blocks | None, recorder: Recorder) -> None:
        self.rank, self.blocks, self.recorder, self._readers = rank, blocks, recorder, _BlockReaders(blocks)

    def channel(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Channel]:
        """Returns a fake channel for each of ``groups`` that holds this rank, keyed by the group's index."""
        return {
            place: FakeChannel(self._readers, self.recorder, ranks, ranks.index(self.rank))
            for place, ranks in enumerate(groups)
            if self.rank in ranks
        }

    def close(self) -> None:
        """Does nothing: a fake world has no connections."""

    def abandon(self, failure: BaseException) -> None:
        """Does nothing: a fake world has no other ranks that must learn of the failure."""

    def saving(self) -> AbstractContextManager[None]:
        """Returns a context that does nothing: no process waits for it."""
        return nullcontext()


def fake_world(rank: int, size: int, device: torch.device | None = None, *, blocks: Blocks | None = None) -> World:
    """Returns a world of ``size`` ranks in which only ``rank`` runs and nothing is sent, by default on the meta device.

    ``blocks``, if given, counts the shared memory that the rank's messages would take in a real run.

    >>> world = fake_world(rank=1, size=4)
    >>> world.everyone().all_gather(torch.empty(2, 3, device="meta")).shape
    torch.Size([8, 3])
    """
    recorder = Recorder()
    return World(rank, size, device or torch.device("meta"), FakeTransport(rank, blocks, recorder), recorder)
