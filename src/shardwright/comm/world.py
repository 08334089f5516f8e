"""``World``: a rank's number, device and process groups (axes), which the function that runs on it is given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, Protocol

import torch

from shardwright.comm.axis import Axis, Channel, Pending
from shardwright.comm.backends.block_sizes import Blocks
from shardwright.comm.recorder import Recorder
from shardwright.mesh import Mesh

WRITERS_S = 3.0
"""How long a rank that has failed waits for what it writes beside its work; all ranks end within 10 s of a failure."""


class Transport(Protocol):
    """What each backend (threads, processes, fake) provides to one rank: its process groups."""

    kind: str
    blocks: Blocks | None
    """The blocks of shared memory that hold this rank's messages; None where the backend uses none."""

    def channel(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Channel]:
        """Returns this rank's channel in each of ``groups`` that holds it, by index; all ranks call it alike."""

    def close(self) -> None:
        """Marks that this rank makes no more collective calls."""

    def abandon(self, failure: BaseException) -> None:
        """Tells ranks that wait for this one that it has failed, so that they raise instead of waiting.

        Between machines nothing can be told: ranks there wait until their timeout.
        """


@dataclass(frozen=True)
class World:
    """One rank's handle on the run: its number, its device, its axes (process groups) and its record of calls.

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
    """What all ranks have begun and must wait for together, in this order: checkpoints written beside training."""

    writers: list[Thread] = field(default_factory=list, compare=False)
    """The threads that write this rank's part of what is pending."""

    def join_writers(self) -> None:
        """Waits some seconds for this rank's part of what is pending, without a message: where the work has failed."""
        end_s = time.monotonic() + WRITERS_S
        for writer in self.writers:
            writer.join(max(0.0, end_s - time.monotonic()))

    def wait_pending(self) -> None:
        """Waits for all that is pending; every rank calls it, ``launch`` at the end of the work. Raises what fails."""
        while self.pending:
            self.pending.pop(0).wait()

    @property
    def local(self) -> bool:
        """Whether the ranks are threads of this process, rather than processes."""
        return self.transport.kind == "threads"

    def axes_in(self, name: str, groups: Sequence[tuple[int, ...]]) -> list[Axis]:
        """Returns this rank's axis (process group) in each group that holds it; all ranks pass the same groups."""
        channels = self.transport.channel(groups)
        return [
            Axis(name, groups[place], groups[place].index(self.rank), channel, device=self.device)
            for place, channel in sorted(channels.items())
        ]

    def axis(self, name: str, groups: Sequence[tuple[int, ...]]) -> Axis:
        """Returns this rank's axis (process group) in a partition of the ranks into ``groups``."""
        (axis,) = self.axes_in(name, groups)
        return axis

    def axes(self, mesh: Mesh) -> dict[str, Axis]:
        """Returns this rank's axes (process groups) of a mesh, by name."""
        return {name: self.axis(name, mesh.groups(name)) for name in mesh.axes}

    def everyone(self) -> Axis:
        """Returns the axis (process group) over all ranks of the run."""
        return self.axis("world", [tuple(range(self.size))])
