"""Ends a rank with an error when a collective call of its accelerator does not complete within the timeout.

Over NCCL ``wait`` blocks only the GPU's stream: a rank whose partner is lost goes on, until it waits for the GPU in a
call that nothing can interrupt. So a thread checks the calls under way, and ends the process with an error that names
the call, its axis and its ranks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardwright.comm.axis import CollectiveCall
from shardwright.comm.backends.group_channel import lost_partner
from shardwright.comm.failures import LostPartnerError

Report = Callable[[LostPartnerError], None]
"""A function that reports the error of a call that did not complete, and ends the process."""

_LOOKS = 20
"""The number of checks within the timeout; there is one each second at least."""


def end_with(failure: LostPartnerError) -> None:
    """Writes the failure on stderr and ends the process at once, even if the main thread waits for the GPU."""
    sys.stderr.write(f"{failure}\n")
    sys.stderr.flush()
    os._exit(1)


class _WatchedCall(NamedTuple):
    call: CollectiveCall
    ranks: tuple[int, ...]
    works: tuple[Any, ...]

    @property
    def is_complete(self) -> bool:
        """Whether the accelerator has completed the call."""
        return all(work.is_completed() for work in self.works)


class Watchdog:
    """A thread that reports a collective call which has been the oldest one under way for ``timeout_s`` seconds.

    ``report`` is called with the error; by default it ends the process.
    """

    def __init__(self, rank: int, timeout_s: float, report: Report = end_with) -> None:
        self.rank, self.timeout_s, self._report = rank, timeout_s, report
        self._under_way: deque[_WatchedCall] = deque()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, call: CollectiveCall, ranks: tuple[int, ...], works: Sequence[Any]) -> None:
        """Adds a call that has begun to the calls under way; ``works`` are torch's handles of it."""
        while self._under_way and self._under_way[0].is_complete:  # so that tensors are not held longer than needed
            self._under_way.popleft()
        self._under_way.append(_WatchedCall(call, ranks, tuple(works)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stops the thread: calls that are under way are no longer reported."""
        self._closed.set()

    def _watch(self) -> None:
        before, since_s = None, time.monotonic()
        while not self._closed.wait(min(1.0, self.timeout_s / _LOOKS)):
            first = next((each for each in list(self._under_way) if not each.is_complete), None)
            if first is not before:
                before, since_s = first, time.monotonic()
            elif first is not None and time.monotonic() - since_s > self.timeout_s:
                text = f"nothing, for {time.monotonic() - since_s:.0f} s"
                self._report(lost_partner(first.call, first.ranks, self.rank, text))
                return
