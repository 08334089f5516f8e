"""torch's attention on rows of which each sample has several: windows, channels or frames folded into dim 0."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.comm.launch import launch
from shardwright.errors import PlanError
from shardwright.parallelize import parallelize
from shardwright.verify import verify

LINES = [
    "single", "dp2/zero3", "tp2", "tp2/sp", "tp4/2d", "tp2x2x2/2.5d", "pp2 mb2", "pp2 mb2 dp2/zero1 tp2",
    "dp2 recompute:full",
]  # fmt: skip


class Windows(nn.Module):
    """Attends in windows of a sequence: the rows of a sample follow each other."""

    def __init__(self, **options):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 3)

    def folded(self, h, layer):
        return layer(h.reshape(-1, 3, 32)).reshape(h.shape)

    def forward(self, x):
        h = self.up(x)
        for layer in self.layers:
            h = self.folded(h, layer)
        return self.head(h.mean(1))


class Frames(Windows):
    """Attends over frames, one place after the other: the rows of a sample are apart by the number of samples."""

    def folded(self, h, layer):
        count = len(h)
        rows = h.unflatten(1, (4, 3)).permute(2, 0, 1, 3).reshape(-1, 4, 32)  # (places, samples), frames
        return layer(rows).view(3, count, 4, 32).permute(1, 2, 0, 3).reshape(h.shape)


class Weights(Windows):
    """Asks attention for its weights, which torch then computes in another way."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, 0.2, batch_first=True) for _ in range(2))

    def folded(self, h, layer):
        rows = h.reshape(-1, 3, 32)
        return h + layer(rows, rows, rows, need_weights=True)[0].reshape(h.shape)


class TokensFirst(Windows):
    """torch's layers as they are by default, with the samples in dim 1."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.2) for _ in range(2))

    def folded(self, h, layer):
        return layer(h.reshape(-1, 3, 32).transpose(0, 1)).transpose(0, 1).reshape(h.shape)


class Both(Frames):
    """Each layer attends in windows first, and over frames then."""

    def folded(self, h, layer):
        return super().folded(layer(h.reshape(-1, 3, 32)).reshape(h.shape), layer)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("kind", [Windows, Frames, Weights, TokensFirst, Both])
def test_attention_with_dropout_on_folded_rows_is_equal(kind, line):
    numbers = torch.sin(torch.arange(2 * 8 * 12 * 16, dtype=torch.float64) * 1.3).view(2, 8, 12, 16)
    found = verify(kind(), line, [(x, torch.arange(8) % 3) for x in numbers])
    assert found.equal, found


class Longer(Frames):
    """Folds a sequence into as many places as it has, and says of how many rows it was."""

    def folded(self, h, layer):
        count, places = len(h), h.shape[1] // 4
        rows = h.unflatten(1, (4, places)).permute(2, 0, 1, 3).reshape(-1, 4, 32)
        return layer(rows).view(places, count, 4, 32).permute(1, 2, 0, 3).reshape(h.shape)


def test_rows_that_the_example_did_not_have_are_refused():
    numbers = torch.sin(torch.arange(8 * 16 * 16.0)).view(8, 16, 16)
    model = Longer()

    def work(world):
        run = parallelize(model, "dp2", world, example=numbers[:, :12])
        first, second = run.shard([(x, torch.arange(8) % 3) for x in (numbers[:, :12], numbers)])
        run.step(first)
        with pytest.raises(PlanError, match="does not get the rows for each sample that the example has"):
            run.step(second)

    launch(work, 2, ranks="threads")
