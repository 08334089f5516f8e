"""Tables of which a model takes sums, means or maxima of rows, as recommenders do, are cut by their features."""

from __future__ import annotations

import pytest
import torch
from tests.contract.cases import CHECKS, planned
from tests.contract.test_on_shards import TOKENS, WIDTH, WORDS, OwnCase
from torch import nn

from shardwright.models.losses import CrossEntropy

CLASSES = 5


class Recommender(nn.Module):
    """Bags of words, weighed or not, whose places are given by a matrix or by the start of each bag."""

    def __init__(self, mode, *, weighted=False, starts=False, last=False):
        super().__init__()
        self.weighted, self.starts, self.last = weighted, starts, last
        self.table = nn.EmbeddingBag(WORDS, WIDTH, mode=mode, include_last_offset=last, padding_idx=3)
        if weighted:
            self.weights = nn.Parameter(torch.randn(WORDS))
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, CLASSES)

    def forward(self, words):
        weights = self.weights.sigmoid()[words] if self.weighted else None
        if not self.starts:
            bags = self.table(words, per_sample_weights=weights)
        else:
            starts = torch.arange(0, words.numel() + self.last, words.size(1), device=words.device)
            flat = None if weights is None else weights.reshape(-1)
            bags = self.table(words.reshape(-1), starts, per_sample_weights=flat)
        return self.down(torch.tanh(self.up(bags)))


class BagCase(OwnCase):
    @property
    def batches(self):
        return [(words, targets[:, 0] % CLASSES) for words, targets in super().batches]


def case_of(*args, **named):
    torch.manual_seed(1)
    return BagCase("bags", Recommender(*args, **named), CrossEntropy(), num_tokens=TOKENS)


CASES = {
    "sums": case_of("sum"),
    "means by starts": case_of("mean", starts=True),
    "maxima": case_of("max"),
    "weighted sums": case_of("sum", weighted=True),
    "weighted sums by starts and the end": case_of("sum", weighted=True, starts=True, last=True),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("line", ["tp2", "tp3", "dp2/zero3 tp2", "tp2x2/2d", "tp2x2x2/3d", "pp2/1f1b mb2 tp2"])
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_bags_keeps_every_promise(name, line):
    plan, _ = planned(line, CASES[name])
    assert plan.compute["table.weight"].axes, "the table is cut"
    for check in CHECKS:
        check(line, CASES[name])


def test_a_table_whose_rows_are_rescaled_stays_whole():
    case = case_of("sum")
    case.config.table.max_norm = 0.5
    plan, _ = planned("tp2", case)
    assert not plan.compute["table.weight"].axes
    for check in CHECKS:
        check("tp2", case)
