"""What a forward draws from a generator that it seeds is what plain torch draws, under every layout that allows it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize, verify
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.models.losses import MeanSquaredError

WIDTH = 8


class Projects(nn.Module):
    """A fixed random projection, drawn anew in each forward, between layers and dropout."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4), nn.Dropout(0.0)
        self.draw, self.generator = draw, torch.Generator()

    def forward(self, x):
        h = self.drop(torch.tanh(self.first(x)))
        return self.last(h @ self.draw(self, h))


def own(model, h):
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3), dtype=h.dtype)


def permutes(model, h):
    return torch.eye(WIDTH, dtype=h.dtype)[torch.randperm(WIDTH, generator=torch.Generator().manual_seed(3))]


def kept(model, h):
    return torch.rand(WIDTH, WIDTH, generator=model.generator.manual_seed(5), dtype=h.dtype)


def forks(model, h):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)  # as torch.manual_seed does
        return torch.randn(WIDTH, WIDTH, dtype=h.dtype)


def per_sample(model, h):
    return torch.diag_embed(torch.rand(h.shape, generator=torch.Generator().manual_seed(3), dtype=h.dtype))[0]


def batch():
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(6, width, generator=draw, dtype=torch.float64) for width in (6, 4))


def plain_losses(model, num_steps=2):
    model, (x, y) = copy.deepcopy(model), batch()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_losses(world, model, line):
    run = parallelize(model, line, world, loss=MeanSquaredError(), example=batch()[0])
    optimizer, losses = run.optimizer(torch.optim.SGD, lr=0.1), []
    (local,) = run.shard([batch()])
    for _ in range(2):
        losses.append(run.step(local).item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("line", ["single", "mb2", "dp2", "dp3/zero3", "tp2/sp", "pp2/1f1b mb2", "dp2 recompute:first"])
@pytest.mark.parametrize("draw", [own, permutes, kept])
def test_numbers_of_a_generator_that_the_forward_seeds_are_those_of_plain_torch(draw, line):
    torch.manual_seed(0)
    model = Projects(draw).double()
    plain = plain_losses(model)
    losses = launch(run_losses, Layout.parse(line).num_ranks, model, line, ranks="threads")
    assert losses == [pytest.approx(plain, abs=1e-12)] * len(losses)
    verdict = verify(model, line, [batch()], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.of_threads
def test_torchs_generator_may_be_seeded_on_one_rank_and_not_where_ranks_share_it():
    torch.manual_seed(0)
    model = Projects(forks).double()
    plain = plain_losses(model)
    (losses,) = launch(run_losses, 1, model, "single", ranks="threads")
    assert losses == pytest.approx(plain, abs=1e-12)
    for line in ("dp2", "tp2", "mb2"):
        with pytest.raises(PlanError, match=r"from torch's generator(.*\n)*.*Generator of the forward's own"):
            launch(run_losses, Layout.parse(line).num_ranks, model, line, ranks="threads")


@pytest.mark.parametrize("line", ["dp2", "mb2"])
def test_numbers_for_each_sample_from_a_generator_with_a_seed_are_refused_where_the_batch_is_cut(line):
    torch.manual_seed(0)
    model = Projects(per_sample).double()
    with pytest.raises(PlanError, match="for each sample from a generator that its forward seeds"):
        launch(run_losses, Layout.parse(line).num_ranks, model, line, ranks="threads")
