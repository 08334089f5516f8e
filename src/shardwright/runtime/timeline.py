"""Timelines of one step: the start and end of each action on each pipeline stage, simulated or measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardwright.plan.schedule import Action


class Span(NamedTuple):
    """One action of a schedule with its start and end on its pipeline stage.

    In a :class:`Timeline` they are seconds since the step began; in ``Executor.spans``, what the executor's clock gave.
    """

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The start and end of every action on each pipeline stage, and each stage's activation memory over time.

    ``spans[s]`` are the actions of stage ``s`` in their order. ``memory[s]`` are pairs (second, bytes): the size of the
    stage's activations from that second on. ``memory`` is empty if it is not known.

    >>> F, B = Action("F", 0), Action("B", 0)
    >>> timeline = Timeline("two stages", ((Span(F, 0, 1), Span(B, 4, 6)), (Span(F, 1, 2), Span(B, 2, 4))))
    >>> timeline.makespan_s, timeline.busy_s(0), timeline.bubble
    (6, 3, 0.5)
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]
    memory: tuple[tuple[tuple[float, int], ...], ...] = field(default=())

    @property
    def makespan_s(self) -> float:
        """The seconds from the first action's start to the last one's end."""
        spans = [span for stage in self.spans for span in stage]
        return max(s.end_s for s in spans) - min(s.start_s for s in spans) if spans else 0.0

    def busy_s(self, stage: int) -> float:
        """Returns the sum of the seconds that the actions of ``stage`` take."""
        return sum(span.end_s - span.start_s for span in self.spans[stage])

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which no action runs, from 0 to 1."""
        whole = self.makespan_s * len(self.spans)
        return 1 - sum(self.busy_s(stage) for stage in range(len(self.spans))) / whole if whole else 0.0

    def at_speed_of(self, other: Timeline) -> Timeline:
        """Returns this timeline with all times scaled so that its total busy time is that of ``other``.

        A predicted and a measured timeline can be compared side by side in this way.

        >>> action = Action("F", 0)
        >>> predicted, measured = (Timeline("", ((Span(action, 0, end),),)) for end in (1, 3))
        >>> predicted.at_speed_of(measured).makespan_s
        3.0
        """
        busy, others = (sum(map(timeline.busy_s, range(len(timeline.spans)))) for timeline in (self, other))
        factor = others / busy if busy else 1.0
        spans = tuple(
            tuple(Span(s.action, s.start_s * factor, s.end_s * factor) for s in stage) for stage in self.spans
        )
        memory = tuple(tuple((at * factor, num_bytes) for at, num_bytes in stage) for stage in self.memory)
        return replace(self, name=f"{self.name} (scaled)", spans=spans, memory=memory)

    def peak_bytes(self, stage: int) -> int:
        """Returns the largest activation memory of ``stage`` in bytes; 0 if it is not known."""
        return max((num_bytes for _, num_bytes in self.memory[stage]), default=0) if self.memory else 0
