"""Sets the stop signals' handlers of the ``shardwright`` command, before anything else is imported.

``import shardwright`` imports this module first. If the program is the ``shardwright`` command, SIGINT, SIGTERM and
SIGHUP then end it with exit code 130 and the line "stopped" instead of a traceback. SIGUSR1, by which a scheduler warns
of its time limit, has no effect until there is something to save. Signals that are ignored, as under ``nohup``, stay
ignored. In every other program nothing is changed.

This module imports only modules that Python has loaded when it starts: any other takes milliseconds, in which Ctrl-C
would still end the command with a traceback.
"""

import _signal  # type: ignore[import-not-found]  # of which the module `signal` makes enums, and takes longest
import os
import sys

INTERRUPTED = 130
"""The exit code of a command that a stop signal ended."""

_BEFORE: list = []  # type: ignore[type-arg]


def _is_command() -> bool:
    """Returns whether this process was started as ``shardwright ...`` or ``python -m shardwright.cli ...``."""
    if sys.argv[:1] == ["-m"]:  # while ``python -m`` imports the package of its module, sys.argv has no path yet
        words = sys.orig_argv
        return "shardwright.cli" in words[words.index("-m") + 1 : words.index("-m") + 2]
    return bool(sys.argv) and os.path.splitext(os.path.basename(sys.argv[0]))[0] == "shardwright"


IS_COMMAND = _is_command()  # asked once: later ``python -m`` has put its module's path into sys.argv


def _end(*_: object) -> None:
    os.write(2, b"stopped\n")
    os._exit(INTERRUPTED)  # an exception could be caught by a module that is being imported


def _pass(*_: object) -> None:
    """Has no effect. SIG_IGN would hide from a launcher that its ranks are to be told of the signal."""


def imported() -> None:
    """Restores the SIGINT handler that this module replaced, once all modules of the command are imported.

    The handlers of SIGTERM, SIGHUP and SIGUSR1 stay until a command sets its own. In a program that is not the
    ``shardwright`` command there is nothing to restore.
    """
    while _BEFORE:
        _signal.signal(_signal.SIGINT, _BEFORE.pop())


def ending() -> None:
    """Sets what signals do until the process ends: SIGUSR1 is ignored if this module's handler for it is still set.

    Python's shutdown takes time and resets handlers that are Python functions; the signal would then kill the process.
    Ctrl-C ends the process at once; Python's own handler would print a traceback from its shutdown.
    """
    if IS_COMMAND and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    if hasattr(_signal, "SIGUSR1") and _signal.getsignal(_signal.SIGUSR1) is _pass:
        _signal.signal(_signal.SIGUSR1, _signal.SIG_IGN)


def _handle(name: str) -> None:
    """Sets the handler of the signal ``name``, unless the system has no such signal or it is ignored."""
    number = getattr(_signal, name, None)
    if number is not None and _signal.getsignal(number) != _signal.SIG_IGN:
        before = _signal.signal(number, _pass if name == "SIGUSR1" else _end)
        if name == "SIGINT":
            _BEFORE.append(before)


if IS_COMMAND:
    try:
        for _name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
            _handle(_name)
    except ValueError:  # this is not the main thread, which alone may handle signals
        pass
