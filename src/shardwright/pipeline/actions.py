"""A schedule is data: for each rank, the list of actions that make one step."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One piece of work: F forward, B backward, on one microbatch."""

    kind: Literal["F", "B"]
    microbatch: int


def accumulate(num_microbatches: int) -> tuple[Action, ...]:
    """The schedule without a pipeline: each microbatch forward, then backward, gradients added up.

    >>> [f"{kind}{microbatch}" for kind, microbatch in accumulate(2)]
    ['F0', 'B0', 'F1', 'B1']
    """
    return tuple(Action(kind, m) for m in range(num_microbatches) for kind in ("F", "B"))
