"""Dropout inside of layers that are cut, where the model's own code has put the samples in another dim than the first."""

import pytest
import torch
from torch import nn

from shardwright import verify

SAMPLES, TOKENS, WIDTH = 8, 7, 16

WAYS = {
    "sequences first": (lambda h: h.transpose(0, 1), lambda h: h.transpose(0, 1)),
    "flat": (lambda h: h.flatten(0, 1), lambda h: h.view(-1, TOKENS, WIDTH)),
    "flat, sequences first": (
        lambda h: h.transpose(0, 1).flatten(0, 1),
        lambda h: h.view(TOKENS, -1, WIDTH).transpose(0, 1),
    ),
}


class Blocks(nn.Module):
    """Blocks of two linears and two dropouts, which get the tokens in a ``way``."""

    def __init__(self, way):
        super().__init__()
        self.table, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, WIDTH), nn.Dropout(0.2))
            for _ in range(2)
        )
        self.way = way

    def forward(self, x):
        there, back = WAYS[self.way]
        h = there(self.table(x))
        for block in self.blocks:
            h = h + block(h)
        return self.head(back(h).mean(1))


class Attends(nn.Module):
    """A block of torch's attention, whose default is sequences first, and a network after it."""

    def __init__(self):
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, 4, dropout=0.1), nn.LayerNorm(WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, WIDTH))

    def forward(self, x):
        h = x.transpose(0, 1)
        h = self.norm(h + self.attention(h, h, h)[0])
        return (h + self.network(h)).mean(0)


LINES = ["tp2", "tp2 dp2", "tp4/2d", "pp2/1f1b mb2 tp2/sp", "tp2x2x2/3d", "tp2 recompute:full"]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("way", WAYS)
def test_masks_are_those_of_one_device_wherever_the_samples_are(way, line):
    torch.manual_seed(0)
    batch = torch.randint(50, (SAMPLES, TOKENS)), torch.randint(5, (SAMPLES,))
    verdict = verify(Blocks(way), line, [batch] * 2)
    assert verdict, str(verdict)
    assert verdict.shares[next(each for each in verdict.shares if each.startswith("tp"))] > 0.9


@pytest.mark.parametrize("line", LINES[:3])
def test_a_network_after_an_attention_of_sequences_first_is_cut_with_its_dropout(line):
    torch.manual_seed(0)
    model = nn.Sequential(Attends(), nn.Linear(WIDTH, 5))
    verdict = verify(model, line, [(torch.randn(SAMPLES, TOKENS, WIDTH), torch.randint(5, (SAMPLES,)))] * 2)
    assert verdict, str(verdict)
