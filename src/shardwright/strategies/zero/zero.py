"""ZeRO: the state of data parallel ranks cut into slices, instead of a copy on each.

::

    dp4              parameters    gradients     optimizer     sent in a step of m microbatches, (n-1)/n P times
    dp4              whole         whole         whole         2
    dp4/zero1        whole         slice         slice         2
    dp4/zero2        whole         slice         slice         m + 1
    dp4/zero3        slice         slice         slice         3 m
    dp2x4/zero3      two replicas of four slices each: slices' gradients are summed over the replicas once a step

Stage 1 sums gradients once a step, into slices; stage 2 after each microbatch, so that no whole gradient outlives its
unit's backward; stage 3 gathers a unit before it is used, forward and backward, and drops it after. Updated slices are
gathered (stages 1 and 2) where the next step uses them first, while the unit before computes.

With ``offload`` slices and optimizer state rest in host memory (on a CPU they do as it is), with ``offload:disk`` in
files that are mapped into memory, and are updated unit by unit: a step works on one unit's state at a time.

Shapes: at rest a parameter, its gradient and its optimizer state are 1-D: what of this rank's slice of its unit's
    sequence is the parameter's, so some parameters lie on some ranks alone.
Traffic: for each unit's sequence of P elements, stage 1 one all-gather and one reduce-scatter; stage 2 one all-gather
    and m reduce-scatters; stage 3 in each microbatch one all-gather forward, one backward, one reduce-scatter (a
    sequence that two chunks of one stage use is gathered for each). Frozen parameters are gathered and not summed.
    A unit that a forward does not use is gathered all the same in stages 1 and 2. In stage 3 ranks compare what they
    have gathered, in one or two all-reduces of two numbers for each set of ranks with slices: the core's, a step.
Raises: PlanError, in stage 3, on every rank: ranks that share slices use units in different orders.
Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054; two levels: Wang et al. 2023, "ZeRO++", arXiv:2306.10209.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from shardwright.comm.axis import Axis
from shardwright.errors import LayoutError
from shardwright.layout import Factor
from shardwright.mesh import Coord
from shardwright.plan.plan import Job, Plan
from shardwright.plan.traffic import StepCalls, Traffic
from shardwright.runtime.applied import Applied
from shardwright.runtime.offload_storage import OffloadStorage, Place
from shardwright.strategies.zero.flat_groups import Group, chunks_with, groups, rest_in_slices
from shardwright.strategies.zero.sharded_state import SlicedState

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


@dataclass(frozen=True)
class Zero:
    """Cuts optimizer state (1), gradients (2) and parameters (3) into slices over ``dp``."""

    name: ClassVar[str] = "zero"
    axis: ClassVar[str] = "dp"
    phase: ClassVar[Literal["operators", "stages", "state"]] = "state"
    default: ClassVar[bool] = False
    options: ClassVar[Mapping[str, str]] = {
        "zero3": "parameters, gradients and optimizer state in slices; units are gathered before use",
        "zero2": "gradients and optimizer state in slices, summed after each microbatch",
        "zero1": "optimizer state in slices",
        "ahead": "how many units are gathered before they are used, and reduced after: ahead:1",
        "offload": "slices and optimizer state in host memory, or in mapped files: offload:disk",
    }
    source: ClassVar[str] = "Rajbhandari et al. 2020, arXiv:1910.02054"

    def place(self, job: Job, plan: Plan) -> Plan:
        """Cuts what rests into slices. Raises LayoutError for two stages at once, or none."""
        stage = _stage(plan)
        drops = stage == 3 and plan.mesh["dp"] > 1
        _ahead(plan)
        return rest_in_slices(plan, "dp", _groups(plan, stage), drops=drops, away=_place(plan))

    def apply(self, job: Job, axes: Mapping[str, Axis], plan: Plan) -> Applied:
        """Flattens this rank's parameters and keeps its slices."""
        stage = _stage(plan)
        place, storage = _place(plan), None
        if place is not None and _is_apart(place, axes["dp"].device.type):
            storage = OffloadStorage(place, axes["world"], job.offload_folder)
        chosen = _groups(plan, stage)
        everyone = axes["world"].for_strategy("core")
        return SlicedState(job.model, plan, axes["dp"], chosen, stage, _ahead(plan), everyone, storage).applied()

    def traffic(self, plan: Plan, batch: StepCalls, coord: Coord) -> tuple[Traffic, ...]:
        """The gathers and sums of every sequence that this rank has a part of."""
        stage, size, num_microbatches = _stage(plan), plan.mesh["dp"], plan.layout.num_microbatches
        found = []
        for group in _groups(plan, stage):
            first, num_elements = group.parameters[0], group.num_elements(plan, coord)
            if not num_elements or size == 1:
                continue
            gathers = 2 * num_microbatches * len(chunks_with(plan, group.unit, coord)) if stage == 3 else 1
            found.append(Traffic("all_gather", "dp", num_elements * plan.dtypes[first].itemsize, size, gathers))
            if group.trained:
                wide = plan.masters if first in plan.wide_sums else plan.dtypes
                sums = 1 if stage == 1 else num_microbatches
                found.append(Traffic("reduce_scatter", "dp", num_elements * wide[first].itemsize, size, sums))
        return tuple(found)


def _groups(plan: Plan, stage: int) -> tuple[Group, ...]:
    return groups(plan, frozen=stage == 3)


def _factor(plan: Plan) -> Factor:
    factor = plan.layout.factor("dp")
    assert factor is not None, "chosen for a layout with dp"
    return factor


def _stage(plan: Plan) -> int:
    factor = _factor(plan)
    given = [option for option in factor.options if option.name in STAGES]
    if len(given) != 1 or given[0].value is not None:
        name = given[-1].name if given else "zero1"
        raise LayoutError(
            "ZeRO has one stage",
            given=str(factor),
            allowed="one of zero1, zero2, zero3, without a value",
            fix=f"write dp{'x'.join(map(str, factor.sizes))}/{name}",
        )
    return STAGES[given[0].name]


def _ahead(plan: Plan) -> int:
    option = _factor(plan).option("ahead")
    if option is None:
        return 1
    if option.value is None or not option.value.isdecimal():
        raise LayoutError(
            "'ahead' needs a number of units",
            given=str(_factor(plan)),
            allowed="0, to gather nothing before it is used, or more",
            fix="write ahead:1",
        )
    return int(option.value)


def _place(plan: Plan) -> Place | None:
    """Where state rests, if that is not where it computes."""
    option = _factor(plan).option("offload")
    if option is None:
        return None
    if option.value not in (None, "disk"):
        raise LayoutError(
            "state rests in host memory or on disk",
            given=str(_factor(plan)),
            allowed="offload, offload:disk",
            fix="write offload:disk",
        )
    return "host" if option.value is None else "disk"


def _is_apart(place: Place, device: str) -> bool:
    """Whether it is other memory than that in which ranks compute."""
    return place == "disk" or device not in ("cpu", "meta")


STRATEGY = Zero()
