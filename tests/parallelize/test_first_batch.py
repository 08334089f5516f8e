"""Without an example, the model's code is checked in the first step, before anything is computed."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.strategies import STRATEGIES, choose

BATCH = torch.linspace(-1, 1, 48).view(6, 8), torch.arange(6)


class Changed(nn.Module):
    """Two layers with a function of the activations, ``change(model, x)``, between them."""

    def __init__(self, change):
        super().__init__()
        self.up, self.down, self.change, self.drop = nn.Linear(8, 6), nn.Linear(6, 8), change, nn.Dropout(0.5)

    def forward(self, x):
        return self.down(self.change(self, self.up(x)))


def losses(change, line, batches=(BATCH, BATCH), **given):
    """Returns the losses of a few steps on each rank, each a thread, or raises what a rank raises."""

    def work(world):
        run = sw.parallelize(models[world.rank], line, world, **given)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        return [run.step(batch, update=optimizer).item() for batch in run.shard(batches)]

    torch.manual_seed(0)
    plain = Changed(change)
    models = [copy.deepcopy(plain) for _ in range(Layout.parse(line).num_ranks)]
    return sw.launch(work, len(models), ranks="threads")


def less_the_mean(model, x):
    return x - x.mean(0)


def in_another_order(model, x):
    return x + x[torch.randperm(len(x))]


def turned(model, x):
    return functional.dropout(x.t(), 0.5, model.training).t()


def dropped_when_turned(model, x):
    return model.drop(x.t()).t()


def written(model, x):
    model.up.weight.data.mul_(0.5)
    return x


@pytest.mark.parametrize("line", ["dp2", "mb2", "dp2/zero3", "pp2/1f1b mb2", "dp3 mb2 bf16"])
def test_code_that_mixes_samples_is_refused_in_the_first_step_as_with_an_example(line):
    with pytest.raises(LayoutError, match="the model computes a sample's values from other samples") as found:
        losses(less_the_mean, line)
    with pytest.raises(LayoutError) as expected:
        losses(less_the_mean, line, example=BATCH[0])
    assert str(found.value).splitlines()[1:] == str(expected.value).splitlines()[1:]


@pytest.mark.parametrize("line", ["dp2", "mb2"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (in_another_order, "draws random numbers that mix the samples"),
        (turned, "draws random numbers otherwise than for each sample in dim 0"),
        (dropped_when_turned, "'drop' draws random numbers otherwise than for each sample in dim 0"),
    ],
)
def test_draws_that_need_an_example_are_refused_without_one(change, words, line):
    with pytest.raises(PlanError, match=words):
        losses(change, line, [(BATCH[0], BATCH[1])])


@pytest.mark.parametrize("line", ["dp2", "mb2"])
def test_dropout_in_another_dim_is_that_of_one_device_with_an_example(line):
    one, found = losses(turned, "single", example=BATCH[0])[0], losses(turned, line, example=BATCH[0])[0]
    assert found == pytest.approx(one, rel=1e-6)


def test_code_that_writes_to_a_gathered_parameter_is_refused_in_the_first_step():
    with pytest.raises(LayoutError, match=r"the forward writes to the parameter 'up\.weight'"):
        losses(written, "dp2/zero3")


def test_scores_between_samples_are_warned_of_in_the_first_step_and_nothing_is_said_later():
    with warnings.catch_warnings(record=True, action="always") as given:
        losses(lambda model, x: x + (x @ x.t()).softmax(-1) @ x, "mb2")
    said = [str(each.message) for each in given]
    assert sorted(text.split(" over all")[0] for text in said) == ["'the model' takes _softmax", "'the model' takes mm"]


def test_code_that_cannot_be_recorded_is_warned_of_in_the_first_step(caplog):
    with caplog.at_level(logging.WARNING, "shardwright"):
        losses(lambda model, x: torch.from_numpy(x.detach().numpy() * 0) + x, "dp2")
    assert "the forward of Changed cannot be recorded" in caplog.text


@pytest.mark.parametrize("line", ["dp2", "mb2", "dp2/zero3 bf16", "dp3 mb2", "tp2"])
def test_code_that_treats_each_sample_alone_runs_as_before(line):
    one, found = losses(lambda model, x: x.tanh(), "single")[0], losses(lambda model, x: x.tanh(), line)[0]
    assert found == pytest.approx(one, rel=2e-2 if "bf16" in line else 1e-6)


def test_a_rank_without_samples_leaves_the_check_to_the_others_and_to_its_own_first_samples():
    one = BATCH[0][:1], BATCH[1][:1]
    assert len(losses(lambda model, x: x.tanh(), "dp2", [one, BATCH])) == 2
    with pytest.raises(LayoutError, match="from other samples"):
        losses(less_the_mean, "dp2", [one, BATCH])


def test_nothing_is_recorded_on_one_rank():
    calls = []
    losses(lambda model, x: calls.append(x.is_meta) or x, "single")
    assert calls == [False, False]


class OwnNorm(nn.Module):
    """Subtracts the batch's mean in training, and a kept one in evaluation."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.ones(6))

    def forward(self, x):
        return x - x.mean(0) if self.training else x - self.kept


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
def test_code_is_looked_at_in_the_modes_in_which_the_model_trains(is_before):
    def work(world):
        model = models[world.rank]
        run = sw.parallelize(model.eval() if is_before else model, "dp2", world)
        run.model.eval()
        return [run.step(batch).item() for batch in run.shard([BATCH])]

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 6), OwnNorm(), nn.Linear(6, 8))
    models = [copy.deepcopy(plain) for _ in range(2)]
    expected = functional.cross_entropy(plain.eval()(BATCH[0]), BATCH[1]).item()
    assert sw.launch(work, 2, ranks="threads")[0] == pytest.approx([expected])
    with pytest.raises(LayoutError, match="from other samples"):
        losses(lambda model, x: OwnNorm()(x), "dp2")


