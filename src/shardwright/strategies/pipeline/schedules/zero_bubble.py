"""The schedules ZB-H1 and ZB-H2: 1F1B with the backward split in I and W; W, which no stage waits for, fills idle time.

ZB-H1, three stages, five microbatches; F, I and W take time 1 each::

    stage 0  F0 F1 F2       I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    stage 1     F0 F1    I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    stage 2        F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

ZB-H2, three stages, six microbatches::

    stage 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
    stage 1     F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
    stage 2        F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

The bubble of a stage, from its own first action to its own last, is (p-1)(F+I-W) under ZB-H1, for p microbatches or
more, and (p-1)(F+I-2W), none for equal times, under ZB-H2, for 2p-1 or more; both for W no longer than F or I. The
stages of ZB-H2 end as they begin, one F after the other: a step takes (p-1)F longer than the work of one stage, unless
the next step begins as early. With M_I for what I needs and M_W for what W still needs of it, stage s holds
(p-s) M_I + s M_W under ZB-H1, at most p M_I as under 1F1B; (2p-2s-1) M_I + 2s M_W under ZB-H2, at most (2p-1) M_I.

Source: Qi et al. 2023, arXiv:2401.10241, section 2 (their B is I here).
"""

from __future__ import annotations

from shardwright.plan.schedule import Action, Schedule


def zb_h1(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the ZB-H1 schedule, with the memory of 1F1B: stage s runs W (weight gradients) s microbatches after I."""
    lists = tuple(_actions(s, num_microbatches, num_stages - s, s) for s in range(num_stages))
    return Schedule("zb-h1", lists, tuple(range(num_stages)), num_microbatches)


def zb_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """Returns the ZB-H2 schedule, with nearly no bubble: stage s runs W (weight gradients) 2s microbatches after I.

    Of p stages, the first has up to 2p-1 microbatches in flight.
    """
    lists = tuple(_actions(s, num_microbatches, 2 * (num_stages - s) - 1, 2 * s) for s in range(num_stages))
    return Schedule("zb-h2", lists, tuple(range(num_stages)), num_microbatches)


def _actions(stage: int, num_microbatches: int, num_ahead: int, num_late: int) -> tuple[Action, ...]:
    """Returns the actions of one stage: F runs ``num_ahead`` microbatches before I, W ``num_late`` of them after it."""
    actions = [Action("F", m, stage) for m in range(min(num_ahead, num_microbatches))]
    for m in range(num_microbatches + num_late):
        if m < num_microbatches:
            actions.append(Action("I", m, stage))
        if m >= num_late:
            actions.append(Action("W", m - num_late, stage))
        if m + num_ahead < num_microbatches:
            actions.append(Action("F", m + num_ahead, stage))
    return tuple(actions)
