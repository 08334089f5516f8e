"""Losses that hold more than numbers: class weights, target networks, teachers with norms, the model, gradients."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import MeanLoss, launch, parallelize, verify
from shardwright.errors import PlanError, RankFailedError
from shardwright.layout import Layout

LINES = ("single", "dp2", "tp2", "pp2 mb2")


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).double()


def batches(number=4, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator).double(), torch.randint(3, (size,), generator=generator))
        for _ in range(number)
    ]


def losses_of(line, model, made, given=None):
    """The losses of four steps; ``made(run)`` returns a loss and what the loop does before each step."""

    def work(world):
        loss, change = made()
        run = parallelize(model, line, world, loss=loss, example=batches()[0][0])
        optimizer, losses = run.optimizer(torch.optim.SGD, lr=0.1), []
        for number, batch in enumerate(run.shard(batches() if given is None else given)):
            change(number, run)
            losses.append(run.step(batch).item())
            optimizer.step()
        return losses

    return launch(work, Layout.parse(line), ranks="threads")


def plain_losses(model, loss, change, given=None):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number, (x, y) in enumerate(batches() if given is None else given):
        change(number, SimpleNamespace(state_dict=model.state_dict))
        optimizer.zero_grad()
        mean = loss(model(x), y)
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return losses


# ---- tensors and lists that the loop changes


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.betas = [0.0]

    def forward(self, output, targets):
        return functional.cross_entropy(output, targets) + self.betas[0] * output.square().mean()


def changing(how):
    """A loss, and what changes it before each step."""
    if how in ("weight is set", "weight is written"):
        loss = nn.CrossEntropyLoss(weight=torch.ones(3).double())

        def change(number, _):
            weight = 1 + number * torch.arange(3).double()
            if how == "weight is set":
                loss.weight = weight
            else:
                loss.weight.copy_(weight)

        return loss, change
    if how == "list":
        own = Weighted()
        return MeanLoss(own), lambda number, _: own.betas.__setitem__(0, 0.3 * number)
    at = SimpleNamespace(betas=[0.0])
    return MeanLoss(partial(Weighted.forward, at)), lambda number, _: setattr(at, "betas", [0.3 * number])


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("how", ["weight is set", "weight is written", "list", "argument of a partial"])
@pytest.mark.sampled(3)
def test_what_a_loop_changes_in_the_loss_that_it_gave_holds_for_the_next_step(line, how):
    loss, change = changing(how)
    expected = plain_losses(plain(), getattr(loss, "function", loss), change)
    found = losses_of(line, plain(), lambda: changing(how))
    assert all(rank == pytest.approx(expected, rel=1e-9) for rank in found)


@pytest.mark.parametrize("line", LINES)
def test_a_target_network_of_the_loss_takes_over_its_buffers_too(line):
    torch.manual_seed(2)
    own = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()

    def made():
        target = copy.deepcopy(own).requires_grad_(False).eval()

        def loss(output, targets):
            return functional.mse_loss(output, target(targets))

        def change(number, run):
            state = run.state_dict()  # on every rank
            if number == 2:
                target.load_state_dict(state)

        return MeanLoss(loss), change

    given = [(x, x.roll(1, 0)) for x, _ in batches()]
    loss, change = made()
    expected = plain_losses(copy.deepcopy(own), loss.function, change, given)
    if "mb" in line:
        line += "/own-statistics"
        assert all(len(rank) == 4 for rank in losses_of(line, own, made, given)), "the model's norm is another there"
        return
    found = losses_of(line, own, made, given)
    assert all(rank == pytest.approx(expected, rel=1e-9) for rank in found)


# ---- the model that was given


class Balanced(nn.Module):
    """Leaves a term of its loss in an attribute, and has a setting."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 2), nn.Linear(6, 8), nn.Linear(8, 3)
        self.aux_loss, self.classes = 0.0, 3

    def forward(self, x):
        chosen = self.gate(x).softmax(-1)
        self.aux_loss = (chosen * chosen.log()).sum(-1).mean()
        return self.down(torch.relu(self.up(x))) * chosen[:, :1]

    def term(self):
        return self.aux_loss


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("reads", ["attribute", "method", "setting"])
def test_an_attribute_that_the_forward_sets_is_not_read_from_the_model_that_was_given(line, reads):
    torch.manual_seed(0)
    model = Balanced().double()

    def loss(output, targets):
        if reads == "setting":
            return functional.cross_entropy(output.view(-1, model.classes), targets)
        return functional.cross_entropy(output, targets) + (model.aux_loss if reads == "attribute" else model.term())

    def step():
        return losses_of(line, model, lambda: (MeanLoss(loss), lambda *_: None))

    if reads == "setting":
        expected = plain_losses(copy.deepcopy(model), loss, lambda *_: None)
        assert all(rank == pytest.approx(expected, rel=1e-9) for rank in step())
        return
    with pytest.raises((PlanError, RankFailedError), match="the loss reads 'aux_loss' of the model that was given"):
        step()


