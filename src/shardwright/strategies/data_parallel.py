"""Data parallel: a replica of the model on each rank, the batch sharded, gradients summed over the replicas.

::

                 batch                      every rank: the full model
        +----------+----------+             gradient of the *global* mean:
        | rank 0   | rank 1   |               sum of the ranks' sums / sum of their counts
        +----------+----------+

Shapes: inputs (B, ...) on one device; (B / dp, ...) on a rank, the first B mod dp ranks holding one sample more.
Traffic: in the last microbatch's backward, one all-reduce of each param group's gradients, P elements in all, while
    the groups before it compute. For each call of a BatchNorm with C channels, an all-gather of 2 C + 1 numbers from
    each rank forward, and an all-reduce of 2 C numbers backward.
Source: Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704 (buckets reduced while backward runs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from shardwright.analysis.traced.batch_norms import batch_norms, derived_batch_norms, uses_batch
from shardwright.axes import LayoutAxis
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError
from shardwright.forward_stack import Rung
from shardwright.mesh import Coord
from shardwright.operators.batch_norm import share_statistics
from shardwright.plan.alike_ranks import TrafficCuts
from shardwright.plan.option import StrategyOption
from shardwright.plan.param_groups import split_into_param_groups
from shardwright.plan.plan import Job, Plan
from shardwright.plan.traffic import StepCalls, Traffic, statistics_traffic, sync_traffic
from shardwright.strategy import check_samples_apart


def _written(entry: Mapping[str, Any]) -> Sequence[str]:
    """Returns the option texts of a layout in dictionary form: ``zero3`` for ``{"size": 4, "zero": 3}``.

    Zero 0 is plain data parallel, without an option.
    """
    return [f"zero{entry['zero']}" if entry.get("zero") else "", entry.get("options", "")]


AXIS = LayoutAxis(
    "dp",
    order=10,
    kind="copies",
    mesh_axes=(("dp",), ("replica", "dp")),
    sizes="dp4, or replicas x slices: dp2x4",
    keyword="data",
    keys={"zero": (int,)},
    written=_written,
    also={
        **dict.fromkeys(("ddp", "replicate", "replica", "ep"), ""),  # ep: other tools place experts on dp's ranks
        **dict.fromkeys(("fsdp", "hsdp", "shard"), "zero3"),
        **dict.fromkeys(("zero", "stage", "z", "deepspeed"), "zero{3}"),
    },
)
"""The layout axis ``dp``: its ranks are replicas of the model on different samples.

``dp2x4`` makes two mesh axes of it: ``replica``, of size 2, and ``dp``, of size 4, over which ZeRO shards.
"""


@dataclass(frozen=True)
class DataParallel:
    """Shards the batch over ``dp``; each rank's gradients become terms of a sum, which gradient sync adds up.

    Parameters are whole on every rank; :class:`~shardwright.strategies.zero.zero.Zero` shards training state on top.
    """

    name: ClassVar[str] = "data_parallel"
    axis: ClassVar[str] = "dp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "operators"
    default: ClassVar[bool] = True
    options: ClassVar[Mapping[str, StrategyOption]] = {
        "bucket": StrategyOption(
            "least KiB of a param group, which is reduced as one: bucket:1024", ("bucket:0",), searched=()
        ),
        "fp32-sums": StrategyOption(
            "with bf16 or fp16, gradients are summed in fp32: over microbatches and ranks", searched=()
        ),
    }
    source: ClassVar[str] = "Li et al. 2020, arXiv:2006.15704"

    def place(self, job: Job, plan: Plan) -> Plan:
        """Returns the plan with dim 0 of every model input sharded over ``dp``.

        The option ``bucket`` sets the least size of a param group, and ``fp32-sums`` the dtype of gradient sums.

        Raises: LayoutError: a layer mixes the samples of a batch, ``bucket`` has no whole number as its value, or a
            layout such as ``dp2x4`` has no ZeRO stage.
        """
        factor = plan.layout.chosen("dp")
        shards_state = any(option.name not in self.options for option in factor.options)  # ZeRO's options
        if len(factor.sizes) > 1 and not shards_state:
            raise LayoutError(
                "replicas x shards need a strategy that shards the state",
                given=str(factor),
                allowed=f"dp{factor.size}, or {factor}/zero3",
                fix=f"write dp{factor.size}",
            )
        if factor.size > 1:
            check_samples_apart(job.model, str(factor), job.graph)
        bucket = factor.option("bucket")
        if bucket is not None:
            if bucket.value is None or not bucket.value.isdecimal():
                what, allowed = "'bucket' needs a size", "a whole number of KiB"
                raise LayoutError(what, given=str(factor), allowed=allowed, fix="write bucket:1024")
            groups = split_into_param_groups(job.model, least_bytes=int(bucket.value) * 1024)
            plan = replace(plan, param_groups=groups)
        if factor.option("fp32-sums") is not None:
            plan = replace(plan, fp32_sums=frozenset(plan.compute))
        for axis in factor.mesh_axes:
            plan = plan.cut_inputs(axis, dim=0)
        alike = job.graph.norms_without_samples if job.graph is not None and plan.statistics else set()
        plan = replace(plan, statistics=tuple(path for path in plan.statistics if path not in alike))
        for path in plan.statistics if factor.size > 1 else ():
            plan = plan.wraps(path, Rung.STATISTICS, self.name)
        return plan

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> None:
        """Makes every BatchNorm of the model normalize by the statistics of all data-parallel ranks.

        The sums of gradients are derived from the plan and need no change to the model.
        """
        over = [axes[name] for name in plan.layout.chosen("dp").mesh_axes]
        norms = (*batch_norms(job.model), *derived_batch_norms(job.model))
        shared = (norm for path, norm in norms if path in plan.statistics or not uses_batch(norm))
        share_statistics(shared, over, by=self.name)  # also of those in evaluation, which may train later

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """Returns one step's all-reduces of gradients, and all-gathers and all-reduces of BatchNorm statistics."""
        return tuple(
            collective
            for axis in plan.layout.chosen("dp").mesh_axes
            for collective in (*sync_traffic(plan, coord, axis), *statistics_traffic(plan, batch, coord, axis))
        )

    def traffic_cuts(self, plan: Plan) -> TrafficCuts:
        """Returns no cuts: the sizes of messages follow from those of parameters and inputs, which the plan has."""
        return TrafficCuts()


STRATEGY = DataParallel()
