"""Timelines, predicted or measured, for a person: as text, as a picture, as a page to hover over, and as a trace."""

from shardwright.report.timeline_page import write_timeline_page
from shardwright.report.timeline_picture import draw_timelines
from shardwright.report.timeline_text import timeline_text
from shardwright.report.timeline_trace import write_trace

__all__ = ["draw_timelines", "timeline_text", "write_timeline_page", "write_trace"]
