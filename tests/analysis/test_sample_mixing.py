"""Code that mixes the samples of a batch is found by its operators, and refused by layouts that take samples apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.traced.batch_norms import batch_norms
from shardwright.errors import LayoutError
from shardwright.models import CrossEntropy
from shardwright.verify import verify


class Between(nn.Module):
    """Two layers, and ``between`` them what a test gives."""

    def __init__(self, between, **hidden):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between
        vars(self).update(hidden)

    def forward(self, x):
        return self.last(self.between(self, self.first(x)))


def centred(model, y):
    return y - y.mean(0)


def scaled(model, y):
    return y / (y.var(0, keepdim=True) + 1).sqrt()


def by_their_products(model, y):
    return y @ (y.T @ y)


def normalised(model, y):
    return functional.batch_norm(y, None, None, training=True)


def in_a_list(model, y):
    return model.hidden[0](y)


def in_chunks(model, y):
    return torch.cat([model.norm(each) for each in y.chunk(3)])


def rotated(model, y):
    turned = torch.complex(y, y)
    return (turned - turned.mean(0)).abs()


MIXING = {
    "mean": Between(centred),
    "mean of complex numbers": Between(rotated),
    "var": Between(scaled),
    "mm": Between(by_their_products),
    "native_batch_norm": Between(normalised),
    "native_batch_norm of a list": Between(in_a_list, hidden=[nn.BatchNorm1d(8, affine=False)]),
    "native_batch_norm of each chunk": Between(in_chunks),
}
MIXING["native_batch_norm of each chunk"].norm = nn.BatchNorm1d(8)


def inside_a_sample(model, y):
    return y - y.mean(1, keepdim=True)


def instance_norm(model, y):
    return functional.instance_norm(y.unsqueeze(2) * torch.ones(4)).mean(2)


def counted(model, y):
    """Positions from a count over the samples, as mixtures of experts take them; integers carry no values."""
    count = (y > 0).sum(0)
    return y * (count.cumsum(0) >= 0)


def batch_norm(model, y):
    return model.norm(y)


APART = {
    "a mean inside of a sample": Between(inside_a_sample),
    "an instance norm": Between(instance_norm),
    "counts": Between(counted),
    "a BatchNorm that ranks share": Between(batch_norm),
}
APART["a BatchNorm that ranks share"].norm = nn.BatchNorm1d(8)


def found_in(model):
    call = ModelGraph(model, torch.empty(8, 6)).mixing_call([path for path, _ in batch_norms(model)])
    return None if call is None else call.name


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.sampled(1)
def test_an_operator_that_mixes_samples_is_found(name):
    assert found_in(MIXING[name]) == name.split()[0]


@pytest.mark.parametrize("name", APART)
@pytest.mark.sampled(1)
def test_code_that_treats_each_sample_alone_is_left_alone(name):
    assert found_in(APART[name]) is None


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "mb2", "pp2/1f1b mb2"])
def test_a_layout_that_takes_samples_apart_refuses_it_before_the_first_step(line):
    batch = torch.randn(8, 6), torch.randint(3, (8,))
    with pytest.raises(LayoutError, match="a sample's values from other samples") as refusal:
        verify(MIXING["mean"], line, [batch], loss=CrossEntropy())
    assert "mean over the samples in the model's own forward" in str(refusal.value)


def test_one_device_runs_it():
    batch = torch.randn(8, 6), torch.randint(3, (8,))
    assert verify(MIXING["mean"], "single", [batch], loss=CrossEntropy()).equal


class Penalised(nn.Module):
    """A loss inside of the model: sums over the samples that end in one number."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        y = self.layer(x)
        return (y.exp().sum() / x.abs().sum()).log() + y.mean(0).square().sum()


def test_sums_that_end_in_a_loss_mix_nothing():
    assert found_in(Penalised()) is None


class TwoTowers(nn.Module):
    """Normalizes two inputs one after the other: all samples of each."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)

    def forward(self, x, y):
        return (self.norm(self.layer(x)) * self.norm(self.layer(y))).sum(1)


def test_a_batch_norm_of_all_samples_of_one_input_of_two_is_none_of_some_samples():
    graph = ModelGraph(TwoTowers(), (torch.empty(8, 6), torch.empty(8, 6)))
    assert graph.mixing_call(["norm"]) is None
