"""The 1F1B schedule: after a warm-up, each stage alternates one forward and one backward.

Three stages, five microbatches; F, I and W take time 1 each, so that B takes 2::

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
    """Returns the 1F1B schedule: stage s of p runs p - s forwards, then alternates one backward and one forward."""
    lists = tuple(_actions(stage, num_stages, num_microbatches) for stage in range(num_stages))
    return Schedule("1f1b", lists, tuple(range(num_stages)), num_microbatches)


def _actions(stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    num_ahead = num_stages - stage  # forwards before the first backward
    actions = [Action("F", m, stage) for m in range(min(num_ahead, num_microbatches))]
    for m in range(num_microbatches):
        actions.append(Action("B", m, stage))
        if m + num_ahead < num_microbatches:
            actions.append(Action("F", m + num_ahead, stage))
    return tuple(actions)
