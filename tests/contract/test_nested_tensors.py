"""Models whose forward joins rows of different sizes in nested tensors: equal where nothing cuts it, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import verify
from shardwright.errors import LayoutError, PlanError

LENGTHS = torch.tensor([4, 1, 2, 3, 4, 1, 2, 2])
BATCH = (torch.randn(8, 4, 6), LENGTHS), torch.arange(8) % 3


class Ragged(nn.Module):
    """Layers over the tokens that each sample has, and a sum of these."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x, lengths):
        rows = [row[:length] for row, length in zip(x, lengths.tolist(), strict=True)]
        return self.sum(torch.nested.as_nested_tensor(rows, layout=torch.jagged))

    def sum(self, rows):
        return self.last(torch.relu(self.first(rows))).to_padded_tensor(0.0).sum(1)


class OfOffsets(Ragged):
    """The same from offsets, without a loop over the samples."""

    def forward(self, x, lengths):
        is_there = torch.arange(4)[None] < lengths[:, None]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return self.sum(torch.nested.nested_tensor_from_jagged(x.flatten(0, 1)[is_there.flatten()], offsets=offsets))


@pytest.mark.filterwarnings("ignore:.*nested tensor")
@pytest.mark.parametrize("kind", [Ragged, OfOffsets])
@pytest.mark.parametrize("line", ["single", "dp2", "dp2/zero3"])
def test_a_model_with_nested_tensors_is_equal_where_each_rank_has_all_of_it(kind, line):
    verdict = verify(kind(), line, [BATCH, BATCH])
    assert verdict.equal, str(verdict)


@pytest.mark.filterwarnings("ignore:.*nested tensor")
@pytest.mark.parametrize("kind", [Ragged, OfOffsets])
@pytest.mark.parametrize("line", ["tp2", "pp2/1f1b mb2"])
def test_a_model_with_nested_tensors_is_refused_by_name_where_ranks_share_it(kind, line):
    with pytest.raises((LayoutError, PlanError), match="nested tensor"):
        verify(kind(), line, [BATCH, BATCH])
