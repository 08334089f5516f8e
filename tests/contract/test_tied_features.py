"""Layers whose output features come back to them as an input: recurrent cells that code writes, residual layers."""

from __future__ import annotations

import pytest
import torch
from tests.contract.cases import CHECKS, planned
from tests.contract.test_on_shards import OwnCase
from torch import nn

from shardwright.models.losses import MeanSquaredError
from shardwright.strategies.tensor_parallel.shards_plan import ShardsNote, share_cut

WIDTH, STEPS = 12, 3


class LSTM(nn.Module):
    """One layer of the input and the state together, whose output is split into four gates."""

    def __init__(self):
        super().__init__()
        self.gates, self.leave = nn.Linear(5 + WIDTH, 4 * WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x):
        h = c = x.new_zeros(len(x), WIDTH)
        found = []
        for step in range(x.shape[1]):
            i, f, o, g = self.gates(torch.cat([x[:, step], h], 1)).split(WIDTH, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(self.leave(h))
        return torch.stack(found, 1)


class GRU(nn.Module):
    """Layers of the input and of the state apart; its states are the output."""

    def __init__(self):
        super().__init__()
        self.of_input, self.of_state = nn.Linear(5, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        h, found = x.new_zeros(len(x), WIDTH), []
        for step in range(x.shape[1]):
            (z, r, n), (zh, rh, nh) = (each.chunk(3, 1) for each in (self.of_input(x[:, step]), self.of_state(h)))
            z = (z + zh).sigmoid()
            h = (1 - z) * (n + (r + rh).sigmoid() * nh).tanh() + z * h
            found.append(h)
        return torch.stack(found, 1)


class Convolutional(nn.Module):
    """A recurrent cell of convolutions over pictures."""

    def __init__(self):
        super().__init__()
        self.gates, self.leave = nn.Conv2d(2 + WIDTH, 4 * WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 2, 1)

    def forward(self, x):
        h = c = x.new_zeros(len(x), WIDTH, *x.shape[3:])
        for step in range(x.shape[1]):
            i, f, o, g = self.gates(torch.cat([x[:, step], h], 1)).split(WIDTH, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return self.leave(h)


class Residual(nn.Module):
    """Layers that add to what they are given."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.leave(x)


GIVEN = {LSTM: (STEPS, 5), GRU: (STEPS, 5), Convolutional: (STEPS, 2, 4, 4), Residual: (5,)}
MADE = {LSTM: (STEPS, 5), GRU: (STEPS, WIDTH), Convolutional: (2, 4, 4), Residual: (5,)}


class CellCase(OwnCase):
    """A model of this file, on a batch of the inputs that it takes."""

    @property
    def batches(self):
        draw, kind = torch.Generator().manual_seed(1), type(self.config)
        return [
            tuple(torch.randn(samples, *shapes[kind], generator=draw).double() for shapes in (GIVEN, MADE))
            for samples in self.num_samples
        ]


def case_of(kind: type[nn.Module]) -> CellCase:
    torch.manual_seed(1)
    return CellCase(kind.__name__, kind(), MeanSquaredError())


CASES = {kind.__name__: case_of(kind) for kind in GIVEN}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("line", ["tp2", "tp3", "dp2/zero3 tp2", "dp2/zero1 tp2", "tp2x2/2d"])
@pytest.mark.parametrize("name", CASES)
def test_they_are_cut_by_their_output_features_and_keep_every_promise(name, line):
    plan, _ = planned(line, CASES[name])
    if line != "tp2x2/2d":
        assert isinstance(plan.notes.get(""), ShardsNote), "the model runs on shards"
    assert share_cut(plan) > 0.9
    for check in CHECKS:
        check(line, CASES[name])


def test_what_comes_back_is_gathered_once_in_each_step():
    plan, _ = planned("tp2", CASES["GRU"])
    weight = plan.compute["of_state.weight"]
    assert weight.shape == (3 * WIDTH, WIDTH)
    assert weight.local_shape({"tp": 0}) == (3 * WIDTH // 2, WIDTH), "its input features are whole"


def test_layers_that_are_cut_by_inner_features_stay_so():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    blocks = Residual()
    blocks.layers = nn.ModuleList(Block() for _ in range(3))
    plan, _ = planned("tp2", CellCase("blocks", blocks, MeanSquaredError()))
    assert plan.compute["layers.0.down.weight"].local_shape({"tp": 0}) == (WIDTH, 2 * WIDTH)
