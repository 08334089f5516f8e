"""What a forward draws from a generator that it seeds is what plain torch draws, under every layout that allows it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright import launch, parallelize, verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.models.losses import MeanSquaredError
from shardwright.rng import RngTracker
from shardwright.runtime.keyed_draws import key_draws

WIDTH = 8


class Projects(nn.Module):
    """A fixed random projection, drawn anew in each forward, between layers and dropout."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4), nn.Dropout(0.0)
        self.draw, self.generator = draw, torch.Generator()
        self.others = {"noise": torch.Generator()}

    def forward(self, x):
        h = self.drop(torch.tanh(self.first(x)))
        return self.last(h @ self.draw(self, h))


def own(model, h):
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3), dtype=h.dtype)


def permutes(model, h):
    return torch.eye(WIDTH, dtype=h.dtype)[torch.randperm(WIDTH, generator=torch.Generator().manual_seed(3))]


def kept(model, h):
    return torch.rand(WIDTH, WIDTH, generator=model.generator.manual_seed(5), dtype=h.dtype)


def held(model, h):
    return torch.randn(WIDTH, WIDTH, generator=model.others["noise"], dtype=h.dtype)


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


@pytest.mark.parametrize("line", ["mb3", "dp2", "dp2 mb3", "pp2/1f1b mb2"])
def test_numbers_of_a_generator_that_the_model_keeps_do_not_depend_on_the_layout(line):
    torch.manual_seed(0)
    verdict = verify(Projects(held).double(), line, [batch()] * 2, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class Checkpoints(nn.Module):
    """A block that draws with a seed and without one inside of a checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.enter, self.reentrant = nn.Linear(6, 6), reentrant
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)

    def run(self, x):
        h = torch.tanh(self.first(x))
        h = h @ torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3), dtype=h.dtype)
        return self.last(functional.dropout(h, 0.3, self.training))

    def forward(self, x):
        x = self.enter(x)
        return self.run(x) if self.reentrant is None else checkpoint(self.run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_draws_with_and_without_a_seed_in_a_checkpoint_have_gradients_as_without_it(reentrant):
    def gradients(how):
        torch.manual_seed(0)
        model, x = Checkpoints(how).double(), batch()[0].requires_grad_()
        key_draws(model, RngTracker(3, samples=range(6)), ModelGraph(model, x.detach().to("meta")).draws)
        model(x).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    for one, other in zip(gradients(reentrant), gradients(None), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_in_evaluation_only_draws_from_a_generator_of_their_own_are_those_with_a_seed():
    class Evaluates(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x):
            if self.training:
                x = x * torch.rand(6, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
            x = x * (1 + torch.rand(x.shape, dtype=x.dtype))
            return functional.dropout(self.layer(x), 0.5, True)

    torch.manual_seed(0)
    model = Evaluates().double()

    def work(world):
        run = parallelize(model, "single", world, loss=MeanSquaredError(), example=batch()[0])
        return run.predict(batch()[0]), run.predict(batch()[0])

    ((first, second),) = launch(work, 1, ranks="threads")
    assert torch.equal(first, second)


@pytest.mark.parametrize("line", ["dp2", "mb2"])
def test_numbers_for_each_sample_from_a_generator_with_a_seed_are_refused_where_the_batch_is_cut(line):
    torch.manual_seed(0)
    model = Projects(per_sample).double()
    with pytest.raises(PlanError, match="for each sample from a generator that its forward seeds"):
        launch(run_losses, Layout.parse(line).num_ranks, model, line, ranks="threads")
