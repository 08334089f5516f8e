"""The schedules GPipe (all forwards, then all backwards) and naive (one microbatch at a time).

Three stages, three microbatches; F, I and W take time 1 each, so that B takes 2::

    stage 0  F0 F1 F2                   B0 .. B1 .. B2 ..
    stage 1     F0 F1 F2          B0 .. B1 .. B2 ..
    stage 2        F0 F1 F2 B0 .. B1 .. B2 ..

The bubble is (p-1)(F+I+W) for each stage, (p-1)/(m+p-1) of all time. A stage holds the activations of all m
microbatches; the paper uses activation checkpointing against that. There the backwards run last to first, here first
to last, so that gradients add up in the order that they have without a pipeline, in the same time.

Naive, three stages, two microbatches: what a model with parts on several devices does by itself::

    stage 0  F0                   B0 .. F1                   B1 ..
    stage 1     F0          B0 ..          F1          B1 ..
    stage 2        F0 B0 ..                   F1 B1 ..

One stage works at a time: each waits (p-1)(F+I+W) for every microbatch, and (p-1)/p of all time is bubble. A stage
holds the activations of one microbatch.

Source: Huang et al. 2018, arXiv:1811.06965, section 2; naive, figure 2b.
"""

from __future__ import annotations

from shardwright.plan.schedule import Action, Schedule


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the GPipe schedule: each stage runs the forwards of all microbatches, then all backwards."""
    lists = tuple(
        tuple(Action(kind, m, stage) for kind in ("F", "B") for m in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule("gpipe", lists, tuple(range(num_stages)), num_microbatches)


def naive(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the naive schedule: each microbatch passes all stages forward and backward before the next begins."""
    lists = tuple(
        tuple(Action(kind, m, stage) for m in range(num_microbatches) for kind in ("F", "B"))
        for stage in range(num_stages)
    )
    return Schedule("naive", lists, tuple(range(num_stages)), num_microbatches)
