"""Locks of files and folders between processes. The system releases a dead process's lock."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import IO


def lock(file: IO[str] | int, *, wait: bool = False, without_locks: bool = True) -> bool:
    """Locks an open file for this process; returns False if another process, or another open file here, holds the lock.

    ``wait`` waits until that one has released it. Where the file system has no locks it returns ``without_locks``.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            handle = file if isinstance(file, int) else file.fileno()
            msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as failure:
        return without_locks and failure.errno not in (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
    return True


def is_same(file: IO[str], path: Path) -> bool:
    """Returns whether an open file is still what ``path`` names; False if nothing is there."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
