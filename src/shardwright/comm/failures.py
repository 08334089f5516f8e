"""Finds the rank that failed first among processes that all fail when one does.

A rank that raises closes its connections, and its partners fail a moment later. Each rank writes a note of its failure
into a folder that the launcher shares, and the launcher raises the failure that explains the others.
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
"""How long a rank that lost its partner waits before it ends, so that the partner's own note is written first."""

LATE_LAUNCHER_S = 2.0
"""How long it waits beyond that for the launcher to see a partner's exit, if that partner left no note."""

_LATE_END_S = 1.0


class LostPartnerError(CommunicationError):
    """A call that did not complete: another rank stopped, or did not make the call in time."""


class StopRequested(KeyboardInterrupt):
    """Raised on every rank to end the run after a stop signal, once all ranks have saved a checkpoint."""


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
    """Writes this rank's process id into the folder that the launcher shares, so that a killed rank is noticed."""
    (Path(folder) / f"{rank}.pid").write_text(str(os.getpid()))


def note_failure(folder: str, rank: int, failure: BaseException) -> list[int]:
    """Writes this rank's exception into the folder that the launcher shares; returns ranks that left no note."""
    gone = _ended_without_note(Path(folder)) if isinstance(failure, LostPartnerError) else []
    text = "".join(traceback.format_exception(failure))
    try:
        pickled = pickle.dumps(failure)
        pickle.loads(pickled)
    except Exception:  # an exception of any class may fail to be pickled; its text is enough
        failure = RuntimeError(str(failure))
    note = _Note(rank, time.time(), failure, text, tuple(gone))
    path = Path(folder) / f"{rank}.failure"
    path.with_suffix(".part").write_bytes(pickle.dumps(note))
    path.with_suffix(".part").rename(path)
    return gone


def _ended_without_note(folder: Path) -> list[int]:
    """The ranks that ended without a note; waits a little until there is one, or until a rank has written a note."""
    end = time.monotonic() + _LATE_END_S
    while True:
        pids = {int(path.stem): int(path.read_text()) for path in folder.glob("*.pid")}
        noted = {int(path.stem) for path in folder.glob("*.failure")}
        gone = sorted(rank for rank, pid in pids.items() if rank not in noted and not _is_alive(pid))
        if gone or noted or time.monotonic() > end:
            return gone
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def first_failure(folder: str, exits: Mapping[int, int]) -> BaseException:
    """Returns the root cause among the ranks' failures; ``exits``: exit codes of the ranks seen to end first."""
    notes: list[_Note] = [pickle.loads(path.read_bytes()) for path in Path(folder).glob("*.failure")]
    # a rank that lost its partner explains nothing: its note counts only where there is no other
    notes.sort(key=lambda note: (isinstance(note.failure, LostPartnerError), note.time_s))
    first = notes[0] if notes else None
    if first is not None and not isinstance(first.failure, LostPartnerError):
        # an error of the user, not of one rank: every rank raises the same text, so none is named
        ours = type(first.failure).__module__ == "shardwright.errors"
        if ours or isinstance(first.failure, CommunicationError | StopRequested):
            return first.failure
        return RankFailedError(f"rank {first.rank} failed\n\n{first.text.rstrip()}")
    ended = {rank: code for rank, code in exits.items() if code != 1}  # 1: it has lost a partner
    gone = [*ended, *(first.gone if first is not None else ())]
    if gone:
        return RankFailedError(_how_it_ended(gone[0], ended.get(gone[0])))
    if first is not None:
        return RankFailedError(f"rank {first.rank} failed\n\n{first.text.rstrip()}")
    return RankFailedError(f"ranks ended early: exit codes {dict(exits)}")


def _how_it_ended(rank: int, code: int | None) -> str:
    """The text for a rank that ended without a traceback; ``code`` is None where its exit was not seen."""
    if code is not None and code >= 0 and code != INTERRUPTED:
        how, given = f"ended with exit code {code}", "an exit, and no traceback"
        cause = "find what calls exit in the function it ran"
    else:
        number = signal.SIGINT if code == INTERRUPTED else signal.SIGKILL if code is None else -code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        how, given = f"was killed by {name}", "a signal from outside, and no traceback"
        cause = "find what sent it"
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
