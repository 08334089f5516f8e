"""Notices ranks that wait for each other in different calls, such as a save below ``if world.rank == 0``.

Such ranks would wait until the time limit of a call, ten minutes by default. So a thread of each rank looks every few
seconds at what the rank's own thread does. Calls themselves do nothing for it. A rank that waits long in one call
publishes that in torch's store. Once every rank has published that it waits, or that its work is done, each confirms
that it still does, since a process that was suspended may have gone on. Once all have, none can go on; where they are
in different calls of the library, that is the error::

    rank 0   sw.save_weights  . . . waits . . . "sw.save_weights" . . . confirmed
    rank 1   run.step         . . . waits . . . "run.step" . . . . . .  confirmed    different: an error on both
"""

from __future__ import annotations

import json
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from shardwright.comm.collective_call import SAME_CALLS
from shardwright.comm.pending import Pending
from shardwright.comm.user_calls import place_of_user
from shardwright.errors import CommunicationError, aligned
from shardwright.formatting import numbered

NOTICE_S = 15.0
"""Seconds that a rank waits in one call before it publishes that; the error comes some ten seconds later."""

_LOOK_S = 5.0
_MOST_NOTES = 1000
"""The number of waits after which a rank publishes no more: torch's store of one machine is a file that only grows."""

_RETURNED = "has returned from its work"


class _Note(NamedTuple):
    """What a waiting rank publishes: the note's number, the user's call in which the rank waits, and that call's line.

    ``confirmed`` are the numbers of all ranks' notes if, after it had read these, the rank was still in the same wait.
    """

    number: int
    call: str
    line: str
    confirmed: list[int]


class NoteStore(Protocol):
    """The methods of ``torch.distributed.Store`` that the watchdog calls."""

    def set(self, key: str, value: str) -> None:
        """As ``Store.set`` of torch.distributed: sets the value of a key."""

    def check(self, keys: list[str]) -> bool:
        """Returns whether all the keys have values."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Returns the values of keys that have some."""


class WaitWatchdog:
    """Watches the thread that creates it, of rank ``rank`` of ``size``, until it is closed.

    ``store`` is torch's. If no rank can go on, ``fail`` is called with the error, so that the watched thread raises it.
    If that thread has still not moved at the next look, ``report`` is called, which ends the process. ``limit_s`` is
    the time limit of a call; with a short limit the looks are more frequent.
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
        with suppress(RuntimeError):  # the store has gone with the rank that has it
            self._publish(_Note(0, _RETURNED, "", []))

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join(2.0)  # a store on a lost node may not answer

    def _publish(self, note: _Note | None) -> None:
        self._store.set(self._keys[self._rank], "" if note is None else json.dumps(note))

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store has gone with the rank that has it, and calls of this rank say so
            self._look()

    def _look(self) -> None:
        num_notes, since_s = 0, time.monotonic()
        last: weakref.ref[Any] | None = None
        own: _Note | None = None
        failure: CommunicationError | None = None
        while not self._closed.wait(self._look_s):
            waits, place = self._waiting()
            goes_on = waits is None or last is None or last() is not waits
            if goes_on:
                last, since_s = None if waits is None else weakref.ref(waits), time.monotonic()
            del waits  # its tensors are not to be held until the next look
            if goes_on:
                if own is not None:
                    self._publish(own := None)
                continue
            if failure is not None:
                self._report(failure)
                return
            if time.monotonic() < since_s + self._notice_s or num_notes >= _MOST_NOTES:
                continue
            if own is None:
                num_notes += 1
                self._publish(own := _Note(num_notes, *place, []))
            texts = self._store.multi_get(self._keys) if self._store.check(self._keys) else []
            notes = [_Note(*json.loads(text)) for text in texts if text]
            numbers = [note.number for note in notes]
            if len(notes) < len(self._keys) or (error := _error_of(notes)) is None:  # one runs, or all in one call
                continue
            if own.confirmed != numbers:
                if last is not None and self._waiting()[0] is last():  # still in the same wait after all have published
                    num_notes += 1
                    self._publish(own := own._replace(confirmed=numbers))
            elif all(note.confirmed == numbers for note in notes if note.call != _RETURNED):
                self._fail(failure := error)

    def _waiting(self) -> tuple[Any, tuple[str, str]]:
        """Returns the collective or message that the watched thread waits for, or None; the user's call and line."""
        frame = sys._current_frames().get(self._watched)
        while frame is not None:
            if frame.f_code is Pending.wait.__code__:
                return frame.f_locals["self"], place_of_user(frame)
            frame = frame.f_back
        return None, ("", "")


def _error_of(notes: Sequence[_Note]) -> CommunicationError | None:
    """Returns the error of ranks that wait for each other in different calls; None if all are in one call."""
    places = [(note.call, note.line) for note in notes]
    if len({call for call, _ in places}) == 1:
        return None
    counts = Counter(call for call, _ in places if call != _RETURNED)
    rarest = min(counts, key=lambda call: counts[call])
    lines = []
    for call, where in dict.fromkeys(places):
        ranks = [rank for rank, place in enumerate(places) if place == (call, where)]
        text = call if call == _RETURNED else f"in {call}{where and f', {where}'}"
        lines.append(f"{numbered(ranks)}: {text}")
    return CommunicationError(
        "ranks wait for each other in different calls, and none can go on",
        given=aligned(lines),
        allowed=SAME_CALLS,
        fix=f"{rarest}: call it on every rank, not under `if world.rank == 0`; what writes files writes them once",
    )
