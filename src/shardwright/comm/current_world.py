"""Keeps this process's current world (the ranks of the run), and the process groups that global tensors use in it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardwright import devices
from shardwright.comm.axis import Axis
from shardwright.comm.backends.fake import fake_world
from shardwright.comm.backends.process_groups import ProcessTransport, has_native_group
from shardwright.comm.backends.rank_devices import RankDevice, decided, exchanged
from shardwright.comm.recorder import Recorder
from shardwright.comm.world import World

_WORLDS: WeakKeyDictionary[Any, tuple[World, dict[tuple[int, ...], Axis]]] = WeakKeyDictionary()
"""The world and axes of each default process group of torch, dropped together with that group."""

_SINGLE_RANK_WORLD: list[tuple[World, dict[tuple[int, ...], Axis]]] = []


def enter(world: World) -> None:
    """Makes ``world`` what :func:`current_world` returns until torch's default process group is destroyed.

    All ranks call it together, because it creates a process group over them.
    """
    everyone = world.everyone()  # made now, while all ranks take part: later only some may call
    _WORLDS[dist.group.WORLD] = (world, {everyone.ranks: everyone.for_strategy("global tensors")})


def current_world() -> World:
    """Returns the ``World`` of this rank: the one from :func:`launch`, or one around torch's default process group.

    The latter is made at the first call, which all ranks make together; the timeout of its calls is
    SHARDWRIGHT_TIMEOUT_S seconds (default 600). If torch.distributed is not initialized, as with ranks that are
    threads, the world has one rank.

    Raises: PlanError: at the first call, the ranks' accelerators do not fit, as in
        :func:`~shardwright.comm.backends.rank_devices.decided`.

    >>> current_world().size
    1
    """
    return _world_and_axes()[0]


def axis_here(ranks: tuple[int, ...]) -> Axis:
    """Returns the axis (process group) over ``ranks``, for global tensors.

    ``ranks`` are numbers in the run, this rank's among them. At the first call with these ranks the group is created,
    so all of them must call it then.
    """
    world, axes = _world_and_axes()
    if ranks not in axes:
        axes[ranks] = world.axis("global", [ranks]).for_strategy("global tensors")
    return axes[ranks]


def everyone_here() -> Axis:
    """Returns the axis (process group) over all ranks of the current world.

    >>> everyone_here().ranks
    (0,)
    """
    return axis_here(tuple(range(current_world().size)))


def _world_and_axes() -> tuple[World, dict[tuple[int, ...], Axis]]:
    if not dist.is_initialized():
        if not _SINGLE_RANK_WORLD:
            _SINGLE_RANK_WORLD.append((fake_world(0, 1, torch.device("cpu")), {}))
        return _SINGLE_RANK_WORLD[0]
    if dist.group.WORLD not in _WORLDS:  # all ranks get here together, at their first global tensor
        rank, size, recorder = dist.get_rank(), dist.get_world_size(), Recorder()
        timeout = timedelta(seconds=float(os.environ.get("SHARDWRIGHT_TIMEOUT_S", "600")))
        device = torch.device("cpu")
        kind = devices.accelerator()
        if kind != "cpu" and has_native_group(kind):
            device = devices.default()
            card = devices.identity(device) or str(rank)
            mine = RankDevice(socket.gethostname(), "auto", kind, device.index, devices.count(), None, card)
            decided(exchanged(mine, dist.distributed_c10d._get_default_store(), rank, size), rank)
        transport = ProcessTransport(rank, size, recorder, timeout, None, "auto", device=device)
        enter(World(rank, size, device, transport, recorder))
    return _WORLDS[dist.group.WORLD]
