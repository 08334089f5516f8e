"""The p2p messages that follow from a schedule: which are sent after each action, and in which order they arrive.

A send never blocks, so messages from one stage arrive in the order of that stage's list of actions. The receiver posts
its receives in this order, ahead of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from shardwright.analysis.chunks.call_graph import Edge
from shardwright.plan.schedule import Action, Schedule


class StageMessage(NamedTuple):
    """One p2p message between pipeline chunks: a microbatch's activations (``F``), or their gradients (``B``).

    ``source`` is always the chunk that computes the activations and ``target`` the one that uses them, also for
    gradients, which travel from ``target`` to ``source``.
    """

    kind: Literal["F", "B"]
    microbatch: int
    source: int
    target: int


def leaving(action: Action, edges: Sequence[Edge]) -> tuple[StageMessage, ...]:
    """Returns the messages that are sent after an action: activations after F, gradients after B or I, none after W.

    The caller skips messages within one stage.

    >>> edges = (Edge(0, 1, ("x",)), Edge(0, 2, ("y",)))
    >>> [(message.source, message.target) for message in leaving(Action("F", 3, 0), edges)]
    [(0, 1), (0, 2)]
    >>> leaving(Action("I", 3, 2), edges), leaving(Action("W", 3, 2), edges)
    ((StageMessage(kind='B', microbatch=3, source=0, target=2),), ())
    """
    return _messages(action, edges, at_source=action.kind == "F")


def coming(action: Action, edges: Sequence[Edge]) -> tuple[StageMessage, ...]:
    """Returns the messages that must be received before an action can run: activations for F, gradients for B or I.

    W needs none. The caller skips messages within one stage.
    """
    return _messages(action, edges, at_source=action.kind != "F")


def _messages(action: Action, edges: Sequence[Edge], *, at_source: bool) -> tuple[StageMessage, ...]:
    """Returns the messages over the edges that begin (``at_source``) or end at the action's chunk; W has none."""
    chosen = [e for e in edges if action.chunk == (e.source if at_source else e.target)] if action.kind != "W" else ()
    return tuple(
        StageMessage("F" if action.kind == "F" else "B", action.microbatch, e.source, e.target) for e in chosen
    )


def receiver(message: StageMessage, stage_of: Sequence[int]) -> int:
    """Returns the pipeline stage that receives a message; ``stage_of`` is the stage of each chunk."""
    return stage_of[message.target if message.kind == "F" else message.source]


def connected_stages(schedule: Schedule, edges: Sequence[Edge]) -> frozenset[tuple[int, int]]:
    """Returns the pairs of stages, each as (lower, higher), that exchange messages under a schedule.

    >>> schedule = Schedule("by hand", ((), ()), (0, 1, 0), 1)
    >>> sorted(connected_stages(schedule, (Edge(0, 1, ("x",)), Edge(1, 2, ("y",)), Edge(0, 2, ("z",)))))
    [(0, 1)]
    """
    ends = ((schedule.stage_of[edge.source], schedule.stage_of[edge.target]) for edge in edges)
    return frozenset((min(pair), max(pair)) for pair in ends if len(set(pair)) == 2)


def arrivals(schedule: Schedule, edges: Sequence[Edge], stage: int) -> dict[int, tuple[StageMessage, ...]]:
    """Returns the messages that ``stage`` receives under a schedule, by sending stage, in order of sending.

    >>> F, B = (Action("F", 0, c) for c in (0, 1)), (Action("B", 0, c) for c in (0, 1))
    >>> (f0, f1), (b0, b1) = F, B
    >>> schedule = Schedule("by hand", ((f0, b0), (f1, b1)), (0, 1), 1)
    >>> arrivals(schedule, (Edge(0, 1, ("x",)),), stage=1)
    {0: (StageMessage(kind='F', microbatch=0, source=0, target=1),)}
    """
    by_sender: dict[int, tuple[StageMessage, ...]] = {}
    for sender, actions in enumerate(schedule.actions):
        sent = [message for action in actions for message in leaving(action, edges)]
        messages = tuple(message for message in sent if receiver(message, schedule.stage_of) == stage)
        if messages and sender != stage:
            by_sender[sender] = messages
    return by_sender
