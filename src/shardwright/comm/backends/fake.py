"""A world with one real rank: every call returns at once, with tensors of the right shapes and meaningless values.

On the meta device this rehearses one rank's whole run and shows its memory and traffic without other ranks. Calls are
recorded as a real backend records them.
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
class _BlockReaders:
    """Models when other ranks have read this rank's blocks: as late as possible for ranks that run the same code.

    When a rank begins a call, it has ended the calls that this rank ended before beginning the same call; no more is
    known of it. So a block is free at the end of a call that began after the block's own call ended, if all of its
    readers take part. Of blocks sent p2p, each message received from the reader frees one.
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
        """Ends a call in which the ranks ``others`` took part."""
        began, taken = begun
        for ended, place, readers in self._ended:
            if ended < began:  # the members of this call have read all that was sent before it began
                self._read(place, readers, others)
        self._ended = [each for each in self._ended if each[2]]
        self._now += 1
        self._ended += [(self._now, place, readers) for place, readers in taken]

    def answered(self, by: int) -> None:
        """Frees the oldest block that rank ``by`` had to read, because a message came from it."""
        for _, place, readers in self._ended:
            if by in readers:
                self._read(place, readers, [by])
                break
        self._ended = [each for each in self._ended if each[2]]

    def _read(self, place: int, readers: set[int], ranks: Collection[int]) -> None:
        for _ in readers.intersection(ranks):
            assert self.blocks is not None, "a block was taken"
            self.blocks.release(place)
        readers.difference_update(ranks)


@dataclass(frozen=True)
class FakeChannel:
    """A process group of which only this rank is real: nothing is sent. See :class:`~shardwright.comm.axis.Channel`."""

    readers: _BlockReaders
    recorder: Recorder
    ranks: tuple[int, ...]
    index: int

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """Sends nothing: the tensors keep their values."""
        self._note(call, tensors)
        return self._all(None, tensors, [tensors])

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """Sends nothing: the other members' ``parts`` keep whatever values they have."""
        self._note(call, parts)
        return self._all(None, parts, [[parts[index]]])

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """Sends nothing: ``out`` stays as it is. ``tensors`` are not kept: a real rank has copied them into a block."""
        self._note(call, tensors)
        return self._all(out, [], [tensors])

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """Sends nothing: ``outs`` keep whatever values they have."""
        self._note(call, parts)
        to = [(part.nbytes, [rank]) for part, rank in zip(parts, self.ranks, strict=True) if rank in self._others]
        return self._pending(outs, parts, self.readers.begin(to))

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Sends nothing: ``tensor`` keeps its values, on the source and elsewhere."""
        self._note(call, [tensor])
        return self._all(tensor, [], [[tensor]] if source == self.index else [])

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Sends nothing, but takes a shared-memory block as a real message would."""
        self._note(call, [tensor])
        self.readers.end(self.readers.begin([(tensor.nbytes, [self.ranks[to]])]), ())
        return done(None)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Receives nothing: ``tensor`` keeps whatever values it has."""
        self._note(call, [tensor])

        def finish() -> Tensor:
            self.readers.answered(self.ranks[source])
            return tensor

        return Pending(finish)

    def subset(self, indices: tuple[int, ...]) -> Channel:
        """Returns the fake channel over some of the group's members."""
        return FakeChannel(
            self.readers, self.recorder, tuple(self.ranks[i] for i in indices), indices.index(self.index)
        )

    def _note(self, call: CollectiveCall, tensors: Iterable[Tensor]) -> None:
        self.recorder.note(call, sum(tensor.nbytes for tensor in tensors))

    @property
    def _others(self) -> tuple[int, ...]:
        return self.ranks[: self.index] + self.ranks[self.index + 1 :]

    def _all(self, result: T, kept: list[Tensor], messages: Sequence[Sequence[Tensor]]) -> Pending[T]:
        """A call in which each message goes to all other members."""
        sizes = [(sum(tensor.nbytes for tensor in message), self._others) for message in messages]
        return self._pending(result, kept, self.readers.begin(sizes))

    def _pending(self, result: T, kept: list[Tensor], begun: tuple[int, list[tuple[int, set[int]]]]) -> Pending[T]:
        """A call that ends in ``wait``, and keeps its tensors until then as a real one would."""

        def finish() -> T:
            self.readers.end(begun, self._others)
            return (result, kept)[0]

        return Pending(finish)


class FakeTransport:
    """Makes the fake process groups (channels) of the one real rank of a fake world."""

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
        """Does nothing: no other rank waits."""

    def abandon(self, failure: BaseException) -> None:
        """Does nothing: no other rank waits."""


def fake_world(rank: int, size: int, device: torch.device | None = None, *, blocks: Blocks | None = None) -> World:
    """Returns a world in which only ``rank`` runs and nothing is sent; on the meta device unless another is given.

    ``blocks`` counts the shared memory that its messages would take.

    >>> world = fake_world(rank=1, size=4)
    >>> world.everyone().all_gather(torch.empty(2, 3, device="meta")).shape
    torch.Size([8, 3])
    """
    recorder = Recorder()
    return World(rank, size, device or torch.device("meta"), FakeTransport(rank, blocks, recorder), recorder)
