"""Conditions that only guard a forward are answered so that it goes on, in whatever form they are written."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tests.analysis.guarded_code import (
    all_of_two,
    asserts,
    by_a_call,
    catches_itself,
    chooses,
    in_a_function,
    is_caught,
    one_of_two,
    raises_either_way,
    raises_else,
    raises_if,
    raises_later,
    raises_unless,
    suppresses,
)  # fmt: skip
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.analysis.on_meta.meta_values import MetaValues
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.analysis.recorded.record_forward import record_forward
from shardwright.errors import LayoutError


class Runs(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        self.function(x)


GUARDS = [raises_if, raises_unless, raises_else, asserts, one_of_two, all_of_two, by_a_call, in_a_function]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("guess", [True, False])
def test_a_condition_that_leads_to_a_raise_at_once_is_answered_so_that_code_goes_on(guard, guess):
    x = torch.empty(3, device="meta")  # made outside: inside it would have values
    with MetaValues(guess=guess) as values:
        call_model(Runs(guard), x)
    assert values.num_guessed == 0


OTHERS = [chooses, raises_later, raises_either_way, catches_itself, is_caught, suppresses]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("condition", OTHERS)
def test_any_other_condition_is_guessed(condition):
    raises = pytest.raises(TypeError) if condition is raises_either_way else nullcontext()
    x = torch.empty(3, device="meta")
    with raises, MetaValues(guess=False) as values:
        call_model(Runs(condition), x)
    assert values.num_guessed == 1


class FallsBack(nn.Module):
    """Catches what its own condition raises, and then mixes samples: a branch like any other."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x)
        try:
            raises_unless(-h.abs())
        except ValueError:
            h = h - h.mean(0)
        return self.last(h)


def test_a_branch_of_an_error_that_code_catches_is_recorded():
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(2)]
    with pytest.raises(LayoutError, match="values from other samples"):
        verify(FallsBack(), "dp2", batches, loss=functional.cross_entropy)


class Guarded(nn.Module):
    """Layers with two guards between, of which one wants a condition to be true and the other wants one to be false."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 32), nn.Linear(32, 6), nn.Linear(6, 3)

    def forward(self, x):
        raises_if(x)
        x = x + self.down(functional.gelu(self.up(x)))
        asserts(x)
        x = self.head(x)
        asserts(x)
        return x


@pytest.mark.parametrize("line", ["tp2", "pp2/1f1b mb2", "pp2/1f1b mb2 tp2"])
def test_a_model_with_guards_is_recorded_and_cut(line):
    assert record_forward(Guarded().to("meta"), torch.empty(2, 6, device="meta")).guess is None
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(2)]
    verdict = verify(Guarded(), line, batches, loss=functional.cross_entropy)
    assert verdict.equal, str(verdict)
    assert "tp" not in line or "tp2 cuts 9" in str(verdict)
