"""Code in which the samples of a batch meet is named, where a layout gives no rank the whole batch."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from shardwright import verify


class Scaled(nn.Module):
    """A layer that divides by its largest activation: of the batch, or of each sample."""

    def __init__(self, dims=None):
        super().__init__()
        self.layer, self.dims = nn.Linear(4, 4), dims

    def forward(self, x):
        x = self.layer(x)
        return x / (x.abs().max() if self.dims is None else x.abs().amax(self.dims, keepdim=True))


def verdict_of(model, line):
    batch = torch.randn(4, 4, dtype=torch.float64), torch.arange(4)
    return verify(model.double(), line, [batch])


@pytest.mark.parametrize("line", ["dp2", "pp1 mb2"])
def test_a_maximum_over_the_batch_is_named_before_it_differs(line):
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="takes max over all samples of a batch"):
        assert not verdict_of(Scaled(), line).equal


@pytest.mark.parametrize(("line", "dims"), [("dp2", -1), ("single", None)])
def test_a_maximum_over_each_sample_is_not_named(line, dims):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdict_of(Scaled(dims), line).equal
