"""A model with few of its alike blocks, for what a search asks of every way to cut operators and of every option."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from shardwright.analysis.meta_device import on_meta
from shardwright.analysis.module_calls import call_model
from shardwright.analysis.operator_results import tensors_of
from shardwright.layout import Layout
from shardwright.parallelize.auto import num_shares, tokens_of
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan, without_storage
from shardwright.plan.plan import Job, Plan
from shardwright.planner.blocks import AlikeBlocks, num_parameters
from shardwright.planner.outline import ModelPlans
from shardwright.planner.records import FEWER_AND_MORE, LayoutRecords, first_rows, record_layout

MOST_OF_MODEL = 0.8
"""The share of the parameters above which alike blocks are the model: beside them it has few modules for stages."""

NUM_BLOCKS = FEWER_AND_MORE[-1] + 1
"""The least blocks of a model that is rehearsed with fewer."""


@dataclass
class ShortModel:
    """A model of which few blocks are planned; it is the model itself where no blocks, or too few, are alike."""

    model: nn.Module
    loss: nn.Module
    batch: tuple[Any, Any]
    device_type: str
    roles: Mapping[str, str]
    model_plans: ModelPlans

    @property
    def blocks(self) -> AlikeBlocks | None:
        """The alike blocks of the model."""
        return self.model_plans.blocks

    @property
    def most_stages(self) -> int:
        """The most stages that do not begin inside of a block: the alike blocks, where they are most of the model.

        0 if other modules could be stages too.
        """
        if self.blocks is None:
            return 0
        held = num_parameters([self.model.get_submodule(name) for name in self.blocks.names])
        return self.blocks.number if held >= MOST_OF_MODEL * num_parameters([self.model]) else 0

    @cached_property
    def _short(self) -> nn.Module:
        few = self.blocks is not None and self.blocks.number > NUM_BLOCKS and not self.roles
        return self.model_plans.shortened(NUM_BLOCKS) if few else self.model

    @cached_property
    def sent_bytes(self) -> int:
        """The bytes of a sample that enter an alike block: what a pipeline stage sends; 0 if no blocks are alike."""
        if self.blocks is None:
            return 0
        sizes: list[int] = []
        model = without_storage(self._short)
        block = model.get_submodule(self.blocks.names[1])
        block.register_forward_pre_hook(lambda _, args: sizes.append(sum(each.nbytes for each in tensors_of(args))))
        with suppress(RuntimeError, TypeError), torch.no_grad(), on_meta(model, values=False):  # code of anybody's
            call_model(model, first_rows(self.batch, 1)[0])
        return sizes[0] if sizes else 0

    def record(self, layout: Layout, samples: int) -> LayoutRecords:
        """Returns the records of a layout without stages on a batch, as those of the whole model.

        Raises: LayoutError, PlanError: as :func:`record_layout`.
        """
        rows = first_rows(self.batch, samples)
        records = record_layout(self._job(self._short, layout, rows), layout, rows, self.device_type)
        if self.blocks is None or self._short is self.model:
            return records
        if records.note:  # what few blocks do says nothing of all
            return record_layout(self._job(self.model, layout, rows), layout, rows, self.device_type)
        return replace(records, num_blocks=((self.blocks.number,),))

    def plan(self, layout: Layout) -> Plan:
        """Returns the plan of the short model. Raises: LayoutError, PlanError: it cannot have the layout."""
        rows = first_rows(self.batch, layout.num_ranks)
        return make_plan(self._job(self._short, layout, rows), layout)[0]

    def summed_bytes(self, layout: Layout) -> int:
        """Returns the bytes of gradients that a rank sums in a step of the short model, as strategies state them."""
        rows = first_rows(self.batch, num_shares(layout))
        job = self._job(self._short, layout, rows)
        plan, strategies = make_plan(job, layout)
        stated = StepTraffic(job, plan, strategies, rows[0]).at(dict.fromkeys(plan.mesh.axes, 0))
        sums = (
            each for traffic in stated.values() for each in traffic if each.kind in ("all_reduce", "reduce_scatter")
        )
        return sum(each.num_bytes * each.times for each in sums)

    def _job(self, model: nn.Module, layout: Layout, rows: tuple[Any, Any]) -> Job:
        return job_for(model, self.loss, layout, rows[0], tokens_of(rows[0], layout), self.roles)
