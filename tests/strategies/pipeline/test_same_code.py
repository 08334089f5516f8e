"""Ranks that read different code raise on every rank, and do not wait for each other."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize
from shardwright.errors import PlanError

W = 4


class Moody(nn.Module):
    """Leaves a layer out on one rank; ``when`` is whether that is in training."""

    def __init__(self, when):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(W, W) for _ in range(3))
        self.when = when

    def forward(self, x):
        x = self.a(x)
        if self.training is not self.when or threading.current_thread().name != "rank 1":
            x = self.b(x)
        return self.c(x)


def batch(run):
    return next(run.shard([(torch.ones(4, W), torch.zeros(4, dtype=torch.int64))]))


def test_code_that_follows_the_rank_is_refused_on_every_rank_before_anything_is_sent():
    def work(world):
        with pytest.raises(PlanError, match=r"rank 0 has 'chunk 0: b = b\(a\)', rank 1 'chunk"):
            parallelize(Moody(when=True), "pp2/cut:a,c mb2", world)

    launch(work, 2, ranks="threads")


def test_code_that_follows_the_rank_in_evaluation_alone_is_refused_there():
    model = Moody(when=False)

    def work(world):
        run = parallelize(model, "pp2/cut:a,c mb2", world)
        run.step(batch(run))
        with pytest.raises(PlanError, match="read different code"):
            run.evaluate(batch(run))

    launch(work, 2, ranks="threads")


def test_ranks_with_other_seconds_are_refused():
    def work(world):
        slow = {"0": 1.0, "1": 1.0, "2": 1.0, str(2 * world.rank): 5.0}
        with pytest.raises(PlanError, match="the same seconds"):
            parallelize(nn.Sequential(*(nn.Linear(W, W) for _ in range(3))), "pp2", world, seconds=slow)

    launch(work, 2, ranks="threads")
