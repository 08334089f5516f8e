"""State and activations that plans predict, beside those of published tables and formulas; differences are stated.

Sources: ZeRO, arXiv:1910.02054, table 1 (54 cells); Korthikanti et al., arXiv:2205.05198, equations 1 to 6.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from shardwright.initial_values import without_values
from shardwright.layout import Layout
from shardwright.ledger.tracking import KINDS
from shardwright.models import GPT, GPTConfig
from shardwright.models.losses import CrossEntropy
from shardwright.parallelize.planning import job_for
from shardwright.planner.memory import pass_memory
from shardwright.planner.records import record_layout

RANKS = (1, 4, 16, 64, 256, 1024)
CELLS = {  # gigabytes of a rank with so many data-parallel ranks, by stage and billions of parameters
    ("zero1", 7.5): (120, 52.5, 35.6, 31.4, 30.4, 30.1),
    ("zero2", 7.5): (120, 41.3, 21.6, 16.6, 15.4, 15.1),
    ("zero3", 7.5): (120, 30, 7.5, 1.88, 0.47, 0.12),
    ("zero1", 128): (2048, 896, 608, 536, 518, 513),
    ("zero2", 128): (2048, 704, 368, 284, 263, 257),
    ("zero3", 128): (2048, 512, 128, 32, 8, 2),
    ("zero1", 1000): (16000, 7000, 4750, 4187, 4046, 4011),
    ("zero2", 1000): (16000, 5500, 2875, 2218, 2054, 2013),
    ("zero3", 1000): (16000, 4000, 1000, 250, 62.5, 15.6),
}


@cache
def recorded(line, tokens=8, rows=1, **sizes):
    with without_values():
        model = GPT(GPTConfig(**{"num_layers": 3, "width": 4096, "num_heads": 32, "vocabulary": 1024, **sizes,
                                 "max_tokens": tokens}))  # fmt: skip
    layout = Layout.parse(line)
    batch = torch.empty(round(rows * layout.num_ranks), tokens, dtype=torch.long, device="meta")
    job = job_for(model, CrossEntropy(), layout, batch)
    return model, record_layout(job, layout, (batch, batch), "cuda", whole=True)


def state_per_parameter(line, *, between_microbatches):
    """Bytes of parameters, gradients and optimizer state, before a step or after the first microbatch's backward."""
    model, records = recorded(line, rows=2)
    whole = records.stages[0].fewer
    changes = [shape.net for place, shape in whole.actions.items() if place.order == "first"]
    assert len(changes) == 2, "of a forward and of a backward"
    held = [sum(each) for each in zip(whole.base, *changes[: 2 * between_microbatches], strict=True)]
    kept = sum(held[KINDS.index(kind)] for kind in ("parameters", "gradients", "optimizer"))
    return kept / sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("ranks", RANKS[1:])
def test_the_state_of_a_rank_is_that_of_the_papers_table(stage, ranks):
    # whole gradients are held while those of further microbatches are added; shards of them, until the next step
    found = state_per_parameter(f"dp{ranks}/{stage} mb2 bf16", between_microbatches=stage == "zero1")
    if stage == "zero2":  # gradients are summed into shards of fp32, and the paper keeps them in fp16
        found -= 2 / ranks
    for (name, billions), cells in CELLS.items():
        cell = cells[RANKS.index(ranks)]
        last_digit = 10.0 ** -len(str(cell).partition(".")[2])  # which is rounded in some cells, and cut off in others
        if name == stage:
            assert abs(found * billions - cell) < last_digit, f"{billions} B"


def test_one_rank_holds_the_same_beside_gradients_in_which_microbatches_are_summed():
    assert state_per_parameter("mb2 bf16", between_microbatches=True) == 16


TOKENS, SAMPLES, WIDTH, HEADS, CUT = 256, 2, 2048, 16, 4
PER_LAYER = {
    # equation 1 without masks of dropout, 2 sbh, and with fused attention in place of scores: 32 sbh
    "mb3 bf16": 32,
    # equation 2: inputs of norms and of layers whole, 8 sbh, and the rest cut
    f"mb3 tp{CUT} bf16": 8 + 24 / CUT,
    # equation 4: all of it cut, where what layers gather is gathered again for the backward
    f"mb3 tp{CUT}/sp/regather bf16": 32 / CUT,
    # inputs of two layers are kept as they were gathered
    f"mb3 tp{CUT}/sp bf16": 28 / CUT + 4,
    # equation 6 and table 2: the input of each layer alone
    "mb3 bf16 recompute:full": 2,
    f"mb3 tp{CUT} bf16 recompute:full": 2,
    f"mb3 tp{CUT}/sp bf16 recompute:full": 2 / CUT,
}
"""Bytes that a layer keeps from the forward to the backward, by token and feature, as the paper counts them."""


@pytest.mark.parametrize(("line", "bytes_each"), PER_LAYER.items())
def test_a_layer_keeps_the_activations_of_the_papers_equations(line, bytes_each):
    kept = []
    for layers in (3, 4):
        sizes = {"num_layers": layers, "width": WIDTH, "num_heads": HEADS}
        rows = 3 * SAMPLES / Layout.parse(line).num_ranks
        kept.append(pass_memory(recorded(line, tokens=TOKENS, rows=rows, **sizes)[-1], 0).kept)
    tokens = TOKENS * SAMPLES
    wanted = bytes_each * tokens * WIDTH
    if "recompute" not in line:
        # fused attention keeps the log-sum-exp of each head's scores, and two norms each token's mean and deviation
        heads, norms = (CUT if "tp" in line else 1), (CUT if "sp" in line else 1)
        wanted += 4 * HEADS * tokens / heads + 16 * tokens / norms
    assert kept[1] - kept[0] == wanted
