"""Draws whose bounds depend on the number of samples differ on ranks and microbatches, and are named."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from shardwright import verify

BATCHES = [(torch.randn(8, 4, dtype=torch.float64), torch.randint(2, (8,)))] * 2


class FirstState(nn.Module):
    """A recurrent cell that draws its first state in each forward, as memories of neural Turing machines do."""

    def __init__(self, fill):
        super().__init__()
        self.cell, self.head, self.fill = nn.GRUCell(4, 6).double(), nn.Linear(6, 2).double(), fill

    def forward(self, x):
        state = torch.zeros(len(x), 6, dtype=x.dtype)
        self.fill(state)
        return self.head(self.cell(x, state))


@pytest.mark.parametrize("line", ["dp2", "mb2", "pp2/1f1b mb2"])
@pytest.mark.parametrize(
    "fill", [nn.init.xavier_uniform_, lambda state: state.normal_(0, 1 / len(state))], ids=["xavier", "deviation"]
)
def test_a_draw_with_bounds_of_the_number_of_samples_is_named(fill, line):
    with pytest.warns(UserWarning, match=r"computes with the number of samples \((uniform_|normal_)\)"):
        verdict = verify(FirstState(fill), line, BATCHES)
    assert not verdict.equal


@pytest.mark.parametrize("line", ["dp2", "pp2/1f1b mb2"])
@pytest.mark.parametrize(
    "fill",
    [
        lambda state: state.uniform_(-0.3, 0.3),
        lambda state: state.normal_(0, 1 / state.shape[1]),
        nn.init.normal_,
        nn.init.uniform_,
    ],
    ids=["bounds", "of features", "normal", "uniform"],
)
def test_a_draw_with_other_bounds_is_equal_and_not_named(fill, line):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict = verify(FirstState(fill), line, BATCHES)
    assert verdict.equal, str(verdict)
