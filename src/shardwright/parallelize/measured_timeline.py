"""Measures when the forwards and backwards of one step ran, on every stage of a rank's pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwright.axes import mesh_axes
from shardwright.comm.agreement import gather_json
from shardwright.devices import moment, seconds_between
from shardwright.parallelize.rank_state import RankState
from shardwright.plan.schedule import Action
from shardwright.runtime.executor import Executor
from shardwright.runtime.timeline import Span, Timeline


def measured_timeline(run: RankState, executor: Executor, take_step: Callable[[], object]) -> Timeline:
    """Returns the times of the actions of the step that ``take_step`` takes, in seconds after a barrier of the stages.

    All ranks call it. ``executor`` is that of ``run``: for this step its times are moments of the rank's device.

    Traffic: that of the step; with pipeline stages also the barrier, and one gather of the times.
    """
    stages = next((run.axes[name].for_strategy("core") for name in mesh_axes("stages") if name in run.axes), None)
    if stages is not None:
        stages.barrier()
    executor.clock = lambda: moment(run.world.device)
    start = executor.clock()
    try:
        take_step()
    finally:
        del executor.clock
    rows = [(*s.action, *(seconds_between(start, instant) for instant in s[1:])) for s in executor.spans]
    rows_by_stage = [rows] if stages is None else gather_json(stages, rows)
    spans = (tuple(Span(Action(*row[:3]), *row[3:]) for row in stage) for stage in rows_by_stage)
    return Timeline(f"{run.plan.layout}, measured", tuple(spans))


def busy_seconds(spans: Sequence[Span]) -> tuple[float, float]:
    """Returns the seconds of all actions in ``spans``, and those from the first's start to the last's end.

    Both are 0 if there are none.
    """
    if not spans:
        return 0.0, 0.0
    return sum(seconds_between(s.start_s, s.end_s) for s in spans), seconds_between(spans[0].start_s, spans[-1].end_s)
