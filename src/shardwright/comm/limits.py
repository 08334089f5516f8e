"""Computes the most ranks that this machine can start, to refuse a layout with a typing error in a size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil

from shardwright.comm.started_world import started_by
from shardwright.errors import LayoutError

Ranks = Literal["threads", "processes"]
"""What the ranks of a run are: threads of one process, or a process each."""

LEAST_RANK_BYTES: Mapping[Ranks, int] = {"threads": 2**22, "processes": 2**25}
"""The least memory that a rank is assumed to need, in bytes. Measured were 0.1 MiB for a thread beside its part of the
model, and 60 MiB for a process with a tiny model, not counting 90 MiB that processes share.

With these numbers 16 GiB allow 4,096 threads or 512 processes, and a typing error in a layout is refused.
"""

_LIMITS = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max", "/sys/fs/cgroup/pids.max")


def most_ranks(ranks: Ranks = "processes") -> int:
    """Returns an upper bound, at least 1, on the number of ranks that this machine can start; far fewer run well.

    It is the smallest of the system's limits on processes and threads, and of the machine's memory divided by
    :data:`LEAST_RANK_BYTES`, the least that a rank is assumed to need.

    >>> 1 <= most_ranks() <= most_ranks("threads") <= psutil.virtual_memory().total // 2**22
    True
    """
    limits = [int(psutil.virtual_memory().total) // LEAST_RANK_BYTES[ranks]]
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # another system; or "max", which is no limit
            limits.append(int(Path(path).read_text()))
    with suppress(ImportError, OSError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if limit != resource.RLIM_INFINITY:
            limits.append(limit)
    return max(min(limits), 1)


def check_can_start(num_ranks: int, ranks: Ranks = "processes") -> None:
    """Raises LayoutError if this machine's memory and process limits allow fewer than ``num_ranks`` ranks.

    ``ranks`` says whether a rank is a thread or a process; :func:`most_ranks` computes the limit.

    In a process that torchrun, srun or mpirun started as a rank, it checks threads alone, and sets torch's environment
    variables (``RANK``, ``WORLD_SIZE``, ...) where they are missing.
    """
    started_by()  # sets WORLD_SIZE where another launcher has started this process as a rank
    is_rank = "WORLD_SIZE" in os.environ
    if (ranks == "threads" or not is_rank) and num_ranks > (most := most_ranks(ranks)):
        raise LayoutError(
            "the layout has more ranks than this machine can start",
            given=f"{num_ranks:,} ranks that are {ranks}",
            allowed=f"up to {most:,} ranks here, by its memory and its limits of processes; show and plans take any",
            fix="write a smaller layout, or start it on several machines with torchrun",
        )
