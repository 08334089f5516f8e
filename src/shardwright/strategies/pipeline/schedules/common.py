"""Helpers to build pipeline schedules: the stage of each chunk, and the microbatch of each action of a stage."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

from shardwright.plan.schedule import Action, ActionKind, Schedule

ScheduleStep = tuple[ActionKind, int]  # kind and chunk of an action whose microbatch follows from the order


def round_robin(num_stages: int, num_chunks_per_stage: int) -> tuple[int, ...]:
    """Returns the stage of each chunk for interleaved schedules: chunk ``c`` is on stage ``c % num_stages``."""
    return tuple(range(num_stages)) * num_chunks_per_stage


def v_shape(num_stages: int) -> tuple[int, ...]:
    """Returns the stage of each chunk for V-shaped schedules: of p stages, stage s holds chunks s and 2p-1-s."""
    return (*range(num_stages), *reversed(range(num_stages)))


def first_microbatches(
    name: str, lists: Sequence[Sequence[Action]], stage_of: Sequence[int], num_microbatches: int
) -> Schedule:
    """Returns the schedule of the given actions of each stage, cut down to the first ``num_microbatches`` microbatches.

    An action depends only on actions of its own microbatch. So the other actions still run when a microbatch is left
    out, and need no more memory than before.
    """
    kept = tuple(tuple(action for action in actions if action.microbatch < num_microbatches) for actions in lists)
    return Schedule(name, kept, tuple(stage_of), num_microbatches)


def number(steps: Iterable[ScheduleStep]) -> list[Action]:
    """Returns the actions of one stage: each given (kind, chunk) pair with the number of the microbatch that it is for.

    The forwards F of a chunk take the microbatches in order, and so do its backwards, B or I. A W takes the microbatch
    of the chunk's oldest I that has no W yet.

    >>> print(*map(str, number([("F", 0), ("F", 0), ("I", 0), ("B", 0), ("W", 0)])))
    0F0 0F1 0I0 0B1 0W0
    """
    forwards: Counter[int] = Counter()
    backwards: Counter[int] = Counter()
    waiting: dict[int, deque[int]] = defaultdict(deque)
    actions = []
    for kind, chunk in steps:
        if kind == "W":
            microbatch = waiting[chunk].popleft()
        else:
            counter = forwards if kind == "F" else backwards
            microbatch = counter[chunk]
            counter[chunk] += 1
            if kind == "I":
                waiting[chunk].append(microbatch)
        actions.append(Action(kind, microbatch, chunk))
    return actions
