"""Writes pipeline timelines, predicted or measured, as a picture, an HTML page or a Chrome trace.

A Chrome trace is a JSON file that ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwright.errors import PlanError
from shardwright.report.timeline_outline import KINDS, TimelineOutline, outlines
from shardwright.report.timeline_page import write_timeline_page
from shardwright.report.timeline_picture import draw_timelines
from shardwright.runtime.timeline import Timeline

Event = dict[str, Any]


def write_timelines(path: Path, timelines: Sequence[Timeline], title: str = "Timeline") -> Path:
    """Writes pipeline timelines in the format of the file's ending: .png, .html or .json. Returns the path.

    Raises: PlanError: another ending, or a file that cannot be written.

    >>> write_timelines(Path("timeline.txt"), [])
    Traceback (most recent call last):
    shardwright.errors.PlanError: a timeline is not written as '.txt'
      given:   timeline.txt
      allowed: .png, a picture; .html, a page to hover over; .json, a trace for Perfetto
      fix:     write timeline.html
    """
    kind = path.suffix.lower()
    if kind not in (".png", ".html", ".json"):
        raise PlanError(
            f"a timeline is not written as '{kind}'",
            given=path,
            allowed=".png, a picture; .html, a page to hover over; .json, a trace for Perfetto",
            fix=f"write {path.with_suffix('.html')}",
        )
    try:
        if kind == ".png":
            return draw_timelines(path, timelines, title)
        return write_timeline_page(path, timelines, title) if kind == ".html" else write_trace(path, timelines)
    except OSError as failure:
        raise PlanError(
            f"cannot write '{path}'", given=failure, allowed="a file that can be written", fix="another path"
        ) from failure


def write_trace(path: Path, timelines: Sequence[Timeline]) -> Path:
    """Writes a Chrome trace with a process for each timeline and a thread for each stage. Returns the path.

    An action is one complete event, in microseconds since its timeline's first action, with its kind, microbatch and
    chunk. The memory of a stage, if it is known, is a counter in bytes.
    """
    drawn = outlines(timelines)
    events = [event for number, outline in enumerate(drawn, 1) for event in _events(number, outline)]
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _events(process: int, outline: TimelineOutline) -> Iterator[Event]:
    """Yields the trace's events: names first, then actions and memory by stage.

    Threads count from 1, because Perfetto takes thread 0 for idle.
    """
    yield _named("process_name", process, 0, {"name": outline.name})
    yield _named("process_sort_index", process, 0, {"sort_index": process})
    for stage in range(len(outline.spans)):
        yield _named("thread_name", process, stage + 1, {"name": f"stage {stage}"})
        yield _named("thread_sort_index", process, stage + 1, {"sort_index": stage})
    for stage, spans in enumerate(outline.spans):
        for action, start_s, end_s in spans:
            start = _microseconds(start_s)
            yield {
                "ph": "X", "name": str(action), "cat": KINDS[action.kind], "pid": process, "tid": stage + 1,
                "ts": start, "dur": _rounded(_microseconds(end_s) - start), "args": action._asdict(),
            }  # fmt: skip
    for stage, changes in enumerate(outline.memory):
        for at_s, num_bytes in changes:
            yield {
                "ph": "C", "name": f"memory of stage {stage}", "pid": process, "ts": _microseconds(at_s),
                "args": {"bytes": num_bytes},
            }  # fmt: skip


def _named(what: str, process: int, thread: int, args: Event) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _microseconds(seconds: float) -> float:
    """Converts to microseconds, rounded to the nanosecond, the resolution of a trace."""
    return _rounded(seconds * 1e6)


def _rounded(number: float) -> float:
    rounded = round(number, 3)
    return int(rounded) if rounded == int(rounded) else rounded
