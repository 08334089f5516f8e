"""Prepares pipeline timelines for drawing as text, as a picture or as a page.

It gives each a name, moves its times to begin at zero, counts bubbles and chunks, and chooses units and axis ticks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from operator import itemgetter
from typing import NamedTuple

from shardwright.formatting import format_bytes, format_duration
from shardwright.plan.schedule import ActionKind
from shardwright.runtime.timeline import Span, Timeline

KINDS: dict[ActionKind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}
"""The kinds of action and their names, in the order of every legend."""

NOTHING = "nothing to draw: no action takes any time"
"""The text that is shown in place of a timeline without actions."""


class TimelineOutline(NamedTuple):
    """A pipeline timeline prepared for drawing by :func:`outlines`: its first action begins at zero.

    ``bubbles[s]`` is the share of the makespan in which stage ``s`` is idle, and ``peaks[s]`` its peak of activation
    memory in bytes, 0 if memory is not known. ``chunks[s]`` maps the number of each chunk of the stage to its place
    among the stage's chunks. If memory changes more than once at one time, only the last change is kept.
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]
    memory: tuple[tuple[tuple[float, int], ...], ...]
    makespan_s: float
    bubble: float
    bubbles: tuple[float, ...]
    peaks: tuple[int, ...]
    chunks: tuple[dict[int, int], ...]

    @property
    def num_spans(self) -> int:
        """The number of actions (forward or backward of a microbatch) on all stages."""
        return sum(map(len, self.spans))

    @property
    def num_microbatches(self) -> int:
        """The number of different microbatches in the timeline."""
        return len({span.action.microbatch for stage in self.spans for span in stage})

    @property
    def kinds(self) -> tuple[ActionKind, ...]:
        """The kinds of action (forward, backward, ...) that occur in the timeline."""
        kinds = {span.action.kind for stage in self.spans for span in stage}
        return tuple(kind for kind in KINDS if kind in kinds)

    @property
    def most_chunks(self) -> int:
        """The largest number of model chunks on a stage: above 1 in an interleaved schedule, 0 without actions."""
        return max(map(len, self.chunks), default=0)

    @property
    def summary(self) -> str:
        """One line of text: makespan, bubble and, if known, the largest memory peak; or that there are no actions."""
        if not self.makespan_s:
            return NOTHING
        times = f"makespan {precise_time(self.makespan_s)}, bubble {percent(self.bubble)}"
        peak = max(self.peaks)
        return times + (f", peak {format_bytes(peak)} on stage {self.peaks.index(peak)}" if peak else "")


def outlines(timelines: Sequence[Timeline]) -> list[TimelineOutline]:
    """Returns pipeline timelines prepared for drawing, with names that differ.

    Two timelines of one name get the endings "predicted" and "measured", in this order. If more than two timelines are
    given and names repeat, all are numbered.

    >>> from shardwright.plan.schedule import Action
    >>> timeline = Timeline("1f1b", ((Span(Action("F", 0), 3, 4), Span(Action("B", 0), 6, 7)),))
    >>> first, second = outlines([timeline, timeline])
    >>> first.name, second.name, first.spans[0][0].start_s, first.bubbles
    ('1f1b, predicted', '1f1b, measured', 0, (0.5,))
    """
    names = [timeline.name for timeline in timelines]
    if len(names) > len(set(names)):
        ends = ("predicted", "measured") if len(names) == 2 else [str(n + 1) for n in range(len(names))]
        names = [f"{name}, {end}" for name, end in zip(names, ends, strict=True)]
    return [_outline(name, timeline) for name, timeline in zip(names, timelines, strict=True)]


def _outline(name: str, timeline: Timeline) -> TimelineOutline:
    """Shifts a timeline to begin at zero and counts its bubbles, peaks and chunks."""
    starts = [span.start_s for stage in timeline.spans for span in stage]
    zero, makespan, stages = min(starts, default=0.0), timeline.makespan_s, range(len(timeline.spans))
    digits = digits_of(makespan)
    chunks = [sorted({span.action.chunk for span in stage}) for stage in timeline.spans]
    return TimelineOutline(
        name,
        tuple(
            tuple(sorted((Span(a, start - zero, end - zero) for a, start, end in stage), key=itemgetter(1, 2)))
            for stage in timeline.spans
        ),
        tuple(tuple({round(at - zero, digits): size for at, size in stage}.items()) for stage in timeline.memory),
        makespan,
        timeline.bubble,
        tuple(1 - timeline.busy_s(stage) / makespan if makespan else 0.0 for stage in stages),
        tuple(timeline.peak_bytes(stage) for stage in stages),
        tuple({chunk: place for place, chunk in enumerate(stage_chunks)} for stage_chunks in chunks),
    )


