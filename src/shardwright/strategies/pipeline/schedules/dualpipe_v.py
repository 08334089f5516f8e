"""DualPipe-V: DualPipe cut in half, one V in place of two opposite pipelines and two copies of the model.

Two stages, four microbatches; F, I and W of a chunk take time 1 each, B takes 2; stage 0 holds chunks 0 and 3::

    stage 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 ..  3F2 0B0 ..  3B2 ..  3F3     0B1 ..  3B3 ..  0I2 0W2 0I3 0W3
    stage 1      1F0 2F0 1F1 2F1 1F2 2B0 ..  2F2 1B0 ..  1F3 2B1 ..  2F3 1B1 ..  2B2 ..  1B2 ..  2I3 1I3 2W3 1W3

DualPipe runs F of one microbatch and B of another at once, so that the traffic of either hides behind the other's
computation; in a list, F comes just before that B. Of 2p stages on 2p devices it has the bubble (p-1)(F&B + B - 3W),
which for F&B = F + B is (p-1)(F+2I-W) of a chunk. Here, for 2p microbatches or more and F no longer than B, the bubble
is at most that, and p-1 where F, I and W take time 1. A stage holds 2p+1 chunks' activations.

Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1, table 2 (DualPipe); cut in half: Qi et al. 2025, "DualPipe
could be better without the Dual", and DeepSeek-AI's DualPipeV.
"""

from __future__ import annotations

from collections import deque

from shardwright.plan.schedule import Schedule
from shardwright.strategies.pipeline.schedules.common import ScheduleStep, first_microbatches, number, v_shape


def dualpipe_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the DualPipe-V schedule: stage s of p holds chunks s and 2p-1-s; F of one is paired with B of the other.

    With fewer than 2p microbatches the schedule for 2p is cut down.
    """
    num_rounded = max(num_microbatches, 2 * num_stages)
    lists = [number(_steps(stage, num_stages, num_rounded)) for stage in range(num_stages)]
    return first_microbatches("dualpipe-v", lists, v_shape(num_stages), num_microbatches)


def _steps(stage: int, num_stages: int, num_microbatches: int) -> list[ScheduleStep]:
    """Returns the steps of one stage, with a chunk of the way down and one of the way up; at least 2p microbatches."""
    down, up = stage, 2 * num_stages - 1 - stage
    num_after, num_here = num_stages - stage - 1, stage + 1
    fill: list[ScheduleStep] = [("F", down)] * (2 * num_after)
    fill += [("F", down), ("F", up)] * num_here
    turn: list[ScheduleStep] = [("I", up), ("W", up), ("F", up)] * num_after
    pair: list[ScheduleStep] = [("F", up), ("B", down)]
    main: list[ScheduleStep] = [("F", down), ("B", up), *pair] * (num_microbatches - 2 * num_stages + num_here)
    ebb: list[ScheduleStep] = [("B", up), *pair] * num_after
    return [*fill, *turn, *main, *ebb, *_drain(down, up, num_here, num_after)]


def _drain(down: int, up: int, num_here: int, num_after: int) -> list[ScheduleStep]:
    """Returns the steps after the last forward: the last half of the backwards is split, so that W fills idle time."""
    backwards = [chunk for _ in range(num_here) for chunk in (up, down)]
    steps: list[ScheduleStep] = [("B", chunk) for chunk in backwards[:num_here]]
    steps += [("I", chunk) for chunk in backwards[num_here:]]
    late = deque(backwards[num_here:])
    for _ in range(num_after):
        steps += [("W", late.popleft()), ("I", down)]
        late.append(down)
    return steps + [("W", chunk) for chunk in late]
