"""The world this process is a rank of, for tensors that carry their ranks with them and are handed no axis."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardwright.comm.axis import Axis
from shardwright.comm.backends.block_sizes import Blocks
from shardwright.comm.backends.process_groups import ProcessTransport
from shardwright.comm.recorder import Recorder
from shardwright.comm.world import World

_WORLDS: WeakKeyDictionary[Any, tuple[World, dict[tuple[int, ...], Axis]]] = WeakKeyDictionary()
"""One for each default process group: torch has one at a time, and it ends with the group. Beside it, its axes."""

_ALONE: list[tuple[World, dict[tuple[int, ...], Axis]]] = []


class _Alone:
    """The transport of a process that is all there is."""

    kind = "alone"
    blocks: Blocks | None = None

    def channel(self, groups: object) -> dict[int, Any]:
        """See :class:`~shardwright.comm.world.Transport`: an axis of one rank sends nothing."""
        return {0: None}

    def close(self) -> None:
        """Nothing to end."""


def enter(world: World) -> None:
    """Makes ``world`` what :func:`here` returns, for as long as torch's default process group lives."""
    everyone = world.everyone()  # now, when all ranks are here: later only some may send
    _WORLDS[dist.group.WORLD] = (world, {everyone.ranks: everyone.for_strategy("global tensors")})


def here() -> World:
    """This process's world: the one it was launched in, else one around torch's default process group.

    A process in which ``torch.distributed`` was never started is a world of one rank.

    >>> here().size
    1
    """
    return _found()[0]


def axis_here(ranks: tuple[int, ...]) -> Axis:
    """The axis over these ranks, this one among them, made by its members at its first use.

    >>> axis_here((0,)).size
    1
    """
    world, axes = _found()
    if ranks not in axes:
        axes[ranks] = world.axis("global", [ranks]).for_strategy("global tensors")
    return axes[ranks]


def everyone_here() -> Axis:
    """The axis over all ranks.

    >>> everyone_here().ranks
    (0,)
    """
    return axis_here(tuple(range(here().size)))


def _found() -> tuple[World, dict[tuple[int, ...], Axis]]:
    if not dist.is_initialized():
        if not _ALONE:
            _ALONE.append((World(0, 1, torch.device("cpu"), _Alone(), Recorder()), {}))
        return _ALONE[0]
    if dist.group.WORLD not in _WORLDS:  # every rank comes here at its first placement
        rank, size, recorder = dist.get_rank(), dist.get_world_size(), Recorder()
        timeout = timedelta(seconds=float(os.environ.get("SHARDWRIGHT_TIMEOUT_S", "600")))
        transport = ProcessTransport(rank, size, recorder, timeout, None, "auto")
        device = torch.device("cpu")
        if dist.get_backend() == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        enter(World(rank, size, device, transport, recorder))
    return _WORLDS[dist.group.WORLD]
