"""Data parallel: one model copy per rank, the batch cut, gradients summed over the copies.

::

                 batch                      every rank: the whole model
        +----------+----------+             gradient of the *global* mean:
        | rank 0   | rank 1   |               sum of the ranks' sums / sum of their counts
        +----------+----------+

Shapes: inputs (B, ...) on one device; (B / dp, ...) on a rank, the first B mod dp ranks holding one sample more.
Traffic: backward, one all-reduce of each unit's gradients, P elements in all, while the units before compute;
    none for any microbatch but the last. For each BatchNorm of C channels, 2 C + 1 numbers of each rank forward,
    2 C summed backward.
Source: Li et al. 2020, "PyTorch Distributed", arXiv:2006.15704 (buckets reduced while backward runs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from shardwright.analysis.batch_norms import batch_norms
from shardwright.axes import LayoutAxis
from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError
from shardwright.forward_stack import Rung
from shardwright.mesh import Coord
from shardwright.operators.batch_norm import share_statistics
from shardwright.plan.option import StrategyOption
from shardwright.plan.param_groups import split_into_param_groups
from shardwright.plan.plan import Job, Plan
from shardwright.plan.traffic import StepCalls, Traffic, statistics_traffic, sync_traffic
from shardwright.strategy import check_samples_apart


def _written(entry: Mapping[str, Any]) -> Sequence[str]:
    """The options of the dictionary form's entry: ``{"size": 4, "zero": 3}``, where 0 is plain."""
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
)
"""Copies of the model, each with samples of its own; ``replica`` is the first number of ``dp2x4``."""


@dataclass(frozen=True)
class DataParallel:
    """Cuts the batch over ``dp``; every gradient becomes a sum over it, which the derived sync makes whole."""

    name: ClassVar[str] = "data_parallel"
    axis: ClassVar[str] = "dp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "operators"
    default: ClassVar[bool] = True
    options: ClassVar[Mapping[str, StrategyOption]] = {
        "bucket": StrategyOption("least KiB of parameters that travel together: bucket:1024", ("bucket:0",)),
        "fp32-sums": StrategyOption(
            "with bf16 or fp16, gradients are added up in fp32: over microbatches, and over ranks"
        ),
    }
    source: ClassVar[str] = "Li et al. 2020, arXiv:2006.15704"

    def place(self, job: Job, plan: Plan) -> Plan:
        """Cuts dim 0 of the inputs. Raises LayoutError for layers that mix the samples in unknown ways."""
        factor = plan.layout.factor("dp")
        assert factor is not None, "chosen for a layout with dp"
        cuts_state = any(option.name not in self.options for option in factor.options)  # another strategy's, of dp
        if len(factor.sizes) > 1 and not cuts_state:
            raise LayoutError(
                "replicas x slices need a strategy that cuts the state into slices",
                given=str(factor),
                allowed=f"dp{factor.size}, or {factor}/zero3",
                fix=f"write dp{factor.size}",
            )
        if factor.size > 1:
            check_samples_apart(job.model, str(factor))
        bucket = factor.option("bucket")
        if bucket is not None:
            plan = replace(
                plan,
                param_groups=split_into_param_groups(job.model, least_bytes=_kib(str(factor), bucket.value) * 1024),
            )
        if factor.option("fp32-sums") is not None:
            plan = replace(plan, fp32_sums=frozenset(plan.compute))
        for axis in factor.mesh_axes:
            plan = plan.cut_inputs(axis, dim=0)
        for path in plan.statistics if factor.size > 1 else ():
            plan = plan.wraps(path, Rung.STATISTICS, self.name)
        return plan

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> None:
        """Operators see a smaller batch, and gradient sync is derived from the plan: only BatchNorms ask the others."""
        over = [axes[name] for name in _axes(plan)]
        share_statistics((norm for _, norm in batch_norms(job.model)), over, by=self.name)

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """One all-reduce of each unit's gradients; BatchNorms' statistics."""
        return tuple(
            each
            for axis in _axes(plan)
            for each in (*sync_traffic(plan, batch, coord, axis), *statistics_traffic(plan, batch, coord, axis))
        )


def _axes(plan: Plan) -> tuple[str, ...]:
    factor = plan.layout.factor("dp")
    assert factor is not None, "chosen for a layout with dp"
    return factor.mesh_axes


def _kib(given: str, value: str | None) -> int:
    if value is None or not value.isdecimal():
        raise LayoutError(
            "'bucket' needs a size", given=given, allowed="a whole number of KiB", fix="write bucket:1024"
        )
    return int(value)


STRATEGY = DataParallel()
