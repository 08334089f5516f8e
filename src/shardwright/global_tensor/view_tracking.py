"""Counts in-place writes, so that a view that is a gathered copy is never read after its base was written to.

On one device a view sees what is written to its base. Here a view of each member's own slice does too, but a view that
needed communication is a gathered copy. A tensor and its views share one count of writes, the same on every rank; a
gathered view remembers the count at which it was taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwright.errors import PlanError
from shardwright.global_tensor.sbp import sbp_text


@dataclass(slots=True)
class WriteCount:
    """The number of in-place writes to a tensor or any view of it, shared by all of them."""

    num: int = 0


class GatheredView(NamedTuple):
    """For a view that is a gathered copy: a text about its base, and the base's count of writes at the copy."""

    base: str
    num_writes: int


def writes_of(x: Any) -> WriteCount:
    """Returns the count of in-place writes that ``x`` shares with its views."""
    if not hasattr(x, "_writes"):
        x._writes = WriteCount()
    return x._writes  # type: ignore[no-any-return]


def is_gathered_view(x: Any) -> bool:
    """Whether ``x`` is a view in torch's terms but in fact a copy, made by communication."""
    return hasattr(x, "_gathered")


def is_stale(x: Any) -> bool:
    """Whether ``x`` is a gathered copy of a view whose base was written to since."""
    return is_gathered_view(x) and bool(x._gathered.num_writes != x._writes.num)


def is_shared(x: Any) -> bool:
    """Whether ``x`` has views, is a view or was written to; a tensor that torch has just created is none of these."""
    return hasattr(x, "_writes")


def mark_view(view: Any, base: Any, *, gathered: bool) -> None:
    """Records that ``view`` is a view of ``base``; ``gathered``: it is a copy, made by communication."""
    view._writes = writes_of(base)
    if is_gathered_view(base):
        view._gathered = base._gathered
    elif gathered:
        view._gathered = GatheredView(f"{list(base.shape)} {sbp_text(base.sbp)} on {base.placement}", view._writes.num)


def count_writes(written: Iterable[Any]) -> None:
    """Counts one in-place write to each of the tensors and to their views."""
    for x in written:
        writes_of(x).num += 1


def check_fresh(verb: str, given: Iterable[Any]) -> None:
    """Raises PlanError if one of the tensors is a gathered copy of a view whose base was written to since."""
    for x in given:
        if is_stale(x):
            raise PlanError(
                f"'{verb}' reads a view that was gathered before its base was written to",
                given=f"a view {list(x.shape)} of {x._gathered.base}, "
                f"written to {x._writes.num - x._gathered.num_writes} times since",
                allowed="views taken after the last write; views of each member's own part, which see it",
                fix="take the view again after the write, or .clone() it before to keep the old values",
            )
