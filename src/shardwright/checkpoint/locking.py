"""The lock of a folder of checkpoints: one save at a time writes to it."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from pathlib import Path

from shardwright.file_locks import is_same, lock

SAVING = ".saving"
"""The file that is locked while a checkpoint is written beside it. Unlike a lock of the folder, it works over NFS."""

MOST_WAIT_S = 300.0
"""How long a save waits for another into the same folder."""

_WAIT_S = 0.02


@contextlib.contextmanager
def one_save(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder's saves while the block runs; waits for the save that has it.

    Raises: OSError: the folder cannot be written, or the other save has not ended after ``MOST_WAIT_S``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, until_s = folder / SAVING, time.monotonic() + MOST_WAIT_S
    while True:
        with path.open("a") as file:  # "w" would empty a file that a link of this name points to
            # the save before removes the file at its end: a lock of a file that is gone is none
            if lock(file) and is_same(file, path):
                try:
                    yield
                finally:
                    with contextlib.suppress(OSError):
                        path.unlink()
                return
        if time.monotonic() > until_s:
            raise OSError(errno.EBUSY, f"another save into '{folder}' has not ended in {MOST_WAIT_S:.0f} s")
        time.sleep(_WAIT_S)
