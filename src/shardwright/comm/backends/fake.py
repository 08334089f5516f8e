"""Ranks that are not there: every call returns at once, with tensors of the right shapes and no meaning.

On the meta device one rank's whole run can be rehearsed like this, to see what it holds and hands on, before anything
is rented.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from shardwright.comm.axis import Channel, CollectiveCall, Pending, done
from shardwright.comm.recorder import Recorder
from shardwright.comm.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class FakeChannel:
    """A group of which this rank alone is there. See :class:`~shardwright.comm.axis.Channel`."""

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """Leaves the tensors as they are."""
        return _kept(None, tensors)

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """Leaves the others' parts as they are."""
        return _kept(None, parts)

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """This rank's share, of no meaning; what is summed was copied where the others read it."""
        return done(out)

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """The others' parts, of no meaning."""
        return _kept(outs, parts)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """The tensor as it is."""
        return done(tensor)

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Nobody receives it."""
        return done(None)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """A message of no meaning."""
        return done(tensor)

    def subset(self, indices: tuple[int, ...]) -> Channel:
        """Some of those who are not there."""
        return self


def _kept(result: T, tensors: list[Tensor]) -> Pending[T]:
    """A call that is over at once, and keeps what it was given as long as one that is not."""
    return Pending(lambda: (result, tensors)[0])


@dataclass
class FakeTransport:
    """One rank of a world without others."""

    rank: int
    kind: str = "ghosts"

    def channel(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Channel]:
        """See :class:`~shardwright.comm.world.Transport`."""
        return {place: FakeChannel() for place, ranks in enumerate(groups) if self.rank in ranks}

    def close(self) -> None:
        """Nobody waits."""


def fake_world(rank: int, size: int, device: torch.device | None = None) -> World:
    """The world as ``rank`` would see it, with nobody else in it; on the meta device unless another is given.

    >>> world = fake_world(rank=1, size=4)
    >>> world.everyone().all_gather(torch.empty(2, 3, device="meta")).shape
    torch.Size([8, 3])
    """
    return World(rank, size, device or torch.device("meta"), FakeTransport(rank), Recorder())


__all__ = ["fake_world"]
