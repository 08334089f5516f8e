"""Reads text files that a user names, with limits on their kind and size."""

from __future__ import annotations

import errno
import os
import stat
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
