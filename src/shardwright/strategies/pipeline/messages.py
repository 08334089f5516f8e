"""What stages send one another, derived from a schedule: which message leaves after an action, and in which order
messages come.

A stage sends as it goes and never waits for it, so what comes from one stage comes in the order of that stage's list.
The receiver posts its receives in this order, before it needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from shardwright.analysis.call_graph import Edge
from shardwright.plan.schedule import Action, Schedule


class StageMessage(NamedTuple):
    """A microbatch's values that cross an edge forward (``F``), or their gradients that cross it back (``B``).

    ``source`` and ``target`` are the edge's chunks, whichever way the message goes.
    """

    kind: Literal["F", "B"]
    microbatch: int
    source: int
    target: int


def leaving(action: Action, edges: Sequence[Edge]) -> tuple[StageMessage, ...]:
    """The messages that an action makes; those between chunks of one stage are never sent.

    >>> edges = (Edge(0, 1, ("x",)), Edge(0, 2, ("y",)))
    >>> leaving(Action("F", 3, 0), edges)
    (Message(kind='F', microbatch=3, source=0, target=1), Message(kind='F', microbatch=3, source=0, target=2))
    >>> leaving(Action("I", 3, 2), edges), leaving(Action("W", 3, 2), edges)
    ((Message(kind='B', microbatch=3, source=0, target=2),), ())
    """
    kind, microbatch, chunk = action
    if kind == "F":
        return tuple(StageMessage("F", microbatch, e.source, e.target) for e in edges if e.source == chunk)
    if kind in ("B", "I"):
        return tuple(StageMessage("B", microbatch, e.source, e.target) for e in edges if e.target == chunk)
    return ()


def coming(action: Action, edges: Sequence[Edge]) -> tuple[StageMessage, ...]:
    """The messages that an action needs.

    >>> coming(Action("B", 3, 0), (Edge(0, 1, ("x",)),))
    (Message(kind='B', microbatch=3, source=0, target=1),)
    """
    kind, microbatch, chunk = action
    if kind == "F":
        return tuple(StageMessage("F", microbatch, e.source, e.target) for e in edges if e.target == chunk)
    if kind in ("B", "I"):
        return tuple(StageMessage("B", microbatch, e.source, e.target) for e in edges if e.source == chunk)
    return ()


def sender(message: StageMessage, stage_of: Sequence[int]) -> int:
    """The stage that sends a message."""
    return stage_of[message.source if message.kind == "F" else message.target]


def receiver(message: StageMessage, stage_of: Sequence[int]) -> int:
    """The stage that receives it."""
    return stage_of[message.target if message.kind == "F" else message.source]


def arrivals(schedule: Schedule, edges: Sequence[Edge], stage: int) -> dict[int, tuple[StageMessage, ...]]:
    """By sending stage, the messages for ``stage`` in the order in which they leave.

    >>> F, B = (Action("F", 0, c) for c in (0, 1)), (Action("B", 0, c) for c in (0, 1))
    >>> (f0, f1), (b0, b1) = F, B
    >>> schedule = Schedule("by hand", ((f0, b0), (f1, b1)), (0, 1), 1)
    >>> arrivals(schedule, (Edge(0, 1, ("x",)),), stage=1)
    {0: (Message(kind='F', microbatch=0, source=0, target=1),)}
    """
    found: dict[int, tuple[StageMessage, ...]] = {}
    for other, actions in enumerate(schedule.actions):
        if other == stage:
            continue
        mine = tuple(
            message
            for action in actions
            for message in leaving(action, edges)
            if receiver(message, schedule.stage_of) == stage
        )
        if mine:
            found[other] = mine
    return found
