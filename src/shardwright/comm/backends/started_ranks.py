"""The launcher's side of the rank processes that it started: sends their work, reads their results, finds what failed.

A failure has a cause: a rank that raised, or ended without a result or report. Ranks that then lose their connection to
it fail only as a consequence. Once the cause is known, the other ranks have a second to end, and then they are killed:
a rank inside a long computation runs no Python signal handler, and a suspended rank reacts to no signal but SIGKILL.
Ranks that save what they hold after the failure have a few seconds more.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import psutil

from shardwright.comm import failures
from shardwright.comm.backends.run_folder import SAVES, run_folder
from shardwright.fork_server import FORK_SERVER, HELD_BACK, RankPipes, read_status

KNOWN_S = 1.0
"""Seconds that the other ranks have to end once the cause of a failure is known."""

SAVES_S = 6.0
"""Seconds after a failure that ranks have to save what they hold; the other ranks run on as long as a rank saves."""

UNKNOWN_S = 3.0
"""Seconds that the launcher waits for the cause once a rank reports that it lost another rank."""

_STOPPED_S = 5.0
_KILLED_S = 3.0
_LOOK_S = 0.5

RESULT, NOTE = b"R", b"N"
"""The first byte of a rank's answer: a result, or a note of its failure. The length and the pickle follow."""


def answer_of(kind: bytes, pickled: bytes) -> bytes:
    """Returns a rank's answer to the launcher as bytes: ``kind``, the length of ``pickled`` in 8 bytes, ``pickled``.

    ``kind`` is ``RESULT`` or ``NOTE`` (of a failure).
    """
    return kind + len(pickled).to_bytes(8, "little") + pickled