def digits_of(longest_s: float) -> int:
    """Returns to how many decimals to round times in seconds, so that a billionth of ``longest_s`` is still seen."""
    return 9 - floor(log10(longest_s)) if longest_s else 9


def times_as_long(drawn: Sequence[TimelineOutline]) -> str:
    """Returns a sentence that compares the makespans of two timelines; "" unless there are two with actions."""
    if len(drawn) != 2 or not all(outline.makespan_s for outline in drawn):
        return ""
    first, second = drawn
    what, _, how = second.name.rpartition(", ")
    of, _, other = first.name.rpartition(", ")
    # for a predicted and a measured timeline of the same layout, the layout's name is left out
    names = (how, other) if what == of else (second.name, first.name)
    return f"{names[0]} takes {second.makespan_s / first.makespan_s:.2f} times as long as {names[1]}"


class TimeUnit(NamedTuple):
    """A unit of time: its name, and its length in seconds."""

    name: str
    size_s: float


_UNITS = (
    TimeUnit("h", 3600), TimeUnit("min", 60), TimeUnit("s", 1), TimeUnit("ms", 1e-3), TimeUnit("µs", 1e-6),
    TimeUnit("ns", 1e-9),
)  # fmt: skip


def time_unit(longest_s: float) -> TimeUnit:
    """Returns the largest unit of time that fits at least twice into ``longest_s`` seconds; ns if none does, s for 0.

    >>> [time_unit(seconds).name for seconds in (0, 3e-6, 0.9, 90, 130, 7200)]
    ['s', 'µs', 'ms', 's', 'min', 'h']
    """
    return next(
        (unit for unit in _UNITS if longest_s >= 2 * unit.size_s), _UNITS[-1] if longest_s else TimeUnit("s", 1)
    )


def precise_time(seconds: float) -> str:
    """Returns a time as text: with three digits in a fitting unit or, from a minute on, in whole units.

    >>> [precise_time(seconds) for seconds in (0, 3.2e-6, 0.0123, 1.5, 75, 4000)]
    ['0 s', '3.20 µs', '12.3 ms', '1.50 s', '1 min 15 s', '1 h 06 min']
    """
    if seconds >= 59.95:
        return format_duration(seconds)
    unit = next((unit for unit in _UNITS[2:] if abs(seconds) >= 0.9995 * unit.size_s), _UNITS[-1])
    count = seconds / unit.size_s
    return f"{count:.{max(0, 2 - floor(log10(abs(count) * 1.0005)))}f} {unit.name}" if seconds else "0 s"


def percent(share: float) -> str:
    """Returns a share (0 to 1) as text in percent, such as "27.3 %"."""
    return f"{100 * share:.1f} %"


def ticks(end: float, most: int) -> list[float]:
    """Returns at most ``most`` round numbers from zero to ``end``, evenly spaced, for the ticks of an axis.

    ``end`` is above zero, and ``most`` is 2 or more.

    >>> ticks(33, 8), ticks(0.07, 3)
    ([0, 5, 10, 15, 20, 25, 30], [0.0, 0.05])
    """
    rough = end / max(most - 1, 1)
    power = 10.0 ** floor(log10(rough))
    step = next(power * round_one for round_one in (1, 2, 5, 10) if power * round_one >= rough * (1 - 1e-9))
    digits = max(0, -floor(log10(step) + 1e-9))
    positions = [round(n * step, digits) for n in range(ceil(end / step) + 1) if n * step <= end * (1 + 1e-9)]
    return [int(tick) for tick in positions] if step >= 1 else positions


def spread(count: int, most: int) -> list[int]:
    """Returns ``most`` (2 or more) of the indices below ``count``, evenly spaced, with both ends; all if fewer.

    >>> spread(3, 4), spread(64, 4)
    ([0, 1, 2], [0, 21, 42, 63])
    """
    few = min(count, most)
    return [round(n * (count - 1) / max(few - 1, 1)) for n in range(few)]
