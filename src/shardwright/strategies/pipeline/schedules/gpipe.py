"""GPipe: all forwards, then all backwards.

Three stages, three microbatches; F, I and W take a unit each, so that B takes two::

    stage 0  F0 F1 F2                   B0 .. B1 .. B2 ..
    stage 1     F0 F1 F2          B0 .. B1 .. B2 ..
    stage 2        F0 F1 F2 B0 .. B1 .. B2 ..

The bubble is (p-1)(F+I+W) for each stage, (p-1)/(m+p-1) of all time. A stage holds the activations of all m
microbatches; the paper recomputes them to bear that. It draws the backwards last to first: here they run first to last,
so that gradients add up in the order that they have without a pipeline, in the same time.

Source: Huang et al. 2018, arXiv:1811.06965, section 2.
"""

from __future__ import annotations

from shardwright.plan.schedule import Action, Schedule


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards of a stage, then all its backwards.

    >>> [" ".join(map(str, actions)) for actions in gpipe(2, 2).actions]
    ['0F0 0F1 0B0 0B1', '1F0 1F1 1B0 1B1']
    """
    lists = tuple(
        tuple(Action(kind, m, stage) for kind in ("F", "B") for m in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule("gpipe", lists, tuple(range(num_stages)), num_microbatches)
