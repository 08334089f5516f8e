"""Models in which no two layers can be cut as a pair: each module is cut by itself, and its output gathered."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from contract.cases import CHECKS, Pictures
from shardwright import verify
from shardwright.models import MeanSquaredError
from shardwright.strategies.tensor_parallel.shards_plan import share_cut, work_cut

CLASSES = 5


class DenseLayer(nn.Module):
    """A layer of a dense network without a bottleneck: norm, activation and convolution of all that came before."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        self.norm, self.convolution = nn.BatchNorm2d(num_in), nn.Conv2d(num_in, num_out, 3, padding=1)

    def forward(self, before):
        return self.convolution(self.norm(torch.cat(before, 1)).relu())


class DenseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.layers = nn.ModuleList(DenseLayer(8 + 4 * number, 4) for number in range(3))
        self.head = nn.Linear(20, CLASSES)

    def forward(self, x):
        before = [self.first(x)]
        for layer in self.layers:
            before.append(layer(before))
        return self.head(torch.cat(before, 1).mean((2, 3)))


class ResidualDenseBlock(nn.Module):
    """Dense convolutions, joined and added to what came in, as in networks for super-resolution."""

    def __init__(self, width: int = 8, growth: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(width + n * growth, growth, 3, padding=1) for n in range(3))
        self.fuse = nn.Conv2d(width + 3 * growth, width, 1)

    def forward(self, x):
        before = [x]
        for layer in self.layers:
            before.append(layer(torch.cat(before, 1)).relu())
        return x + self.fuse(torch.cat(before, 1))


def super_resolution():
    blocks = [ResidualDenseBlock() for _ in range(2)]
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), *blocks, nn.Conv2d(8, 4, 3, padding=1))


class Scaled(nn.Module):
    """A linear layer of one's own whose weight is scaled when it is used, as in StyleGAN."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(num_out, num_in)), nn.Parameter(torch.empty(num_out))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias, std=0.1)

    def forward(self, x):
        return functional.linear(x, self.weight * self.weight.shape[1] ** -0.5, self.bias)


class Standardized(nn.Conv2d):
    """A convolution whose weight is standardized when it is used."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(x, weight / (weight.std((1, 2, 3), keepdim=True) + 1e-5), self.bias, padding=1)


class Softmaxes(nn.Module):
    """Layers between which each feature depends on all."""

    def __init__(self, make, join):
        super().__init__()
        self.first, self.layers, self.join = make(4, 12), nn.ModuleList(make(12, 12) for _ in range(3)), join
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.softmax(layer(x), self.join) + torch.cumsum(x, self.join) / 12
        return self.head(x.mean((2, 3)) if x.dim() == 4 else x)


CASES = {
    "dense network": Pictures("dense network", make=DenseNetwork),
    "super-resolution": Pictures(
        "super-resolution", make=super_resolution, loss=MeanSquaredError(), targets=(4, 6, 7)
    ),
    "scaled": Pictures("scaled", make=lambda: Softmaxes(Scaled, -1), shape=(4,)),
    "linear": Pictures("linear", make=lambda: Softmaxes(nn.Linear, -1), shape=(4,)),
    "standardized": Pictures(
        "standardized", make=lambda: Softmaxes(lambda i, o: Standardized(i, o, 3, padding=1), 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", ["tp2", "tp3", "tp2x2/2d", "dp2/zero3 tp2", "pp2/1f1b tp2", "tp2 recompute:full"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(9)
def test_modules_that_are_cut_alone_keep_every_promise(name, line):
    for check in CHECKS:
        check(line, CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_nearly_all_of_them_is_cut_and_so_is_the_work(name):
    plans, case = [], CASES[name]
    verify(case.model, "tp2", case.batches, loss=case.loss, alter=lambda run: plans.append(run.plan))
    assert share_cut(plans[0]) > 0.9
    assert work_cut(plans[0]) > 0.9


class Pairs(nn.Module):
    """A model of which more than half is cut in pairs, and one layer in none."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.alone = nn.Linear(4, 40), nn.Linear(40, 12), nn.Linear(12, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x):
        x = torch.softmax(self.down(self.up(x).relu()), -1)
        return self.head(torch.softmax(self.alone(x).unsqueeze(1) * x.new_ones(1, 40, 1), -1).mean(1))


def test_a_model_of_which_pairs_are_more_than_half_sends_nothing_for_the_rest():
    plans, case = [], Pictures("pairs", make=Pairs, shape=(4,))
    verdict = verify(case.model, "tp2", case.batches, loss=case.loss, alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    plan = plans[0]
    assert plan.compute["up.weight"].axes
    assert not plan.compute["alone.weight"].axes
