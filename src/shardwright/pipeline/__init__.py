"""Schedules as data, and the one executor that runs any of them."""

from shardwright.pipeline.actions import Action, Schedule, accumulate
from shardwright.pipeline.deferred import Deferred
from shardwright.pipeline.ends import LossEnd, OutputEnd
from shardwright.pipeline.executor import Events, Executor, Frame, Last, Microbatch, WholeModel, Work
from shardwright.pipeline.samples import Rows, Samples
from shardwright.pipeline.timeline import Span, Timeline

__all__ = [
    "Action",
    "Deferred",
    "Events",
    "Executor",
    "Frame",
    "Last",
    "LossEnd",
    "Microbatch",
    "OutputEnd",
    "Rows",
    "Samples",
    "Schedule",
    "Span",
    "Timeline",
    "WholeModel",
    "Work",
    "accumulate",
]
