"""``cut:`` names one module for each stage, also where the model's own code runs on tensor shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import LayoutError


class Asserting(nn.Module):
    """No trace follows its code, which looks at a size."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        assert x.shape[1] == 4
        return self.c(self.b(self.a(x)))


@pytest.mark.parametrize("names", ["a,b,c", "a"])
@pytest.mark.parametrize("rest", ["", " tp2"])
def test_another_number_of_names_than_of_stages_is_refused_before_any_rank_starts(names, rest):
    batch = torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(LayoutError, match=f"2 stages begin at {names.count(',') + 1} names"):
        sw.verify(Asserting(), f"pp2/cut:{names}{rest}", [batch])