@dataclass(eq=False)
class RankProcess:
    """The launcher's handle on one rank's process: its pipes, what it has sent so far, and how it ended.

    ``number`` is the rank, ``process`` its process (None if that ended at once), ``task`` the bytes still to be sent to
    it, ``answer`` the bytes read of its result or failure report, and ``code`` its exit code once known. ``ended`` says
    that it has ended, ``killed`` that the launcher has killed it, ``stopped`` that it was suspended by then, and
    ``unwatched`` that the fork server has ended, so that its exit code stays unknown.
    """

    number: int
    pipes: RankPipes
    process: psutil.Process | None
    task: memoryview
    answer: bytearray = field(default_factory=bytearray)
    code: int | None = None
    ended: bool = False
    killed: bool = False
    stopped: bool = False  # by SIGSTOP, when it was killed
    unwatched: bool = False  # the fork server has ended, so its exit code stays unknown

    @staticmethod
    def started(number: int, pipes: RankPipes, pid: int, task: bytes) -> RankProcess:
        """Returns the handle of a rank that was just forked; :meth:`send` then sends ``task`` to it."""
        os.set_blocking(pipes.task, False)
        os.set_blocking(pipes.answer, False)
        try:
            process = psutil.Process(pid)
        except psutil.NoSuchProcess:  # killed at once: its exit code follows
            process = None
        return RankProcess(number, pipes, process, memoryview(len(task).to_bytes(8, "little") + task))

    @property
    def alive(self) -> bool:
        """Whether the process still runs, as the system says.

        It is needed only after the fork server, which otherwise reports the exit of a rank, has ended or was suspended.
        """
        try:
            return self.process is not None and self.process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    @property
    def answered(self) -> bytes:
        """The kind of the rank's answer, ``RESULT`` or ``NOTE`` (a failure); empty until the whole answer was read."""
        whole = len(self.answer) >= 9 and len(self.answer) == 9 + int.from_bytes(self.answer[1:9], "little")
        return bytes(self.answer[:1]) if whole else b""

    def signal(self, number: int) -> None:
        """Sends the signal ``number`` to the process, unless the process has ended."""
        with suppress(psutil.NoSuchProcess):
            if self.process is not None and not self.ended:
                self.process.send_signal(number)

    def kill(self) -> None:
        """Kills the process (SIGKILL), and records in ``stopped`` whether it was suspended, as by SIGSTOP."""
        self.stopped = self.process is not None and _is_suspended(self.process.pid)
        self.killed = True
        self.signal(signal.SIGKILL)

    def send(self) -> bool:
        """Sends as much of the rank's pickled work as the pipe takes without blocking; returns whether more is left.

        Returns False if the process has ended.
        """
        try:
            self.task = self.task[os.write(self.pipes.task, self.task) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:  # it has ended already
            return False
        return bool(self.task)

    def hear(self) -> bool:
        """Reads what the rank has sent of its result or failure report, and returns whether its pipe is still open."""
        with suppress(BlockingIOError):
            while data := os.read(self.pipes.answer, 2**20):
                self.answer += data
            return False
        return True


def _is_suspended(pid: int | None) -> bool:
    """Returns whether process ``pid`` exists and is suspended, as by the signal SIGSTOP."""
    try:
        return pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _for_ranks(number: int) -> int:
    return signal.SIGTERM if number == signal.SIGHUP else number  # ranks may end on SIGHUP


class StartedRanks:
    """The processes of one launch: passes signals on to them, and collects their results or the cause of a failure.

    Processes that have not ended ``grace_s`` seconds after a stop signal are killed. ``folder`` is the run's folder,
    which exists during :meth:`running`. A rank that saves after a failure has a file in it for that time.
    """

    folder: Path

    def __init__(self, grace_s: float) -> None:
        self.ranks: list[RankProcess] = []
        self.grace_s = grace_s
        self._last_s = self._grace_end_s = float("inf")  # when ranks that save are killed too
        self.signalled = 0  # the first signal to the launcher that told the run to stop
        self._late = 0  # a signal that came after all ranks had ended
        self._notes: dict[int, failures.FailureNote] = {}
        self._end_s = float("inf")  # when the ranks that are still there are killed
        self._poll = select.poll()
        self._heard: dict[int, Callable[[], None]] = {}

    def add(self, rank: RankProcess) -> None:
        """Adds a rank that was just started, and sends it the stop signal if the launcher has received one before."""
        self.ranks.append(rank)
        self._listen(rank)
        if self.signalled:
            rank.signal(_for_ranks(self.signalled))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Returns a context that makes the run's folder and forwards signals to the ranks.

        At its end it kills the ranks that still run, closes all pipes, removes the folder and only then restores the
        signal handlers, so that a repeated signal cannot interrupt this. If the first signal comes that late, it is
        raised again for the restored handler. The signals are SIGINT, SIGTERM, SIGHUP (forwarded as SIGTERM) and
        SIGUSR1, unless they are ignored, and only in the main thread. A signal to the whole process group reaches a
        rank twice: from its sender, and from here.

        Raises: PlanError: as :func:`~shardwright.comm.backends.run_folder.run_folder`.
        """
        handled = HELD_BACK if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.getsignal(number) for number in handled}
        handlers = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
        for number in handlers:
            signal.signal(number, self._forward)
        try:
            with run_folder() as self.folder:
                try:
                    yield
                finally:
                    self._kill_all()
                    for rank in self.ranks:
                        for pipe in rank.pipes:
                            os.close(pipe)
        finally:
            for number in sorted(handlers, key=lambda sig: sig == signal.SIGINT):  # SIGINT last: it may raise then
                signal.signal(number, handlers[number])
            if self._late and not self.signalled:
                signal.raise_signal(self._late)

    def wait(self) -> list[bytes]:
        """Waits until all ranks have ended, and returns their pickled results in rank order.

        If a rank has failed, the others are killed unless they end within seconds.

        Raises: the failure that caused the others, if a rank has failed; KeyboardInterrupt, if the ranks ended because
            of a stop signal to the launcher.
        """
        while not all(rank.ended for rank in self.ranks):
            events = self._poll.poll(_LOOK_S * 1000)
            for handle, _ in events:
                if handle in self._heard:  # an earlier event may have closed the pipe
                    self._heard[handle]()
            is_silent = not events and _is_suspended(FORK_SERVER.pid)
            for rank in self.ranks:
                if (rank.unwatched or is_silent) and not rank.ended and not rank.alive:
                    self._note_end(rank, None)
            if time.monotonic() > self._end_s and not self._waits_for_saves():
                self._kill_all()
        if all(rank.answered == RESULT for rank in self.ranks):
            return [bytes(rank.answer[9:]) for rank in self.ranks]
        raise self._failure()

    def _forward(self, number: int, _: FrameType | None = None) -> None:
        if self.ranks and all(rank.ended for rank in self.ranks):
            self._late = number
            return
        if number != signal.SIGUSR1 and not self.signalled:  # a second signal changes nothing: the ranks save
            self.signalled = number
            self._end_within(self.grace_s)
            self._grace_end_s = self._end_s
        for rank in self.ranks:
            rank.signal(_for_ranks(number))

    def _end_within(self, seconds: float) -> None:
        self._end_s = min(self._end_s, time.monotonic() + seconds)

    def _failed_within(self, seconds: float) -> None:
        """Gives the ranks ``seconds`` to end because one has failed; ranks that save have up to ``SAVES_S``."""
        self._end_within(seconds)
        self._last_s = min(self._last_s, time.monotonic() + SAVES_S)

    def _waits_for_saves(self) -> bool:
        """Returns whether to wait for a rank that saves after a failure; if so, all ranks get a further second to end.

        If the time to save is over, it prints that on standard error.
        """
        left = (rank.number for rank in self.ranks if not rank.ended and not rank.killed)
        if not any((self.folder / f"{number}{SAVES}").exists() for number in left):
            return False
        if time.monotonic() > min(self._last_s, self._grace_end_s):
            with suppress(OSError):  # a closed pipe, as of "| head": the ranks are waited for all the same
                sys.stderr.write(f"the last step is not saved: {SAVES_S:g} s after the failure it was not written\n")
            return False
        self._end_s = time.monotonic() + KNOWN_S
        return True

    def _kill_all(self) -> None:
        for rank in self.ranks:
            if rank.killed and not rank.ended:  # in a system call; it ends when that returns
                rank.ended = True
            elif not rank.ended:
                rank.kill()
        self._end_s = time.monotonic() + _KILLED_S

    def _listen(self, rank: RankProcess) -> None:
        """Registers the functions to run when a pipe of the rank can be read or written."""

        def status() -> None:
            code = read_status(rank.pipes.status)
            rank.unwatched = code is None
            self._forget(rank.pipes.status)
            if not rank.unwatched:
                self._note_end(rank, code)

        def answer() -> None:
            if not rank.hear():
                self._forget(rank.pipes.answer)
                self._note_answer(rank)

        def task() -> None:
            if not rank.send():
                self._forget(rank.pipes.task)

        pipes, reads = rank.pipes, select.POLLIN
        listened = ((pipes.status, status, reads), (pipes.answer, answer, reads), (pipes.task, task, select.POLLOUT))
        for pipe, heard, event in listened:
            self._heard[pipe] = heard
            self._poll.register(pipe, event)

    def _forget(self, pipe: int) -> None:
        if self._heard.pop(pipe, None) is not None:
            self._poll.unregister(pipe)

    def _note_answer(self, rank: RankProcess) -> None:
        if rank.answered != NOTE or rank.number in self._notes:
            return
        note: failures.FailureNote = pickle.loads(rank.answer[9:])
        self._notes[rank.number] = note
        if isinstance(note.failure, failures.StopRequested):
            self._end_within(_STOPPED_S)
        else:
            self._failed_within(KNOWN_S if note.explains else UNKNOWN_S)

    def _note_end(self, rank: RankProcess, code: int | None) -> None:
        rank.hear()
        rank.ended, rank.code = True, code
        for pipe in rank.pipes:
            self._forget(pipe)
        self._note_answer(rank)
        if not rank.answered and not rank.killed:
            self._failed_within(KNOWN_S)

    def _failure(self) -> BaseException:
        silent = [rank for rank in self.ranks if not rank.killed and not rank.answered]
        stopped = [rank.number for rank in self.ranks if rank.stopped]
        exits = {rank.number: rank.code for rank in silent}
        failure = failures.first_failure([*self._notes.values()], exits, stopped)
        told = any(note.explains and not isinstance(note.failure, KeyboardInterrupt) for note in self._notes.values())
        crashed = any(code not in (-signal.SIGTERM, failures.INTERRUPTED) for code in exits.values())
        if isinstance(failure, KeyboardInterrupt) and str(failure):
            return failure
        if not self.signalled or told or crashed:
            return failure
        killed = ", ".join(str(rank.number) for rank in self.ranks if rank.killed)
        late = f"rank {killed} had not ended {self.grace_s:g} s after {signal.Signals(self.signalled).name}"
        return KeyboardInterrupt(f"{late}, the time of --grace-s, and was killed" if killed else "")
