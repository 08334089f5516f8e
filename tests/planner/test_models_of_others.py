"""Plans of models that others write: what a run takes is priced, and ends in no error of torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
        self.table, self.encoder = nn.Embedding(37, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 37)

    def forward(self, x):
        return self.head(self.encoder(self.table(x)))


class Counted(nn.Module):
    """Counts how many rows go to each of its experts, in whole numbers where it finds no CPU, as mixtures do."""

    def __init__(self):
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(37, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 37)

    def forward(self, x):
        h = self.table(x)
        places = torch.arange(x.shape[1], device=x.device) % 4
        counts = torch.histc(places.float() if x.device.type == "cpu" else places.int(), bins=4, min=0, max=3)
        return self.head(h + self.second(torch.relu(self.first(h))) * (counts.sum() / x.shape[1]))


class OwnLoss(nn.Module):
    """Computes a mean itself, which torch divides by its number of elements."""

    def __init__(self, loss):
        super().__init__()
        self.layers, self.loss = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4))), loss

    def forward(self, x, labels):
        return {"loss": self.loss(self.layers(x).sigmoid(), labels.sigmoid())}


class HasEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.none, self.first, self.last = nn.Parameter(torch.zeros(0, 8)), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.last(torch.relu(self.first(x))) + self.none.sum(0)


TOKENS = torch.arange(64).reshape(8, 8) % 37


@pytest.mark.parametrize(
    ("model", "line"), [(Encoder, "pp2/1f1b mb4"), (Counted, "pp2/1f1b mb2 tp2"), (Encoder, "pp2/1f1b mb2 dp2/zero1")]
)
def test_stages_of_torchs_encoders_and_of_mixtures_are_priced(model, line):
    plans = sw.plan_layouts(model(), f"a100-80gb:1x{sw.Layout.parse(line).num_ranks}", (TOKENS, TOKENS), layout=line)
    assert plans.best.step_s > 0
    verdict = sw.verify(model(), line, [(TOKENS, TOKENS)])
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize(
    "loss", [functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss, functional.binary_cross_entropy]
)
def test_a_mean_of_no_samples_on_a_rank_is_priced(loss):
    x = torch.randn(8, 12)
    batch = {"x": x, "labels": x.flip(1)}
    plans = sw.plan_layouts(OwnLoss(loss), "a100-80gb:1x2", batch, loss=sw.ModelLoss(), layout="mb8 tp2/sp")
    assert plans.best.step_s > 0


@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d"])
def test_a_parameter_without_elements_is_no_obstacle_to_a_cut(line):
    x = torch.randn(8, 8)
    batch = (x, torch.zeros(8, dtype=torch.int64))
    plans = sw.plan_layouts(HasEmpty(), f"a100-80gb:1x{sw.Layout.parse(line).num_ranks}", batch, layout=line)
    assert plans.best.step_s > 0
    verdict = sw.verify(HasEmpty(), line, [batch])
    assert verdict.equal, str(verdict)
