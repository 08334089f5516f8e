"""ZeRO / FSDP: each data-parallel rank stores a shard of the training state instead of a full copy.

::

    dp4              parameters    gradients     optimizer     sent in a step of m microbatches, (n-1)/n P times
    dp4              full          full          full          2
    dp4/zero1        full          shard         shard         2
    dp4/zero2        full          shard         shard         m + 1
    dp4/zero3        shard         shard         shard         3 m
    dp2x4/zero3      hybrid: two replicas of four shards each; replicas sum the gradients of their shards once a step

Stage 1 reduce-scatters gradients once a step: until then a rank holds them whole. Stage 2 does so after each
microbatch, so that the full gradients of one param group at a time are in memory. Stage 3 also unshards a param group
before it is used, forward and backward, and reshards it after. In stages 1 and 2 the updated shards are gathered when
the next step first uses them, prefetched while the group before computes. FSDP calls stages 2 and 3 SHARD_GRAD_OP and
FULL_SHARD, and the hybrid HSDP.

``offload`` stores shards and optimizer state in host memory (on a CPU nothing moves), ``offload:disk`` in files that
are mapped into memory. Both update one param group at a time, so that one group's state is in compute memory.

Shapes: a sharded parameter, its gradient and its optimizer state are 1-D: the elements of the parameter that are in
    this rank's shard of its flat sequence. Some ranks may have none of them.
Traffic: for each flat sequence of P elements, stage 1 one all-gather and one reduce-scatter; stage 2 one all-gather
    and m reduce-scatters; stage 3 in each microbatch one all-gather forward, one backward and one reduce-scatter. In
    stage 3 a sequence that two chunks of one stage use is gathered for each of them, and a sequence that a forward uses
    again after many others is gathered for each use. Frozen parameters are gathered and not reduced.
    Stages 1 and 2 gather also the groups that a forward does not use. In stage 3 ranks compare their calls, once a
    step, in one or two all-reduces of two numbers for each set of ranks with shards (recorded under ``core``).
Raises: PlanError, in stage 3, on every rank: ranks that share shards use param groups in different orders.
Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054; two levels: Wang et al. 2023, "ZeRO++", arXiv:2306.10209.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal

from shardwright.analysis.recorded.module_log import UseEvent
from shardwright.analysis.recorded.recording import Recording
from shardwright.analysis.traced.structure import owners
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError
from shardwright.forward_stack import Rung
from shardwright.mesh import Coord
from shardwright.plan.alike_ranks import TrafficCuts
from shardwright.plan.event_stages import EventStages
from shardwright.plan.option import StrategyOption
from shardwright.plan.param_groups import ParamGroup, count_gathers, merge_groups
from shardwright.plan.plan import Job, Plan
from shardwright.plan.traffic import StepCalls, Traffic
from shardwright.runtime.applied import AppliedStrategy
from shardwright.runtime.offload_storage import OffloadStorage, OffloadTarget
from shardwright.strategies.zero.flat_groups import FlatGroup, chunks_using, flat_groups, shard_state
from shardwright.strategies.zero.sharded_state import FSDPState
from shardwright.strategy import check_own_writes

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True)
class Zero:
    """Shards optimizer state (stage 1), gradients (stage 2) and parameters (stage 3) over ``dp``."""

    name: ClassVar[str] = "zero"
    axis: ClassVar[str] = "dp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "state"
    default: ClassVar[bool] = False
    options: ClassVar[Mapping[str, StrategyOption]] = {
        # bucket:0, since the models of tests are so small that they would be one param group
        "zero3": StrategyOption(
            "parameters, gradients and optimizer state sharded; parameters are unsharded before use",
            ("zero3/bucket:0",),
            sizes=("2x2",),
        ),
        "zero2": StrategyOption(
            "gradients and optimizer state sharded; gradients reduce-scattered after each microbatch",
            ("zero2/bucket:0",),
            sizes=("2x2",),
        ),
        "zero1": StrategyOption("optimizer state sharded", ("zero1/bucket:0", "zero1/offload:disk/bucket:0")),
        "ahead": StrategyOption(
            "how many param groups are prefetched, and how many reductions stay under way: ahead:1",
            ("ahead:0", "ahead:2"),
            searched=(),
        ),
        "offload": StrategyOption(
            "shards and optimizer state in host memory, or in mapped files: offload:disk",
            ("offload:disk",),
            searched=("offload",),  # files take longer, and the speed of a disk is in no profile
        ),
    }
    source: ClassVar[str] = "Rajbhandari et al. 2020, arXiv:1910.02054"

    def place(self, job: Job, plan: Plan) -> Plan:
        """Returns the plan with the training state of the layout's ZeRO stage sharded over ``dp``.

        Raises: LayoutError: the layout has several ZeRO stages or none, or gives one a value; ``ahead`` has no whole
            number as its value; or ``offload`` has a value other than ``disk``.
        """
        stage = _stage(plan)
        reshards = stage == 3 and plan.mesh["dp"] > 1
        _num_prefetch(plan)  # used in apply(), but a bad value is refused here, before anything is sent
        if reshards:
            plan = replace(plan, param_groups=_groups_as_used(job, plan))
        groups = _groups(plan, stage)
        sharded = {name for group in groups for name in group.parameters}
        check_own_writes(job.graph, sharded, str(plan.layout.factor("dp")), replaced_only=not reshards)
        for path in dict.fromkeys(use.module for use in plan.uses if use.parameter in sharded):
            plan = plan.wraps(path, Rung.UNSHARD, self.name)
        return shard_state(plan, "dp", groups, reshards=reshards, offload=_offload_target(plan))

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> AppliedStrategy:
        """Flattens and shards this rank's parameters, and hooks the model so that they are unsharded before use.

        Returns the event listeners, sharded parameters and offloaded state for the run. All ranks call it: with
        ``offload`` they all-gather whether any of them lacks space.

        Raises: PlanError, on every rank: there is no space on disk for offloaded shards.
        """
        stage, target, storage = _stage(plan), _offload_target(plan), None
        if target is not None and _moves(target, job.stands_for or axes["dp"].device.type):
            storage = OffloadStorage(target, axes["world"], job.offload_folder)
        groups, world = _groups(plan, stage), axes["world"].for_strategy("core")
        return FSDPState(job.model, plan, axes["dp"], groups, stage, _num_prefetch(plan), world, storage).applied()

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """Returns one step's all-gathers and reduce-scatters of the flat parameters of the rank at ``coord``.

        The all-reduces by which ranks compare their calls in stage 3 are not among them.
        """
        stage, size, num_microbatches = _stage(plan), plan.mesh["dp"], plan.layout.num_microbatches
        collectives, times = [], {param_group.name: param_group.num_gathers for param_group in plan.param_groups}
        for group in _groups(plan, stage, coord):
            first, num_elements = group.parameters[0], group.num_elements(plan, coord)
            if not num_elements or size == 1:
                continue
            chunks = chunks_using(plan, group.param_group, coord)
            gathers = 2 * num_microbatches * times[group.param_group] * len(chunks) if stage == 3 else 1
            num_bytes = num_elements * plan.compute_dtypes[first].itemsize
            collectives.append(Traffic("all_gather", "dp", num_bytes, size, gathers, group.param_group))
            if group.trained:
                wide = plan.stored_dtypes if first in plan.fp32_sums else plan.compute_dtypes
                sums = 1 if stage == 1 else num_microbatches
                num_bytes = num_elements * wide[first].itemsize
                collectives.append(Traffic("reduce_scatter", "dp", num_bytes, size, sums, group.param_group))
        return tuple(collectives)

    def traffic_cuts(self, plan: Plan) -> TrafficCuts:
        """Returns no cuts: messages have the sizes of unsharded parameters, which the plan has, equal along ``dp``."""
        return TrafficCuts()


def _groups(plan: Plan, stage: int, at: Coord | None = None) -> tuple[FlatGroup, ...]:
    # stages 1 and 2 save nothing on frozen parameters, so these stay full
    return flat_groups(plan, frozen=stage == 3, at=at)


def _groups_as_used(job: Job, plan: Plan) -> tuple[ParamGroup, ...]:
    """Returns the param groups as the forward uses them, with how often each is unsharded.

    Parameters inside a module that selects by values, such as a mixture of experts, are merged into one group. In
    groups of their own, ranks whose samples use different experts would unshard different groups. If a model does not
    run on the meta device, its forward is not known: then such ranks raise an error, and ``traffic`` states one use of
    each group.
    """
    recording: Recording | None = None
    with suppress(Exception):  # the user's forward may raise anything on meta tensors
        recording = job.graph.run.recording if job.graph is not None and len(plan.param_groups) > 1 else None
    groups = merge_groups(plan.param_groups, recording.selecting if recording is not None else ())
    forwards: list[Iterable[UseEvent]] = [recording.uses] if recording is not None else []
    if isinstance(plan.stages, EventStages):
        chunked = plan.stages.chunked
        forwards += [[("use", name) for name in chunked.weights_by_event(n)] for n in range(chunked.num_chunks)]
    sizes = {name: prod(layout.shape) * plan.compute_dtypes[name].itemsize for name, layout in plan.compute.items()}
    users = Counter(name for _, _, _, name in owners(job.model))
    shared = [name for name, number in users.items() if number > 1 and plan.stages is None]
    # The uses of a parameter may lie in different chunks. With ``holds`` each of these chunks gathers its group once
    # and keeps it until the chunk has run.
    return count_gathers(groups, forwards, sizes, shared=shared, holds=plan.stages is not None)


def _stage(plan: Plan) -> int:
    factor = plan.layout.chosen("dp")
    stages = [option for option in factor.options if option.name in STAGES]
    if len(stages) != 1 or stages[0].value is not None:
        name = stages[-1].name if stages else "zero1"
        raise LayoutError(
            "ZeRO has one stage",
            given=str(factor),
            allowed="one of zero1, zero2, zero3, without a value",
            fix=f"write dp{'x'.join(map(str, factor.sizes))}/{name}",
        )
    return STAGES[stages[0].name]


def _num_prefetch(plan: Plan) -> int:
    option = plan.layout.chosen("dp").option("ahead")
    if option is None:
        return 1
    if option.value is None or not option.value.isdecimal():
        raise LayoutError(
            "'ahead' needs a number of param groups",
            given=str(plan.layout.chosen("dp")),
            allowed="0, to unshard each group when it is used, or more",
            fix="write ahead:1",
        )
    return int(option.value)


def _offload_target(plan: Plan) -> OffloadTarget | None:
    """Returns where shards and optimizer state are offloaded to, host memory or disk; None without offloading.

    Raises LayoutError for any other place.
    """
    option = plan.layout.chosen("dp").option("offload")
    if option is None:
        return None
    if option.value not in (None, "disk"):
        raise LayoutError(
            "state is offloaded to host memory or to disk",
            given=str(plan.layout.chosen("dp")),
            allowed="offload, offload:disk",
            fix="write offload:disk",
        )
    return "host" if option.value is None else "disk"


def _moves(target: OffloadTarget, device: str) -> bool:
    """Returns whether the offload target is memory other than that of the ranks' device type."""
    return target == "disk" or device not in ("cpu", "meta")


STRATEGY = Zero()
