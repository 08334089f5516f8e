"""Which cores of a machine each of its ranks runs on: its own, so that ranks do not push each other about.

The system moves a busy process between cores, and its memory stays behind. What works on state in host memory or in
files, as an update under ``offload`` does, waits for memory most of its time, and feels it first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from shardwright.errors import PlanError
from shardwright.mesh import balanced_part


def cores_of(index: int, num_ranks: int, cores: Sequence[int]) -> tuple[int, ...]:
    """The cores of one of a machine's ranks: a run of them, or one in turn where there are fewer than ranks.

    >>> [cores_of(index, 2, range(5)) for index in range(2)], cores_of(2, 3, [4, 6])
    ([(0, 1, 2), (3, 4)], (4,))
    """
    if len(cores) < num_ranks:
        return (cores[index % len(cores)],)
    return tuple(cores[i] for i in balanced_part(len(cores), num_ranks, index))


def bind(index: int, num_ranks: int) -> tuple[int, ...]:
    """Binds this process, and the threads it starts from now on, to its cores, and returns them.

    They are among those that it may use already. Raises: PlanError: a system that binds no processes.
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
