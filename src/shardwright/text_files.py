"""Reads text files that a user names, with limits on their kind and size; finds folders near one that was meant."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path


def read_text(path: Path, most_bytes: int, encoding: str = "utf-8", *, pipes: bool = True) -> str:
    """Returns the text of a file of up to ``most_bytes`` bytes: a regular file or, unless ``pipes`` is False, a pipe.

    Raises: OSError: the file cannot be read, is something else, such as a device, or is longer than ``most_bytes``.
        UnicodeDecodeError: its bytes are not text in ``encoding``.

    >>> read_text(Path("/dev/null"), 100)
    Traceback (most recent call last):
    OSError: [Errno 22] no regular file: '/dev/null'
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "a folder" if stat.S_ISDIR(mode) else "no regular file", str(path))
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(path))
    return content.decode(encoding)


MOST_ENTRIES = 2000
"""How many entries of folders :func:`folders_near` looks at, so that an error is as quick in a full folder."""


def folders_near(path: Path, holds: Callable[[Path], bool], most: int = 3) -> str:
    """Returns up to ``most`` folders that hold something, the newest first: what a user may have meant by ``path``.

    They lie up to two levels below it, or are a folder above it; or beside it, if there is no such path. They are
    text for an error, ``'a' or 'b'``, which is empty if there are none. A folder that cannot be read holds nothing.
    """
    found = {above for above in islice(path.parents, 2) if above.name and _is(holds, above)}
    below = path if os.path.isdir(path) else path.parent
    entries = (inside for each in _folders_in(below) for inside in (each, *_folders_in(each)))
    found |= {each for each in islice(entries, MOST_ENTRIES) if _is(holds, each)}
    newest = sorted(found, key=lambda each: (-each.stat().st_mtime, each))[:most]
    return " or ".join(f"'{each}'" for each in newest)


def _folders_in(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            yield from [Path(e.path) for e in islice(entries, MOST_ENTRIES) if e.is_dir(follow_symlinks=False)]
    except (OSError, ValueError):
        return


def _is(holds: Callable[[Path], bool], folder: Path) -> bool:
    try:
        return holds(folder)
    except (OSError, ValueError):
        return False
