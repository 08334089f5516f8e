"""1F1B: after a warm-up, one forward and one backward by turns.

Three stages, five microbatches; F, I and W take a unit each, so that B takes two::

    stage 0  F0 F1 F2             B0 .. F3 B1 .. F4 B2 ..    B3 ..    B4 ..
    stage 1     F0 F1       B0 .. F2 B1 .. F3 B2 .. F4 B3 ..    B4 ..
    stage 2        F0 B0 .. F1 B1 .. F2 B2 .. F3 B3 .. F4 B4 ..

The bubble is (p-1)(F+I+W) for each stage, that of GPipe. Stage s holds the activations of min(p-s, m) microbatches
where GPipe holds m.

Source: the order is that of Harlap et al. 2018 (PipeDream), arXiv:1806.03377; with one update for each batch, as here,
Fan et al. 2020 (DAPPLE), arXiv:2007.01045, and Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
"""

from __future__ import annotations

from shardwright.plan.schedule import Action, Schedule


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Stage s runs ahead by as many forwards as there are stages after it, then alternates.

    >>> [" ".join(map(str, actions)) for actions in one_f_one_b(2, 3).actions]
    ['0F0 0F1 0B0 0F2 0B1 0B2', '1F0 1B0 1F1 1B1 1F2 1B2']
    """
    lists = tuple(_stage(stage, num_stages, num_microbatches) for stage in range(num_stages))
    return Schedule("1f1b", lists, tuple(range(num_stages)), num_microbatches)


def _stage(stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """The list of one stage."""
    warmup = min(num_stages - stage - 1, num_microbatches)
    first = [Action("F", m, stage) for m in range(warmup)]
    steady = [
        action
        for m in range(warmup, num_microbatches)
        for action in (Action("F", m, stage), Action("B", m - warmup, stage))
    ]
    last = [Action("B", m, stage) for m in range(num_microbatches - warmup, num_microbatches)]
    return (*first, *steady, *last)
