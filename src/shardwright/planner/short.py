"""``ShortModel``: a model with few of its repeated blocks, which a search plans and rehearses in place of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.analysis.on_meta.operator_results import tensors_of
from shardwright.analysis.recorded.recording import Recording
from shardwright.analysis.traced.batch_norms import ignoring_batch_statistics
from shardwright.axes import mesh_axes
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Factor, Layout
from shardwright.parallelize.auto import num_shares, tokens_of
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan, without_storage
from shardwright.plan.plan import Job, Plan
from shardwright.planner.blocks import AlikeBlocks, num_parameters
from shardwright.planner.layout_records import LayoutRecords
from shardwright.planner.outline import ModelPlans
from shardwright.planner.records import (
    FEWER_AND_MORE,
    WHERE_RECOMPUTED,
    WHERE_UNSHARDED,
    first_rows,
    record_layout,
)
from shardwright.planner.records_file import RecordsFile

MOST_OF_MODEL = 0.8
"""If repeated blocks have this share of a model's parameters or more, each pipeline stage is taken to need a block."""

NUM_BLOCKS = FEWER_AND_MORE[-1] + 1
"""The number of blocks of a short model: the fewest from which rehearsals with one block and with two are made."""


TRIED_SAMPLES = (1, 2, 3, 4, 6, 8)
"""The numbers of samples with which a forward is tried, since a model's code may not accept a single one."""

_UPDATES = frozenset(("add_", "sub_", "mul_", "div_", "lerp_", "addcmul_", "addcdiv_"))
"""The operators that update a tensor in place from its former values."""


