"""A model that returns parameters beside its outputs, as learned weights of losses or a table that a loss reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright.verify import verify

LINES = [
    "pp2 mb2", "pp2 mb2 tp2", "pp4/zb-v mb4 tp2", "pp2 mb2 dp2/zero1 tp2", "pp2 mb2 dp2/zero3", "pp2 mb2 dp2/zero3 tp2",
    "dp2 tp2",
]  # fmt: skip


class Returning(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.zeros(2))
        self.table = nn.Embedding(12, 16)
        self.trunk = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(8))
        self.kinds, self.sizes = nn.Linear(16, 3), nn.Linear(16, 1)

    def forward(self, tokens):
        h = self.table(tokens).mean(1)
        for block in self.trunk:
            h = h + block(h)
        return {"kinds": self.kinds(h), "sizes": self.sizes(h), "scales": self.scales, "table": self.table.weight}


def loss(output, targets):
    kinds = functional.cross_entropy(output["kinds"], targets, reduction="sum")
    sizes = (output["sizes"][:, 0] - targets).square().sum()
    scales, count = output["scales"], len(targets)
    sums = kinds * torch.exp(-scales[0]) + sizes * torch.exp(-scales[1])
    return sums + count * (scales.sum() + 0.01 * output["table"].square().sum()), count


@pytest.mark.parametrize("line", LINES)
def test_parameters_among_the_outputs_are_trained_on_the_stage_of_the_loss(line):
    batches = [(torch.arange(8 * 5).view(8, 5) * (3 + step) % 12, torch.arange(8) % 3) for step in range(2)]
    found = verify(Returning(), line, batches, loss=loss)
    assert found.equal, found
