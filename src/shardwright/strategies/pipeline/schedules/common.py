"""What the families share: where chunks live, and how a list for more microbatches serves fewer."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

from shardwright.plan.schedule import Action, Kind, Schedule

ScheduleStep = tuple[Kind, int]  # what kind of action on which chunk; the microbatch follows from the order


def round_robin(num_stages: int, num_chunks_per_stage: int) -> tuple[int, ...]:
    """The stage of each chunk when the chunks are dealt out like cards: chunk ``c`` on stage ``c % num_stages``.

    >>> round_robin(2, 2)
    (0, 1, 0, 1)
    """
    return tuple(range(num_stages)) * num_chunks_per_stage


def v_shape(num_stages: int) -> tuple[int, ...]:
    """The stage of each chunk when the model runs down the stages and back up: stage ``s`` holds s and 2p-1-s.

    >>> v_shape(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(num_stages), *reversed(range(num_stages)))


def first_microbatches(
    name: str, lists: Sequence[Sequence[Action]], stage_of: Sequence[int], num_microbatches: int
) -> Schedule:
    """The schedule of the first ``num_microbatches`` microbatches of lists that may hold more.

    What an action needs belongs to its own microbatch, so whatever could run still can when a microbatch is left out,
    and no more is held than before.

    >>> F0, F1 = Action("F", 0), Action("F", 1)
    >>> [str(action) for action in first_microbatches("by hand", [[F0, F1]], [0], 1).actions[0]]
    ['0F0']
    """
    kept = tuple(tuple(action for action in actions if action.microbatch < num_microbatches) for actions in lists)
    return Schedule(name, kept, tuple(stage_of), num_microbatches)


def number(steps: Iterable[ScheduleStep]) -> list[Action]:
    """Gives each step its microbatch: forwards count up, backwards too, and W takes the oldest I.

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
