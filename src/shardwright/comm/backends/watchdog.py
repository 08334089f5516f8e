"""Ends a rank with an error if a collective call on its accelerator does not complete within the timeout.

Over NCCL, ``wait`` blocks only the GPU's stream: a rank that has lost another rank goes on, until it waits for the GPU
in a call that nothing can interrupt. So a thread checks the calls under way, and ends the process with an error that
names the call, its axis and its ranks.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from shardwright import devices
from shardwright.comm.backends.group_channel import lost_partner
from shardwright.comm.collective_call import CollectiveCall
from shardwright.errors import CommunicationError

Report = Callable[[CommunicationError], None]
"""A function that reports the error of a call that did not complete, and ends the process."""

_ORDER = itertools.count()
_LOOKS = 20
"""The number of checks within the timeout; there is one each second at least."""


def end_with(failure: CommunicationError) -> None:
    """Writes the failure on stderr and ends the process at once, even if the main thread waits for the GPU."""
    sys.stderr.write(f"{failure}\n")
    sys.stderr.flush()
    os._exit(1)


@dataclass(eq=False)
class WatchedCall:
    """A collective call under way, with torch's handles of it or a device event on the stream that waits for it."""

    call: CollectiveCall
    ranks: tuple[int, ...]
    works: tuple[Any, ...]
    order: float = inf
    """The call's place in the order in which streams began to wait for calls; infinity if none waits for it yet."""

    @property
    def is_complete(self) -> bool:
        """Whether the accelerator has completed the call."""
        return all(work.query() if hasattr(work, "query") else work.is_completed() for work in self.works)

    def waited(self, device: torch.device) -> None:
        """Replaces torch's handles of the call, which keep its tensors alive, by an event on the current stream.

        Call it when that stream of ``device`` has been made to wait for the call. On the CPU, the handles stay.
        """
        self.order = next(_ORDER)
        if device.type not in devices.HOST:
            self.works = (devices.module_of(device).current_stream(device).record_event(),)


class Watchdog:
    """Watches the calls under way in a thread, and reports one that has been the oldest for ``timeout_s`` seconds.

    ``report`` is called with the error, once; by default it ends the process.
    """

    def __init__(self, rank: int, timeout_s: float, report: Report = end_with) -> None:
        self.rank, self.timeout_s, self._report = rank, timeout_s, report
        self._under_way: deque[WatchedCall] = deque()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, call: CollectiveCall, ranks: tuple[int, ...], works: Sequence[Any]) -> WatchedCall:
        """Adds a call that has begun to the calls under way, and returns it; ``works`` are torch's handles of it."""
        while self._under_way and self._under_way[0].is_complete:  # so that tensors are not held longer than needed
            self._under_way.popleft()
        watched = WatchedCall(call, ranks, tuple(works))
        self._under_way.append(watched)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return watched

    def close(self) -> None:
        """Stops the thread, so that calls under way are not reported."""
        self._closed.set()

    def _watch(self) -> None:
        before, since_s = None, time.monotonic()
        while not self._closed.wait(min(1.0, self.timeout_s / _LOOKS)):
            open_calls = [call for call in list(self._under_way) if not call.is_complete]
            # only the first call that a stream waits for is surely under way: later ones may be done
            head = min(open_calls, key=lambda call: call.order, default=None)
            first = next((call for call in open_calls if call is head or call.order == inf), None)
            if first is not before:
                before, since_s = first, time.monotonic()
            elif first is not None and time.monotonic() - since_s > self.timeout_s:
                text = f"nothing, for {time.monotonic() - since_s:.0f} s"
                self._report(lost_partner(first.call, first.ranks, self.rank, text))
                return
