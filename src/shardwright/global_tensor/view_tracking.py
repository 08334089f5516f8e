"""Views that had to be gathered, and what is written to their bases: counted, so that none is read stale.

On one device a view sees what is written to its base. A view of a member's own slice does here, too; one that had to
be gathered is a copy. A tensor and its views share one count of writes, the same on every rank; a gathered view
remembers the count it was taken at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.errors import PlanError
from shardwright.global_tensor.sbp import text


@dataclass(slots=True)
class Writes:
    """How often a tensor, or any view of it, was written to."""

    num: int = 0


class GatheredView(NamedTuple):
    """What a view that is a copy remembers of its base."""

    base: str
    num_writes: int


def writes_of(x: Any) -> Writes:
    """The count that ``x`` shares with its views."""
    if not hasattr(x, "_writes"):
        x._writes = Writes()
    found: Writes = x._writes
    return found


def is_apart(x: Any) -> bool:
    """Whether ``x`` is a view in torch's eyes and a copy here."""
    return hasattr(x, "_apart")


def is_stale(x: Any) -> bool:
    """Whether ``x`` is a copy of what its base no longer is."""
    return is_apart(x) and bool(x._apart.num_writes != x._writes.num)


def is_shared(x: Any) -> bool:
    """Whether ``x`` has views, is one or was written to: what torch has just made is not."""
    return hasattr(x, "_writes")


def bind(view: Any, base: Any, *, apart: bool) -> None:
    """Makes ``view`` a view of ``base``; ``apart`` where it is a copy."""
    view._writes = writes_of(base)
    if is_apart(base):
        view._apart = base._apart
    elif apart:
        view._apart = GatheredView(f"{list(base.shape)} {text(base.sbp)} on {base.placement}", view._writes.num)


def note_writes(written: Iterable[Any]) -> None:
    """Counts one write to each."""
    for x in written:
        writes_of(x).num += 1


def check_fresh(verb: str, given: Iterable[Any]) -> None:
    """Raises PlanError where one of the tensors is a gathered view, and its base was written to since."""
    for x in given:
        if is_stale(x):
            raise PlanError(
                f"'{verb}' reads a view that was gathered before its base was written to",
                given=f"a view {list(x.shape)} of {x._apart.base}, "
                f"written to {x._writes.num - x._apart.num_writes} times since",
                allowed="views taken after the last write; views of each member's own part, which see it",
                fix="take the view again after the write, or .clone() it before to keep the old numbers",
            )
