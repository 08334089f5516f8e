"""Locks files and folders between processes; the operating system releases the locks of a process that has died."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import IO, Any


def lock(file: IO[str] | int, *, wait: bool = False, without_locks: bool = True) -> bool:
    """Locks an open file and returns True, or returns False if the file is locked already.

    The lock may be another process's, or this process's through another open file. With ``wait`` the call blocks until
    the lock is free, on Windows for about ten seconds at most. If locking itself fails, as on a file system without
    locks, nothing is locked and ``without_locks`` is returned.
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


def is_same(file: IO[Any], path: Path) -> bool:
    """Returns whether ``path`` still names the open file ``file``; False if the path was removed or names another."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
