"""What ``plan`` says of twelve layouts, word for word: a change of a price, a sentence or a digit is seen here.

After a change that is meant, ``python tests/planner/test_texts.py`` writes the texts again; read the difference.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig, MeanSquaredError
from shardwright.planner.plans import plan_layouts

TEXTS = Path(__file__).parent / "texts.txt"

GPTS = (
    "single", "dp2", "dp4/zero1 bf16", "dp2/zero3 mb2", "tp2", "tp4/sp bf16", "tp2x2/2d", "tp2x2x2/2.5d",
    "pp2/1f1b mb4", "pp2/zb-h1 mb4 dp2/zero1 tp2 bf16", "dp2 recompute:full",
)  # fmt: skip
LINES = (*(("gpt", line) for line in GPTS), ("mlp", "tp2 dp2"))


def text_of(name, line):
    layout = Layout.parse(line)
    if name == "gpt":
        model, loss = GPT(GPTConfig(num_layers=4, width=64, num_heads=4, vocabulary=96, max_tokens=32)), CrossEntropy()
        batch = torch.zeros(16, 32, dtype=torch.int64), torch.ones(16, 32, dtype=torch.int64)
    else:
        model, loss = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), MeanSquaredError()
        batch = torch.zeros(16, 32), torch.zeros(16, 32)
    nodes = f"h100-80gb:1x{layout.num_ranks}"
    return plan_layouts(model, nodes, batch, loss=loss, layout=layout).text()


def kept():
    parts = re.split(r"^=== (\S+) on (.+) ===\n", TEXTS.read_text(encoding="utf-8"), flags=re.M)[1:]
    return {(name, line): text.strip() for name, line, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "line"), LINES, ids=" ".join)
def test_the_text_of_a_plan_is_the_one_that_is_kept(name, line):
    assert text_of(name, line).strip() == kept()[name, line]


if __name__ == "__main__":
    TEXTS.write_text("".join(f"=== {name} on {line} ===\n{text_of(name, line)}\n\n" for name, line in LINES))