@dataclass
class ShortModel:
    """A model of which only a few repeated blocks are planned and rehearsed, for the estimates of a search.

    It is the whole model if it has too few alike blocks, or if the user gave roles to layers by name.
    """

    model: nn.Module
    loss: nn.Module
    batch: tuple[Any, Any]
    device_type: str
    roles: Mapping[str, str]
    model_plans: ModelPlans
    kept: RecordsFile = field(default_factory=RecordsFile)
    """The cache of what earlier searches found out about the model, to which this one adds."""
    _records: dict[tuple[Layout, int], LayoutRecords] = field(default_factory=dict)
    """The results of :meth:`record`, kept because searches on several clusters rehearse the same layouts."""

    @property
    def blocks(self) -> AlikeBlocks | None:
        """The repeated blocks of the model, or None if no two are alike."""
        return self.model_plans.blocks

    @property
    def most_stages(self) -> int:
        """The most pipeline stages that each have a whole block: the number of repeated blocks.

        It is 0 (unknown) if no blocks are alike, or if these have less than 80 % of the parameters, so that other
        modules could be stages too.
        """
        if self.blocks is None:
            return 0
        held = num_parameters([self.model.get_submodule(name) for name in self.blocks.names])
        return self.blocks.number if held >= MOST_OF_MODEL * num_parameters([self.model]) else 0

    @cached_property
    def _short(self) -> nn.Module:
        return self._of_blocks(NUM_BLOCKS)

    def _of_blocks(self, number: int) -> nn.Module:
        few = self.blocks is not None and self.blocks.number > number and not self.roles
        return self.model_plans.shortened(number) if few else self.model

    @cached_property
    def sent_bytes(self) -> int:
        """The bytes of one sample that enter a repeated block, which is what a pipeline stage sends to the next.

        It is 0 if no blocks are alike, or if the model does not run on the meta device.
        """
        return self.kept.find("sent", self._sent_bytes)

    def _sent_bytes(self) -> int:
        if self.blocks is None:
            return 0
        sizes: list[int] = []
        model = without_storage(self._short)
        block = model.get_submodule(self.blocks.names[1])

        def count(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            sizes.append(sum(tensor.nbytes for tensor in tensors_of(args) or tensors_of(named)))

        block.register_forward_pre_hook(count, with_kwargs=True)
        self._runs(model, self.fewest)
        return sizes[0] // self.fewest if sizes else 0

    def _runs(self, model: nn.Module, samples: int) -> bool:
        """Runs a forward on the meta device; returns whether the model's code takes so many samples."""
        with torch.no_grad(), ignoring_batch_statistics(model), on_meta(model, values=False):
            try:
                call_model(model, first_rows(self.batch, samples)[0])
            except Exception:  # the user's code may raise anything, as an assertion on the number of samples
                return False
        return True

    @cached_property
    def fewest(self) -> int:
        """The fewest samples that the model's code takes, of a few numbers that are tried; 1 if it takes none."""

        def found() -> int:
            tried = (samples for samples in TRIED_SAMPLES if self._runs(without_storage(self._short), samples))
            return next(tried, 1)

        return self.kept.find("fewest", found)

    def record(self, layout: Layout, samples: int) -> LayoutRecords:
        """Returns the operators, messages and memory of a step with a global batch of ``samples`` samples.

        ``layout`` has no pipeline stages. The records are of the short model where these can be extrapolated to the
        whole, and else of the whole model; pricing them gives the cost of the whole model.

        Raises: LayoutError, PlanError: the model cannot have the layout or does not run on the meta device.
        """
        if (layout, samples) not in self._records:
            recorded = partial(self._recorded, layout, samples)
            self._records[layout, samples] = self.kept.find(("short", str(layout), samples), recorded)
        return self._records[layout, samples]

    def _recorded(self, layout: Layout, samples: int) -> LayoutRecords:
        rows = first_rows(self.batch, samples)
        few = FEWER_AND_MORE if layout.recompute is None else WHERE_RECOMPUTED
        if any(factor.options for factor in layout.factors) and self.plan(layout).unsharded_on_use:
            few = WHERE_UNSHARDED
        short = self._of_blocks(few[-1] + 1)
        # whether blocks are used in the same way is known of the whole model, so the short one gets no inputs to check
        plans = self.model_plans if short is self.model else ModelPlans(short, known=self.model_plans.known)
        job = self._job(short, layout, rows)
        records = record_layout(job, layout, rows, self.device_type, model_plans=plans)
        if self.blocks is None or short is self.model:
            return records
        if records.note:  # rehearsed whole, so that it cannot be extrapolated to more blocks
            job = self._job(self.model, layout, rows)
            return record_layout(job, layout, rows, self.device_type, model_plans=self.model_plans)
        return replace(records, num_blocks=((self.blocks.number,),))

    @cached_property
    def refuses_microbatches(self) -> str:
        """Why the model cannot have ``mb`` without ``own-statistics``, as BatchNorm cannot; "" if it can."""
        return self.kept.find("microbatches", self._why_not_in_microbatches)

    def _why_not_in_microbatches(self) -> str:
        layout = Layout((), 2)
        try:
            self.plan(layout)
            graph = self._job(self._short, layout, first_rows(self.batch, 2 * self.fewest)).graph
            changed = "" if graph is None or graph.failure else _changed_buffer(graph.run.recording)
            if changed:
                return f"'{changed}' changes with every call, and 'mb' makes several calls a step"
        except LayoutError as refused:
            with suppress(LayoutError, PlanError):
                self.plan(Layout((), 2, own_statistics=True))
                return refused.what
        except PlanError:  # an error of the model itself, which is raised again where a layout is recorded
            pass
        return ""

    def plan(self, layout: Layout) -> Plan:
        """Returns the plan of the short model under a layout, for a batch with one sample or a few for each rank.

        Raises: LayoutError, PlanError: the short model cannot have the layout.
        """
        rows = first_rows(self.batch, layout.num_ranks * self.fewest)
        return make_plan(self._job(self._short, layout, rows), layout)[0]

    def summed_bytes(self, layout: Layout) -> int:
        """Returns the payload bytes of the all-reduces and reduce-scatters in a step of the short model.

        The bytes are those of rank 0, as strategies state them. Under a layout of model copies they are the sums of
        gradients.
        """
        rows = first_rows(self.batch, num_shares(layout) * self.fewest)
        job = self._job(self._short, layout, rows)
        plan, strategies = make_plan(job, layout)
        stated = StepTraffic(job, plan, strategies, rows[0]).at(dict.fromkeys(plan.mesh.axes, 0))
        sums = (
            message
            for traffic in stated.values()
            for message in traffic
            if message.kind in ("all_reduce", "reduce_scatter")
        )
        return sum(message.num_bytes * message.times for message in sums)

    def ends(self, axis: str) -> tuple[float, float]:
        """Returns, for two stages on ``axis``, the shares that each holds of the parameters outside repeated blocks.

        A parameter that both stages use, such as a tied table, is held by both. If the model cannot be cut into two
        stages, both shares are 1.
        """
        blocks = () if self.blocks is None else self.blocks.names
        layout = Layout((Factor(axis, (2,)),), 2, own_statistics=bool(self.refuses_microbatches))
        try:
            plan = self.plan(layout)
        except (LayoutError, PlanError):
            return 1.0, 1.0
        rest_names = [name for name in plan.state if not any(name.startswith(f"{block}.") for block in blocks)]
        axes = mesh_axes("stages")
        held = [sum(plan.parameter_bytes(name, {**dict.fromkeys(plan.mesh.axes, 0), **{
                mesh_axis: stage for mesh_axis in axes if mesh_axis in plan.mesh.axes}}) for name in rest_names)
                for stage in range(2)]  # fmt: skip
        whole = sum(parameter.nbytes for name, parameter in self._short.named_parameters() if name in rest_names)
        return (held[0] / whole, held[1] / whole) if whole else (0.0, 0.0)

    def _job(self, model: nn.Module, layout: Layout, rows: tuple[Any, Any]) -> Job:
        runs = self.model_plans.known.runs
        return job_for(model, self.loss, layout, rows[0], tokens_of(rows[0], layout), self.roles, runs)


def _changed_buffer(recording: Recording) -> str:
    """Returns the name of a buffer that every forward changes in place, such as a counter of steps; "" if none is."""
    set_anew = set[str]()
    for call in recording.calls:
        for use in (tensor_use for tensor_use in call.written if tensor_use.kind == "buffer"):
            if call.name in _UPDATES and use.name not in set_anew:
                return use.name
            set_anew.add(use.name)
    return ""
