"""Which rank failed first, among processes that all fall when one does.

A rank that raises closes its connections, and its partners fail a moment later. Each writes what it knows into a
folder that the launcher shares with them, and the launcher tells the person the one that explains the others.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from shardwright.errors import CommunicationError, RankFailedError, explain

GRACE_S = 0.3
"""How long a rank that lost its partner waits before it ends, so that the partner's own words are there first."""

LATE_LAUNCHER_S = 2.0
"""How long it waits beyond that, if the partner has gone without a word, for the launcher to see how that one ended."""

_LATE_END_S = 1.0


class LostPartnerError(CommunicationError):
    """A call that did not complete: another rank stopped, or did not come in time."""


class ToldToStop(KeyboardInterrupt):
    """A signal asked one rank or more to stop: all have saved, and end."""


INTERRUPTED = 130
"""The exit code of a rank that a signal asked to stop."""

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


class _Note(NamedTuple):
    rank: int
    time_s: float
    failure: BaseException
    text: str
    gone: tuple[int, ...]


def note_start(folder: str, rank: int) -> None:
    """Writes down which process this rank is."""
    (Path(folder) / f"{rank}.pid").write_text(str(os.getpid()))


def note_failure(folder: str, rank: int, failure: BaseException) -> list[int]:
    """Writes down why this rank ends, and which ranks have ended without a word; returns these."""
    gone = _gone(Path(folder)) if isinstance(failure, LostPartnerError) else []
    text = "".join(traceback.format_exception(failure))
    try:
        pickled = pickle.dumps(failure)
        pickle.loads(pickled)
    except Exception:  # any class may refuse to be pickled; its text is enough
        failure = RuntimeError(str(failure))
    note = _Note(rank, time.time(), failure, text, tuple(gone))
    path = Path(folder) / f"{rank}.failure"
    path.with_suffix(".part").write_bytes(pickle.dumps(note))
    path.with_suffix(".part").rename(path)
    return gone


def _gone(folder: Path) -> list[int]:
    """The ranks that have ended without a word; waits a little until there is one, or one that has said why it ends."""
    end = time.monotonic() + _LATE_END_S
    while True:
        pids = {int(path.stem): int(path.read_text()) for path in folder.glob("*.pid")}
        told = {int(path.stem) for path in folder.glob("*.failure")}
        gone = sorted(rank for rank, pid in pids.items() if rank not in told and not _is_alive(pid))
        if gone or told or time.monotonic() > end:
            return gone
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def first_failure(folder: str, exits: Mapping[int, int]) -> BaseException:
    """The failure that explains the others; ``exits`` are the exit codes of the ranks that were seen to end first."""
    notes: list[_Note] = [pickle.loads(path.read_bytes()) for path in Path(folder).glob("*.failure")]
    notes.sort(key=lambda note: (isinstance(note.failure, LostPartnerError), note.time_s))
    first = notes[0] if notes else None
    if first is not None and not isinstance(first.failure, LostPartnerError):
        # the same words from every rank: a person's mistake, not one rank's
        if isinstance(first.failure, CommunicationError | ToldToStop) or _is_ours(first.failure):
            return first.failure
        return RankFailedError(f"rank {first.rank} failed\n\n{first.text.rstrip()}")
    ended = {rank: code for rank, code in exits.items() if code != 1}  # 1: it has lost a partner
    gone = [*ended, *(first.gone if first is not None else ())]
    if gone:
        return RankFailedError(_how_it_ended(gone[0], ended.get(gone[0])))
    if first is not None:
        return RankFailedError(f"rank {first.rank} failed\n\n{first.text.rstrip()}")
    return RankFailedError(f"ranks ended early: exit codes {dict(exits)}")


def _is_ours(failure: BaseException) -> bool:
    return type(failure).__module__ == "shardwright.errors"


def _how_it_ended(rank: int, code: int | None) -> str:
    """What to tell of a rank that ended without a traceback; the code is None where nobody saw it.

    >>> print(_how_it_ended(2, -15))
    rank 2 was killed by SIGTERM; the other ranks were ended
      given:   a signal from outside, and no traceback
      allowed: ranks that run to their end
      fix:     see who sent it; train --resume goes on from the last checkpoint
    """
    if code is not None and code >= 0 and code != INTERRUPTED:
        how, given = f"ended with exit code {code}", "an exit, and no traceback"
        cause = "see what in its work calls exit"
    else:
        number = signal.SIGINT if code == INTERRUPTED else signal.SIGKILL if code is None else -code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        how, given = f"was killed by {name}", "a signal from outside, and no traceback"
        cause = "see who sent it"
        if code is None:
            how, given = "was killed", "a process that has gone, and no traceback"
        if number == signal.SIGKILL:
            cause = "see whether the machine ran out of memory"
        elif name in _CRASHES:
            given = "a crash in native code, and no traceback"
            cause = "set PYTHONFAULTHANDLER=1 to see where"
    return explain(
        f"rank {rank} {how}; the other ranks were ended",
        given=given,
        allowed="ranks that run to their end",
        fix=f"{cause}; train --resume goes on from the last checkpoint",
    )
