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


class LostPartnerError(CommunicationError):
    """A call that did not complete: another rank stopped, or did not come in time."""


class _Note(NamedTuple):
    rank: int
    time_s: float
    failure: BaseException | None
    text: str
    gone: tuple[int, ...]


def note_start(folder: str, rank: int) -> None:
    """Writes down which process this rank is."""
    (Path(folder) / f"{rank}.pid").write_text(str(os.getpid()))


def note_failure(folder: str, rank: int, failure: BaseException) -> None:
    """Writes down why this rank ends, and which ranks have ended without a word."""
    gone = []
    if isinstance(failure, LostPartnerError):
        for path in Path(folder).glob("*.pid"):
            other = int(path.stem)
            if not _is_alive(int(path.read_text())) and not (Path(folder) / f"{other}.failure").exists():
                gone.append(other)
    text = "".join(traceback.format_exception(failure))
    try:
        pickled = pickle.dumps(failure)
        pickle.loads(pickled)
    except Exception:  # any class may refuse to be pickled; its text is enough
        failure = RuntimeError(str(failure))
    note = _Note(rank, time.time(), failure, text, tuple(sorted(gone)))
    path = Path(folder) / f"{rank}.failure"
    path.with_suffix(".part").write_bytes(pickle.dumps(note))
    path.with_suffix(".part").rename(path)


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def first_failure(folder: str, exits: Mapping[int, int]) -> Exception:
    """The failure that explains the others; ``exits`` are the exit codes that the launcher saw."""
    notes: list[_Note] = [pickle.loads(path.read_bytes()) for path in Path(folder).glob("*.failure")]
    notes.sort(key=lambda note: (isinstance(note.failure, LostPartnerError), note.time_s))
    first = notes[0] if notes else None
    if first is not None and not isinstance(first.failure, LostPartnerError):
        # the same words from every rank: a person's mistake, not one rank's
        if isinstance(first.failure, CommunicationError) or type(first.failure).__module__ == "shardwright.errors":
            assert isinstance(first.failure, Exception)
            return first.failure
        return RankFailedError(f"rank {first.rank} failed\n\n{first.text.rstrip()}")
    killed = {rank: -code for rank, code in exits.items() if code < 0 and -code != signal.SIGTERM}
    gone = sorted({*killed, *(first.gone if first is not None else ())})
    if gone:
        name = signal.Signals(killed[gone[0]]).name if gone[0] in killed else "a signal such as SIGKILL"
        return RankFailedError(
            explain(
                f"rank {gone[0]} was killed; the other ranks were ended",
                given=f"it ended by {name}, without a traceback",
                allowed="ranks that run to their end",
                fix="see whether the machine ran out of memory; train --resume goes on from the last checkpoint",
            )
        )
    if first is not None:
        return RankFailedError(f"rank {first.rank} failed\n\n{first.text.rstrip()}")
    return RankFailedError(f"ranks ended early: exit codes {dict(exits)}")
