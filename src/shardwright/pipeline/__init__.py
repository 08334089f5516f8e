"""Schedules as data, and the one executor that runs any of them."""

from shardwright.pipeline.actions import Action, accumulate
from shardwright.pipeline.executor import End, Ends, Events, Executor, LossEnd, Microbatch, MicrobatchEnd
from shardwright.pipeline.samples import Rows, Samples

__all__ = [
    "Action",
    "End",
    "Ends",
    "Events",
    "Executor",
    "LossEnd",
    "Microbatch",
    "MicrobatchEnd",
    "Rows",
    "Samples",
    "accumulate",
]
