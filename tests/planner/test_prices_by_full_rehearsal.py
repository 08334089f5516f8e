"""The price of any layout, extended from few blocks, is that of a rehearsal of all of them."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest
import torch
from torch import nn

from shardwright.cost.cluster import Cluster
from shardwright.errors import LayoutError, PlanError
from shardwright.initial_values import without_values
from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig, MLPConfig, build_mlp
from shardwright.parallelize.auto import num_shares
from shardwright.parallelize.planning import job_for
from shardwright.planner.price import Pricing
from shardwright.planner.records import record_layout

STAGES = ("", "pp2/gpipe", "pp2/1f1b", "pp2/zb-h1", "pp3/1f1b", "pp2/interleaved:v2", "pp2/zb-v")
COPIES = ("", "dp2", "dp2/zero1", "dp2/zero2", "dp2/zero3")
OPERATORS = ("", "tp2", "tp2/sp", "tp2x2/2d")
RECOMPUTE = ("", "recompute:full", "recompute:selective")

TOLERANCE = 1e-5
"""The largest relative difference. Nine of the ten draws are equal to 1e-15, and one to 4e-6."""


class Unlike(nn.Module):
    """Residual blocks of widths that differ: some are alike, some alone."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16)) for width in widths
        )
        self.head = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def gpt(**options):
    return GPT(GPTConfig(width=32, max_tokens=16, vocabulary=40, **options))


MODELS = {
    "tied": lambda layers: gpt(num_layers=layers),
    "untied": lambda layers: gpt(num_layers=layers, tied=False, dropout=0.1),
    "llama": lambda layers: gpt(num_layers=layers, style="llama"),
    "mlp": lambda layers: build_mlp(MLPConfig(widths=(32, *[24] * layers, 10))),
    "unlike": lambda layers: Unlike((32, *[16] * (layers - 3), 24, 24)),
}


def batch_of(kind, model, samples):
    meta = {"device": "meta"}
    if kind == "mlp":
        inputs = torch.empty(samples, 32, **meta)
    elif kind == "unlike":
        inputs = torch.empty(samples, 16, **meta)
    else:
        inputs = torch.empty(samples, 16, dtype=torch.long, **meta)
        return inputs, inputs
    return inputs, torch.empty(samples, dtype=torch.long, **meta)


def priced(layout, job, batch, **how):
    records = record_layout(job, layout, batch, "cuda", **how)
    return Pricing(Cluster.parse("a100-80gb", layout.num_ranks)).price(layout, records)


def drawn(seed):
    """Draws a model and a layout of which few blocks are rehearsed: what they are, the batch, the job and the price."""
    random = Random(seed)
    while True:
        kind, layers, microbatches = random.choice(sorted(MODELS)), random.randint(6, 12), random.choice([1, 3, 4, 5])
        words = [random.choice(each) for each in (STAGES, COPIES, OPERATORS, RECOMPUTE, ("", "bf16"))]
        line = " ".join(each for each in (*words, f"mb{microbatches}" * (microbatches > 1)) if each) or "single"
        layout = Layout.parse(line)
        with without_values():
            model = MODELS[kind](layers)
        samples = 2 * num_shares(layout) * microbatches + random.randint(0, 1)
        batch = batch_of(kind, model, samples)
        with suppress(LayoutError, PlanError):  # also where all blocks would be rehearsed anyway
            job = job_for(model, CrossEntropy(), layout, batch[0])
            price = priced(layout, job, batch, most_whole=0)
            return f"{kind}, {layers} layers: {line}", layout, batch, job, price


@pytest.mark.sampled(0)
@pytest.mark.parametrize("seed", range(10))
def test_a_price_from_few_blocks_is_that_of_all(seed):
    """Seconds and memory grow linearly with blocks, but where a message that few blocks hide is hidden by more."""
    said, layout, batch, job, few = drawn(seed)
    every = priced(layout, job, batch, whole=True)
    assert few.traffic_by_axis == every.traffic_by_axis, said
    assert few.flops == every.flops, said
    assert few.step_s == pytest.approx(every.step_s, rel=TOLERANCE), said
    assert few.waterfall == pytest.approx(every.waterfall, rel=TOLERANCE, abs=TOLERANCE * every.step_s), said
    assert few.memory_bytes == pytest.approx(every.memory_bytes, rel=TOLERANCE), said
