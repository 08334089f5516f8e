"""Estimates a layout's step time and memory by closed formulas, so that a search can rank thousands of layouts.

The formulas start from one rehearsal (a step on the meta device) for each way to cut operators, and from plans of a
model with few blocks. The code names no axis and no option: the memory that an option saves between steps is read from
the plan that its strategy makes of that model; a schedule's idle time and its microbatches in flight are simulated for
a toy model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
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
from shardwright.plan.schedule import Schedule
from shardwright.planner.extended import extended
from shardwright.planner.memory import held_at_rest, kept_bytes
from shardwright.planner.price import Price, Pricing
from shardwright.planner.records_file import RecordsFile
from shardwright.strategies import STRATEGIES
from shardwright.strategies.pipeline.simulate import ChunkTimes, ends_of

MOMENTS_BYTES = 8
"""The bytes of optimizer state that estimates count for each trained element: two moments in fp32."""

FEW_RANKS, TOY_STAGES, TOY_MICROBATCHES, TOY_TRANSFER_S = (2, 4), 4, (8, 16), 0.1
"""The sizes from which estimates are extrapolated: two numbers of ranks for shares of state, and the stages, numbers of
microbatches and seconds of a transfer of the toy model whose schedules are simulated. On each stage of that model, a
microbatch's forward, input gradient and weight gradient take a second each."""

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
    repeated: float = 0.0
    """The bytes of gradient sums that each microbatch after the first adds, as a share of those of the first."""


class ScheduleCost(NamedTuple):
    """The cost of a pipeline schedule, as coefficients of formulas in p stages and m microbatches.

    A stage is idle for ``idle * (p - 1)`` times a microbatch's forward and backward on one stage. The fullest stage
    holds the activations of ``held_by_stage * p + held_by_microbatch * m`` microbatches, and that with the most weight
    gradients still to compute those of ``late_by_stage * p + late_by_microbatch * m`` microbatches. A step waits for
    ``waits_by_stage * (p - 1) + waits_by_microbatch * m`` transfers between stages.
    """

    idle: float = 1.0
    held_by_stage: float = 1.0
    held_by_microbatch: float = 0.0
    late_by_stage: float = 0.0
    """The microbatches on a stage, for each stage, whose gradients of inputs are computed and not those of weights."""
    late_by_microbatch: float = 0.0
    waits_by_stage: float = 2.0
    """The transfers between stages that a step waits for, for each stage but one."""
    waits_by_microbatch: float = 0.0
    chunks: int = 1
    """The chunks of the model on each stage."""
    scatters: bool = False
    """Whether ranks that hold alike what crosses between stages each send a part of it."""

    def held(self, num_stages: int, num_microbatches: int) -> float:
        """Returns the number of microbatches whose activations the fullest stage holds at once: 1 on a single stage."""
        held = self.held_by_stage * num_stages + self.held_by_microbatch * num_microbatches
        return min(num_microbatches, max(1.0, held)) if num_stages > 1 else 1.0

    def late(self, num_stages: int, num_microbatches: int) -> float:
        """Returns the most microbatches on a stage of which only the gradients of weights are still to be computed.

        What they need, the inputs of layers and the gradients of outputs, takes as much as the activations before. A
        stage has computed them by then even if it recomputes its blocks.
        """
        late = self.late_by_stage * num_stages + self.late_by_microbatch * num_microbatches
        return min(late, self.held(num_stages, num_microbatches)) if num_stages > 1 else 0.0


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
    """What estimates read of the price of a layout of one stage and one microbatch, such as ``tp2``."""

    price: Price
    pass_s: float
    """The seconds of the microbatch's passes."""
    at_rest: Mapping[str, int]
    kept_bytes: int

    @classmethod
    def of(cls, price: Price) -> _Alone:
        return cls(price, _pass_s(price), held_at_rest(price.records, 0), kept_bytes(price.records, 0))


def _pass_s(price: Price) -> float:
    """The seconds of a microbatch's passes on a layout of one stage and one microbatch."""
    return sum(seconds for name, seconds in price.waterfall.items() if name not in ("optimizer", "bubble", "other"))


