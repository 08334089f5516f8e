"""The actions of a pipeline schedule in rounds: all actions of a round may run at once, after those of earlier rounds.

A simulation computes the ends of a whole round together, so that it takes as many operations as there are rounds: 318
for 1F1B on 64 stages with 96 microbatches, which has 12,288 actions.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwright.plan.schedule import Schedule
from shardwright.strategies.pipeline.schedule_checks import run_order

KINDS = "FBIW"
"""The kinds of actions, in the order in which :attr:`Rounds.what` numbers them."""

Numbers = npt.NDArray[np.intp]


class Rounds(NamedTuple):
    """The actions of a schedule, numbered round by round; the first two arrays have one entry for each action."""

    stage: Numbers
    what: Numbers
    """The kind of each action and its chunk: ``KINDS.index(kind) * num_chunks + chunk``."""
    waits: tuple[tuple[slice, Numbers], ...]
    """For each round its actions, and the indices of the actions that they wait for: in the first row those whose
    results they need, in the second those before them on their stages. An index equal to the number of actions means
    that there is nothing to wait for."""


@lru_cache(maxsize=32)
def rounds_of(schedule: Schedule) -> Rounds:
    """Returns the rounds of a schedule: each action is in the round right after the last action that it waits for.

    An action waits for the action before it on its stage, and for the action whose result it needs.

    Raises: LayoutError: stages deadlock.

    >>> from shardwright.strategies.pipeline.schedules import build
    >>> found = rounds_of(build("1f1b", 2, 2))
    >>> found.stage.tolist(), [(own.start, own.stop) for own, _ in found.waits]
    ([0, 0, 1, 1, 1, 0, 1, 0], [(0, 1), (1, 3), (3, 4), (4, 6), (6, 7), (7, 8)])
    """
    chunks = schedule.num_chunks
    gives, rounds, lasts = dict[int, int](), dict[int, int](), [(-1, 0)] * schedule.num_stages
    rows: list[tuple[int, int, int, int, int]] = []
    for number, (stage, (kind, _, chunk), need, give) in enumerate(run_order(schedule)):
        before, at = lasts[stage]
        needed = gives.get(need, -1)
        at = max(at, rounds.get(needed, 0)) + 1
        gives[give] = number
        rounds[number] = at
        lasts[stage] = number, at
        rows.append((at, stage, KINDS.index(kind) * chunks + chunk, needed, before))
    at_round, stage_of, what, *waits = np.array(rows, dtype=np.intp).reshape(-1, 5).T
    order = np.argsort(at_round, kind="stable")
    # maps an action's number in run_order to its number here; index -1 (no action) reads the last entry
    number_of = np.full(len(order) + 1, len(order))
    number_of[order] = np.arange(len(order))
    waited = number_of[np.stack(waits)[:, order]]
    begins = np.flatnonzero(np.diff(at_round[order], prepend=0, append=len(order) + 1))
    rounds_in_order = (slice(*bounds) for bounds in pairwise(begins.tolist()))
    return Rounds(
        stage_of[order], what[order], tuple((actions, waited[:, actions].copy()) for actions in rounds_in_order)
    )
