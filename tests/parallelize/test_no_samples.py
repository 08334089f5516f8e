"""Batches that leave a rank or a microbatch without samples: models that take none are refused with the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import Layout, launch, parallelize
from shardwright.errors import PlanError


class Heads(nn.Module):
    """Splits features into heads by a shape with -1, which torch cannot infer for a tensor without elements."""

    def __init__(self, infers):
        super().__init__()
        self.first, self.last, self.heads = nn.Linear(8, 8), nn.Linear(8, 8), -1 if infers else 4

    def forward(self, x):
        h = self.first(x)
        return self.last(h.view(len(x), self.heads, 2).relu().flatten(1))


@pytest.mark.parametrize(
    ("line", "num_samples", "trains", "least"),
    [
        ("dp2", 1, True, 2),
        ("dp2", 1, False, 2),
        ("dp2/zero3", 1, True, 2),
        ("dp2 mb2", 3, True, 4),
        ("pp2 mb4", 3, False, 4),
        ("dp2 mb2", 3, False, 0),  # microbatches are not cut in an evaluation
        ("dp2", 2, True, 0),
    ],
)
def test_a_batch_smaller_than_its_parts_is_refused_on_every_rank_if_the_model_takes_no_empty_one(
    line, num_samples, trains, least
):
    torch.manual_seed(0)
    plain = Heads(True)
    num_ranks = Layout.parse(line).num_ranks

    def work(world):
        run = parallelize(plain, line, world, example=torch.zeros(8, 8))
        whole = torch.ones(8, 8), torch.zeros(8, dtype=torch.int64)
        rest = torch.ones(num_samples, 8), torch.zeros(num_samples, dtype=torch.int64)
        try:
            if trains:
                return str([run.step(part).item() for part in run.shard([whole, rest])])
            return str(run.evaluate_all(run.shard([whole, rest])).item())
        except PlanError as refusal:
            return str(refusal)

    for text in launch(work, num_ranks, ranks="threads"):
        assert (f"a batch of {num_samples} samples for" in text) == bool(least)
        assert (f"batch_size={least}, drop_last=True" in text) == bool(least)


def test_a_model_that_takes_empty_batches_trains_on_them():
    torch.manual_seed(0)
    plain = Heads(False)

    def work(world):
        run = parallelize(plain, "dp2 mb2", world, example=torch.zeros(8, 8))
        return run.step(next(run.shard([(torch.ones(1, 8), torch.zeros(1, dtype=torch.int64))]))).item()

    expected = nn.functional.cross_entropy(plain(torch.ones(1, 8)), torch.zeros(1, dtype=torch.int64)).item()
    assert launch(work, 2, ranks="threads") == pytest.approx([expected] * 2)
