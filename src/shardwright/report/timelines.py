"""Timelines, predicted or measured: as text, as a picture, as an interactive page, and as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardwright.errors import PlanError
from shardwright.report.timeline_page import write_timeline_page
from shardwright.report.timeline_picture import draw_timelines
from shardwright.report.timeline_text import timeline_text
from shardwright.report.timeline_trace import write_trace
from shardwright.runtime.timeline import Timeline

__all__ = ["draw_timelines", "timeline_text", "write_timeline_page", "write_timelines", "write_trace"]


def write_timelines(path: Path, timelines: Sequence[Timeline], title: str = "Timeline") -> Path:
    """Timelines, one below the other, in the form that the file's ending says: .png, .html or .json.

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
