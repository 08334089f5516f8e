"""Interleaved 1F1B: each stage holds v chunks of the model, assigned round-robin; the pipeline fills v times as fast.

Two stages, two chunks on each, four microbatches; F, I and W of a chunk take time 1 each, so that B takes 2::

    stage 0  0F0 0F1 2F0 2F1 0F2     2B0 ..  0F3 2B1 ..  2F2 0B0 ..  2F3 0B1 ..      2B2 ..      2B3 ..  0B2 ..  0B3 ..
    stage 1      1F0 1F1 3F0 3B0 ..  3F1 3B1 ..  1F2 1B0 ..  1F3 1B1 ..  3F2 3B2 ..  3F3 3B3 ..  1B2 ..  1B3 ..

The bubble is (p-1)(F+I+W)/v for each stage, F, I and W being those of all its chunks, where m is a multiple of p.
Stage 0 holds 1 + (p-1)/(p v) times what it holds under 1F1B: pv + p - 1 chunks' activations, a v-th of a stage's each.
A microbatch is sent v times as often.

Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; the memory, Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2.3.
"""

from __future__ import annotations

from shardwright.plan.schedule import Action, Schedule
from shardwright.strategies.pipeline.schedules.common import first_microbatches, round_robin


def interleaved(num_stages: int, num_microbatches: int, num_chunks_per_stage: int = 2) -> Schedule:
    """Returns the interleaved 1F1B schedule of p stages: groups of p microbatches take turns on a stage's chunks.

    If the number of microbatches is no multiple of p, the schedule for the next multiple is cut down.
    """
    num_rounded = -(-num_microbatches // num_stages) * num_stages
    lists = [_actions(stage, num_stages, num_rounded, num_chunks_per_stage) for stage in range(num_stages)]
    return first_microbatches("interleaved", lists, round_robin(num_stages, num_chunks_per_stage), num_microbatches)


def _actions(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """Returns the actions of one stage; ``num_microbatches`` is a multiple of the number of stages."""
    chunks = range(stage, num_stages * num_chunks, num_stages)
    groups = [range(first, first + num_stages) for first in range(0, num_microbatches, num_stages)]
    forwards = [Action("F", m, chunk) for group in groups for chunk in chunks for m in group]
    backwards = [Action("B", m, chunk) for group in groups for chunk in reversed(chunks) for m in group]
    warmup = min(2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]
