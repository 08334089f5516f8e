"""Whether all ranks were told the same, found out before anything else is sent: a different call elsewhere hangs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwright.comm.here import everyone_here
from shardwright.comm.values import difference
from shardwright.errors import LayoutError, explain


def check_alike(what: str, told: Sequence[object]) -> None:
    """Raises LayoutError when ranks were told other things than rank 0; ``told`` holds what each was."""
    others = [rank for rank, each in enumerate(told) if each != told[0]]
    if others:
        raise _disagreement(what, f"ranks {others} give another than rank 0")


def check_everywhere(what: str, said: Iterable[object]) -> None:
    """The same for what every rank says now, item by item. Traffic: one all-reduce of two numbers."""
    found = difference(everyone_here(), [str(each) for each in said])
    if found is not None:
        raise _disagreement(what, found)


def _disagreement(what: str, given: str) -> LayoutError:
    return LayoutError(
        explain(
            f"ranks disagree on {what}",
            given=given,
            allowed="the same on every rank, members or not",
            fix="compute it without looking at the rank",
        )
    )
