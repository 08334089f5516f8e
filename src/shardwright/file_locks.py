"""Locks of files and folders between processes; the system releases the lock of a process that has died."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import IO


def lock(file: IO[str] | int, *, wait: bool = False, without_locks: bool = True) -> bool:
    """Locks an open file for this process; returns False if another process, or another open file here, has the lock.

    With ``wait`` it blocks until the lock is free. If the file system has no locks, ``without_locks`` is returned.
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
    """Returns whether ``path`` still names the open file ``file``; False if it was replaced or removed."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
