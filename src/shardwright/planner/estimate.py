"""Estimates a layout's step time and memory by closed formulas, so that a search can rank thousands of layouts.

The formulas start from rehearsals (steps on the meta device) of each way to cut operators, with few and with more
samples, and from plans of a model with few blocks. The code names no axis and no option: the memory that an option
saves between steps is read from the plan that its strategy makes of that model; a schedule's idle time and its
microbatches in flight are simulated for a toy model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import NamedTuple

from shardwright.axes import layout_axes
from shardwright.cost.operators import MESSAGE_STARTS
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import OWN, Factor, Layout, Option, Precision
from shardwright.parallelize.auto import num_shares
from shardwright.plan.event_stages import UNEVEN
from shardwright.plan.plan import Plan
from shardwright.planner.layout_records import LayoutRecords
from shardwright.planner.pass_cost import OperatorsAlone, PassCost, PassShares
from shardwright.planner.price import Pricing
from shardwright.planner.records import FEW_MICROBATCHES
from shardwright.planner.records_file import RecordsFile
from shardwright.planner.schedule_cost import EVEN, TOY_STAGES, ScheduleCost, schedule_cost
from shardwright.planner.state_shares import STATE_KINDS, StateShares, state_of
from shardwright.strategies import STRATEGIES

FEW_RANKS = (2, 4)
"""Two numbers of ranks: the state that a rank holds is read from plans for these, and extrapolated to other numbers."""

FEW_SAMPLES = (1, 8)
"""Two sizes of a microbatch, in samples: each way to cut the operators is priced at both, and prices of other sizes are
extrapolated from the two."""

MOST_EXTRAPOLATED = 32
"""The most samples of a microbatch that are extrapolated from few, for a model that refuses ``mb``; more are rehearsed
as they are."""

TOO_LONG, TOO_MUCH = 1.06, 1.11
"""The ratios of estimate to price, of seconds and of bytes, up to which an estimate may be too high. They are those of
a GPT of 13 B in ``benchmarks/planner_search``, rounded up. A search leaves a layout out only if its estimate, divided
by this ratio, is no better than the prices that it has."""


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


def declared_options(axis: str) -> tuple[Option, ...]:
    """Returns the options of an axis that strategies declare and that a search tries.

    Options of strategies that a layout line must ask for come first, those of default strategies after.
    """
    options = []
    for strategy in sorted(STRATEGIES.values(), key=lambda candidate: candidate.default):
        for name, option in strategy.options.items() if strategy.axis == axis else ():
            options += [Option(*text.split(":", 1)) for text in option.tried(name)]
    return tuple(options)


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
        ends: returns, for an axis of two stages, the shares of the parameters outside of all blocks that each holds.
        refuses_microbatches: why the model can have no ``mb`` without ``own-statistics``; "" if it can.
        kept: the cache of what earlier searches found out about the model, to which this one adds.
        fewest: the fewest samples that the model's code accepts; it is taken to accept multiples of them.
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
    refuses_microbatches: str = ""
    fewest: int = 1
    _estimates: dict[Layout, Estimate | None] = field(default_factory=dict)
    _alone: dict[tuple[Layout, int], OperatorsAlone | None] = field(default_factory=dict)
    _cuts: dict[tuple[object, ...], tuple[float, float, float]] = field(default_factory=dict)
    _states: dict[Layout, StateShares | None] = field(default_factory=dict)
    _shares: dict[tuple[str, tuple[Option, ...]], tuple[StateShares, ...] | None] = field(default_factory=dict)
    _schedules: dict[tuple[object, ...], ScheduleCost | None] = field(default_factory=dict)
    _of_passes: dict[tuple[object, ...], PassCost | None] = field(default_factory=dict)
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
                factor_share = self._share(factor)
                if factor_share is None:
                    return None
                share = factor_share
        schedule = None if alone is None else self._schedule(plain["stages"], alone.shares)
        stages = prod(f.size for f in plain["stages"])
        if alone is None or schedule is None or 0 < self.most_chunks < stages * schedule.chunks:
            return None
        return self._put_together(layout, alone, share, schedule, plain["stages"])

    def stages_of(self, layout: Layout) -> tuple[object, ...]:
        """Returns a key that is equal for layouts with the same stages, chunks, tensor cuts and microbatch size."""
        kinds = {name: axis.kind for name, axis in layout_axes().items()}
        stages = tuple(f for f in layout.factors if kinds[f.axis] == "stages")
        operators = tuple(f for f in layout.factors if kinds[f.axis] == "operators")
        schedule = self._schedule(stages)
        cut = schedule and (schedule.chunks, schedule.returns)
        return prod(f.size for f in stages), cut, operators, self._samples(layout)

    def refusal(self, layout: Layout) -> str:
        """Returns why :meth:`estimate` gives None, as text.

        It is "" if the model refused the operators, since ``alone`` has then met the model's own error.
        """
        kinds = {name: axis.kind for name, axis in layout_axes().items()}
        of_kind = {kind: tuple(f for f in layout.factors if kinds[f.axis] == kind) for kind in ("operators", "stages")}
        if self._passes(of_kind["operators"], layout.recompute, self._samples(layout)) is None:
            return ""
        if self._schedule(of_kind["stages"]) is None:
            return "its schedule cannot be on so few stages as estimates simulate"
        if any(kinds[f.axis] == "copies" and f.options and self._share(f) is None for f in layout.factors):
            return "the model cannot have its option of model copies"
        return "more chunks than alike blocks"

    @property
    def _own_statistics(self) -> bool:
        """Whether rehearsals have ``own-statistics``: those of a microbatch cost as much as those of a batch."""
        return bool(self.refuses_microbatches)

    def refusal_of_microbatches(self, layout: Layout) -> str:
        """Returns why the model cannot run in a layout's microbatches, as BatchNorm cannot; "" if it can."""
        if not self.refuses_microbatches or layout.num_microbatches == 1 or layout.own_statistics:
            return ""
        return f"{self.refuses_microbatches}; --fix mb/{OWN} allows it"

    def schedules(self, axis: str) -> list[Option]:
        """Returns the declared options of a pipeline axis, except those that give its default schedule.

        If no plans can be made (``plan`` is None), all are returned.
        """
        return [option for option in declared_options(axis) if not self._is_default(axis, option)]

    def default_schedule(self, axis: str) -> tuple[Option, ...]:
        """Returns, as a tuple of one, the option that names the default schedule of a pipeline axis.

        The tuple is empty if no declared option does, or if no plans can be made.
        """
        if axis not in self._defaults:
            candidates = (option for option in declared_options(axis) if self._is_default(axis, option))
            self._defaults[axis] = tuple(
                option for option in candidates if self._of_toy(axis, option) == self._of_toy(axis)
            )[:1]
        return self._defaults[axis]

    def _is_default(self, axis: str, option: Option) -> bool:
        """Returns whether an option gives an axis its default schedule; it may change how activations are sent."""
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
        shares = ((option, self._share(Factor(axis, FEW_RANKS[-1:], (option,)))) for option in declared_options(axis))
        return [option for option, share in shares if share is not None and sum(share[:3]) < 3 - 1e-9]

    def _put_together(
        self, layout: Layout, passes: PassCost, share: StateShares, schedule: ScheduleCost, factors: tuple[Factor, ...]
    ) -> Estimate:
        stages, number = prod(f.size for f in factors), layout.num_microbatches
        copies, samples = num_shares(layout) // number, self._samples(layout)
        slowest, blocks, last_blocks = self._cut(passes, stages, schedule.chunks)
        cluster, of_stage = self.pricing.cluster, layout.num_ranks // stages
        next_stage = 0, of_stage
        # if a node has the ranks of some stages and not of all, some neighboring stages are on two nodes
        node = cluster.nodes.ranks_per_node
        apart = (node - of_stage, node) if of_stage <= node < layout.num_ranks else next_stage
        alike = self._num_alike(passes.operators) if schedule.scatters and stages > 1 else 1
        gather_s = cluster.message_s("all_gather", self.sent_bytes * samples, range(alike))
        copied_s = self._copied(passes, share, layout)
        backward_s = passes.backward_s + passes.hidden_s * schedule.splits + copied_s[1]
        mean_s = (passes.forward_s + copied_s[0] + backward_s) / stages
        mean_s += 2 * schedule.chunks * gather_s  # of activations, and of their gradients
        adds_s = (copied_s[2] if any(copied_s) else passes.adds_s * share.summed) * slowest / stages
        # gradients that are summed as they are computed: a W action adds them within its matrix products
        if share.summed == share.computed < 1:
            adds_s *= 1 - schedule.splits
        passes_s = (number * slowest + schedule.idle * (stages - 1)) * mean_s + (number - 1) * adds_s
        transfers = schedule.waits_by_stage * (stages - 1) + schedule.waits_by_microbatch * number
        if stages > 1:
            sent_s = cluster.message_s("send", self.sent_bytes * samples / alike, next_stage)
            # a slow link sends the activations and gradients of all microbatches one after the other
            slow_s = cluster.message_s("send", self.sent_bytes * samples / alike, apart)
            passes_s = max(passes_s + transfers * sent_s, 2 * schedule.chunks * number * slow_s)
        stride = max(1, layout.num_ranks // (copies * stages))
        ranks = range(0, copies * stride, stride)
        states = self._held(passes, factors, schedule, blocks, last_blocks)
        of_state = max(by_kind["parameters"] for by_kind in states) / passes.at_rest["parameters"]
        gathered = max(by_kind["parameters"] for by_kind in states) * share.gathered
        gathers_s = 2 * number * cluster.message_s("all_gather", gathered, ranks)
        kind = "reduce_scatter" if share.gradients < 1 else "all_reduce"
        sums_s = cluster.message_s(kind, max(by_kind["gradients"] for by_kind in states) * share.computed, ranks)
        repeated_s = share.repeated * (number - 1) * sums_s
        # hidden by the passes of other microbatches; but several stages wait for each other in between, so there the
        # repeated sums are taken not to be hidden
        hidden_s = gathers_s + (repeated_s if stages == 1 else 0)
        groups = max(1, self.num_blocks // stages)
        sums_s = max(sums_s / groups, sums_s - backward_s / stages)  # hidden by the last backward, but for one group's
        sums_s += repeated_s if stages > 1 else 0
        moved_s = self._offloaded_s(passes.at_rest["optimizer"] * share.moved * of_state)
        update_s = of_state * max(passes.update_s * share.updated, passes.update_starts_s)
        first_gathers_s = gathers_s / number / max(1, self.num_blocks)  # of the first block, which nothing hides
        starts_s = self._starts_s(share, number, groups) if copies > 1 else 0.0
        starts_s += self._messages_s(4 * schedule.chunks * number) if stages > 1 else 0.0  # to and from two neighbors
        step_s = max(passes_s, hidden_s) + first_gathers_s + sums_s + update_s + moved_s + starts_s
        step_s += cluster.constants.step_s
        activations = self._activations(layout, passes, schedule, stages, blocks, last_blocks)
        memory = max(
            self._peak(passes, share, at_rest, active, number)
            for at_rest, active in zip(states, activations, strict=True)
        )
        return Estimate(layout, step_s, memory)

    def _starts_s(self, share: StateShares, number: int, groups: int) -> float:
        """Returns the seconds in which the host of an accelerator starts the messages between model copies.

        There are ``groups`` param groups. Each has one sum of gradients in a step. It also has two gathers in each of
        ``number`` microbatches if parameters are gathered at each use, or one gather if each rank updates a shard.
        """
        return self._messages_s(groups * (1 + (2 * number if share.gathered else share.updated < 1)))

    def _messages_s(self, number: int) -> float:
        return 0.0 if self.pricing.on_host else number * MESSAGE_STARTS * self.pricing.cluster.constants.launch_s

    def _copied(self, passes: PassCost, share: StateShares, layout: Layout) -> tuple[float, float, float]:
        """Returns the seconds that an option of model copies, such as ``zero3``, adds to a microbatch; 0 without one.

        The three numbers are those of the forward, of the backward, and of adding gradients to those of microbatches
        before. Such options copy parameters and gradients, so the seconds grow with a rank's parameters, not with the
        samples.
        """
        kinds = {name: axis.kind for name, axis in layout_axes().items()}
        factors = tuple(f for f in layout.factors if kinds[f.axis] == "copies" and f.options)
        if not factors:
            return 0.0, 0.0, 0.0
        key = tuple(Factor(f.axis, FEW_RANKS[-1:], f.options) for f in factors)
        if key not in self._copies:
            own, plain = self._read(key, None, self.fewest), self._read((), None, self.fewest)
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
        self, passes: PassCost, factors: tuple[Factor, ...], schedule: ScheduleCost, blocks: float,
        last_blocks: float,
    ) -> list[dict[str, float]]:  # fmt: skip
        """Returns the bytes of state by kind that the first and the last stage hold, without ZeRO and offload.

        The list has one entry if there is one stage.
        """
        if not factors or prod(f.size for f in factors) == 1:
            return [dict(passes.at_rest)]
        first, last = self._ends(factors[0].axis)
        if schedule.returns:
            first, last = min(1.0, first + last), 0.0
        return [
            {kind: number * passes.of_block[kind] + part * passes.of_rest[kind] for kind in STATE_KINDS}
            for number, part in ((blocks, first), (last_blocks, last))
        ]

    def _ends(self, axis: str) -> tuple[float, float]:
        if axis not in self._at_ends:
            self._at_ends[axis] = self.kept.find(("ends", axis), partial(self.ends, axis))
        return self._at_ends[axis]

    def _activations(
        self, layout: Layout, passes: PassCost, schedule: ScheduleCost, stages: int, blocks: float, last_blocks: float
    ) -> list[float]:
        """Returns the peak bytes of activations, with temporaries of the backward, on the first and the last stage.

        The list has one entry if there is one stage.
        """
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
        self, passes: PassCost, share: StateShares, at_rest: Mapping[str, float], active: float, number: int
    ) -> float:
        """Returns the peak bytes of a stage's rank: in the backward of a microbatch, or at the optimizer's step.

        ``at_rest`` has the stage's state by kind, and ``active`` is the peak of its activations, both in bytes.
        """
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
        """Returns how many ranks hold the same activations between layers: those along axes that cut no inputs."""
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
        """Returns the seconds of an update by the host, for moments of so many bytes, copies over the link included."""
        cluster = self.pricing.cluster
        link = cluster.device.host_bytes_per_s * cluster.constants.host_link_efficiency
        return moments_bytes / link + 4.5 * moments_bytes / cluster.constants.host_update_bytes_per_s

    def _cut(self, passes: PassCost, stages: int, chunks: int) -> tuple[float, float, float]:
        """Returns the slowest stage's seconds divided by the mean, and the blocks of a stage and of the last stage.

        Stages have whole blocks if that is even enough (:data:`UNEVEN`), and else halves of blocks too; the chunks of a
        stage may differ in their number of blocks. Modules outside of the blocks, such as the head, are taken to be in
        the last stage, which has accordingly fewer blocks.
        """
        blocks, number = max(1, self.num_blocks), stages * chunks
        if stages == 1 or not self.num_blocks or not passes.has_rest or blocks < number:
            return 1.0, blocks / stages, blocks / stages
        key = passes.operators, passes.recompute, stages, chunks
        if key not in self._cuts:
            whole = self._cut_in(passes, stages, chunks, 1)
            self._cuts[key] = whole if whole[0] <= UNEVEN else self._cut_in(passes, stages, chunks, 2)
        return self._cuts[key]

    def _cut_in(self, passes: PassCost, stages: int, chunks: int, parts: int) -> tuple[float, float, float]:
        """Returns what :meth:`_cut` does, if stages may begin at each of the ``parts`` equal parts of a block."""
        blocks, rest = parts * self.num_blocks, passes.rest_s
        of_block = (passes.forward_s + passes.backward_s - rest) / blocks
        end = blocks * passes.rest_flops / (1 - passes.rest_flops)  # the head in blocks; FLOPs decide where cuts are
        cuts = []
        for last in range(chunks - 1, blocks // stages + 1):  # the last chunk may have the head alone
            others = -(-(blocks - last) // (stages - 1))
            cuts.append((max(others, last + end), -last, others))
        _, fewer, others = min(cuts)
        slowest = max(1.0, max(others * of_block, rest - fewer * of_block) * stages / (rest + blocks * of_block))
        return slowest, others / parts, -fewer / parts

    def _samples(self, layout: Layout) -> int:
        return -(-self.batch // num_shares(layout))

    def _passes(self, operators: tuple[Factor, ...], recompute: str | None, samples: int) -> PassCost | None:
        """Returns the cost of the passes of a microbatch of ``samples``; None if the model refuses the operators.

        It is extrapolated from rehearsals with few and with more samples. Operators with options, which few layouts
        have, are rehearsed with ``samples`` alone. Recomputation is rehearsed with the larger number alone, and what it
        adds is taken to grow in proportion.
        """
        key = operators, recompute, samples
        if key not in self._of_passes:
            is_large = samples > MOST_EXTRAPOLATED and bool(self.refuses_microbatches)
            is_exact = is_large or any(factor.options for factor in operators)
            sizes: tuple[int, ...] = (samples,) if is_exact else tuple(size * self.fewest for size in FEW_SAMPLES)
            few, *more = (self._read(operators, None, size) for size in sizes if size <= max(self.batch, sizes[0]))
            if few is None:  # the model may not take so few samples
                few, sizes, more = (more or [few])[0], sizes[len(more) :], []
            own = (more or [few])[0] if recompute is None else self._read(operators, recompute, sizes[len(more)])
            readings = [few, own, *more]
            self._of_passes[key] = (
                None
                if any(reading is None for reading in readings)
                else PassCost.of(
                    operators, recompute, samples, self.num_blocks, sizes, [reading for reading in readings if reading]
                )
            )
        return self._of_passes[key]

    def _read(self, operators: tuple[Factor, ...], recompute: str | None, samples: int) -> OperatorsAlone | None:
        """Returns what estimates need of a rehearsal of microbatches of so many samples; None if it is refused.

        There are several microbatches, since the second one adds its gradients to those of the first.
        """
        key = Layout(operators, FEW_MICROBATCHES, self.precision, recompute, self._own_statistics), samples
        if key not in self._alone:
            records = self.alone(key[0], num_shares(key[0]) * samples)
            self._alone[key] = None if records is None else OperatorsAlone.of(self.pricing, records)
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
        """Returns the shares of state that a rank holds under a factor's options; None if a strategy refuses them.

        They are extrapolated linearly in 1 / (number of ranks) from those of :data:`FEW_RANKS`.
        """
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
        shares = []
        for size in FEW_RANKS:
            few = tuple(Factor(factor.axis, (size,), options) for options in ((), factor.options))
            plain, own = (self._state(Layout((few_factor,), 1, self.precision)) for few_factor in few)
            if plain is None or own is None:
                return None
            wholes = (*plain[:4], plain.parameters, plain.optimizer, plain.gradients)
            parts = [a / b if b else 1.0 for a, b in zip(own[:7], wholes, strict=True)]
            few_of = (Layout((few[1],), n, self.precision, own_statistics=self._own_statistics) for n in (1, 2))
            once, twice = map(self.summed_bytes, few_of)
            shares.append(StateShares(*parts)._replace(repeated=twice / once - 1 if once else 0.0))
        return tuple(shares)

    def _state(self, layout: Layout) -> StateShares | None:
        """Returns the state of a layout's first rank, in bytes (:func:`state_of`); None if a strategy refuses it."""
        assert self.plan is not None, "asked for options alone"
        if layout not in self._states:
            self._states[layout] = None
            with suppress(LayoutError, PlanError):
                self._states[layout] = state_of(self.plan(layout))
        return self._states[layout]
