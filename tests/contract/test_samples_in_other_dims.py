"""Models whose own code puts the samples in another dim than the first: every layout computes what one device does."""

from __future__ import annotations

import pytest
import torch
from tests.contract.cases import CHECKS, check_equal, check_traffic, planned
from tests.contract.test_on_shards import TOKENS, WIDTH, WORDS, OwnCase
from torch import nn

from shardwright.models.losses import CrossEntropy
from shardwright.strategies.tensor_parallel.shards_plan import share_cut

WAYS = {
    "tokens first": (lambda h: h.transpose(0, 1), lambda h: h.transpose(0, 1)),
    "rows of tokens": (lambda h: h.flatten(0, 1), lambda h: h.view(-1, TOKENS, WIDTH)),
    "rows of tokens, tokens first": (
        lambda h: h.transpose(0, 1).flatten(0, 1),
        lambda h: h.view(TOKENS, -1, WIDTH).transpose(0, 1),
    ),
}


class Blocks(nn.Module):
    """Blocks of two linears and two dropouts, which get the tokens in one of the ways."""

    def __init__(self, way, inner=32):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, inner), nn.ReLU(), nn.Dropout(0.2), nn.Linear(inner, WIDTH), nn.Dropout(0.2))
            for _ in range(2)
        )
        self.way = way

    def forward(self, tokens):
        there, back = WAYS[self.way]
        h = there(self.words(tokens))
        for block in self.blocks:
            h = h + block(h)
        return self.head(back(h))


class Attends(nn.Module):
    """Looks words up with the tokens first, as torch's attention takes them by default."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, 4, dropout=0.1), nn.LayerNorm(WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, WIDTH))

    def forward(self, tokens):
        h = self.words(tokens.transpose(0, 1))
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        return self.head((h + self.network(h)).transpose(0, 1))


def case_of(name, model):
    return OwnCase(name, model, CrossEntropy(), num_tokens=TOKENS, num_samples=(9, 4))


with torch.random.fork_rng():
    torch.manual_seed(1)
    CASES = {name: case_of(name, Blocks(name)) for name in WAYS} | {"attends": case_of("attends", Attends())}

LINES = (
    "tp2", "tp2 dp2", "tp4/2d", "tp2/sp", "mb2 tp2/sp", "pp2/1f1b mb2 tp2/sp", "tp2x2x2/3d", "tp2x2x2/2.5d mb2",
    "dp2/zero3 tp2/sp recompute:full", "pp2/1f1b mb2 dp2/zero1 tp2",
)  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", CASES)
def test_samples_may_be_in_any_dim(name, line):
    assert share_cut(planned(line, CASES[name])[0]) > 0.8
    for check in CHECKS:
        check(line, CASES[name])


def test_where_weights_are_larger_than_activations_nothing_is_gathered_from_other_dims():
    """Column- and row-parallel would send less there, and would gather samples from dim 0."""
    case = case_of("wide", Blocks("tokens first", inner=512))
    plan, _ = planned("tp2/sp", case)
    assert {plan.roles[f"blocks.0.{layer}"].name for layer in (0, 3)} == {"tp:t"}
    check_equal("tp2/sp", case)


class Positions(nn.Module):
    """Computes positions by layers of their own, which get no samples."""

    def __init__(self, inner):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH))
        self.block = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, tokens):
        places = self.network(self.places(torch.arange(TOKENS, device=tokens.device)))
        h = self.words(tokens) + places
        return self.head(h + self.block(h))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("line", ["tp2", "dp4 tp2", "tp2/sp", "mb2 tp2/sp", "tp2x2/2d", "tp2x2x2/3d", "dp2 tp2x2/2d"])
@pytest.mark.parametrize(("inner", "samples"), [(512, (16, 9)), (32, (3, 1))], ids=["wide", "few samples"])
def test_layers_of_positions_get_no_samples_and_send_what_is_said(inner, samples, line):
    torch.manual_seed(1)
    case = OwnCase("positions", Positions(inner), CrossEntropy(), num_tokens=TOKENS, num_samples=samples)
    check_equal(line, case)
    check_traffic(line, case)
