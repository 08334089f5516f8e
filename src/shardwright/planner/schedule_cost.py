"""``ScheduleCost``: the idle time, microbatches in flight and transfers of a pipeline schedule, for any size.

They are simulated for toy models of few stages and few microbatches, and extrapolated to as many as a layout has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Factor, Layout, Option
from shardwright.models.losses import CrossEntropy
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.plan.schedule import Action, Schedule
from shardwright.planner.pass_cost import PassShares
from shardwright.strategies.pipeline.simulate import ChunkTimes, ends_of

TOY_STAGES, TOY_MICROBATCHES, TOY_TRANSFER_S = (2, 4), (8, 16), 0.03
"""The stages, numbers of microbatches and seconds of a transfer of the toy model whose schedules are simulated. On each
of its stages, a microbatch's forward and backward together take a second."""

EVEN = PassShares()


class ScheduleCost(NamedTuple):
    """What a pipeline schedule costs with p stages and m microbatches, as the coefficients of formulas in p and m.

    A stage is idle for ``idle * (p - 1)`` times a microbatch's forward and backward on one stage. A step waits for
    ``waits_by_stage * (p - 1) + waits_by_microbatch * m`` transfers between stages. ``of_held``, ``of_late`` and
    ``of_last`` are coefficients of 1, p and m.
    """

    idle: float = 1.0
    of_held: tuple[float, float, float] = (0.0, 1.0, 0.0)
    """The largest number of microbatches whose activations one stage holds at the same time."""
    of_late: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The largest number of microbatches for which a stage has computed its inputs' gradients, but not its weights'."""
    of_last: tuple[float, float, float] = (1.0, 0.0, 0.0)
    """The same number for the stage that has the model's last chunk."""
    waits_by_stage: float = 2.0
    """The transfers between stages that a step waits for, for each stage but one."""
    waits_by_microbatch: float = 0.0
    chunks: int = 1
    """The chunks of the model on each stage."""
    returns: bool = False
    """Whether the last chunk is on the stage of the first."""
    scatters: bool = False
    """Whether ranks with equal activations each send a part of them to the next stage (the option ``scatter``)."""
    splits: float = 0.0
    """The share of backwards that are split into I (gradients of inputs) and W (gradients of weights)."""

    def held(self, num_stages: int, num_microbatches: int) -> float:
        """Returns the number of microbatches whose activations the fullest stage holds at once: 1 on a single stage."""
        return _of_stage(self.of_held, num_stages, num_microbatches)

    def held_last(self, num_stages: int, num_microbatches: int) -> float:
        """Returns the same of the stage that has the last chunk."""
        return _of_stage(self.of_last, num_stages, num_microbatches)

    def late(self, num_stages: int, num_microbatches: int) -> float:
        """Returns the most microbatches on a stage of which only the gradients of weights are still to be computed.

        These microbatches hold the inputs of layers and the gradients of their outputs, which are taken to need as many
        bytes as all activations. That is so under recomputation too, since the blocks were recomputed by then.
        """
        late = _at(self.of_late, num_stages, num_microbatches)
        return min(late, self.held(num_stages, num_microbatches)) if num_stages > 1 else 0.0


def _at(coefficients: tuple[float, float, float], num_stages: int, num_microbatches: int) -> float:
    always, by_stage, by_microbatch = coefficients
    return always + by_stage * num_stages + by_microbatch * num_microbatches


def _of_stage(coefficients: tuple[float, float, float], num_stages: int, num_microbatches: int) -> float:
    held = _at(coefficients, num_stages, num_microbatches)
    return min(num_microbatches, max(1.0, held)) if num_stages > 1 else 1.0


@cache
def _toys(axis: str, options: tuple[Option, ...], stages: int) -> tuple[tuple[Schedule, bool], ...]:
    """Returns the schedules of the toy model with few and with more microbatches, each with whether it scatters.

    Raises: LayoutError, PlanError: the toy model cannot have the schedule.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(stages * 8)))
    schedules = []
    for number in TOY_MICROBATCHES:
        layout = Layout((Factor(axis, (stages,), options),), number)
        plan, _ = make_plan(job_for(model, CrossEntropy(), layout), layout)
        assert plan.schedule is not None, "of stages"
        schedules.append((plan.schedule, plan.scatters))
    return tuple(schedules)


def schedule_cost(axis: str, options: tuple[Option, ...], shares: PassShares = EVEN) -> ScheduleCost | None:
    """Returns the cost of the pipeline schedule that ``options`` choose on ``axis``, simulated for toy models.

    ``shares`` divide the time of each chunk among its passes. The result is None if the toy models cannot have the
    schedule.

    >>> found = schedule_cost("pp", (Option("1f1b"),)), schedule_cost("pp", (Option("gpipe"),))
    >>> [(each.idle, each.held(4, 32)) for each in found if each is not None]
    [(1.0, 4.0), (1.0, 32)]
    """
    try:
        toys = [_toys(axis, options, stages) for stages in TOY_STAGES]
    except (LayoutError, PlanError):
        return None
    (few, more), (few_stages, stages) = TOY_MICROBATCHES, TOY_STAGES

    def held(number: int) -> tuple[float, float, float]:
        of_few, of_more = (_most_held(schedule)[number] for schedule, _ in toys[1])
        by_microbatch = (of_more - of_few) / (more - few)
        by_stage = (of_few - _most_held(toys[0][0][0])[number]) / (stages - few_stages)
        return of_few - by_stage * stages - by_microbatch * few, by_stage, by_microbatch

    took, longer = list[float](), list[float]()
    for number, (schedule, _) in zip(TOY_MICROBATCHES, toys[-1], strict=True):
        part = stages / schedule.num_chunks
        times = ChunkTimes.equal(schedule.num_chunks, *(part * share for share in shares))
        ends = ends_of(schedule, times, replace(times, transfer_s=TOY_TRANSFER_S))
        first_s, second_s = (max(timing.ends_s) for timing in ends)
        took.append((first_s - number) / (stages - 1))
        longer.append((second_s - first_s) / TOY_TRANSFER_S)
    waits = (longer[1] - longer[0]) / (more - few)
    schedule, scatters = toys[-1][-1]
    kinds = [action.kind for actions in schedule.actions for action in actions]
    return ScheduleCost(
        round(took[-1], 12), held(0), held(1), held(2), (longer[0] - waits * few) / (stages - 1), waits,
        schedule.num_chunks // stages, schedule.stage_of[-1] == schedule.stage_of[0], scatters,
        kinds.count("I") / (kinds.count("I") + kinds.count("B")),
    )  # fmt: skip


def _most_held(schedule: Schedule) -> tuple[float, ...]:
    """Returns three peaks, in microbatches, of the actions of a schedule.

    They are the most microbatches held on a stage, the most on a stage of which only W is left to run, and the most
    held on the stage of the last chunk. A microbatch on one of n chunks of a stage counts as 1 / n.
    """
    held, late = {"F": 1, "B": -1, "W": -1}, {"I": 1, "W": -1}

    def most(counted: Mapping[str, int], stages: Sequence[Sequence[Action]]) -> float:
        peak = max(max(accumulate(counted.get(action.kind, 0) for action in actions)) for actions in stages)
        return peak * schedule.num_stages / schedule.num_chunks

    last = schedule.actions[schedule.stage_of[-1]]
    return most(held, schedule.actions), most(late, schedule.actions), most(held, [last])
