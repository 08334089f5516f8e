"""Gives a run a private folder for temporary files and sockets, which the next run removes if this one is killed.

The process that started the run holds a lock on the folder, and normally removes the folder at the end. A run whose
processes were all killed cannot do so, but the system releases the lock, by which the next run sees that the folder is
left over.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.comm.backends.message_blocks import folder_for_sockets
from shardwright.errors import PlanError
from shardwright.file_locks import lock

SAVES = ".saves"
"""The end of the name of a file in the run's folder, after the rank's number, while that rank saves after a failure."""

_PREFIX = "shardwright-run-"
_ROOM_BYTES = 2**20


@contextmanager
def run_folder() -> Iterator[Path]:
    """Returns a context that yields a new folder, which only this user can enter, and removes it at the end.

    At its start it also removes the folders of this user's runs that were killed.

    Raises: PlanError: as :func:`~shardwright.comm.backends.message_blocks.folder_for_sockets`, or the folder cannot be
        made there, or not have a file of a mebibyte.

    >>> with run_folder() as folder:
    ...     oct(folder.stat().st_mode & 0o777)
    '0o700'
    """
    base = Path(folder_for_sockets())
    for path in base.glob(f"{_PREFIX}*"):
        _remove_if_dead(path)
    try:
        folder, handle = _owned(base)
    except OSError as failure:
        raise _no_room(base, failure) from failure
    try:
        _check_room(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _check_room(folder: Path) -> None:
    """Raises PlanError if the folder has no room for the file by which ranks meet.

    A rank of 8 writes some hundred bytes into it. Where a part of them has no room, torch (2.13) reads for ever, in
    native code and with the file's lock, which neither a time limit nor the rank that could not write then ends.
    """
    path = folder / "room"
    try:
        path.write_bytes(bytes(_ROOM_BYTES))
        path.unlink()
    except OSError as failure:
        raise _no_room(folder.parent, failure) from failure


def _no_room(base: Path, failure: OSError) -> PlanError:
    return PlanError(
        "ranks cannot meet: the folder for temporary files has no room",
        given=f"'{base}': {failure.strerror}",
        allowed="a folder that can be written, with a mebibyte of room, and no smaller limit of a file (ulimit -f)",
        fix="free space there, or set TMPDIR to another folder",
    )


def _owned(base: Path) -> tuple[Path, int]:
    """Returns a new folder and the handle that locks it. Another run may remove a folder until it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        with suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY)
            lock(handle, wait=True)
            if folder.exists():
                return folder, handle
            os.close(handle)


def _remove_if_dead(folder: Path) -> None:
    with suppress(OSError):  # another run removes it, or it is not a folder of this user
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if lock(handle, without_locks=False):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)
