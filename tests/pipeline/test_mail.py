"""What stages remember of what crosses between them."""

from __future__ import annotations

import torch
from torch import nn

from shardwright import launch, parallelize
from shardwright.pipeline.mail import KEPT_KEYS


def test_forms_of_shapes_that_change_from_step_to_step_are_forgotten_and_told_again():
    def batch(size):
        return torch.ones(size, 4), torch.zeros(size, dtype=torch.int64)

    def work(world):
        run = parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "pp2 mb2", world)
        mail = run._executor.work.mail
        losses = {}
        for size in [*range(2, 202), 2, 3]:
            loss = run.step(next(run.shard([batch(size)]))).item()
            assert losses.setdefault(size, loss) == loss
            assert len(mail._known) <= KEPT_KEYS
        return len(mail._known)

    assert launch(work, 2, ranks="threads") == [KEPT_KEYS] * 2
