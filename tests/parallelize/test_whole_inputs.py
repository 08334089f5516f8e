"""An input without samples, which ``sw.whole`` marks, is whole on every rank and in every microbatch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import LayoutError, PlanError
from shardwright.ledger import predict_memory
from shardwright.parallelize.planning import job_for
from shardwright.layout import Layout

TOKENS, WIDTH, NUM = 5, 16, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, turned):
        return x + self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x * turned)))))


class Positioned(nn.Module):
    """Embeds positions that all samples share by layers of its own, and turns its activations by them, as Flux does."""

    def __init__(self):
        super().__init__()
        self.places, self.mixed = nn.Linear(3, 24), nn.Linear(24, WIDTH)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, ids, scale=None):
        turned = self.dropout(self.mixed(torch.relu(self.places(ids))))
        for block in self.blocks:
            x = block(x, turned)
        return self.head(x) if scale is None else self.head(x) * scale


def batch(num=NUM):
    inputs = {
        "x": torch.randn(num, TOKENS, WIDTH, dtype=torch.float64),
        "ids": sw.whole(torch.randn(TOKENS, 3, dtype=torch.float64)),
        "scale": sw.whole(torch.tensor(0.5, dtype=torch.float64)),
    }
    return inputs, torch.randn(num, TOKENS, 4, dtype=torch.float64)


LINES = ["single", "dp2", "dp2/zero3 mb2", "tp2", "tp2/sp", "tp4/2d", "pp2/1f1b mb4", "pp2/1f1b mb2 dp2/zero1 tp2"]


@pytest.mark.parametrize("line", [*LINES, "pp4/zb-v mb4", "tp2x2x2/2.5d", "tp2x2x2/3d"])
def test_positions_of_all_samples_are_whole_under_any_layout(line):
    torch.manual_seed(0)
    result = sw.verify(Positioned().double(), line, [batch(), batch(7)], loss=sw.MeanSquaredError())
    assert result.equal, str(result)