def schedule_cost(axis: str, options: tuple[Option, ...]) -> ScheduleCost | None:
    """Returns the cost of the pipeline schedule that ``options`` choose on ``axis``, simulated for a toy model.

    It is None if the toy model cannot have the schedule.

    >>> found = schedule_cost("pp", (Option("1f1b"),)), schedule_cost("pp", (Option("gpipe"),))
    >>> [(each.idle, each.held(4, 32)) for each in found if each is not None]
    [(1.0, 4.0), (1.0, 32)]
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(TOY_STAGES * 8)))
    idle, counts, chunks, scatters = list[float](), list[tuple[float, ...]](), TOY_STAGES, False
    for number in TOY_MICROBATCHES:
        try:
            layout = Layout((Factor(axis, (TOY_STAGES,), options),), number)
            plan, _ = make_plan(job_for(model, CrossEntropy(), layout), layout)
            assert plan.schedule is not None, "of stages"
            scatters = plan.scatters
            chunks, share = plan.schedule.num_chunks, TOY_STAGES / plan.schedule.num_chunks
            times = ChunkTimes.equal(chunks, share, share, share)
            ends = ends_of(plan.schedule, times, replace(times, transfer_s=TOY_TRANSFER_S))
        except (LayoutError, PlanError):
            return None
        took_s, longer_s = (max(each.ends_s) for each in ends)
        idle.append((took_s - 3 * number) / 3 / (TOY_STAGES - 1))
        most_held = (most * share for most in _most_held(plan.schedule))
        counts.append((*most_held, (longer_s - took_s) / TOY_TRANSFER_S))
    few, more = TOY_MICROBATCHES
    at_few, at_more = counts
    growth = [(b - a) / (more - few) for a, b in zip(at_few, at_more, strict=True)]
    held, late, waits = (a - part * few for a, part in zip(at_few, growth, strict=True))
    per_stage = held / TOY_STAGES, late / TOY_STAGES, waits / (TOY_STAGES - 1)
    return ScheduleCost(
        idle[-1], per_stage[0], growth[0], per_stage[1], growth[1], per_stage[2], growth[2],
        chunks // TOY_STAGES, scatters,
    )  # fmt: skip


def _most_held(schedule: Schedule) -> tuple[int, int]:
    """Returns the most microbatches that a chunk's stage holds anything of, and of which only W is left to compute."""
    held, late = {"F": 1, "B": -1, "W": -1}, {"I": 1, "W": -1}
    most = (
        max(max(accumulate(each.get(action.kind, 0) for action in actions)) for actions in schedule.actions)
        for each in (held, late)
    )
    return next(most), next(most)