def test_strategies_of_the_callers_own_are_those_of_the_look_too():
    class Allowing(type(STRATEGIES["data_parallel"])):
        """Takes models whose code mixes samples, as its user wants it."""

        def place(self, job, plan):
            return super().place(job._replace(graph=None), plan)

    own = [Allowing() if each.name == "data_parallel" else each for each in choose(Layout.parse("dp2"))]
    assert losses(less_the_mean, "dp2", strategies=own)[0][0] > 0
    with pytest.raises(LayoutError, match="from other samples"):
        losses(less_the_mean, "dp2")


class ByCount(nn.Module):
    """Computes with the size of the batch, or with a number that is as large."""

    def __init__(self, way):
        super().__init__()
        self.way, self.layer = way, nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        if self.way == "scaled":
            return h * (16.0 / x.shape[0])
        if self.way == "over its length":
            return h / len(h)
        if self.way == "elements":
            return h + x.numel()
        if self.way == "constant":
            return h * 46 + 23
        return h.view(x.shape[0], 2, 2).flatten(1) * 0.5


@pytest.mark.parametrize("way", ["scaled", "over its length", "elements", "constant", "shapes alone"])
@pytest.mark.parametrize(("line", "shows"), [("dp2", True), ("dp2", False), ("mb2", True), ("single", True)])
def test_a_number_of_samples_as_a_value_is_warned_of_where_the_batch_is_cut(way, line, shows):
    model, x = ByCount(way), torch.randn(8, 4)

    def work(world):
        given = {"example": x} if shows else {}
        run = sw.parallelize(model, line, world, loss=nn.MSELoss(), **given)
        run.step(next(run.shard([(x, x)])))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sw.launch(work, line, ranks="threads")
    said = [each for each in caught if "computes with the number of samples" in str(each.message)]
    assert len(said) == (line != "single" and way in ("scaled", "over its length", "elements"))


class ToZero(nn.Module):
    def forward(self, output, target):
        return output.square().sum(), len(target)


class ByPlace(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.table = way, nn.Linear(4, 4), nn.Embedding(50, 4)
        self.layer = nn.Linear(4, 4)
        self.positions = nn.Parameter(torch.ones(50, 1, 4))
        self.register_buffer("waves", torch.ones(50, 4))

    def forward(self, x):
        h = self.layer(self.first(x))
        number = torch.arange(len(h), device=h.device)
        if self.way == "number":
            return h + number.view(-1, 1, 1)
        if self.way == "buffer":  # written for a batch in dim 1
            return h + self.waves[: h.size(0)].unsqueeze(1)
        if self.way == "parameter":
            return torch.cat((h, self.positions[: len(h)].expand_as(h)), -1)
        if self.way == "table":
            return h * self.layer(self.table(number))[:, None]
        if self.way == "ramp":
            return h * torch.linspace(0, 1, len(h), device=h.device)[:, None, None]
        if self.way == "tokens":  # which are not the samples
            return h + self.waves[: h.size(1)] + torch.arange(h.size(1), device=h.device)[:, None]
        if self.way == "cache":
            rows = torch.zeros(50, *h.shape[1:], dtype=h.dtype, device=h.device)[: len(h)]
            return rows.copy_(h) * 2
        if self.way == "rows":  # of all samples in one tensor, as graph networks take neighbours
            near = x[..., 0].long() % x.shape[1] + x.shape[1] * number[:, None]
            return h.flatten(0, 1)[near] + h[number]
        return h + self.positions[:1] + torch.zeros(len(h), 1, 1, device=h.device)


@pytest.mark.parametrize("way", ["number", "buffer", "parameter", "table", "ramp", "tokens", "rows", "cache", "alike"])
@pytest.mark.parametrize(("line", "shows"), [("dp2", True), ("mb2", False), ("pp2/1f1b mb2", True), ("tp2", True)])
def test_a_place_in_the_batch_as_a_value_is_warned_of_where_the_batch_is_cut(way, line, shows):
    model, x = ByPlace(way), torch.randn(8, 3, 4)

    def work(world):
        given = {"example": x} if shows else {}
        run = sw.parallelize(model, line, world, loss=ToZero(), **given)
        run.step(next(run.shard([(x, x)])))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sw.launch(work, line, ranks="threads")
    said = [each for each in caught if "a sample's place in the batch" in str(each.message)]
    assert len(said) == (line != "tp2" and way in ("number", "buffer", "parameter", "table", "ramp"))
