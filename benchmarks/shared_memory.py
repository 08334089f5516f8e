"""What a program has left in shared memory, where other programs of the machine make names and remove them."""

import os
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")  # Linux alone shows the names
OURS = "sem.mp-", "psm_", "torch_", "shardwright"
"""How names begin of Python's semaphores and memory, torch's memory, and what the library itself may make."""


def names() -> set[str]:
    """The names of shared memory and semaphores that there are now."""
    return {name for name in os.listdir(FOLDER) if name.startswith(OURS)} if FOLDER.is_dir() else set()


def left_since(before: set[str], most_s: float = 20.0) -> set[str]:
    """The names that have come since ``before`` and that no other process has mapped, so that it will not remove them.

    A process maps a name a moment after it has made it, so names are only left if they are so for ``most_s`` seconds.
    """
    end = time.monotonic() + most_s
    while (new := names() - before) and (left := new - _mapped()) and time.monotonic() < end:
        time.sleep(0.05)
    return left if new else new


def _mapped() -> set[str]:
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # of a process that has ended, or of another user
            if maps.parent.name != str(os.getpid()):
                lines = maps.read_text().splitlines()
                found |= {line.partition(f"{FOLDER}/")[2] for line in lines if f"{FOLDER}/" in line}
    return found
