"""Whose calls of a layer are known: a chain that somebody looks into from elsewhere is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.analysis.traced.callers import AllowedCallers, called_elsewhere
from shardwright.analysis.traced.convolution_chains import find_convolution_chains
from shardwright.plan.layer_overrides import Overrides


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)

    def encode(self, x):
        return torch.relu(self.up(x))

    def forward(self, x):
        return self.down(self.drop(self.encode(x)))


class Looking(nn.Module):
    """A model around a coder, a sequence and two convolutions; ``body(model, x)``."""

    def __init__(self, body, coder=None, choices=False):
        super().__init__()
        self.coder, self.last = coder or Coder(), nn.Linear(4, 4)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.images = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
        self.body, self.choices = body, choices

    def forward(self, x, more=None):
        return self.body(self, x)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Insistent(Coder):
    def __call__(self, x):
        return self.down(self.up(x).softmax(-1))


def rows(model):
    return {chain.row for chain in Overrides.of(model, {}).all_chains(model)}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda m, x: m.coder(x), {"coder.down", "layers.2"}),
        (lambda m, x: m.coder(m.coder(x)), {"coder.down", "layers.2"}),
        (lambda m, x: m.coder.forward(x), {"coder.down", "layers.2"}),
        (lambda m, x: m.layers(x), {"coder.down", "layers.2"}),
        (lambda m, x: m.coder.down(m.coder.encode(x).softmax(-1)), {"layers.2"}),
        (lambda m, x: m.coder(x) + m.coder.encode(x).mean(), {"layers.2"}),
        (lambda m, x: m.coder(x) + m.coder.drop(x), {"layers.2"}),
        (lambda m, x: m.layers[2](m.layers[0](x).softmax(-1)), {"coder.down"}),
        (lambda m, x: sum(layer(x).mean() for layer in m.layers[:1]), {"coder.down"}),
    ],
)
def test_a_pair_is_cut_where_all_calls_of_its_layers_are_its_own_modules(body, expected):
    assert rows(Looking(body)) == expected
    assert rows(Around(Looking(body))) == {f"inner.{name}" for name in expected}


def test_a_module_that_does_not_run_its_forward_has_no_pair():
    assert rows(Looking(lambda m, x: m.coder(x), Insistent())) == {"layers.2"}
    assert rows(Looking(lambda m, x: m.coder(x), Coder())) == {"layers.2", "coder.down"}


def test_code_that_cannot_be_followed_hides_what_is_above_it_and_no_more():
    def asks(m, x):
        return m.coder.encode(x) if float(x.sum()) > 0 else x

    allowed_callers = {"inner.coder.up": AllowedCallers.of("inner.coder"), "inner.last": AllowedCallers.of("inner")}
    assert called_elsewhere(Around(Looking(asks)), allowed_callers) == set()
    looks = Looking(lambda m, x: m.coder.encode(x))
    assert called_elsewhere(Around(looks), allowed_callers) == {"inner.coder.up"}
    outside = Around(looks)
    outside.forward = lambda x: outside.inner.last(x) if float(x.sum()) > 0 else x
    assert called_elsewhere(outside, allowed_callers) == {"inner.coder.up"}


@pytest.mark.parametrize(
    ("body", "found"), [(lambda m, x: m.images(x), 1), (lambda m, x: m.images[2](m.images[0](x).softmax(1)), 0)]
)
def test_a_chain_of_convolutions_is_one_where_all_calls_are_as_they_were_followed(body, found):
    assert len(find_convolution_chains(Looking(body))) == found
    (chain,) = find_convolution_chains(Around(nn.Sequential(Looking(lambda m, x: m.images(x)))))
    assert chain.allowed_callers["inner.0.images.2"].callers == {"inner.0"}