# ---- gradients


class Modulated(nn.Module):
    def __init__(self):
        super().__init__()
        self.style, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        w = self.style(x)
        return self.second(torch.tanh(self.first(w)) * w), w


@pytest.mark.parametrize("line", ["dp2", "pp2", "pp2 mb2"])
def test_a_gradient_by_a_tensor_of_the_output_is_refused_in_stages(line):
    def loss(output, targets):
        y, w = output
        (slope,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        return functional.cross_entropy(y, targets) + slope.square().sum(1).mean()

    if line == "dp2":
        assert verify(Modulated(), line, batches(2), loss=MeanLoss(loss)).equal
        return
    with pytest.raises((PlanError, RankFailedError), match="takes a gradient by a tensor that the model returns"):
        verify(Modulated(), line, batches(2), loss=MeanLoss(loss))


@pytest.mark.parametrize("line", ["dp2", "pp2"])
def test_a_gradient_within_the_loss_is_that_of_one_device(line):
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).requires_grad_(False)

    def loss(output, targets):
        moved = output + 0.1
        (slope,) = torch.autograd.grad(critic(moved).sum(), moved, create_graph=True)
        return functional.cross_entropy(output, targets) + slope.square().sum(1).mean()

    verdict = verify(plain(), line, batches(2), loss=MeanLoss(loss))
    assert verdict.equal, str(verdict)
    assert verdict.tolerance == 1e-10, "the critic computes in float64 too"


# ---- norms and counters


class Perceptual(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh()).requires_grad_(False)

    def forward(self, output, targets):
        return functional.mse_loss(self.net(output), self.net(functional.one_hot(targets, 3).to(output)))


@pytest.mark.parametrize("line", ["dp2", "tp2"])
@pytest.mark.parametrize("how", ["training", "frozen"])
def test_norms_of_a_network_in_the_loss_are_warned_of_where_ranks_have_other_samples(line, how, recwarn):
    loss = Perceptual().eval() if how == "frozen" else Perceptual()
    verdict = verify(plain(), line, batches(1), loss=MeanLoss(lambda output, targets: loss(output, targets)))
    differs = line == "dp2" and how == "training"
    assert verdict.equal is not differs, str(verdict)
    assert any("holds a BatchNorm1d in training mode" in str(each.message) for each in recwarn) is differs
    assert verdict.tolerance == 1e-10


class Counts:
    """A loss that is no module, and warms up by the number of its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, targets):
        self.calls += 1
        return min(1.0, 0.1 * self.calls) * functional.cross_entropy(output, targets)


@pytest.mark.parametrize("line", ["dp2", "mb2"])
def test_a_counter_of_a_plain_class_is_warned_of_too(line, recwarn):
    losses_of(line, plain(), lambda: (MeanLoss(Counts()), lambda *_: None))
    assert any("the loss changes 'function.calls' in each call" in str(each.message) for each in recwarn) is (
        "mb" in line
    )
