"""Counts in-place writes, so that reading an outdated view of a global tensor raises an error.

On one device a view shows later writes to its base. Here a view of each rank's own slice does too, but a view that
needed communication is a gathered copy and does not. A tensor and its views share one count of writes, the same on
every rank; a gathered view stores the count at which it was taken, and reading it after a later write is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.errors import PlanError
from shardwright.global_tensor.sbp import sbp_text


@dataclass(slots=True)
class WriteCount:
    """The number of in-place writes to a tensor and its views, which all share this object."""

    num: int = 0


class GatheredView(NamedTuple):
    """What a view that is a gathered copy stores: a description of its base, and the base's write count at the copy."""

    base: str
    num_writes: int


def writes_of(x: Any) -> WriteCount:
    """Returns the count of in-place writes that ``x`` shares with its views; the first call makes the count."""
    if not hasattr(x, "_writes"):
        x._writes = WriteCount()
    return x._writes  # type: ignore[no-any-return]


def is_gathered_view(x: Any) -> bool:
    """Returns whether ``x`` is a copy that an operator made by communication, where in torch it returns a view."""
    return hasattr(x, "_gathered")


def is_stale(x: Any) -> bool:
    """Returns whether ``x`` is a gathered copy of a view whose base has been written to since."""
    return is_gathered_view(x) and bool(x._gathered.num_writes != x._writes.num)


def is_shared(x: Any) -> bool:
    """Returns whether ``x`` has views, is a view or was written to.

    A tensor that torch has just created is none of these, so that its shape or layout may still be changed in place.
    """
    return hasattr(x, "_writes")


def mark_view(view: Any, base: Any, *, gathered: bool) -> None:
    """Makes ``view`` share the count of in-place writes of ``base``.

    With ``gathered`` the view is a copy made by communication: reading it after a later write to ``base`` is an error.
    A view of such a copy is marked like the copy, whatever ``gathered`` is.
    """
    view._writes = writes_of(base)
    if is_gathered_view(base):
        view._gathered = base._gathered
    elif gathered:
        view._gathered = GatheredView(f"{list(base.shape)} {sbp_text(base.sbp)} on {base.placement}", view._writes.num)


def count_writes(written: Iterable[Any]) -> None:
    """Adds one to the count of in-place writes of each of these tensors, which its views share."""
    for x in written:
        writes_of(x).num += 1


def check_fresh(verb: str, given: Iterable[Any]) -> None:
    """Raises PlanError if one of the tensors is a gathered copy of a view whose base has been written to since.

    ``verb`` names the operation that reads the tensors, for the error's text.
    """
    for x in given:
        if is_stale(x):
            raise PlanError(
                f"'{verb}' reads a view that was gathered before its base was written to",
                given=f"a view {list(x.shape)} of {x._gathered.base}, "
                f"written to {x._writes.num - x._gathered.num_writes} times since",
                allowed="views taken after the last write; views of each member's own part, which see it",
                fix="take the view again after the write, or .clone() it before to keep the old values",
            )
