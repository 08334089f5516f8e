"""Ranks that are processes, started once and given one task after another: starting them anew costs seconds.

A task is a module-level function that is called as ``task(world, *args)`` on every rank. Each rank calls back over a
local socket and answers there. A task that fails anywhere ends all ranks of the pool; the next use starts new ones.
"""

from __future__ import annotations

import os
import pickle
import queue
import secrets
import signal
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from shardwright.comm.launch import launch
from shardwright.comm.world import World

START_S, TASK_S, GRACE_S = 60.0, 30.0, 5.0


class TaskFailedError(AssertionError):
    """A task raised on some rank: the text begins with the traceback of the first that answered so."""


def serve(world: World, address: str, key: bytes) -> None:
    """One rank: does what it is told until it is told nothing."""
    with Client(address, family="AF_UNIX", authkey=key) as line:
        line.send((world.rank, os.getpid()))
        while task := line.recv_bytes():
            try:
                work, args = pickle.loads(task)
                answer = pickle.dumps(work(world, *args))
            except BaseException:
                line.send(traceback.format_exc())
                raise
            line.send(answer)


class Pool:
    """So many ranks, over these links."""

    def __init__(self, num_ranks: int, links: str = "auto") -> None:
        self.num_ranks, self.links = num_ranks, links
        self.num_starts = 0
        self._lines: list[Connection] = []
        self._pids: list[int] = []
        self._thread: threading.Thread | None = None
        self._ended: BaseException | None = None

    def run(self, work: Any, *args: Any, timeout_s: float = TASK_S) -> list[Any]:
        """What the task returns on each rank. Raises TaskFailedError: it raised, or a rank has gone."""
        if not self._lines:
            self._start()
        told = pickle.dumps((work, args))
        answers: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout_s
        try:
            for line in self._lines:
                line.send_bytes(told)
            while len(answers) < self.num_ranks and time.monotonic() < deadline:
                for line in wait([self._lines[i] for i in range(self.num_ranks) if i not in answers], timeout=0.5):
                    rank = self._lines.index(line)
                    answers[rank] = self._answer(line)
                    if isinstance(answers[rank], str):
                        failures.append(f"rank {rank}: {answers[rank]}")
                        deadline = min(deadline, time.monotonic() + GRACE_S)  # the others have lost a partner
        except OSError as failure:
            failures.append(f"a rank has gone: {failure}")
        if failures or len(answers) < self.num_ranks:
            missing = sorted(set(range(self.num_ranks)) - answers.keys())
            self._end(kill=True)
            silent = f"ranks {missing} gave no answer" if missing else ""
            raise TaskFailedError("\n".join([*failures, silent, str(self._ended or "")]))
        return [pickle.loads(answers[rank]) for rank in range(self.num_ranks)]

    def _answer(self, line: Connection) -> Any:
        try:
            return line.recv()
        except EOFError:
            return "it has gone without a word"

    def close(self) -> None:
        """Ends the ranks; their own end must be a good one."""
        if self._lines:
            self._end(kill=False)
            if self._ended is not None:
                raise self._ended

    def _start(self) -> None:
        self.num_starts += 1
        self._ended, key = None, secrets.token_bytes(16)
        arrived: queue.Queue[Connection] = queue.Queue()
        with tempfile.TemporaryDirectory(prefix="pool-") as folder:
            address = str(Path(folder) / "pool")
            with Listener(address, family="AF_UNIX", backlog=self.num_ranks, authkey=key) as listener:
                accepting = threading.Thread(target=self._accept, args=(listener, arrived), daemon=True)
                self._thread = threading.Thread(target=self._launch, args=(address, key), daemon=True)
                accepting.start()
                self._thread.start()
                lines = self._arrivals(arrived)
                if len(lines) < self.num_ranks:
                    for _ in range(self.num_ranks - len(lines)):  # let the accepting thread end
                        with suppress(Exception):
                            Client(address, family="AF_UNIX", authkey=key).close()
                    self._end(kill=True)
                    raise RuntimeError(f"the pool of {self.num_ranks} did not start") from self._ended
        self._lines = [lines[rank] for rank in range(self.num_ranks)]

    def _accept(self, listener: Listener, arrived: queue.Queue[Connection]) -> None:
        for _ in range(self.num_ranks):
            with suppress(Exception):
                arrived.put(listener.accept())

    def _arrivals(self, arrived: queue.Queue[Connection]) -> dict[int, Connection]:
        lines: dict[int, Connection] = {}
        self._pids, deadline = [], time.monotonic() + START_S
        assert self._thread is not None
        while len(lines) < self.num_ranks and self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(queue.Empty):
                line = arrived.get(timeout=0.2)
                rank, pid = line.recv()
                lines[rank] = line
                self._pids.append(pid)
        return lines

    def _launch(self, address: str, key: bytes) -> None:
        try:
            launch(serve, self.num_ranks, address, key, ranks="processes", debug=True, links=self.links)
        except BaseException as failure:  # the one who waits for an answer is told
            self._ended = failure

    def _end(self, *, kill: bool) -> None:
        for line in self._lines:
            with suppress(OSError):
                if not kill:
                    line.send_bytes(b"")
                line.close()
        for pid in self._pids if kill else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._thread is not None:
            self._thread.join(timeout=30)
            assert not self._thread.is_alive(), "the ranks did not end"
        self._lines, self._pids, self._thread = [], [], None
