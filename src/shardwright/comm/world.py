"""``World``: what one rank is handed when it starts, and the way it gets its axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwright.comm.axis import Axis, Channel
from shardwright.comm.backends.block_sizes import Blocks
from shardwright.comm.recorder import Recorder
from shardwright.mesh import Mesh


class Transport(Protocol):
    """One backend, seen from one rank."""

    kind: str
    blocks: Blocks | None
    """The blocks of shared memory through which this rank talks, where it does."""

    def channel(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Channel]:
        """Channels for the groups this rank is in, by the group's place; every rank asks in the same order."""
        ...

    def close(self) -> None:
        """Ends this rank's part."""
        ...


@dataclass(frozen=True)
class World:
    """One rank's handle on all of them: its number, its device, its record of calls.

    >>> from shardwright.comm.launch import launch
    >>> launch(lambda world: (world.rank, world.size), 3, ranks="threads")
    [(0, 3), (1, 3), (2, 3)]
    """

    rank: int
    size: int
    device: torch.device
    transport: Transport
    recorder: Recorder

    @property
    def local(self) -> bool:
        """Whether the ranks are threads of this process."""
        return self.transport.kind == "threads"

    def axes_in(self, name: str, groups: Sequence[tuple[int, ...]]) -> list[Axis]:
        """The axis of each group that holds this rank; every rank calls it with the same groups, in turn."""
        channels = self.transport.channel(groups)
        return [
            Axis(name, groups[place], groups[place].index(self.rank), channel, device=self.device)
            for place, channel in sorted(channels.items())
        ]

    def axis(self, name: str, groups: Sequence[tuple[int, ...]]) -> Axis:
        """This rank's axis in a partition of the ranks into ``groups``."""
        (axis,) = self.axes_in(name, groups)
        return axis

    def axes(self, mesh: Mesh) -> dict[str, Axis]:
        """One axis for each of the mesh's, by name."""
        return {name: self.axis(name, mesh.groups(name)) for name in mesh.axes}

    def everyone(self) -> Axis:
        """The axis that joins all ranks."""
        return self.axis("world", [tuple(range(self.size))])
