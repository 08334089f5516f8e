"""What happened when, on every stage: what a simulation predicts and what a run has measured, in one form."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardwright.plan.schedule import Action


class Span(NamedTuple):
    """One action on its stage, in seconds since the step began."""

    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """The spans of every stage, in order, and how much each held in memory over time.

    ``spans[s]`` are those of stage ``s``. ``memory[s]`` are pairs (second, bytes) where the stage's activations change:
    bytes from that second on; empty where nobody counted.

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
        """From the first action's start to the last one's end."""
        spans = [span for stage in self.spans for span in stage]
        return max(s.end_s for s in spans) - min(s.start_s for s in spans) if spans else 0.0

    def busy_s(self, stage: int) -> float:
        """How long ``stage`` computes."""
        return sum(span.end_s - span.start_s for span in self.spans[stage])

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they wait."""
        whole = self.makespan_s * len(self.spans)
        return 1 - sum(self.busy_s(stage) for stage in range(len(self.spans))) / whole if whole else 0.0

    def at_speed_of(self, other: Timeline) -> Timeline:
        """The same with all times scaled, so that the stages compute for as long as those of ``other`` do.

        >>> action = Action("F", 0)
        >>> predicted, measured = (Timeline("", ((Span(action, 0, end),),)) for end in (1, 3))
        >>> predicted.at_speed_of(measured).makespan_s
        3.0
        """
        busy, others = (sum(map(each.busy_s, range(len(each.spans)))) for each in (self, other))
        factor = others / busy if busy else 1.0
        return replace(
            self,
            name=f"{self.name} (scaled)",
            spans=tuple(
                tuple(Span(s.action, s.start_s * factor, s.end_s * factor) for s in each) for each in self.spans
            ),
            memory=tuple(tuple((at * factor, num_bytes) for at, num_bytes in each) for each in self.memory),
        )

    def peak_bytes(self, stage: int) -> int:
        """The most that ``stage`` holds at any time; 0 where nobody counted."""
        return max((num_bytes for _, num_bytes in self.memory[stage]), default=0) if self.memory else 0
