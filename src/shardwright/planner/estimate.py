"""Estimates a layout's step time and memory by closed formulas, so that a search can rank thousands of layouts.

The formulas start from one rehearsal (a step on the meta device) for each way to cut operators, and from plans of a
model with few blocks. The code names no axis and no option: the memory that an option saves between steps is read from
the plan that its strategy makes of that model; a schedule's idle time and its microbatches in flight are simulated for
a toy model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from shardwright.axes import layout_axes
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Factor, Layout, Option, Precision
from shardwright.models.losses import CrossEntropy
from shardwright.parallelize.auto import num_shares
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.plan.plan import Plan
from shardwright.plan.schedule import Action, Schedule
from shardwright.planner.extended import extended
from shardwright.planner.memory import PassMemory, beside_bytes, held_at_rest, pass_memory
from shardwright.planner.price import PassTimes, Pricing
from shardwright.planner.records import FEW_MICROBATCHES, LayoutRecords
from shardwright.planner.records_file import RecordsFile
from shardwright.strategies import STRATEGIES
from shardwright.strategies.pipeline.simulate import ChunkTimes, ends_of

MOMENTS_BYTES = 8
"""The bytes of optimizer state that estimates count for each trained element: two moments in fp32."""

FEW_RANKS, TOY_STAGES, TOY_MICROBATCHES, TOY_TRANSFER_S = (2, 4), (2, 4), (8, 16), 0.03
"""The sizes from which estimates are extrapolated: two numbers of ranks for shares of state, and the stages, numbers of
microbatches and seconds of a transfer of the toy model whose schedules are simulated. On each stage of that model, a
microbatch's forward and backward take a second."""

FEW_SAMPLES = (1, 8)
"""Two sizes of a microbatch, in samples: each way to cut the operators is priced at both, and prices of other sizes are
extrapolated from the two."""


class Estimate(NamedTuple):
    """The estimated step time of a layout in seconds, and the estimated bytes that a rank of the layout holds."""

    layout: Layout
    step_s: float
    memory_bytes: float

    def over(self, limit: float) -> float:
        """Returns the step's seconds, made longer if the memory exceeds ``limit`` bytes.

        In that case they are multiplied by (memory / limit) cubed. A search tries layouts in the order of this value,
        so a layout that is estimated a few percent above the limit may still be tried.
        """
        return longer_over(self.step_s, self.memory_bytes, limit)


def longer_over(step_s: float, memory_bytes: float, limit: float) -> float:
    """Returns a step's seconds, times the cube of how many times ``limit`` the memory is; unchanged if it fits.

    >>> longer_over(3.0, 20, 10), longer_over(3.0, 5, 10)
    (24.0, 3.0)
    """
    return step_s * max(1.0, memory_bytes / max(limit, 1.0)) ** 3


class StateShares(NamedTuple):
    """The training state that one rank stores, updates, gathers and offloads under options such as a ZeRO stage.

    The values are shares of the state without options, for which the defaults stand. In the result of
    :func:`state_of` they are bytes, and a number of elements for ``updated``. ``parameters``, ``gradients`` and
    ``optimizer`` are stored on the device.
    """

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    updated: float = 1.0
    """The elements that the optimizer updates."""
    gathered: float = 0.0
    """The parameters that are gathered at each use."""
    moved: float = 0.0
    """The optimizer state that is offloaded to the host or to disk."""
    computed: float = 1.0
    """The gradients as the backward computes them, whole and in the dtype of the step."""
    repeated: float = 0.0
    """The bytes of gradient sums that each microbatch after the first adds, as a share of those of the first."""

    @property
    def summed(self) -> float:
        """The gradients that are held from one microbatch to the next: whole until they are summed over the copies."""
        return self.gradients if self.repeated or self.gradients >= 1 else self.computed


