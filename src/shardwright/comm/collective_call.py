"""``CollectiveCall``: a collective's kind, axis, shape and dtype, by which ranks notice that their calls differ."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardwright.errors import CommunicationError, aligned


class CollectiveCall(NamedTuple):
    """The description of one collective call or message, by which ranks notice that they make different calls.

    ``kind`` is the collective, such as "all_reduce"; ``axis`` the name of the axis; ``shape`` and ``dtype`` are those
    of its tensor (several tensors count as one flat tensor, and an all-to-all has the shape ``()``); and ``details`` is
    text on what else must agree, such as the reduction. ``source``, the strategy that makes the call, is for records
    and error texts.
    """

    kind: str
    axis: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    details: str = ""

    def agrees(self, other: CollectiveCall) -> bool:
        """Returns whether the calls of two ranks are the same in all but ``source``."""
        return (self.kind, self.axis, self.shape, self.dtype, self.details) == (
            (other.kind, other.axis, other.shape, other.dtype, other.details)
        )

    def __str__(self) -> str:
        what = f"{self.kind} of {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        return f"{what} {self.details} over axis '{self.axis}' for {self.source}".replace("  ", " ")


SAME_CALLS = "the same calls in the same order on every rank of an axis"
FIX_CALLS = (
    "look for code that depends on the rank: a branch, such as `if world.rank == 0` around a save (call it on every "
    "rank: it writes files once) or a hook, a loop, the size of a batch; or on values of its samples, as a loop up to "
    "their largest length does: /sp and grids give the ranks of tp other samples, dp and plain tp run such code"
)
DEBUG = "sw.launch(..., debug=True), or --debug of the command,"
FIX_LOST = (
    "see why the other rank stopped, or which call it made instead; sw.save or a method of a run: call it on every "
    f"rank, never below `if world.rank == 0`; {DEBUG} names ranks that make different calls"
)
"""Texts for errors about ranks that make different calls: what is allowed (``SAME_CALLS``), where to look for the cause
(``FIX_CALLS``), what names both calls (``DEBUG``), and where to look if another rank has not come (``FIX_LOST``).
"""


def disagreement(axis: str, rank: int, call: object, other: int, others_call: object) -> CommunicationError:
    """Returns the error for two ranks that make different collective calls over one axis; it names both calls."""
    (a, first), (b, second) = sorted([(rank, str(call)), (other, str(others_call))])
    return CommunicationError(
        f"ranks {a} and {b} disagree on a call over axis '{axis}'",
        given=aligned([f"rank {a}: {first}", f"rank {b}: {second}"]),
        allowed=SAME_CALLS,
        fix=FIX_CALLS,
    )
