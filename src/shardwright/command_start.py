"""Sets the signal handlers of the ``shardwright`` command, and starts its fork server, before torch is imported.

``import shardwright`` imports this module first. If the program is the ``shardwright`` command, SIGINT, SIGTERM and
SIGHUP then end it with exit code 130 and the line "stopped" instead of a traceback. SIGUSR1, by which a scheduler warns
of its time limit, has no effect until there is something to save. Signals that are ignored, as under ``nohup``, stay
ignored.

Garbage collection is paused until the command's modules are imported, which shortens these imports by a quarter.

For a ``shardwright train`` that starts processes as ranks, the module also starts the fork server, the process that
forks the ranks, so that both import torch at the same time. In every other program the import of this module does none
of this.
"""

from __future__ import annotations

import gc
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
    """Restores the SIGINT handler that this module replaced; ``cli.main`` calls it once all modules are imported.

    The handlers of SIGTERM, SIGHUP and SIGUSR1 stay until a command sets its own. Garbage is collected again, but not
    among what was imported. In a program that is not the ``shardwright`` command there is nothing to restore.
    """
    if _IS_COMMAND:
        gc.freeze()
        gc.enable()
    while _BEFORE:
        signal.signal(signal.SIGINT, _BEFORE.pop())


def ending() -> None:
    """Sets SIGUSR1 to be ignored until the process ends, if this module's handler for it is still set.

    Python's shutdown takes time and resets handlers that are Python functions; the signal would then kill the process.
    What was imported may be collected again: extensions built with nanobind, such as triton's, would else name on
    stderr each function that outlived the interpreter.
    """
    if _IS_COMMAND:
        gc.unfreeze()
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


_IS_COMMAND = _is_command()  # asked once: later ``python -m`` has put its module's path into sys.argv
if _IS_COMMAND:
    gc.disable()  # until all modules are imported: see ``imported``
if _IS_COMMAND and threading.current_thread() is threading.main_thread():
    for _name in ("SIGINT", "SIGTERM", "SIGHUP"):
        _handle(_name, _end)
    _handle("SIGUSR1", _pass)
    if _trains_here() and os.name == "posix":
        with suppress(OSError):  # too many processes or too little memory: the launcher tries again, and says so
            FORK_SERVER.start()