class ScheduleCost(NamedTuple):
    """The cost of a pipeline schedule, as coefficients of formulas in p stages and m microbatches.

    A stage is idle for ``idle * (p - 1)`` times a microbatch's forward and backward on one stage. A step waits for
    ``waits_by_stage * (p - 1) + waits_by_microbatch * m`` transfers between stages. The others are coefficients of
    1, p and m.
    """

    idle: float = 1.0
    of_held: tuple[float, float, float] = (0.0, 1.0, 0.0)
    """The microbatches of which the fullest stage holds activations."""
    of_late: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """The microbatches on a stage whose gradients of inputs are computed and not those of weights."""
    of_last: tuple[float, float, float] = (1.0, 0.0, 0.0)
    """The microbatches of which the stage of the last chunk holds activations."""
    waits_by_stage: float = 2.0
    """The transfers between stages that a step waits for, for each stage but one."""
    waits_by_microbatch: float = 0.0
    chunks: int = 1
    """The chunks of the model on each stage."""
    returns: bool = False
    """Whether the last chunk is on the stage of the first."""
    scatters: bool = False
    """Whether ranks that hold alike what crosses between stages each send a part of it."""
    splits: float = 0.0
    """The share of backwards of which the gradients of inputs and of weights are computed in actions of their own."""

    def held(self, num_stages: int, num_microbatches: int) -> float:
        """Returns the number of microbatches whose activations the fullest stage holds at once: 1 on a single stage."""
        return _of_stage(self.of_held, num_stages, num_microbatches)

    def held_last(self, num_stages: int, num_microbatches: int) -> float:
        """Returns the same of the stage that has the last chunk."""
        return _of_stage(self.of_last, num_stages, num_microbatches)

    def late(self, num_stages: int, num_microbatches: int) -> float:
        """Returns the most microbatches on a stage of which only the gradients of weights are still to be computed.

        What they need, the inputs of layers and the gradients of outputs, takes as much as the activations before. A
        stage has computed them by then even if it recomputes its blocks.
        """
        late = _at(self.of_late, num_stages, num_microbatches)
        return min(late, self.held(num_stages, num_microbatches)) if num_stages > 1 else 0.0


def _at(coefficients: tuple[float, float, float], num_stages: int, num_microbatches: int) -> float:
    always, by_stage, by_microbatch = coefficients
    return always + by_stage * num_stages + by_microbatch * num_microbatches


def _of_stage(coefficients: tuple[float, float, float], num_stages: int, num_microbatches: int) -> float:
    held = _at(coefficients, num_stages, num_microbatches)
    return min(num_microbatches, max(1.0, held)) if num_stages > 1 else 1.0


def state_of(plan: Plan) -> StateShares:
    """Returns the bytes of training state that the first rank of a plan stores, all-gathers at each use, and offloads.

    The state is parameters, frozen ones included, gradients, and the two fp32 moments of an optimizer such as Adam. Of
    parameters whose state is offloaded, ``moved`` has the moments, and the gradients are not counted. ``updated`` is
    the number of elements that the optimizer updates. ``repeated`` is left at 0.

    >>> job = job_for(nn.Linear(4, 4, bias=False), CrossEntropy(), Layout.parse("dp2"))
    >>> state_of(make_plan(job, Layout.parse("dp2"))[0])[:3]
    (64, 64, 128)
    """
    coord = dict.fromkeys(plan.mesh.axes, 0)
    trained = {name: each for name, each in plan.state.items() if name not in plan.frozen}
    here = {name: each for name, each in trained.items() if name not in plan.offloaded}
    updated = {name: each.optimizer.num_elements(coord) for name, each in trained.items()}
    return StateShares(
        sum(plan.parameter_bytes(name, coord) for name in plan.state),
        sum(each.gradient.num_elements(coord) * plan.stored_dtypes[name].itemsize for name, each in here.items()),
        sum(updated[name] * MOMENTS_BYTES for name in here),
        sum(updated.values()),
        sum(plan.compute[n].num_elements(coord) * plan.compute_dtypes[n].itemsize for n in plan.unsharded_on_use),
        sum(updated[name] * MOMENTS_BYTES for name in trained if name not in here),
        sum(plan.compute[n].num_elements(coord) * plan.compute_dtypes[n].itemsize for n in trained),
    )


def declared_options(axis: str) -> tuple[Option, ...]:
    """Returns the options of an axis that strategies declare and that a search tries.

    Options of strategies that a layout line must ask for come first, those of default strategies after.
    """
    found = []
    for strategy in sorted(STRATEGIES.values(), key=lambda each: each.default):
        for name, option in strategy.options.items() if strategy.axis == axis else ():
            found += [Option(*text.split(":", 1)) for text in option.tried(name)]
    return tuple(found)


