"""Notices ranks that wait for each other in different calls, such as a save below ``if world.rank == 0``.

Such ranks would wait until the time limit of a call, ten minutes by default. So a thread of each rank looks every few
seconds at what the rank's own thread does. Calls themselves do nothing for it. A rank that waits long in one call
publishes that in torch's store. Once every rank has published that it waits, or that its work is done, and nothing has
changed between two looks, none can go on; where they are in different calls of the library, that is the error::

    rank 0   sw.save_weights  . . . waits . . . "sw.save_weights"
    rank 1   run.step         . . . waits . . . "run.step"          the same twice, and different: an error on both
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from shardwright.comm.axis import SAME_CALLS, Pending
from shardwright.comm.user_calls import place_of_user
from shardwright.errors import CommunicationError, aligned
from shardwright.formatting import numbered

NOTICE_S = 15.0
"""Seconds that a rank waits in one call before it publishes that; the error comes some ten seconds later."""

_LOOK_S = 5.0
_MOST_NOTES = 1000
"""How often a rank publishes at most: torch's store of one machine is a file that only grows."""

_RETURNED = "has returned from its work"


class NoteStore(Protocol):
    """A store of torch, with the methods that are used here."""

    def set(self, key: str, value: str) -> None:
        """Sets the value of a key."""

    def check(self, keys: list[str]) -> bool:
        """Returns whether all the keys have values."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Returns the values of keys that have some."""


class WaitWatchdog:
    """Watches the thread that creates it, of rank ``rank`` of ``size``, until it is closed.

    ``store`` is torch's. Where no rank can go on, ``fail`` is called with the error, for the thread to raise it, and if
    the thread has not moved at the next look, ``report``, which ends the process. ``limit_s`` is the time limit of a
    call; a short one shortens the looks.
    """

    def __init__(
        self, rank: int, size: int, store: NoteStore, limit_s: float, fail: Callable[[CommunicationError], None],
        report: Callable[[CommunicationError], Any],
    ) -> None:  # fmt: skip
        self._rank, self._store, self._fail, self._report = rank, store, fail, report
        self._keys = [f"waits/{other}" for other in range(size)]
        self._look_s, self._notice_s = min(_LOOK_S, limit_s / 20), min(NOTICE_S, limit_s / 4)
        self._watched = threading.get_ident()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="waits", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Publishes that this rank's work is done, and ends the thread."""
        self.close()
        self._store.set(self._keys[self._rank], json.dumps([0, _RETURNED, ""]))

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        num_notes, published, since_s = 0, False, time.monotonic()
        last: weakref.ref[Any] | None = None
        before: list[bytes] = []
        failure: CommunicationError | None = None
        while not self._closed.wait(self._look_s):
            waits, place = self._waiting()
            if waits is None or last is None or last() is not waits:
                last, since_s, before = None if waits is None else weakref.ref(waits), time.monotonic(), []
                if published:
                    self._store.set(self._keys[self._rank], "")
                    published = False
                continue
            del waits
            if failure is not None:
                self._report(failure)
                return
            if time.monotonic() < since_s + self._notice_s or num_notes >= _MOST_NOTES:
                continue
            if not published:
                num_notes, published = num_notes + 1, True
                self._store.set(self._keys[self._rank], json.dumps([num_notes, *place]))
            notes = self._store.multi_get(self._keys) if self._store.check(self._keys) else []
            if notes and notes == before and (failure := _error_of(notes)) is not None:
                self._fail(failure)
            before = notes

    def _waiting(self) -> tuple[Any, tuple[str, str]]:
        """Returns the collective or message that the watched thread waits for, or None; the user's call and line."""
        frame = sys._current_frames().get(self._watched)
        while frame is not None:
            if frame.f_code is Pending.wait.__code__:
                return frame.f_locals["self"], place_of_user(frame)
            frame = frame.f_back
        return None, ("", "")


def _error_of(notes: list[bytes]) -> CommunicationError | None:
    """Returns the error of ranks of which each has published that it waits or is done; None if all are in one call."""
    if not all(notes):  # a rank goes on
        return None
    places = [tuple(json.loads(note)[1:]) for note in notes]
    if len({call for call, _ in places}) == 1:
        return None
    counts = Counter(call for call, _ in places if call != _RETURNED)
    rarest = min(counts, key=lambda call: counts[call])
    given = []
    for call, where in dict.fromkeys(places):
        ranks = [rank for rank, place in enumerate(places) if place == (call, where)]
        text = call if call == _RETURNED else f"in {call}{where and f', {where}'}"
        given.append(f"{numbered(ranks)}: {text}")
    return CommunicationError(
        "ranks wait for each other in different calls, and none can go on",
        given=aligned(given),
        allowed=SAME_CALLS,
        fix=f"{rarest}: call it on every rank, not under `if world.rank == 0`; what writes files writes them once",
    )
