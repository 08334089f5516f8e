"""``World``: a rank's number, device and process groups (axes), which ``launch`` passes to the function it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, Protocol

import torch

from shardwright.comm.axis import Axis
from shardwright.comm.backends.block_sizes import Blocks
from shardwright.comm.channel import Channel
from shardwright.comm.pending import Pending
from shardwright.comm.recorder import Recorder
from shardwright.comm.stop import Stop
from shardwright.mesh import Mesh

WRITERS_S = 3.0
"""Seconds that a rank which has failed waits for the threads that write its checkpoint."""


class Transport(Protocol):
    """One rank's access to a backend, which creates the rank's process groups.

    ``kind`` is "threads", "processes" or "fake".
    """

    kind: str
    blocks: Blocks | None
    """The shared-memory blocks that carry this rank's messages, or None if the backend uses none."""

    def channel(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Channel]:
        """Returns a channel (the rank's end of a process group) for each of ``groups`` that holds this rank.

        A group is a tuple of ranks. The result is keyed by the group's index in ``groups``; all ranks pass the same
        groups.
        """

    def close(self) -> None:
        """Marks that this rank makes no more collective calls."""

    def abandon(self, failure: BaseException) -> None:
        """Tells the other ranks that this one has failed by ``failure``, so that they raise instead of waiting for it.

        Ranks that it reaches over gloo or NCCL are not told: they wait until this process ends, or until their timeout.
        """

    def saving(self) -> AbstractContextManager[None]:
        """Returns a context in which the launcher does not yet end this rank, for some seconds, after another failed.

        Ranks that another launcher has started, such as ``torchrun``, have the time that it gives them.
        """


@dataclass(frozen=True)
class World:
    """One rank's handle on the run: its number, its device, its process groups and the record of what it sends.

    ``size`` is the number of ranks, ``transport`` creates the process groups, and ``recorder`` records the messages.

    >>> from shardwright.comm.launch import launch
    >>> launch(lambda world: (world.rank, world.size), 3, ranks="threads")
    [(0, 3), (1, 3), (2, 3)]
    """

    rank: int
    size: int
    device: torch.device
    transport: Transport
    recorder: Recorder
    pending: list[Pending[Any]] = field(default_factory=list, compare=False)
    """Checkpoint saves under way on all ranks, which all ranks must wait for in this order."""

    writers: list[Thread] = field(default_factory=list, compare=False)
    """The threads that write this rank's part of the pending checkpoints."""

    nodes: tuple[int, ...] = ()
    """The node of each rank, counted from 0.

    Empty if one process has started all ranks, on one node, and in a world around a process group that the user made.
    """

    stop: Stop = field(default_factory=Stop, compare=False)
    """Requests to stop the run, which signals make once :meth:`~shardwright.Run.stop_requested` was called."""

    def join_writers(self) -> None:
        """Waits up to three seconds for the threads that write this rank's part of a checkpoint; sends no messages.

        It is for a run that has failed, in which ranks cannot wait for each other by :meth:`wait_pending`.
        """
        end_s = time.monotonic() + WRITERS_S
        for writer in self.writers:
            writer.join(max(0.0, end_s - time.monotonic()))

    def wait_pending(self) -> None:
        """Waits for every checkpoint save that overlaps with training, and raises the error of a save that failed.

        All ranks call it together; ``launch`` calls it at the end of the ranks' work.
        """
        while self.pending:
            self.pending.pop(0).wait()

    @property
    def local(self) -> bool:
        """Whether the ranks are threads of this process, rather than processes."""
        return self.transport.kind == "threads"

    def axes_in(self, name: str, groups: Sequence[tuple[int, ...]]) -> list[Axis]:
        """Returns an axis (process group) called ``name`` for each of ``groups`` that holds this rank, in their order.

        A group is a tuple of ranks. Every rank must pass the same groups.
        """
        channels = self.transport.channel(groups)
        return [
            Axis(name, groups[place], groups[place].index(self.rank), channel, device=self.device)
            for place, channel in sorted(channels.items())
        ]

    def axis(self, name: str, groups: Sequence[tuple[int, ...]]) -> Axis:
        """Returns an axis (process group) called ``name`` over the one of ``groups`` that holds this rank.

        A group is a tuple of ranks. Every rank must pass the same groups, and be in exactly one.
        """
        (axis,) = self.axes_in(name, groups)
        return axis

    def axes(self, mesh: Mesh) -> dict[str, Axis]:
        """Returns this rank's axes (process groups) of a mesh, by axis name; every rank must pass the same mesh."""
        return {name: self.axis(name, mesh.groups(name)) for name in mesh.axes}

    def everyone(self) -> Axis:
        """Returns a new axis (process group), called "world", over all ranks of the run; every rank must call it."""
        return self.axis("world", [tuple(range(self.size))])