class _Alone(NamedTuple):
    """What estimates read of the records of a layout of one stage, such as ``tp2``, on microbatches of one size.

    ``rest`` has the same of the model without its repeated blocks, and is empty if these cannot be told from the rest.
    """

    times: PassTimes
    memory: PassMemory
    at_rest: Mapping[str, int]
    beside: int
    rest: tuple[_Alone, ...] = ()

    @classmethod
    def of(cls, pricing: Pricing, records: LayoutRecords) -> _Alone:
        """Returns what is read of records, extended to all blocks."""
        found = cls(
            pricing.pass_times(records), pass_memory(records, 0), held_at_rest(records, 0), beside_bytes(records, 0)
        )
        if records.note or not records.num_blocks[0]:
            return found
        none = replace(records, num_blocks=tuple((0,) * len(each) for each in records.num_blocks))
        return found._replace(rest=(cls.of(pricing, replace(none, note="without blocks")),))


class PassShares(NamedTuple):
    """The fractions of a microbatch's compute time for forward, input gradient and weight gradient; they sum to 1."""

    forward: float = 1 / 3
    inputs: float = 1 / 3
    weights: float = 1 / 3


EVEN = PassShares()
_STATE = "parameters", "gradients", "optimizer"


@dataclass(frozen=True)
class _PassCost:
    """The seconds and bytes of one microbatch of all blocks on one stage, under operators cut in one way."""

    operators: tuple[Factor, ...]
    recompute: str | None
    forward_s: float
    backward_s: float
    shares: PassShares
    rest_s: float
    """The seconds of the passes of what is in no block; 0 if that is not known."""
    has_rest: bool
    rest_flops: float
    """The share of FLOPs that is in no block."""
    hidden_s: float
    """The seconds of messages that are under way while gradients of weights are computed."""
    adds_s: float
    """The seconds in which gradients are added to those of microbatches before."""
    update_s: float
    block_bytes: float
    """The bytes that the forward of a block keeps for the backward."""
    plain_bytes: float
    """The same without recomputation."""
    most_bytes: float
    """The most bytes of the passes at once, but for gradients."""
    at_rest: Mapping[str, float]
    of_block: Mapping[str, float]
    of_rest: Mapping[str, float]
    update_bytes: float
    beside: float

    @classmethod
    def of(
        cls, operators: tuple[Factor, ...], recompute: str | None, samples: int, num_blocks: int,
        sizes: Sequence[int], known: Sequence[_Alone],
    ) -> _PassCost:  # fmt: skip
        """Returns what ``samples`` do, from records of few samples, the same recomputed, and if there are of more."""
        few, own, *more = known
        blocks, has_rest = max(1, num_blocks), bool(few.rest)

        def scaled(read: Callable[[_Alone], float]) -> float:
            if more:
                (found,) = extended(samples, [read(few)], [read(more[0])], *sizes)
                return found
            return read(few) * samples / sizes[0]

        def at_blocks(read: Callable[[_Alone], float]) -> Callable[[_Alone], float]:
            return lambda each: (read(each) - (read(each.rest[0]) if each.rest else 0.0)) / blocks

        def with_own(read: Callable[[_Alone], float]) -> float:
            """The same with recomputation, of which the difference grows with the samples."""
            return scaled(read) + (read(own) - read((more or [few])[0])) * samples / sizes[len(more)]

        forward_s, backward_s = scaled(lambda e: e.times.forward_s), with_own(lambda e: e.times.backward_s)
        weights_s = scaled(lambda e: e.times.weights_s)
        whole_s = forward_s + backward_s
        parts = [round(each / whole_s, 2) for each in (forward_s, weights_s)]
        kept = at_blocks(lambda e: e.memory.kept)
        rest = few.rest[0] if has_rest else few
        of_block = {kind: (few.at_rest[kind] - rest.at_rest[kind] * has_rest) / blocks for kind in _STATE}
        rest_s = rest_flops = 0.0
        if has_rest:
            rest_s = scaled(lambda e: e.rest[0].times.forward_s + e.rest[0].times.backward_s)
            rest_flops = rest.times.flops / (few.times.flops or 1)
        return cls(
            operators, recompute, forward_s, backward_s,
            PassShares(parts[0], round(1 - sum(parts), 2), parts[1]), rest_s, has_rest, rest_flops,
            with_own(lambda e: e.times.hidden_s), few.times.adds_s, few.times.update_s, with_own(kept), scaled(kept),
            with_own(lambda e: e.memory.most), few.at_rest, of_block,
            {kind: few.at_rest[kind] - blocks * of_block[kind] for kind in _STATE}, few.memory.update, few.beside,
        )  # fmt: skip


