"""The ZB-V schedule: two chunks on each stage, down the stages and back up, the backward split in I and W.

Two stages, four microbatches; F, I and W of a chunk take time 1 each; stage 0 holds chunks 0 and 3::

    stage 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    stage 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

For equal times and 2p-1 microbatches or more a stage never waits from its own first action to its own last; a step
takes p-1 forwards of a chunk longer than the work of one stage. Every stage holds 2p chunks' activations, what stage 0
holds under 1F1B. The loss is on the first stage, beside the inputs; a microbatch is sent twice as often as under 1F1B.

Source: Qi et al. 2023, arXiv:2401.10241, second version (their B is I here).
"""

from __future__ import annotations

from shardwright.plan.schedule import Schedule
from shardwright.strategies.pipeline.schedules.common import ScheduleStep, first_microbatches, number, v_shape


def zb_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the ZB-V schedule: stage s of p holds chunks s and 2p-1-s, and runs W where it would wait.

    With fewer than 2p-1 microbatches the schedule for 2p-1 is cut down.
    """
    num_rounded = max(num_microbatches, 2 * num_stages - 1)
    lists = [number(_steps(stage, num_stages, num_rounded)) for stage in range(num_stages)]
    return first_microbatches("zb-v", lists, v_shape(num_stages), num_microbatches)


def _steps(stage: int, num_stages: int, num_microbatches: int) -> list[ScheduleStep]:
    """Returns the steps of one stage, with a chunk of the way down and one of the way up; 2p-1 microbatches or more."""
    down, up = stage, 2 * num_stages - 1 - stage
    num_after = num_stages - stage
    turn: list[ScheduleStep] = [("F", up), ("I", up), ("W", up)]
    back: list[ScheduleStep] = [("I", down), ("W", down)]
    steps: list[ScheduleStep] = [("F", down)] * (2 * num_after - 1)
    steps += [("F", up), ("F", down)] * stage
    steps += turn * num_after
    num_full = num_microbatches - (2 * num_stages - 1 - stage)  # as many forwards down are left
    steps += [("F", down), *back, *turn] * min(num_full, num_microbatches - num_stages)
    steps += [*back, *turn] * (num_microbatches - num_stages - num_full)
    steps += [("I", down), ("I", up)] * stage
    steps += back * num_after
    steps += [("W", up)] * stage
    steps += [("W", down)] * stage
    return steps
