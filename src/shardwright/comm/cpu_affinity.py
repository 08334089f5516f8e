"""Binds the ranks of one machine to CPU cores: each to cores of its own or, with fewer cores than ranks, to one core.

In the second case some ranks share a core. The system moves a busy process between cores, away from its memory. An
optimizer update on state in host memory or files (``offload``) waits for memory most of its time, so it gains most from
binding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from shardwright.errors import PlanError
from shardwright.mesh import balanced_part


def cores_of(index: int, num_ranks: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Returns those of ``cores`` to which rank number ``index`` of ``num_ranks`` on a machine is to be bound.

    They are a contiguous run of ``cores``. If there are fewer cores than ranks, each rank gets one core, and some ranks
    share one.

    >>> [cores_of(index, 2, range(5)) for index in range(2)], cores_of(2, 3, [4, 6])
    ([(0, 1, 2), (3, 4)], (4,))
    """
    if len(cores) < num_ranks:
        return (cores[index % len(cores)],)
    return tuple(cores[i] for i in balanced_part(len(cores), num_ranks, index))


def bind(index: int, num_ranks: int) -> tuple[int, ...]:
    """Binds the calling thread, and what it starts later, to this process's share of the CPU cores; returns the cores.

    The process is rank number ``index`` of ``num_ranks`` on its machine. Only cores on which it may run already are
    shared out.

    Raises: PlanError: the system cannot bind processes.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise PlanError(
            "ranks cannot be bound to cores on this system",
            given="bind_cores",
            allowed="Linux",
            fix="leave out bind_cores, or --bind-cores",
        )
    cores = cores_of(index, num_ranks, sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, cores)
    return cores
