"""Opens files of weights: only regular files, which are read at given places, never mapped, and at the end checked.

The check raises an error for a file that was written to meanwhile. If a mapped file is shortened, the process dies
(SIGBUS); a read at a place raises an error instead.
"""

from __future__ import annotations

import io
import json
import os
import stat
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardwright.errors import CheckpointError
from shardwright.text_files import read_text

MOST_INDEX_BYTES = 2**28
"""The size in bytes up to which a JSON file, such as an index, is read."""


class OpenFile:
    """A regular file that is open for reading; a link to one is followed. ``num_read_bytes`` counts what was read.

    Raises: CheckpointError: there is no file, it cannot be read, or it is a folder, a device or a pipe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_regular(path)
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as failure:
            raise broken(path, failure.strerror or str(failure)) from failure
        weakref.finalize(self, self._file.close)
        self._state = self._now()
        self.num_bytes: int = self._state[0]
        self.num_read_bytes = 0

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):  # it was replaced since its kind was checked
            raise broken(self.path, "no regular file")
        return status.st_size, status.st_mtime_ns

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fills ``buffer`` with the bytes of the file from ``start`` on.

        Raises: CheckpointError: the file ends before.
        """
        self._file.seek(start)
        while buffer:
            got = self._file.readinto(buffer)
            if not got:
                raise broken(self.path, f"it ends {len(buffer)} bytes too early")
            self.num_read_bytes += got
            buffer = buffer[got:]

    def read(self, start: int, size: int) -> bytearray:
        """Returns ``size`` bytes of the file from ``start`` on. Raises CheckpointError if the file ends before."""
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), start)
        return buffer

    def check_unchanged(self) -> None:
        """Raises CheckpointError if the file was written to since it was opened."""
        if self._now() != self._state:
            raise broken(self.path, "it was written to while it was read")


class FilePart(io.RawIOBase):
    """The bytes of an open file from ``start`` up to ``start + size``, as a file of their own."""

    def __init__(self, file: OpenFile, start: int, size: int) -> None:
        super().__init__()
        self._whole, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def tell(self) -> int:
        """Returns the place of the next byte, counted from the start of the part."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Moves to a place in the part, and returns it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"a place before the start: {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Reads bytes into ``buffer``, and returns their number: 0 at the end of the part."""
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._whole.read_into(view, self._start + self._at)
        self._at += len(view)
        return len(view)


def check_regular(path: Path) -> None:
    """Raises CheckpointError unless ``path`` is a regular file or a link to one; nothing is opened."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as failure:
        raise broken(path, getattr(failure, "strerror", None) or str(failure)) from failure
    if not stat.S_ISREG(mode):
        raise broken(path, "a folder" if stat.S_ISDIR(mode) else "a device or a pipe")


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file of which each object has each key once.

    Raises: CheckpointError: it is missing, is no regular file, is too long, or is not JSON.
    """
    try:
        return parse_json(read_text(path, MOST_INDEX_BYTES, pipes=False))
    except OSError as failure:
        raise broken(path, failure.strerror or str(failure)) from failure
    except (ValueError, RecursionError) as failure:
        raise broken(path, f"not JSON: {failure}".splitlines()[0]) from failure


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError if an object has a key twice, or the text is not JSON.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: 'a' stands there twice
    """
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"{key!r:.80} stands there twice")
        entries[key] = value
    return entries


def check_plain_name(folder: Path, name: Any) -> str:
    """Returns ``name``; raises CheckpointError unless it names a file in ``folder``, and not a path elsewhere."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & {"/", "\\", "\0"}:
        raise broken(folder, f"it names the file {name!r:.80}, which is not in it")
    return name


def broken(path: Path, what: str, fix: str = "check the path, or copy the file again") -> CheckpointError:
    """Returns the error for a file or folder of weights that cannot be read; ``what`` says why."""
    return CheckpointError(
        f"there are no weights to read at '{path}'",
        given=what,
        allowed="a complete file of safetensors or of torch.save, or a folder of such files, of transformers or of "
        "torch.distributed.checkpoint",
        fix=fix,
    )
