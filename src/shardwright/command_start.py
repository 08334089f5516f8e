"""Ends the command in one line if Ctrl-C comes while it still imports, torch above all.

``import shardwright`` imports this module first. In the ``shardwright`` command it sets a handler of SIGINT, which
``cli.main`` removes when all is imported. In every other program it does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""

_BEFORE: list[Any] = []


def _is_command() -> bool:
    """Whether this process was started as ``shardwright ...`` or ``python -m shardwright.cli ...``."""
    words = sys.orig_argv[1:]
    return "shardwright.cli" in words[:4] or any(Path(word).name == "shardwright" for word in words[:2])


def _end(*_: Any) -> None:
    os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)  # an exception would end in whatever module is being imported


def imported() -> None:
    """Gives SIGINT its former handler back."""
    while _BEFORE:
        signal.signal(signal.SIGINT, _BEFORE.pop())


if _is_command() and threading.current_thread() is threading.main_thread():
    _BEFORE.append(signal.signal(signal.SIGINT, _end))
