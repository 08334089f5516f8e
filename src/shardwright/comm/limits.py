"""How many ranks this machine can start at most, so that a layout with a typing error is refused by its number."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

from shardwright.errors import LayoutError

LEAST_RANK_BYTES = 2**22
"""The memory that each rank is counted with: between the 0.1 MiB that a rank takes as a thread with the smallest model
and the 150 MiB that it takes as a process (measured). So 16 GiB allow 4,096 ranks, and a typing error is refused."""

_LIMITS = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max", "/sys/fs/cgroup/pids.max")


def most_ranks() -> int:
    """Returns the most ranks that this machine's memory and its limits of processes allow; at least 1.

    >>> 1 <= most_ranks() <= psutil.virtual_memory().total // LEAST_RANK_BYTES
    True
    """
    found = [int(psutil.virtual_memory().total) // LEAST_RANK_BYTES]
    for path in _LIMITS:
        with suppress(OSError, ValueError):  # another system; or "max", which is no limit
            found.append(int(Path(path).read_text()))
    with suppress(ImportError, OSError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if limit != resource.RLIM_INFINITY:
            found.append(limit)
    return max(min(found), 1)


def check_can_start(num_ranks: int) -> None:
    """Raises LayoutError if so many ranks can never run on this machine; under torchrun they are there already."""
    if "WORLD_SIZE" not in os.environ and num_ranks > (most := most_ranks()):
        raise LayoutError(
            "the layout has more ranks than this machine can start",
            given=f"{num_ranks:,} ranks",
            allowed=f"up to {most:,} ranks here, by its memory and its limits of processes; show and plans take any",
            fix="write a smaller layout, or start it on several machines with torchrun",
        )
