"""The specs and receive buffers that stages keep for the values they exchange."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import MeanSquaredError, launch, parallelize
from shardwright.strategies.pipeline.p2p import KEPT_KEYS, LEAST_BYTES
from shardwright.strategies.pipeline.pipeline_stage import POSTED_AHEAD


@pytest.mark.sampled(0)
def test_specs_of_shapes_that_change_from_step_to_step_are_dropped_and_announced_again():
    def batch(size):
        return torch.ones(size, 4), torch.zeros(size, dtype=torch.int64)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def work(world):
        run = parallelize(model, "pp2 mb2", world, check_every=0)  # without updates, of which a run would warn
        p2p = run._executor.work.p2p
        losses = {}
        for size in [*range(2, 202), 2, 3]:
            loss = run.step(next(run.shard([batch(size)]))).item()
            assert losses.setdefault(size, loss) == loss
            assert len(p2p._by_key) <= KEPT_KEYS
        return len(p2p._by_key)

    assert launch(work, 2, ranks="threads") == [KEPT_KEYS] * 2


class Scale(nn.Module):
    """Multiplies by one number; keeps its inputs, and a copy, of the calls in ``keeps``."""

    def __init__(self, keeps=()):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))
        self.keeps, self.seen = keeps, []

    def forward(self, x):
        if len(self.seen) in self.keeps and not x.is_meta:
            self.seen.append((x.detach()[1:], x.detach().clone()[1:]))
        elif not x.is_meta:
            self.seen.append(None)
        return x * self.factor


def test_large_messages_reuse_the_buffers_of_earlier_ones_unless_a_tensor_still_refers_to_them():
    size = (LEAST_BYTES // 4 // 1024, 1024)

    def work(world):
        run = parallelize(nn.Sequential(Scale(), Scale(keeps=(0, 5))), "pp2 mb4", world, loss=MeanSquaredError())
        (batch,) = run.shard([(torch.arange(4.0).view(4, 1, 1).expand(4, *size), torch.zeros(4, *size))])
        for _ in range(3):
            run.step(batch)
        kept = [pair for pair in run.model[1].seen if pair is not None]
        assert all(torch.equal(mine, copy) for mine, copy in kept)
        return len(kept), sum(map(len, run._executor.work.p2p.buffers._kept.values())), run.parameters

    (_, gradients, _), (num_kept, values, parameters) = launch(work, 2, ranks="threads")
    assert parameters["1.factor"].grad.item() == pytest.approx(2 * (0 + 1 + 4 + 9) / 4)
    assert num_kept == 2
    assert values <= 2 + POSTED_AHEAD + num_kept < 12  # of twelve messages
    assert gradients <= 2 + POSTED_AHEAD < 12
