"""Modules that are alike share a trace and a cost; those that only look alike do not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import MeanSquaredError, verify
from shardwright.analysis.objects.alike import likeness, signature


class Mixing(nn.Module):
    """Under a setting of its own, the inner features of a sample are mixed, so they cannot be cut."""

    def __init__(self, mixes):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self._mixes = mixes

    def forward(self, x):
        inner = self.up(x)
        return self.down(inner.softmax(-1) if self._mixes else functional.gelu(inner))


def made_by_a_function(mixes):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            inner = self.up(x)
            return self.down(inner.softmax(-1) if mixes else functional.gelu(inner))

    return Mixing()


@pytest.mark.parametrize("order", [(False, True), (True, False)])
@pytest.mark.parametrize("make", [Mixing, made_by_a_function])
def test_blocks_that_differ_in_a_private_setting_or_a_closure_are_cut_each_by_its_own_code(make, order):
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(4, 8)
    assert verify(nn.Sequential(*map(make, order)), "tp2", [batch], loss=MeanSquaredError()).equal


@pytest.mark.parametrize("make", [Mixing, made_by_a_function])
def test_a_signature_tells_a_private_setting_and_a_closure(make):
    assert signature(make(True)) != signature(make(False))
    assert signature(Mixing(True)) == signature(Mixing(True))


def test_lists_are_compared_by_what_they_hold_and_lists_of_tensors_by_themselves():
    """Torch shows a part of a large tensor only: two texts may be equal where the tensors are not."""
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    one.names, other.names = ["query", "key"], ["query", "key"]
    assert likeness(one) == likeness(other)
    other.names = ["query", "value"]
    assert likeness(one) != likeness(other)
    large = torch.zeros(10_000)
    one.names, other.names = [large], [large.index_fill(0, torch.tensor(5_000), 1.0)]
    assert repr(one.names) == repr(other.names)
    assert likeness(one) != likeness(other)


def test_frozen_configs_are_compared_by_their_values_and_others_by_identity():
    @dataclass(frozen=True)
    class Sizes:
        width: int
        held: object = None

    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    one.config, other.config = Sizes(3), Sizes(3)
    assert likeness(one) == likeness(other)
    other.config = Sizes(4)
    assert likeness(one) != likeness(other)
    one.config, other.config = Sizes(3, held=nn.ReLU()), Sizes(3, held=nn.ReLU())
    assert likeness(one) != likeness(other)
