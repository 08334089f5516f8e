"""Finds the rank that failed first among processes that all fail when one does.

A rank that raises closes its connections, so ranks that wait for it fail a moment later. Each rank sends the launcher a
note of its failure, and the launcher raises the failure that caused the others.
"""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwright.errors import CommunicationError, ExplainedError, RankFailedError, explain

GRACE_S = 0.3
"""Seconds that a rank with a CommunicationError waits before it ends, so that the note of the rank that failed first is
written first. A rank whose own work is done, and whose peers do not end theirs, waits twice as long.
"""


class LostPartnerError(CommunicationError):
    """Raised for a call or a start that did not complete, because another rank stopped or did not come in time."""


class StopRequested(KeyboardInterrupt):
    """Raised on each rank that is a process, to end training after a stop signal, when all have saved a checkpoint."""


class StopStatus(KeyboardInterrupt, SystemExit):
    """Raised by a launch that a signal ended, such as SIGTERM: a KeyboardInterrupt, which Ctrl-C raises alone.

    If the program does not catch it, it ends without a traceback, with the exit code of such a signal, 143 for SIGTERM.

    >>> str(StopStatus(signal.SIGTERM, "rank 1 was killed")), StopStatus(signal.SIGTERM).code
    ('rank 1 was killed', 143)
    """

    def __init__(self, number: int, *text: str) -> None:
        super().__init__(*text)
        self.code = 128 + number


INTERRUPTED = 130
"""The exit code of a rank that a signal asked to stop."""

_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


class FailureNote(NamedTuple):
    """A rank's report of its failure to the launcher: the rank, the time, the exception and its traceback as text.

    ``time_s`` is in seconds of a clock that all processes of the machine share and that is never set.
    """

    rank: int
    time_s: float
    failure: BaseException
    text: str

    @property
    def explains(self) -> bool:
        """Whether the failure can be the root cause: it cannot if the rank only lost another rank that had failed."""
        return not isinstance(self.failure, LostPartnerError)


def note_of(rank: int, failure: BaseException) -> FailureNote:
    """Returns the note that reports a rank's exception to the launcher.

    In the note, an exception that cannot be pickled is replaced by a RuntimeError with the same text.
    """
    text = "".join(traceback.format_exception(failure))
    try:
        pickle.loads(pickle.dumps(failure))
    except Exception:  # an exception of any class may fail to be pickled; its text is enough
        failure = RuntimeError(str(failure))
    return FailureNote(rank, time.monotonic(), failure, text)


def first_failure(
    notes: Sequence[FailureNote], exits: Mapping[int, int | None], stopped: Sequence[int]
) -> BaseException:
    """Returns the exception that the launcher should raise: the root cause among the ranks' failures.

    ``notes`` are the ranks' reports, ``exits`` the exit codes of ranks that ended without a report (None if unknown),
    and ``stopped`` the ranks that were found suspended (SIGSTOP). The cause is the earliest report of a rank that did
    not only lose another rank; without one, the first of ``exits``; without any, the first of ``stopped``; or else the
    earliest report of a rank that lost another. A reported error of the library itself and :class:`StopRequested` are
    returned as they are if they are the cause, and all other causes as a RankFailedError.
    """
    # the note of a rank that only lost its partner counts only if there is no other note
    first = min(notes, key=lambda note: (not note.explains, note.time_s), default=None)
    if first is not None and first.explains:
        # an error of the user: every rank raises the same text, so the text names no rank
        if isinstance(first.failure, ExplainedError | StopRequested):
            return first.failure
        return RankFailedError(f"rank {first.rank} failed\n\n{first.text.rstrip()}")
    if exits:
        rank = next(iter(exits))
        return RankFailedError(_how_it_ended(rank, exits[rank]))
    text = f"\n\n{first.text.rstrip()}" if first is not None else ""
    if stopped:
        waits = explain(
            f"rank {stopped[0]} was stopped, and the other ranks waited for it in vain; all ranks were ended",
            given="a stop signal (SIGSTOP, SIGTSTP) from outside, and no SIGCONT in time",
            allowed="ranks that run, or go on within --timeout-s",
            fix="find what stopped it; train --resume goes on from the last checkpoint",
        )
        return RankFailedError(f"{waits}{text}")
    if first is not None:
        return RankFailedError(f"rank {first.rank} failed{text}")
    return RankFailedError(
        "the ranks ended before their work did",
        given="no result, no traceback and no exit code of any rank",
        allowed="ranks that run to their end",
        fix="see whether the machine ran out of memory; train --resume goes on from the last checkpoint",
    )


def _how_it_ended(rank: int, code: int | None) -> str:
    """Returns the error text for a rank that ended without a traceback; ``code`` is None for an unknown exit code."""
    if code is not None and code >= 0 and code != INTERRUPTED:
        how, evidence = f"ended with exit code {code}", "an exit, and no traceback"
        cause = "find what calls exit in the function it ran"
    else:
        number = signal.SIGINT if code == INTERRUPTED else signal.SIGKILL if code is None else -code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        how, evidence = f"was killed by {name}", "a signal from outside, and no traceback"
        cause = "find what sent it"
        if code is None:
            how, evidence = "was killed", "a process that has gone, and no traceback"
        if number == signal.SIGKILL:
            cause = "see whether the machine ran out of memory"
        elif name in _CRASHES:
            evidence = "a crash in native code, and no traceback"
            cause = "set PYTHONFAULTHANDLER=1 to see where"
    return explain(
        f"rank {rank} {how}; the other ranks were ended",
        given=evidence,
        allowed="ranks that run to their end",
        fix=f"{cause}; train --resume goes on from the last checkpoint",
    )
