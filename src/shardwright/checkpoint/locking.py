"""Locks a folder of checkpoints, so that saves into the same folder wait for each other."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from pathlib import Path

from shardwright.file_locks import is_same, lock

SAVING = ".saving"
"""The name of the file that a save locks while it writes a checkpoint beside it. A folder's own lock fails on NFS."""

MOST_WAIT_S = 300.0
"""The seconds for which a save waits for another save into the same folder."""

_WAIT_S = 0.02


@contextlib.contextmanager
def one_save(folder: Path, most_s: float | None = None) -> Iterator[None]:
    """Returns a context in which no other save writes into ``folder``, which is created if it is missing.

    The context waits for a save that is under way, for at most ``most_s`` seconds or five minutes, and then locks the
    folder.

    Raises: OSError: the folder cannot be written, or the other save has not ended in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    most_s = MOST_WAIT_S if most_s is None else most_s
    path, until_s = folder / SAVING, time.monotonic() + most_s
    while True:
        with path.open("a") as file:  # "w" would empty a file that a link of this name points to
            # an earlier save removes the file at its end, and a lock on a removed file keeps no other save out
            if lock(file) and is_same(file, path):
                try:
                    yield
                finally:
                    with contextlib.suppress(OSError):
                        path.unlink()
                return
        if time.monotonic() > until_s:
            raise OSError(errno.EBUSY, f"another save into '{folder}' has not ended in {most_s:.0f} s")
        time.sleep(_WAIT_S)
