"""From what chunks cost to the times and bytes that a simulation takes."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.analysis.costs import FLOPS_PER_S, Cost
from shardwright.plan.schedule import Schedule
from shardwright.runtime.timeline import Timeline
from shardwright.strategies.pipeline.simulate import Memory, Times, simulate


def times_of(costs: Sequence[Cost], flops_per_s: float = FLOPS_PER_S, transfer_s: float = 0) -> Times:
    """Forward as counted; the input's gradient takes as long again, and so do the weights' where there are any.

    >>> times_of([Cost(work=50e9, parameter_bytes=4), Cost(work=25e9)])
    Times(forward_s=(1.0, 0.5), input_s=(1.0, 0.5), weight_s=(1.0, 0.0), transfer_s=0)
    """
    forward = tuple(cost.work / flops_per_s for cost in costs)
    weights = tuple(cost.work / flops_per_s if cost.parameter_bytes else 0.0 for cost in costs)
    return Times(forward, forward, weights, transfer_s)


def memory_of(costs: Sequence[Cost]) -> Memory:
    """What a chunk makes forward it keeps until its backward; half of it until its weights' gradients are made.

    >>> memory_of([Cost(activation_bytes=8, parameter_bytes=4)])
    Memory(activation_bytes=(4,), weight_bytes=(4,), parameter_bytes=(0,))
    """
    half = tuple(cost.activation_bytes // 2 for cost in costs)
    rest = tuple(cost.activation_bytes - cost.activation_bytes // 2 for cost in costs)
    return Memory(half, rest, (0,) * len(costs))


def predict(schedule: Schedule, costs: Sequence[Cost]) -> Timeline:
    """The timeline of one step, before anything has run.

    >>> from shardwright.strategies.pipeline.schedules import build
    >>> round(predict(build("1f1b", 2, 4), [Cost(5e9, 1), Cost(5e9, 1)]).bubble, 3)
    0.2
    """
    return simulate(schedule, times_of(costs), memory_of(costs))
