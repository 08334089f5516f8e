"""Turns signals into requests to stop a run or to save a checkpoint, and finds out if ``torchrun`` has restarted it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardwright.train.run_file import run_name_in


class Stop:
    """A request to end the run after the current step with a checkpoint, or to save a checkpoint and continue.

    ``signal`` is the number of the signal that requested the stop, or 0. ``num_saves_requested`` counts the requests of
    checkpoints. Ranks that are processes each handle signals; ranks that are threads share one object.
    """

    def __init__(self) -> None:
        self.requested = False  # without a lock, because a second signal may interrupt the handler of the first
        self.signal = 0
        self.num_saves_requested = 0

    def request(self, number: int = 0, *_: Any) -> None:
        """Requests that the run stops after the current step; as a signal handler it gets the signal's ``number``."""
        self.requested, self.signal = True, number

    def request_save(self, *_: Any) -> None:
        """Requests a checkpoint after the current step, after which the run continues: the handler of SIGUSR1."""
        self.num_saves_requested += 1

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Returns a context in which SIGINT, SIGTERM and SIGHUP request the stop, and SIGUSR1 requests a checkpoint.

        It has an effect only in the main thread, which alone may set handlers. SIGHUP stays ignored under ``nohup``.
        The earlier handlers are restored afterwards.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        wanted: dict[int, Callable[..., None]] = {signal.SIGINT: self.request, signal.SIGTERM: self.request}
        if sys.platform != "win32":
            wanted[signal.SIGUSR1] = self.request_save
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                wanted[signal.SIGHUP] = self.request
        before = {sig: signal.signal(sig, handler) for sig, handler in wanted.items()}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)


def started_again(out: Path) -> bool:
    """Returns whether ``torchrun`` has restarted the run in ``out``, as it does after a rank or machine was lost.

    That is so if ``torchrun`` counts a restart of this process, or if the run in ``out`` was begun by the same job of
    ``torchrun`` (``--rdzv-id``): on a machine that lost no rank, no restart is counted.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none" and run_name_in(out) == name:
        return True
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
