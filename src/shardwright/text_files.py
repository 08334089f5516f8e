"""Reads text files that a user names, with limits on their kind and size; finds folders near one that was meant."""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

PIPE_S = 10.0
"""The seconds for which a pipe is read that nothing is written to."""


def read_text(path: Path, most_bytes: int, encoding: str = "utf-8", *, pipes: bool = True) -> str:
    """Returns the text of a file of up to ``most_bytes`` bytes: a regular file or, unless ``pipes`` is False, a pipe.

    Raises: OSError: the file cannot be read, is something else, such as a device, is longer than ``most_bytes``, or is
        a pipe to which nothing was written in ten seconds.
        UnicodeDecodeError: its bytes are not text in ``encoding``.

    >>> read_text(Path("/dev/null"), 100)
    Traceback (most recent call last):
    OSError: [Errno 22] no regular file: '/dev/null'
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
        code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(code, "a folder" if stat.S_ISDIR(mode) else "no regular file", str(path))
    if stat.S_ISFIFO(mode):
        content = _read_pipe(path, most_bytes + 1)
    else:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(path))
    return content.decode(encoding)


def _read_pipe(path: Path, most_bytes: int) -> bytes:
    """Returns what is written to a pipe, up to ``most_bytes``, without the endless wait of a plain open.

    Raises: OSError: nothing was written in ten seconds.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        content = b""
        while len(content) < most_bytes:
            if not poll.poll(PIPE_S * 1000):
                raise OSError(errno.ETIMEDOUT, f"a pipe to which nothing was written in {PIPE_S:g} s", str(path))
            if not (more := os.read(handle, min(2**16, most_bytes - len(content)))):
                break
            content += more
        return content
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Writes a text to a file, with a question mark for what UTF-8 does not have; missing folders are created.

    Raises: OSError: it cannot be written, or is a pipe that no other program reads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    is_pipe = path.exists() and stat.S_ISFIFO(os.stat(path).st_mode)
    # opening a pipe as a file waits for a reader for ever
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK) if is_pipe else None
    if handle is not None:
        os.set_blocking(handle, True)
    with open(path if handle is None else handle, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


MOST_ENTRIES = 2000
"""How many entries of folders :func:`folders_near` looks at, so that an error is as quick in a full folder."""


def folders_near(path: Path, holds: Callable[[Path], bool], most: int = 3) -> str:
    """Returns up to ``most`` folders that hold something, the newest first: what a user may have meant by ``path``.

    They lie up to two levels below it, or are a folder above it; or beside it, if there is no such path. They are
    text for an error, ``'a' or 'b'``, which is empty if there are none. A folder that cannot be read holds nothing.
    """
    folders = {above for above in islice(path.parents, 2) if above.name and _is(holds, above)}
    below = path if os.path.isdir(path) else path.parent
    entries = (inside for folder in _folders_in(below) for inside in (folder, *_folders_in(folder)))
    folders |= {entry for entry in islice(entries, MOST_ENTRIES) if _is(holds, entry)}
    newest = sorted(folders, key=lambda folder: (-folder.stat().st_mtime, folder))[:most]
    return " or ".join(f"'{folder}'" for folder in newest)


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