@dataclass
class Estimator:
    """Estimates the step time and memory of layouts of one model on one cluster.

    Args:
        pricing: the prices of operators and messages on the cluster.
        batch: the number of samples of the global batch.
        precision: the precision in which all layouts compute.
        alone: returns the price of a layout that has only the given factors, such as ``tp2``, which cut operators, for
            a number of samples; None if the model refuses it.
        plan: returns the plan of a model with few blocks; without it, no options of strategies are considered.
        sent_bytes: the bytes that a pipeline stage sends to the next for one sample.
        most_chunks: the most pipeline chunks (stages times chunks on each) that the model can be cut into; 0: unknown.
        summed_bytes: returns the bytes of gradients that a rank sums in a step of a layout, as strategies state them.
        num_blocks: the number of alike blocks of the model.
        kept: what was found of the model before, and what is to be kept for later searches.
    """

    pricing: Pricing
    batch: int
    precision: Precision
    alone: Callable[[tuple[Factor, ...], int], Price | None]
    plan: Callable[[Layout], Plan] | None = None
    sent_bytes: int = 0
    most_chunks: int = 0
    summed_bytes: Callable[[Layout], int] = lambda _: 0
    num_blocks: int = 0
    kept: RecordsFile = field(default_factory=RecordsFile)
    _estimates: dict[Layout, Estimate | None] = field(default_factory=dict)
    _alone: dict[tuple[tuple[Factor, ...], int], _Alone | None] = field(default_factory=dict)
    _paces: dict[tuple[Factor, ...], tuple[float, float]] = field(default_factory=dict)
    _slowest_by: dict[tuple[object, ...], float] = field(default_factory=dict)
    _states: dict[Layout, StateShares | None] = field(default_factory=dict)
    _shares: dict[tuple[str, tuple[Option, ...]], tuple[StateShares, ...] | None] = field(default_factory=dict)
    _schedules: dict[tuple[str, tuple[Option, ...]], ScheduleCost | None] = field(default_factory=dict)
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
        alone = self._priced(plain["operators"], self._samples(layout))
        schedule, share = self._schedule(plain["stages"]), StateShares()
        for factor in layout.factors:
            if kinds[factor.axis] == "copies" and factor.options:
                found = self._share(factor)
                if found is None:
                    return None
                share = found
        stages = prod(f.size for f in plain["stages"])
        if not alone or schedule is None or 0 < self.most_chunks < stages * schedule.chunks:
            return None
        return self._put_together(layout, alone, share, schedule, stages)

    def refusal(self, layout: Layout) -> str:
        """Returns why :meth:`estimate` gives None; "" if the model refused the operators, which it says itself."""
        kinds = {name: axis.kind for name, axis in layout_axes().items()}
        of_kind = {kind: tuple(f for f in layout.factors if kinds[f.axis] == kind) for kind in ("operators", "stages")}
        if not self._priced(of_kind["operators"], self._samples(layout)):
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
        return self._schedule((Factor(axis, (TOY_STAGES,), options),))

    def saving_options(self, axis: str) -> list[Option]:
        """Returns the declared options of an axis that reduce the state that a rank holds between steps.

        The state is parameters, gradients and optimizer state. The list is empty if no plans can be made.
        """
        if self.plan is None:
            return []
        shares = ((each, self._share(Factor(axis, FEW_RANKS[-1:], (each,)))) for each in declared_options(axis))
        return [each for each, share in shares if share is not None and sum(share[:3]) < 3 - 1e-9]

    def _put_together(
        self, layout: Layout, prices: Mapping[int, _Alone], share: StateShares, schedule: ScheduleCost, stages: int
    ) -> Estimate:
        number, copies = layout.num_microbatches, num_shares(layout) // layout.num_microbatches
        samples, sizes = self._samples(layout), list(prices)
        few, *more = (each.pass_s for each in prices.values())
        known = prices[sizes[0]]
        alone, by_kind = known.price, known.at_rest
        (pass_s,) = extended(samples, [few], more, *sizes) if more else (few * samples / sizes[0],)
        pass_s *= self._slowest(prices[sizes[-1]].price, stages, schedule.chunks) if stages > 1 else 1.0
        kinds = ("parameters", "gradients", "optimizer")
        at_once = 1.0 if number > 1 and not share.repeated else share.gradients  # whole until they are summed
        parts = share.parameters, at_once, share.optimizer
        state = sum(by_kind[kind] * part for kind, part in zip(kinds, parts, strict=True))
        under_way, held = schedule.held(stages, number), known.kept_bytes * samples / sizes[0] / stages
        activations = held * under_way
        if layout.recompute is not None:  # what enters the blocks is kept of each microbatch, and one block's own
            blocks, late = max(1, self.num_blocks), schedule.late(stages, number)
            pass_s, inputs = pass_s * 4 / 3, self.sent_bytes * samples * blocks / stages
            activations = min(held, inputs) * (under_way - late) + held * (late + stages / blocks)
        cluster, next_stage = self.pricing.cluster, (0, layout.num_ranks // stages)
        alike = self._num_alike(alone.layout.factors) if schedule.scatters and stages > 1 else 1
        gather_s = cluster.message_s("all_gather", self.sent_bytes * samples, range(alike))
        of_stage_s = pass_s / stages + 2 * schedule.chunks * gather_s  # of activations, and of their gradients
        passes_s = (number + schedule.idle * (stages - 1)) * of_stage_s
        transfers = schedule.waits_by_stage * (stages - 1) + schedule.waits_by_microbatch * number
        if stages > 1:
            passes_s += transfers * cluster.message_s("send", self.sent_bytes * samples / alike, next_stage)
        stride = max(1, layout.num_ranks // (copies * stages))
        ranks = range(0, copies * stride, stride)
        gathers_s = 2 * number * cluster.message_s("all_gather", by_kind["parameters"] * share.gathered / stages, ranks)
        kind = "reduce_scatter" if share.gradients < 1 else "all_reduce"
        sums_s = cluster.message_s(kind, by_kind["gradients"] / stages, ranks)
        repeated_s = share.repeated * (number - 1) * sums_s
        # beside the passes of other microbatches; a stage waits for its neighbors in between, so there less is hidden
        hidden_s = gathers_s + (repeated_s if stages == 1 else 0)
        sums_s += repeated_s if stages > 1 else 0
        moved_s = self._offloaded_s(by_kind["optimizer"] * share.moved / stages)
        update_s = alone.waterfall["optimizer"] / stages * share.updated
        first_gathers_s = gathers_s / number / max(1, self.num_blocks)  # of the first block, which nothing hides
        step_s = max(passes_s, hidden_s) + first_gathers_s + sums_s + update_s + moved_s
        return Estimate(layout, step_s, state / stages + activations)

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

    def _slowest(self, price: Price, stages: int, chunks: int) -> float:
        """Returns how many times as long as the mean the slowest stage takes, since it has whole blocks only.

        What is not of a block, such as the head, is taken to be in the last chunk, which has so many blocks fewer.
        """
        if not self.num_blocks or price.records.note:
            return 1.0
        key = price.layout.factors, stages, chunks
        if key not in self._slowest_by:
            self._slowest_by[key] = self._slowest_found(price, stages, chunks)
        return self._slowest_by[key]

    def _slowest_found(self, price: Price, stages: int, chunks: int) -> float:
        blocks, number, slowest = self.num_blocks, stages * chunks, list[float]()
        operators = price.layout.factors
        if operators not in self._paces:
            none = self.pricing.price(price.layout, replace(price.records, num_blocks=((0,),)))
            self._paces[operators] = _pass_s(none), (_pass_s(price) - _pass_s(none)) / blocks
        rest, of_block = self._paces[operators]
        for last in range(blocks // number + 1):
            others = -(-(blocks - last) // (number - 1))
            last_s = ((chunks - 1) * others + last) * of_block + rest
            slowest.append(max(chunks * others * of_block, last_s))
        return max(1.0, min(slowest) * stages / (rest + blocks * of_block))

    def _samples(self, layout: Layout) -> int:
        return -(-self.batch // num_shares(layout))

    def _priced(self, operators: tuple[Factor, ...], samples: int) -> dict[int, _Alone]:
        """Returns prices by the number of samples, few and more; none if the model refuses the factors.

        With options, which few layouts have, it is one price, of as many samples as are asked for.
        """
        sizes = (samples,) if any(each.options for each in operators) else FEW_SAMPLES
        found: dict[int, _Alone] = {}
        for size in (each for each in sizes if each <= self.batch):
            if (operators, size) not in self._alone:
                price = self.alone(operators, size)
                self._alone[operators, size] = None if price is None else _Alone.of(price)
            known = self._alone[operators, size]
            if known is None:
                return {}
            found[size] = known
        return found

    def _schedule(self, factors: tuple[Factor, ...]) -> ScheduleCost | None:
        if not factors or self.plan is None:
            return ScheduleCost()
        key = factors[0].axis, factors[0].options
        if key not in self._schedules:
            name = str(Factor(key[0], (TOY_STAGES,), key[1]))
            self._schedules[key] = self.kept.find(("schedule", name), partial(schedule_cost, *key))
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
            wholes = (*plain[:4], plain.parameters, plain.optimizer)
            parts = [a / b if b else 1.0 for a, b in zip(own[:6], wholes, strict=True)]
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
