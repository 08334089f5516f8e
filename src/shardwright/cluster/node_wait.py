"""``NodeWait``: says which nodes of a torchrun job have come to their meeting place while others are missing."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread
from types import TracebackType

import psutil
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

SAY_AFTER_S = 30.0
"""Seconds after which a node says for the first time who has come; each time after takes twice as long."""

LOOK_EVERY_S = 0.5
"""Seconds between two reads of the store, which lists the nodes that have come."""

CONNECT_S = 2.0
"""The most seconds for an attempt to connect to the store, and for an answer of the store."""


class NodeWait:
    """The nodes that have come to torchrun's store at ``host`` and ``port``, of the ``num_nodes`` that it waits for.

    ``rank`` is the number of this node, or None if torchrun gives out the numbers once all nodes have come. ``address``
    is the address at which other nodes reach this node, by default its host name, and ``run_id`` is torchrun's option.

    As a context manager, the object runs a thread that lists this node in the store. After ``say_after_s``, and then
    each time after twice as long, the thread says which nodes have come (``say``, by default on standard error), or
    that the store has not answered yet. It sends a few bytes, and ends by itself when all nodes have come or this
    node's ranks have been started.
    """

    def __init__(
        self, host: str, port: int, num_nodes: int, rank: int | None, address: str = "", run_id: str = "",
        *, say_after_s: float = SAY_AFTER_S, say: Callable[[str], object] | None = None,
    ) -> None:  # fmt: skip
        self.num_nodes, self.has_number = num_nodes, rank is not None
        address = address or socket.gethostname()
        self._where, self._name = (host, port), address if rank is None else f"{rank} ({address})"
        self._mark = f"{address}/{os.getpid()}" if rank is None else str(rank)  # stays the same if the node comes again
        self._key = f"shardwright/nodes/{run_id}"
        self._say_after_s, self._say = say_after_s, say or (lambda text: sys.stderr.write(text))
        self._names: dict[str, str] = {}  # by mark
        self._began, self._ended, self._children = time.monotonic(), Event(), _num_children()
        self._thread = Thread(target=self._watch, name="wait for nodes", daemon=True)

    @property
    def are_complete(self) -> bool:
        """Whether all nodes have come."""
        return len(self._names) >= self.num_nodes

    @property
    def is_started(self) -> bool:
        """Whether this process has started ranks, which happens once torchrun no longer waits."""
        return _num_children() > self._children

    @property
    def waited_s(self) -> float:
        """The seconds since the wait began on this node, which is when torchrun was started there."""
        return time.monotonic() - self._began

    def seen(self) -> str:
        """Returns which nodes have come and which are missing, or that the first one does not answer, as text."""
        if not self._names:
            return f"nothing answers at {self._where[0]}:{self._where[1]}, where the first node is waited for"
        text = f"{len(self._names)} of {self.num_nodes} nodes: {', '.join(self._names.values())}"
        missing = [str(rank) for rank in range(self.num_nodes) if str(rank) not in self._names]
        return f"{text}; missing: {', '.join(missing)}" if self.has_number and missing else text

    def __enter__(self) -> NodeWait:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        next_s, store = self._say_after_s, None
        while not (self._ended.wait(LOOK_EVERY_S) or self.are_complete or self.is_started):
            try:
                store = store or self._came()
                self._names = self._read(store)
            except (DistError, RuntimeError, OSError):  # the store does not exist yet, or not any more
                store = None
            if self.waited_s >= next_s and not self.are_complete:
                next_s *= 2
                self._say(f"waiting for nodes, for {self.waited_s:.0f} s: {self.seen()}\n")

    def _came(self) -> TCPStore:
        """Adds this node to the list in torchrun's store, unless it is listed already, and returns the store.

        Raises: OSError: nothing answers at the store's address yet. (Torch itself would print a trace at each attempt.)
        """
        with socket.create_connection(self._where, timeout=CONNECT_S):
            pass
        timeout = timedelta(seconds=CONNECT_S)
        store = TCPStore(*self._where, is_master=False, timeout=timeout, wait_for_workers=False)
        if self._mark not in self._read(store):
            number = store.add(f"{self._key}/number", 1)
            store.set(f"{self._key}/{number}", f"{self._mark}\n{self._name}")
        return store

    def _read(self, store: TCPStore) -> dict[str, str]:
        keys = [f"{self._key}/{number}" for number in range(1, store.add(f"{self._key}/number", 0) + 1)]
        lines = [store.get(key).decode().split("\n") for key in keys if store.check([key])]
        return dict(sorted((mark, name) for mark, name in lines))


def _num_children() -> int:
    """Returns how many child processes this process has."""
    return len(psutil.Process().children())
