"""Axes, collectives, messages and who runs them: the only folder that names ``torch.distributed``."""

from shardwright.comm.autograd import (
    cut_to_cut,
    cut_to_shared,
    cut_to_whole,
    once,
    partial_to_cut,
    partial_to_whole,
    sum_gradient,
    whole_to_cut,
)
from shardwright.comm.axis import Axis, Call, Pending
from shardwright.comm.exchange import Link
from shardwright.comm.launch import launch, run_on_threads
from shardwright.comm.recorder import Record, Recorder, ring_factor, total_bytes
from shardwright.comm.world import World

__all__ = [
    "Axis",
    "Call",
    "Link",
    "Pending",
    "Record",
    "Recorder",
    "World",
    "cut_to_cut",
    "cut_to_shared",
    "cut_to_whole",
    "launch",
    "once",
    "partial_to_cut",
    "partial_to_whole",
    "ring_factor",
    "run_on_threads",
    "sum_gradient",
    "total_bytes",
    "whole_to_cut",
]
