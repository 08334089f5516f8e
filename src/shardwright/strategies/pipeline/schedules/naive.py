"""One microbatch at a time: layer-wise model parallel, what a model with parts on several devices does by itself.

Three stages, two microbatches; F, I and W take a unit each, so that B takes two::

    stage 0  F0                   B0 .. F1                   B1 ..
    stage 1     F0          B0 ..          F1          B1 ..
    stage 2        F0 B0 ..                   F1 B1 ..

One stage works at a time: each waits (p-1)(F+I+W) for every microbatch, and (p-1)/p of all time is bubble however many
there are. A stage holds the activations of one microbatch.

Source: the starting point of Huang et al. 2018, arXiv:1811.06965, figure 2b.
"""

from __future__ import annotations

from shardwright.plan.schedule import Action, Schedule


def naive(num_stages: int, num_microbatches: int) -> Schedule:
    """Each microbatch forward through all stages, then backward, before the next begins.

    >>> [" ".join(map(str, actions)) for actions in naive(2, 2).actions]
    ['0F0 0B0 0F1 0B1', '1F0 1B0 1F1 1B1']
    """
    lists = tuple(
        tuple(Action(kind, m, stage) for m in range(num_microbatches) for kind in ("F", "B"))
        for stage in range(num_stages)
    )
    return Schedule("naive", lists, tuple(range(num_stages)), num_microbatches)
