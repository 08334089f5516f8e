"""Turns signals into requests to stop a run, or to save a checkpoint, after the step under way."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any


class Stop:
    """A request to end the run after the current step with a checkpoint, or to save a checkpoint and continue.

    ``signal`` is the number of the signal that requested the stop, or 0. ``num_saves_requested`` counts the requests of
    checkpoints. Ranks that are processes each handle signals; ranks that are threads share one object.
    """

    def __init__(self) -> None:
        self.requested = False  # without a lock, because a second signal may interrupt the handler of the first
        self.signal = 0
        self.num_saves_requested = 0
        self.wanted = False
        """Whether :meth:`follow_signals` was called, by any thread: the main thread then sets the handlers."""
        self._handled = contextlib.ExitStack()
        self._is_handled = False

    def request(self, number: int = 0, *_: Any) -> None:
        """Requests that the run stops after the current step; as a signal handler it gets the signal's ``number``."""
        self.requested, self.signal = True, number

    def request_save(self, *_: Any) -> None:
        """Requests a checkpoint after the current step, after which the run continues: the handler of SIGUSR1."""
        self.num_saves_requested += 1

    def follow_signals(self) -> None:
        """Lets signals request the stop, as in :meth:`on_signals`, from now until :meth:`restore`.

        If ranks are threads, their launcher calls it in the main thread too, once a rank has called it.
        """
        self.wanted = True
        if not self._is_handled and threading.current_thread() is threading.main_thread():
            self._is_handled = True
            self._handled.enter_context(self.on_signals())

    def restore(self) -> None:
        """Restores the handlers that :meth:`follow_signals` replaced; the main thread calls it once the work ended."""
        self._handled.close()
        self._is_handled = False

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
