"""The fork server: a process that forks the ranks of one machine, so that torch is imported once and not by each rank.

The launcher starts the fork server as a new program, connected by a socket pair without a name. ``shardwright train``
starts it before importing torch itself, so that both import at the same time. For each rank the launcher sends the
ends of three pipes: the rank reads its task from one and writes its answer to another; the fork server writes the
rank's process id and later its exit code to the third. No other process can connect, and after a kill no files are left
behind::

    launcher --socket pair--> fork server --fork--> rank 0, rank 1, ...
        |<---- id and exit code ----+                  |
        +------------- task, answer (pipes) -----------+

The fork server blocks signals to the whole process group (Slurm, systemd, ``timeout``), so that the ranks can save. If
it is killed after the ranks have started, they run on, and only their exit codes stay unknown.
"""

from __future__ import annotations

import atexit
import gc
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import spawn, util
from typing import NamedTuple

from shardwright.errors import RankFailedError

HELD_BACK = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1} if os.name == "posix" else set()
"""The signals that the fork server always blocks. A new rank unblocks them once it has set its first handlers."""

_STATUS = struct.Struct("<q")
_ORPHANS_S = 3.0
_COMMAND = """
import gc, os, select, sys, threading
gc.disable()  # until ranks are forked: passes over the objects of torch take a quarter of the time of these imports
sys.path[:] = {path!r}
hung_up, imported = select.poll(), threading.Event()
hung_up.register({line}, select.POLLHUP)
def end_with_the_launcher():
    while not imported.is_set():
        if hung_up.poll(50):
            os._exit(1)
watch = threading.Thread(target=end_with_the_launcher, daemon=True)  # must not hold a failed import
watch.start()
import shardwright, torch._dynamo, torch.optim  # optimizers load _dynamo
from shardwright import fork_server
from shardwright.comm.backends import processes
imported.set()
watch.join()  # ranks are forked from one thread
fork_server.serve({line}, processes.rank_main)
"""


class RankPipes(NamedTuple):
    """The launcher's ends of a rank's three pipes, as file descriptors.

    The launcher writes the rank's task to ``task``, and reads the rank's answer from ``answer`` and its process id and
    exit code from ``status``.
    """

    task: int
    answer: int
    status: int


class ForkServer:
    """The launcher's handle on the fork server process; starts it for the first rank, and again if it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._owner = 0

    @property
    def pid(self) -> int | None:
        """The process id of the fork server that was started last, or None if none was."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the fork server unless one is running, without waiting for its imports."""
        with self._lock:
            self._start()

    def fork(self) -> tuple[RankPipes, int]:
        """Starts a new rank process, and returns the launcher's ends of its pipes, and its process id.

        It starts the fork server first if none is running, and waits until that has forked the rank.

        Raises: RankFailedError: the fork server ended before it had forked the rank.
        """
        pairs = [os.pipe() for _ in range(3)]
        theirs = [pairs[0][0], pairs[1][1], pairs[2][1]]
        pipes = RankPipes(pairs[0][1], pairs[1][0], pairs[2][0])
        try:
            with self._lock:
                line = self._start()
                with suppress(OSError):  # the fork server has ended, which read_status finds out below
                    socket.send_fds(line, [b"F"], theirs)
        finally:
            for handle in theirs:
                os.close(handle)
        pid = read_status(pipes.status)
        if pid is None:
            for handle in pipes:
                os.close(handle)
            raise RankFailedError(
                "the process that forks the ranks ended before they were started",
                given="a fork server that was killed, or could not import what ranks need",
                allowed="a fork server that runs until all ranks have started",
                fix="see the lines above, or whether the machine ran out of memory; then start again",
            )
        return pipes, pid

    def _start(self) -> socket.socket:
        ended = self._process is None or self._owner != os.getpid() or self._process.poll() is not None
        if self._line is not None and not ended:
            return self._line
        self._line, theirs = socket.socketpair()
        command = _COMMAND.format(path=sys.path, line=theirs.fileno())
        # -W, -X and the like of this program: the standard library has no public function for them
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)  # the new program begins with this mask
        try:
            self._process = subprocess.Popen(
                [os.fsdecode(spawn.get_executable()), *flags, "-c", command],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )  # fmt: skip
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._owner = os.getpid()
        atexit.register(self._end, self._process, self._line)
        return self._line

    def _end(self, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        if self._owner == os.getpid():
            line.close()
            process.send_signal(signal.SIGCONT)  # so that a suspended process can end too
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2 * _ORPHANS_S)


FORK_SERVER = ForkServer()
"""The fork server of this process."""


def read_status(handle: int) -> int | None:
    """Waits for the next number from a rank's status pipe and returns it: first its process id, then its exit code.

    An exit code of -N means that signal N killed the rank. Returns None if the fork server has ended before it sent the
    number, or has sent both.
    """
    data = os.read(handle, _STATUS.size)
    return _STATUS.unpack(data)[0] if len(data) == _STATUS.size else None


def serve(line: int, main: Callable[[int, int], None]) -> None:
    """Forks a rank, which runs ``main(task, answer)``, at each request of the launcher on the socket ``line``.

    This is the main function of the fork server, and does not return. When the launcher has closed its end of the
    socket, ranks have three seconds to end; the others are killed, and this process ends. ``line``, ``task`` and
    ``answer`` are file descriptors; the last two are the rank's ends of its pipes.

    Objects that exist when it is called, such as imported modules, are exempt from garbage collection in all ranks.
    They are never garbage, and a pass over them would take some 0.1 s and write to memory that the ranks share.
    """
    children: dict[int, int] = {}
    gc.freeze()
    gc.enable()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(fileno=line) as launcher, selectors.DefaultSelector() as selector:
        selector.register(launcher, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                os.read(woken, 4096)
                _report_ended(children)
            if launcher in ready:
                asked, handles, _, _ = socket.recv_fds(launcher, 1, 3)
                if not asked:
                    break
                task, answer, status = handles
                pid = os.fork()
                if not pid:
                    selector.close()
                    launcher.close()
                    for handle in (woken, wakes, status, *children.values()):
                        os.close(handle)
                    _begin_rank()
                    main(task, answer)
                    os._exit(0)
                children[pid] = status
                os.close(task)
                os.close(answer)
                _report(status, pid)
    _end_orphans(children)
    os._exit(0)  # a normal exit of the interpreter takes long with torch loaded


def _begin_rank() -> None:
    """Sets the signal handling of a new rank, which holds until its task sets its own handlers."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # an early warning ends no rank that has nothing to save
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)


def _report(status: int, number: int) -> None:
    with suppress(OSError):  # the launcher has gone
        os.write(status, _STATUS.pack(number))


def _report_ended(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        if pid in children:
            handle = children.pop(pid)
            _report(handle, os.waitstatus_to_exitcode(status))
            os.close(handle)


def _end_orphans(children: dict[int, int]) -> None:
    """Waits for ranks that outlive the launcher to end by themselves, and kills those that do not."""
    end = time.monotonic() + _ORPHANS_S
    while children and time.monotonic() < end:
        _report_ended(children)
        time.sleep(0.05)  # a wait for events is not possible, since the selector is closed by now
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
