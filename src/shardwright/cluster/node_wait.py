"""``NodeWait``: which nodes of a torchrun job have come to the place where they meet, said while others are missing."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from types import TracebackType

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

SAY_AFTER_S = 30.0
"""Seconds after which a node says for the first time who has come; each time after takes twice as long."""

LOOK_EVERY_S = 0.5
"""Seconds between two looks at who has come."""

CONNECT_S = 2.0
"""Seconds that one try to reach the store may take."""

_KEY = "shardwright/nodes"


class NodeWait:
    """The nodes that have come to torchrun's store at ``host`` and ``port``, of the ``num_nodes`` that it waits for.

    ``rank`` is the number of this node, or None if torchrun gives the numbers once all have come, and ``address`` is
    how the others reach it; by default, its host name. As a context manager it runs a thread that writes down this node
    in the store, and says on standard error, after 30 s and then each time after twice as long, who has come. It sends
    a few bytes, and ends by itself when all have come. A store that it cannot use does no harm: nothing is said of it.
    """

    def __init__(
        self, host: str, port: int, num_nodes: int, rank: int | None, address: str = "",
        *, say_after_s: float = SAY_AFTER_S, say: Callable[[str], object] = sys.stderr.write,
    ) -> None:  # fmt: skip
        self.num_nodes = num_nodes
        self._where, self._rank, self._address = (host, port), rank, address or socket.gethostname()
        self._say_after_s, self._say = say_after_s, say
        self._names: tuple[str, ...] = ()
        self._began, self._ended = time.monotonic(), Event()
        self._thread = Thread(target=self._watch, name="wait for nodes", daemon=True)

    @property
    def are_complete(self) -> bool:
        """Whether all nodes have come."""
        return len(self._names) >= self.num_nodes

    @property
    def waited_s(self) -> float:
        """The seconds since this node came."""
        return time.monotonic() - self._began

    def seen(self) -> str:
        """Returns which nodes have come and which are missing, or that the first one does not answer, as text."""
        if not self._names:
            return f"nothing answers at {self._where[0]}:{self._where[1]}, where the first node is waited for"
        found = f"{len(self._names)} of {self.num_nodes} nodes: {', '.join(self._names)}"
        if self._rank is None:
            return found
        there = {name.partition(" ")[0] for name in self._names}
        missing = [str(rank) for rank in range(self.num_nodes) if str(rank) not in there]
        return f"{found}; missing: {', '.join(missing)}"

    def __enter__(self) -> NodeWait:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(3 * CONNECT_S)

    def _watch(self) -> None:
        next_s, store = self._say_after_s, None
        while not self._ended.wait(LOOK_EVERY_S) and not self.are_complete:
            with suppress(DistError, RuntimeError, OSError):  # the store is not there yet, or has gone
                if store is None:
                    store = self._came()
                self._names = self._read(store)
            if self.waited_s >= next_s and not self.are_complete:
                next_s *= 2
                self._say(f"waiting for nodes, for {self.waited_s:.0f} s: {self.seen()}\n")

    def _came(self) -> TCPStore:
        """Writes down this node, and returns the store.

        Raises: OSError: nothing answers there yet, of which torch would print a trace each time.
        """
        with socket.create_connection(self._where, timeout=CONNECT_S):
            pass
        store = TCPStore(*self._where, is_master=False, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False)
        name = self._address if self._rank is None else f"{self._rank} ({self._address})"
        number = str(self._rank) if self._rank is not None else f"#{store.add(f'{_KEY}/number', 1) - 1}"
        store.set(f"{_KEY}/{number}", name)
        return store

    def _read(self, store: TCPStore) -> tuple[str, ...]:
        marks = [f"{'' if self._rank is not None else '#'}{number}" for number in range(self.num_nodes)]
        there = [f"{_KEY}/{mark}" for mark in marks if store.check([f"{_KEY}/{mark}"])]
        return tuple(store.get(key).decode() for key in there)