@cache
def _toys(axis: str, options: tuple[Option, ...], stages: int) -> tuple[tuple[Schedule, bool], ...]:
    """Returns the schedules of the toy model with few and with more microbatches, and whether parts are sent.

    Raises: LayoutError, PlanError: the toy model cannot have the schedule.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(stages * 8)))
    found = []
    for number in TOY_MICROBATCHES:
        layout = Layout((Factor(axis, (stages,), options),), number)
        plan, _ = make_plan(job_for(model, CrossEntropy(), layout), layout)
        assert plan.schedule is not None, "of stages"
        found.append((plan.schedule, plan.scatters))
    return tuple(found)


def schedule_cost(axis: str, options: tuple[Option, ...], shares: PassShares = EVEN) -> ScheduleCost | None:
    """Returns the cost of the pipeline schedule that ``options`` choose on ``axis``, simulated for toy models.

    ``shares`` are those of each chunk's passes. It is None if the toy models cannot have the schedule.

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
        times = ChunkTimes.equal(schedule.num_chunks, *(part * each for each in shares))
        ends = ends_of(schedule, times, replace(times, transfer_s=TOY_TRANSFER_S))
        first_s, second_s = (max(each.ends_s) for each in ends)
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
    """Returns the most microbatches of which a stage holds anything, and of which only W is left to compute.

    The third is the most of which the stage of the last chunk holds anything. A chunk's is a part of a microbatch.
    """
    held, late = {"F": 1, "B": -1, "W": -1}, {"I": 1, "W": -1}

    def most(counted: Mapping[str, int], stages: Sequence[Sequence[Action]]) -> float:
        found = max(max(accumulate(counted.get(action.kind, 0) for action in actions)) for actions in stages)
        return found * schedule.num_stages / schedule.num_chunks

    last = schedule.actions[schedule.stage_of[-1]]
    return most(held, schedule.actions), most(late, schedule.actions), most(held, [last])


