"""What the ``shardwright`` command does before it imports torch: it sets signal handlers, and starts the fork server.

A stop signal then ends it with one line of text, and ``train`` and the process that forks its ranks import torch at
the same time.

``import shardwright`` imports this module first. In the ``shardwright`` command it sets signal handlers: SIGINT,
SIGTERM and SIGHUP end the command, and SIGUSR1, a scheduler's early warning, has no effect until there is something to
save. Signals that are ignored, as under ``nohup``, stay so. In every other program the module does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from shardwright.fork_server import FORK_SERVER

INTERRUPTED = 130
"""The exit code of a command that a stop signal ended."""

_OF_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables that a launcher of ranks sets, whose processes start none."""

_BEFORE: list[Any] = []


def _is_command() -> bool:
    """Returns whether this process was started as ``shardwright ...`` or ``python -m shardwright.cli ...``."""
    if sys.argv[:1] == ["-m"]:  # as long as ``python -m`` imports the package of its module
        words = sys.orig_argv
        return "shardwright.cli" in words[words.index("-m") + 1 : words.index("-m") + 2]
    return Path(sys.argv[0]).stem == "shardwright" if sys.argv else False


def _end(*_: Any) -> None:
    os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)  # an exception would end in whatever module is being imported


def _pass(*_: Any) -> None:
    """Has no effect. SIG_IGN would hide from a launcher that its ranks are to be told of the signal."""


def imported() -> None:
    """Restores the SIGINT handler that was set before the import; ``cli.main`` calls it once all is imported.

    The other handlers stay: commands that end in another way by a signal, or can save, set their own.
    """
    while _BEFORE:
        signal.signal(signal.SIGINT, _BEFORE.pop())


def ending() -> None:
    """Lets SIGUSR1 be ignored to the end of the process; Python's own end, which takes a while, undoes all handlers."""
    if hasattr(signal, "SIGUSR1") and signal.getsignal(signal.SIGUSR1) is _pass:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _handle(name: str, handler: Callable[..., None]) -> None:
    """Sets the handler of the signal ``name``, unless the system has no such signal or it is ignored."""
    number = getattr(signal, name, None)
    if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
        before = signal.signal(number, handler)
        if name == "SIGINT":
            _BEFORE.append(before)


def _trains_here() -> bool:
    """Returns whether this command is a ``shardwright train`` that will start ranks on this machine."""
    words = [*sys.orig_argv]
    while words and words[0] != "shardwright.cli" and Path(words[0]).stem != "shardwright":
        del words[0]
    if words[1:2] != ["train"] or any(name in os.environ for name in _OF_RANKS):
        return False
    threads = any(pair == ("--ranks", "threads") for pair in pairwise(words))
    return not (threads or {"--help", "--ranks=threads"} & {*words})


if _is_command() and threading.current_thread() is threading.main_thread():
    for _name in ("SIGINT", "SIGTERM", "SIGHUP"):
        _handle(_name, _end)
    _handle("SIGUSR1", _pass)
    if _trains_here() and os.name == "posix":
        with suppress(OSError):  # too many processes or too little memory: the launcher tries again, and says so
            FORK_SERVER.start()
