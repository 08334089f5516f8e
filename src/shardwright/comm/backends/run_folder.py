"""Gives a run a private folder for temporary files and sockets, which the next run removes if this one is killed.

The process that started the run holds a lock on the folder, and normally removes the folder at the end. A run whose
processes were all killed cannot do so, but the system releases the lock, by which the next run sees that the folder is
left over.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.comm.backends.message_blocks import folder_for_sockets
from shardwright.errors import PlanError
from shardwright.file_locks import lock

STORE = "store"
"""The name of the file in the run's folder by which ranks meet."""

SAVES = ".saves"
"""The end of the name of a file in the run's folder, after the rank's number, while that rank saves after a failure."""

_PREFIX = "shardwright-run-"
_ROOM_BYTES = 2**20
_KEEP_SIZE = 1


@contextmanager
def run_folder() -> Iterator[Path]:
    """Returns a context that yields a new folder, which only this user can enter, and removes it at the end.

    At its start it also removes the folders of this user's runs that were killed.

    The folder has an empty file by which ranks meet, with a mebibyte of the disk reserved for it where the system can.

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
        _reserve_room(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _reserve_room(folder: Path) -> None:
    """Makes the file by which ranks meet, with room that stays when the disk fills. Raises PlanError: there is none.

    In a run of 8 ranks, each writes some hundred bytes into it. If the disk has no room for all of them, torch (2.13)
    reads forever, in native code and holding the file's lock. Neither a time limit nor the end of the rank that could
    not write ends that.
    """
    path = folder / STORE
    try:
        path.write_bytes(bytes(_ROOM_BYTES))
        os.truncate(path, 0)
        with path.open("ab") as file:
            _reserve(file.fileno())
    except OSError as failure:
        raise _no_room(folder.parent, failure) from failure


def _reserve(handle: int) -> None:
    """Reserves the room of an open file, which stays empty, on systems that can. Raises OSError: there is no room."""
    # not os.posix_fallocate, which would fill the file with zeros
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is not None and fallocate(handle, _KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(_ROOM_BYTES)):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(number, os.strerror(number))


def _no_room(base: Path, failure: OSError) -> PlanError:
    return PlanError(
        "ranks cannot meet: the folder for temporary files has no room",
        given=f"'{base}': {failure.strerror}",
        allowed="a folder that can be written, with a mebibyte of room, and no smaller limit of a file (ulimit -f)",
        fix="free space there, or set TMPDIR to another folder",
    )


def _owned(base: Path) -> tuple[Path, int]:
    """Returns a new folder and its lock's handle; tries again if another run removes the folder before it is locked."""
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