@dataclass
class Estimator:
    """Estimates the step time and memory of layouts of one model on one cluster.

    Args:
        pricing: the prices of operators and messages on the cluster.
        batch: the number of samples of the global batch.
        precision: the precision in which all layouts compute.
        alone: returns the records of a layout without stages and copies, such as ``tp2``, for a number of samples; None
            if the model refuses it.
        plan: returns the plan of a model with few blocks; without it, no options of strategies are considered.
        sent_bytes: the bytes that a pipeline stage sends to the next for one sample.
        most_chunks: the most pipeline chunks (stages times chunks on each) that the model can be cut into; 0: unknown.
        summed_bytes: returns the bytes of gradients that a rank sums in a step of a layout, as strategies state them.
        num_blocks: the number of alike blocks of the model.
        ends: returns the shares of what is in no block that the first and the last of two stages hold, on an axis.
        kept: what was found of the model before, and what is to be kept for later searches.
    """

    pricing: Pricing
    batch: int
    precision: Precision
    alone: Callable[[Layout, int], LayoutRecords | None]
    plan: Callable[[Layout], Plan] | None = None
    sent_bytes: int = 0
    most_chunks: int = 0
    summed_bytes: Callable[[Layout], int] = lambda _: 0
    num_blocks: int = 0
    kept: RecordsFile = field(default_factory=RecordsFile)
    ends: Callable[[str], tuple[float, float]] = lambda _: (1.0, 1.0)
    _estimates: dict[Layout, Estimate | None] = field(default_factory=dict)
    _alone: dict[tuple[Layout, int], _Alone | None] = field(default_factory=dict)
    _cuts: dict[tuple[object, ...], tuple[float, float, float]] = field(default_factory=dict)
    _states: dict[Layout, StateShares | None] = field(default_factory=dict)
    _shares: dict[tuple[str, tuple[Option, ...]], tuple[StateShares, ...] | None] = field(default_factory=dict)
    _schedules: dict[tuple[object, ...], ScheduleCost | None] = field(default_factory=dict)
    _of_passes: dict[tuple[object, ...], _PassCost | None] = field(default_factory=dict)
    _copies: dict[tuple[Factor, ...], tuple[float, float, float, float]] = field(default_factory=dict)
    _at_ends: dict[str, tuple[float, float]] = field(default_factory=dict)
    _alike: dict[tuple[Factor, ...], int] = field(default_factory=dict)
    _defaults: dict[str, tuple[Option, ...]] = field(default_factory=dict)

    def estimate(self, layout: Layout) -> Estimate | None:
        """Returns the estimated step time and memory of a layout, or None if it cannot be estimated.

        It cannot if the model or a strategy refuses the layout, or if it has more pipeline chunks than the model can be
        cut into.
        """
        if layout not in self._estimates:
            self._estimates[layout] = self._estimated(layout)
        return self._estimates[layout]

    def _estimated(self, layout: Layout) -> Estimate | None:
        kinds = {name: axis.kind for name, axis in layout_axes().items()}
        plain = {kind: tuple(f for f in layout.factors if kinds[f.axis] == kind) for kind in ("operators", "stages")}
        alone = self._passes(plain["operators"], layout.recompute, self._samples(layout))
        share = StateShares()
        for factor in layout.factors:
            if kinds[factor.axis] == "copies" and factor.options:
                found = self._share(factor)
                if found is None:
                    return None
                share = found
        schedule = None if alone is None else self._schedule(plain["stages"], alone.shares)
        stages = prod(f.size for f in plain["stages"])
        if alone is None or schedule is None or 0 < self.most_chunks < stages * schedule.chunks:
            return None
        return self._put_together(layout, alone, share, schedule, plain["stages"])

    def refusal(self, layout: Layout) -> str:
        """Returns why :meth:`estimate` gives None; "" if the model refused the operators, which it says itself."""
        kinds = {name: axis.kind for name, axis in layout_axes().items()}
        of_kind = {kind: tuple(f for f in layout.factors if kinds[f.axis] == kind) for kind in ("operators", "stages")}
        if self._passes(of_kind["operators"], layout.recompute, self._samples(layout)) is None:
            return ""
        if self._schedule(of_kind["stages"]) is None:
            return "its schedule cannot be on so few stages as estimates simulate"
        if any(kinds[f.axis] == "copies" and f.options and self._share(f) is None for f in layout.factors):
            return "the model cannot have its option of model copies"
        return "more chunks than alike blocks"

    def schedules(self, axis: str) -> list[Option]:
        """Returns the declared options of a pipeline axis, except those that give its default schedule.

        If no plans can be made (``plan`` is None), all are returned.
        """
        return [each for each in declared_options(axis) if not self._is_default(axis, each)]

    def default_schedule(self, axis: str) -> tuple[Option, ...]:
        """Returns, as a tuple of one, the option that names the default schedule of a pipeline axis.

        The tuple is empty if no declared option does, or if no plans can be made.
        """
        if axis not in self._defaults:
            found = (each for each in declared_options(axis) if self._is_default(axis, each))
            self._defaults[axis] = tuple(each for each in found if self._of_toy(axis, each) == self._of_toy(axis))[:1]
        return self._defaults[axis]

    def _is_default(self, axis: str, option: Option) -> bool:
        """Whether stages have their default schedule under an option, which may change what they send each other."""
        plain, own = self._of_toy(axis), self._of_toy(axis, option)
        return self.plan is not None and own is not None and plain == own._replace(scatters=False)

    def _of_toy(self, axis: str, *options: Option) -> ScheduleCost | None:
        return self._schedule((Factor(axis, TOY_STAGES[-1:], options),))

    def saving_options(self, axis: str) -> list[Option]:
        """Returns the declared options of an axis that reduce the state that a rank holds between steps.

        The state is parameters, gradients and optimizer state. The list is empty if no plans can be made.
        """
        if self.plan is None:
            return []
        shares = ((each, self._share(Factor(axis, FEW_RANKS[-1:], (each,)))) for each in declared_options(axis))
        return [each for each, share in shares if share is not None and sum(share[:3]) < 3 - 1e-9]

    def _put_together(
        self, layout: Layout, passes: _PassCost, share: StateShares, schedule: ScheduleCost, factors: tuple[Factor, ...]
    ) -> Estimate:
        stages, number = prod(f.size for f in factors), layout.num_microbatches
        copies, samples = num_shares(layout) // number, self._samples(layout)
        slowest, blocks, last_blocks = self._cut(passes, stages, schedule.chunks)
        cluster, next_stage = self.pricing.cluster, (0, layout.num_ranks // stages)
        alike = self._num_alike(passes.operators) if schedule.scatters and stages > 1 else 1
        gather_s = cluster.message_s("all_gather", self.sent_bytes * samples, range(alike))
        copied_s = self._copied(passes, share, layout)
        backward_s = passes.backward_s + passes.hidden_s * schedule.splits + copied_s[1]
        mean_s = (passes.forward_s + copied_s[0] + backward_s) / stages
        mean_s += 2 * schedule.chunks * gather_s  # of activations, and of their gradients
        adds_s = (copied_s[2] if any(copied_s) else passes.adds_s * share.summed) * slowest / stages
        if share.summed == share.computed < 1:  # gradients of weights alone are added by their products
            adds_s *= 1 - schedule.splits
        passes_s = (number * slowest + schedule.idle * (stages - 1)) * mean_s + (number - 1) * adds_s
        transfers = schedule.waits_by_stage * (stages - 1) + schedule.waits_by_microbatch * number
        if stages > 1:
            passes_s += transfers * cluster.message_s("send", self.sent_bytes * samples / alike, next_stage)
        stride = max(1, layout.num_ranks // (copies * stages))
        ranks = range(0, copies * stride, stride)
        held = self._held(passes, share, factors, schedule, blocks, last_blocks)
        of_state = max(each["parameters"] for each in held) / passes.at_rest["parameters"]
        gathered = max(each["parameters"] for each in held) * share.gathered
        gathers_s = 2 * number * cluster.message_s("all_gather", gathered, ranks)
        kind = "reduce_scatter" if share.gradients < 1 else "all_reduce"
        sums_s = cluster.message_s(kind, max(each["gradients"] for each in held) * share.computed, ranks)
        repeated_s = share.repeated * (number - 1) * sums_s
        # beside the passes of other microbatches; a stage waits for its neighbors in between, so there less is hidden
        hidden_s = gathers_s + (repeated_s if stages == 1 else 0)
        groups = max(1, self.num_blocks // stages)
        sums_s = max(sums_s / groups, sums_s - backward_s / stages)  # beside the last backward
        sums_s += repeated_s if stages > 1 else 0
        moved_s = self._offloaded_s(passes.at_rest["optimizer"] * share.moved * of_state)
        update_s = passes.update_s * of_state * share.updated
        first_gathers_s = gathers_s / number / max(1, self.num_blocks)  # of the first block, which nothing hides
        step_s = max(passes_s, hidden_s) + first_gathers_s + sums_s + update_s + moved_s + cluster.constants.step_s
        activations = self._activations(layout, passes, schedule, stages, blocks, last_blocks)
        memory = max(
            self._peak(passes, share, at_rest, active, number)
            for at_rest, active in zip(held, activations, strict=True)
        )
        return Estimate(layout, step_s, memory)

    def _copied(self, passes: _PassCost, share: StateShares, layout: Layout) -> tuple[float, float, float]:
        """Returns the seconds that an option of model copies, such as ``zero3``, adds to each microbatch.

        They are those of its forward, of its backward, and of adding its gradients to those of microbatches before.
        Such options copy parameters and gradients, so the seconds grow with a rank's parameters, not with the samples.
        """
        kinds = {name: axis.kind for name, axis in layout_axes().items()}
        factors = tuple(f for f in layout.factors if kinds[f.axis] == "copies" and f.options)
        if not factors:
            return 0.0, 0.0, 0.0
        key = tuple(Factor(f.axis, FEW_RANKS[-1:], f.options) for f in factors)
        if key not in self._copies:
            own, plain = self._read(key, None, FEW_SAMPLES[0]), self._read((), None, FEW_SAMPLES[0])
            self._copies[key], few = (0.0, 0.0, 0.0, 1.0), self._share(key[0])
            if own is not None and plain is not None and few is not None:
                times = own.times, plain.times
                more = [max(0.0, a - b) for a, b in zip(times[0][:2], times[1][:2], strict=True)]
                adds_s = own.times.adds_s / (few.summed or 1.0)
                self._copies[key] = more[0], more[1], adds_s, plain.at_rest["parameters"]
        *seconds, of_all = self._copies[key]
        part = passes.at_rest["parameters"] / of_all
        return seconds[0] * part, seconds[1] * part, seconds[2] * part * share.summed

    def _held(
        self, passes: _PassCost, share: StateShares, factors: tuple[Factor, ...], schedule: ScheduleCost,
        blocks: float, last_blocks: float,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Returns the bytes by kind between steps of the first and the last stage, before what ``share`` saves."""
        if not factors or prod(f.size for f in factors) == 1:
            return [dict(passes.at_rest)]
        first, last = self._ends(factors[0].axis)
        if schedule.returns:
            first, last = min(1.0, first + last), 0.0
        return [
            {kind: number * passes.of_block[kind] + part * passes.of_rest[kind] for kind in _STATE}
            for number, part in ((blocks, first), (last_blocks, last))
        ]

    def _ends(self, axis: str) -> tuple[float, float]:
        if axis not in self._at_ends:
            self._at_ends[axis] = self.kept.find(("ends", axis), partial(self.ends, axis))
        return self._at_ends[axis]

    def _activations(
        self, layout: Layout, passes: _PassCost, schedule: ScheduleCost, stages: int, blocks: float, last_blocks: float
    ) -> list[float]:
        """Returns the most bytes of activations, and of what backwards need for a moment, on the two end stages."""
        number = layout.num_microbatches
        if stages == 1:
            return [passes.most_bytes]
        again = max(0.0, passes.plain_bytes - passes.block_bytes)  # of a block, while it is recomputed
        late = schedule.late(stages, number)
        first = schedule.held(stages, number) * blocks * passes.block_bytes + max(1.0, late * blocks) * again
        last = schedule.held_last(stages, number) * last_blocks * passes.block_bytes + late * last_blocks * again
        of_end = passes.most_bytes - max(1, self.num_blocks) * passes.block_bytes
        return [first + of_end, last] if schedule.returns else [first, last + of_end]

    def _peak(
        self, passes: _PassCost, share: StateShares, at_rest: Mapping[str, float], active: float, number: int
    ) -> float:
        """Returns the most bytes of a stage: in the backward of a microbatch, or at the optimizer's step."""
        kept = at_rest["parameters"] * share.parameters + at_rest["optimizer"] * share.optimizer + passes.beside
        blocks = max(1, self.num_blocks)
        block, gradients = (at_rest[kind] / blocks for kind in ("parameters", "gradients"))
        once = 2 * block * share.gathered + gradients * share.computed * bool(share.repeated)
        summed = at_rest["gradients"] * share.summed
        in_backward = active + once + summed if number > 1 else max(active + once, summed)
        part = at_rest["parameters"] / passes.at_rest["parameters"]
        in_update = at_rest["gradients"] * share.gradients + passes.update_bytes * share.updated * part
        return kept + max(in_backward, in_update)

    def _num_alike(self, operators: tuple[Factor, ...]) -> int:
        """Returns how many ranks hold the same values between layers: those along axes that do not cut the batch."""
        if self.plan is None or not operators:
            return 1
        if operators not in self._alike:
            layout = Layout(operators, 1, self.precision)
            self._alike[operators] = self.kept.find(("alike", str(layout)), partial(self._count_alike, layout))
        return self._alike[operators]

    def _count_alike(self, layout: Layout) -> int:
        assert self.plan is not None, "asked for plans alone"
        with suppress(LayoutError, PlanError):
            plan = self.plan(layout)
            return prod(plan.mesh[axis] for axis in plan.mesh.axes if axis not in plan.inputs)
        return 1

    def _offloaded_s(self, moments_bytes: float) -> float:
        """Returns the seconds in which the host updates state whose moments take so many bytes, copies included."""
        cluster = self.pricing.cluster
        link = cluster.device.host_bytes_per_s * cluster.constants.host_link_efficiency
        return moments_bytes / link + 4.5 * moments_bytes / cluster.constants.host_update_bytes_per_s

    def _cut(self, passes: _PassCost, stages: int, chunks: int) -> tuple[float, float, float]:
        """Returns how many times the mean the slowest stage takes, and the blocks of a stage and of the last one.

        Stages have whole blocks only. What is not of a block, such as the head, is taken to be in the last chunk, which
        has so many blocks fewer.
        """
        blocks, number = max(1, self.num_blocks), stages * chunks
        if stages == 1 or not self.num_blocks or not passes.has_rest or blocks < number:
            return 1.0, blocks / stages, blocks / stages
        key = passes.operators, passes.recompute, stages, chunks
        if key not in self._cuts:
            rest = passes.rest_s
            of_block = (passes.forward_s + passes.backward_s - rest) / blocks
            end = blocks * passes.rest_flops / (1 - passes.rest_flops)  # stages are cut by FLOPs, here in blocks
            found = []
            for last in range(blocks // number + 1):
                others = -(-(blocks - last) // (number - 1))
                found.append((max(chunks * others, (chunks - 1) * others + last + end), -last, others))
            _, last, others = min(found)
            last_s = ((chunks - 1) * others - last) * of_block + rest
            slowest = max(1.0, max(chunks * others * of_block, last_s) * stages / (rest + blocks * of_block))
            self._cuts[key] = slowest, chunks * others, (chunks - 1) * others - last
        return self._cuts[key]

    def _samples(self, layout: Layout) -> int:
        return -(-self.batch // num_shares(layout))

    def _passes(self, operators: tuple[Factor, ...], recompute: str | None, samples: int) -> _PassCost | None:
        """Returns what a microbatch of so many samples does, from few and from more samples; None if it is refused.

        Operators with options, which few layouts have, are rehearsed with as many samples as are asked for. Blocks that
        are recomputed are rehearsed with few alone: what they add grows with the rest.
        """
        key = operators, recompute, samples
        if key not in self._of_passes:
            sizes = (samples,) if any(each.options for each in operators) else FEW_SAMPLES
            few, *more = (self._read(operators, None, each) for each in sizes if each <= max(self.batch, sizes[0]))
            own = (more or [few])[0] if recompute is None else self._read(operators, recompute, sizes[len(more)])
            known = [few, own, *more]
            self._of_passes[key] = (
                None
                if any(each is None for each in known)
                else _PassCost.of(
                    operators, recompute, samples, self.num_blocks, sizes, [each for each in known if each]
                )
            )
        return self._of_passes[key]

    def _read(self, operators: tuple[Factor, ...], recompute: str | None, samples: int) -> _Alone | None:
        """Reads the records of microbatches of so many samples: the second one adds gradients to those of the first."""
        key = Layout(operators, FEW_MICROBATCHES, self.precision, recompute), samples
        if key not in self._alone:
            records = self.alone(key[0], num_shares(key[0]) * samples)
            self._alone[key] = None if records is None else _Alone.of(self.pricing, records)
        return self._alone[key]

    def _schedule(self, factors: tuple[Factor, ...], shares: PassShares = EVEN) -> ScheduleCost | None:
        if not factors or self.plan is None:
            return ScheduleCost()
        key = factors[0].axis, factors[0].options, shares
        if key not in self._schedules:
            name = str(Factor(key[0], TOY_STAGES[-1:], key[1]))
            self._schedules[key] = self.kept.find(("schedule", name, *shares), partial(schedule_cost, *key))
        return self._schedules[key]

    def _share(self, factor: Factor) -> StateShares | None:
        """Returns the shares of state under a factor's options: affine in one rank's part of the copies."""
        if self.plan is None:
            return StateShares()
        key = factor.axis, factor.options
        if key not in self._shares:
            name = str(Layout((replace(factor, sizes=FEW_RANKS[:1]),), 1, self.precision))
            self._shares[key] = self.kept.find(("shares", name), partial(self._shares_of_few, factor))
        known = self._shares[key]
        if known is None:
            return None
        few, more = (1 / size for size in FEW_RANKS)
        at = (1 / factor.size - few) / (more - few)
        return StateShares(*(max(0.0, a + (b - a) * at) for a, b in zip(*known, strict=True)))

    def _shares_of_few(self, factor: Factor) -> tuple[StateShares, ...] | None:
        found = []
        for size in FEW_RANKS:
            few = tuple(Factor(factor.axis, (size,), options) for options in ((), factor.options))
            plain, own = (self._state(Layout((each,), 1, self.precision)) for each in few)
            if plain is None or own is None:
                return None
            wholes = (*plain[:4], plain.parameters, plain.optimizer, plain.gradients)
            parts = [a / b if b else 1.0 for a, b in zip(own[:7], wholes, strict=True)]
            once, twice = (self.summed_bytes(Layout((few[1],), number, self.precision)) for number in (1, 2))
            found.append(StateShares(*parts)._replace(repeated=twice / once - 1 if once else 0.0))
        return tuple(found)

    def _state(self, layout: Layout) -> StateShares | None:
        """Returns what a rank of a layout holds and does, in bytes; None if a strategy refuses it."""
        assert self.plan is not None, "asked for options alone"
        if layout not in self._states:
            self._states[layout] = None
            with suppress(LayoutError, PlanError):
                self._states[layout] = state_of(self.plan(layout))
        return self._states[layout]
