"""A timeline as a Chrome trace: a JSON file that ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwright.report.timeline_outline import KINDS, Outline, outlines
from shardwright.runtime.timeline import Timeline

Event = dict[str, Any]


def write_trace(path: Path, timelines: Sequence[Timeline]) -> Path:
    """Writes a trace with a process for each timeline and a thread for each of its stages. Returns the path.

    An action is one complete event, in microseconds since its timeline's first action, with its kind, microbatch and
    chunk; the memory of a stage, where counted, is a counter in bytes.

    >>> import json, tempfile
    >>> from shardwright.plan.schedule import Action
    >>> from shardwright.runtime.timeline import Span
    >>> timeline = Timeline("one stage", ((Span(Action("F", 3), 0, 0.25),),))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     events = json.loads(write_trace(Path(folder) / "trace.json", [timeline]).read_text())["traceEvents"]
    >>> {key: events[-1][key] for key in ("ph", "name", "ts", "dur", "args")}
    {'ph': 'X', 'name': '0F3', 'ts': 0, 'dur': 250000, 'args': {'kind': 'F', 'microbatch': 3, 'chunk': 0}}
    """
    drawn = outlines(timelines)
    events = [event for number, outline in enumerate(drawn, 1) for event in _events(number, outline)]
    path = Path(path)
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _events(process: int, outline: Outline) -> Iterator[Event]:
    """First the names, then actions and memory, stage by stage. Threads count from 1: 0 is the idle one to Perfetto."""
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
    """To the nanosecond, the finest that a trace holds."""
    return _rounded(seconds * 1e6)


def _rounded(number: float) -> float:
    rounded = round(number, 3)
    return int(rounded) if rounded == int(rounded) else rounded
