"""Starts the fork server of the ``shardwright`` command before torch is imported, and pauses garbage collection.

It first opens standard input, output and error, if the command was started with one of them closed.

``import shardwright`` imports this module right after the one that handles the command's signals. If the program is the
``shardwright`` command, garbage collection is paused until the command's modules are imported, which shortens these
imports by a quarter.

For a ``shardwright train`` that starts processes as ranks, the module also starts the fork server, the process that
forks the ranks, so that both import torch at the same time. In every other program the import of this module does none
of this.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from shardwright import command_signals
from shardwright.fork_server import FORK_SERVER

_OF_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""The environment variables that launchers set for a rank: a process with one of them starts no ranks itself."""


def imported() -> None:
    """Ends the settings that hold only during the imports; ``cli.main`` calls it once all modules are imported.

    SIGINT is handled as before this library was imported. Garbage is collected again, but not among what was imported,
    and not in a ``plan`` of one number of ranks, which ends soon after its search. In a program that is not the
    ``shardwright`` command there is nothing to end.
    """
    if command_signals.IS_COMMAND:
        gc.freeze()
        if sys.argv[1:2] != ["plan"] or any(word.partition("=")[0] == "--ranks" for word in sys.argv):
            gc.enable()
    command_signals.imported()


def ending() -> None:
    """Ends the settings that hold while a command runs; the command calls it last.

    SIGUSR1 is ignored from now on, and the interpreter ends without a search for garbage. If triton is imported,
    garbage is searched for after all, among the imported objects too, which takes a third of a second: triton's
    extensions, built with nanobind, would else name on stderr each function that outlived the interpreter.
    """
    if command_signals.IS_COMMAND:
        (gc.unfreeze if "triton" in sys.modules else gc.freeze)()
    command_signals.ending()


def _open_closed() -> None:
    """Opens the null device as standard input, output or error where that is closed, as by ``>&-``.

    Otherwise a file that is opened later, such as a checkpoint, would get the number of the closed one, and native code
    would print into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, for processes too
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def _trains_here() -> bool:
    """Returns whether this command is a ``shardwright train`` that will start ranks on this machine."""
    words = [*sys.orig_argv]
    while words and words[0] != "shardwright.cli" and Path(words[0]).stem != "shardwright":
        del words[0]
    if words[1:2] != ["train"] or any(name in os.environ for name in _OF_RANKS):
        return False
    threads = any(pair == ("--ranks", "threads") for pair in pairwise(words))
    return not (threads or {"--help", "--ranks=threads"} & {*words})


if command_signals.IS_COMMAND:
    gc.disable()  # until all modules are imported: see ``imported``
    _open_closed()
    if threading.current_thread() is threading.main_thread() and _trains_here() and os.name == "posix":
        with suppress(OSError):  # too many processes or too little memory: the launcher tries again, and raises it
            FORK_SERVER.start()
