"""A rehearsal leaves out the first step where the second does the same without it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import without_values
from shardwright.layout import Layout
from shardwright.ledger.account import JobPlan
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.parallelize.auto import tokens_of
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.planner import rehearse

LINES = (
    "dp2", "dp2/zero3", "dp2/zero1 fp16", "mb4 dp2/zero2 bf16", "mb2 dp2/zero3 bf16", "mb2 dp2/zero3/ahead:1",
    "dp2/zero3/offload",
    "dp2/zero1/offload bf16", "tp2", "tp2x2/2d", "tp2/sp bf16", "dp2 recompute:full", "dp2 recompute:offload",
    "mb2 tp2 recompute:selective bf16", "pp2/1f1b mb4 dp2/zero1 tp2 bf16", "pp2/1f1b/scatter mb4 tp2",
    "pp2/zb-v mb4 dp2/zero1",
    "pp2/interleaved:v2 mb4 tp2/sp bf16", "pp2/gpipe mb4 dp2/zero3", "pp2/dualpipe-v mb4 tp2 recompute:full",
)  # fmt: skip


class Unused(nn.Module):
    """A model with a layer that no forward calls: it has no gradient, and AdamW no state of it."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


class WithTable(nn.Module):
    """A model that keeps a table which its first forward has made, as an attribute or in a dict."""

    def __init__(self, *, in_dict):
        super().__init__()
        self.layer, self.in_dict = nn.Linear(8, 4), in_dict
        self.table, self.tables = None, {}

    def forward(self, x):
        if self.table is None and not self.tables:
            made = torch.arange(64.0, device=x.device).cos()
            if self.in_dict:
                self.tables[8] = made
            else:
                self.table = made
        return self.layer(x + (self.tables[8] if self.in_dict else self.table)[:8])


def both(model, line, inputs, device, rank=0):
    layout = Layout.parse(line)
    job = job_for(model.to("meta"), CrossEntropy(), layout, inputs, tokens_of(inputs, layout))
    plan = make_plan(job, layout)
    targets = torch.zeros(inputs.shape[: 2 - inputs.is_floating_point()], dtype=torch.long, device="meta")
    given = rank, (inputs, targets), device, torch.optim.AdamW
    whole = rehearse._rehearsed(job, JobPlan(*plan), *given, first_step=True)
    return rehearse.rehearse(job, JobPlan(*plan), *given), whole


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("line", LINES)
@pytest.mark.sampled(100)
def test_operators_messages_and_memory_are_those_of_a_second_step(line, device):
    with without_values():  # so large that ZeRO has a param group for each block, and stages buffers for messages
        model = GPT(GPTConfig(num_layers=4, width=512, num_heads=4, vocabulary=32, max_tokens=1024))
    found, whole = both(model, line, torch.zeros(16, 1024, dtype=torch.long, device="meta"), device, rank=1)
    assert found == whole


def test_a_parameter_without_a_gradient_has_no_optimizer_state():
    found, whole = both(Unused(), "dp2", torch.zeros(4, 8, device="meta"), "cuda")
    assert found == whole


@pytest.mark.parametrize("in_dict", [False, True])
def test_a_table_that_the_first_forward_makes_is_no_part_of_a_step(in_dict):
    found, whole = both(WithTable(in_dict=in_dict), "dp2", torch.zeros(4, 8, device="meta"), "cuda")
    assert found == whole
