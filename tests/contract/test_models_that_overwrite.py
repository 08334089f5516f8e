"""Models whose code writes into what a layer gave: as on one device, in every mode."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.errors import PlanError, RankFailedError
from shardwright.models.losses import MeanSquaredError

LINES = [
    "tp2", "tp2/sp", "tp2x2/2d", "tp2x2/2d:summa", "tp2x2/2d/regather", "tp2x2x2/2.5d", "tp2x2x2/3d",
    "tp2x2x2/3d:classic", "pp2/zb-h1 mb2",
]  # fmt: skip
WIDTH = 8


def sequence(norm=None):
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 16), nn.ReLU(inplace=True)]
    layers += [nn.Linear(16, WIDTH)]
    return nn.Sequential(*layers, *([norm, nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)] if norm else []))


class Multiplying(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.down, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        y = self.down(torch.relu(self.gate(x)) * self.up(x))
        y += x
        y.mul_(2.0)
        return self.last(y)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        x = self.first(x)
        y = self.attention(x, x, x, need_weights=False)[0]
        return self.last(y.add_(x).relu_())


class Pictures(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.up, self.down = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1, groups=groups)
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, WIDTH)

    def forward(self, x):
        x = functional.relu(self.down(functional.relu(self.up(x), inplace=True)), inplace=True)
        return self.out(functional.relu(self.norm(x), inplace=True))


MODELS = {
    "layers": sequence,
    "LayerNorm": lambda: sequence(nn.LayerNorm(WIDTH)),
    "LayerNorm without weights": lambda: sequence(nn.LayerNorm(WIDTH, elementwise_affine=False)),
    "RMSNorm": lambda: sequence(nn.RMSNorm(WIDTH)),
    "RMSNorm without weights": lambda: sequence(nn.RMSNorm(WIDTH, elementwise_affine=False)),
    "a product": Multiplying,
    "attention": Attending,
    "convolutions": lambda: Pictures(1),
    "convolutions in groups": lambda: Pictures(4),
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(23)
def test_what_a_layer_gives_may_be_written_into(name, line):
    if "convolutions" in name and ("mb" in line or line == "tp2/sp"):
        return  # microbatches of a BatchNorm are refused, and /sp cuts no Linear that stands alone
    torch.manual_seed(0)
    x = torch.randn(6, 3, WIDTH)
    shape = (6, 8, WIDTH) if "convolutions" in name else x.shape
    verdict = verify(MODELS[name](), line, [(x, torch.randn(shape))] * 2, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class Overwriting(nn.Module):
    """Not elementwise, so it takes in whole features; and it changes them for others."""

    def forward(self, x):
        x.mul_(2.0)
        return x.softmax(-1)


class SeesWhatWasOverwritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(WIDTH, WIDTH), Overwriting(), nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.mix(x)) + self.other(x)


@pytest.mark.parametrize("line", ["tp1x2/2d", "tp2x2/2d"])
def test_a_module_that_overwrites_features_gathered_for_it_alone_is_named(line):
    batch = (torch.randn(4, 3, WIDTH), torch.randn(4, 3, WIDTH))
    with pytest.raises((PlanError, RankFailedError), match="'mix' writes into its input"):
        verify(SeesWhatWasOverwritten(), line, [batch], loss=MeanSquaredError())
    assert verify(SeesWhatWasOverwritten(), "dp2", [batch], loss=MeanSquaredError()).equal
