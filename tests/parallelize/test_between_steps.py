"""What a loop does between steps counts: writes to parameters, averages of closures and stages, rates and options."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.models import MeanSquaredError

WIDTH, BOUND = 8, 0.2


def plain():
    torch.manual_seed(0)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, WIDTH)).double()


def batches(number=6):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 4, WIDTH, generator=generator).double()) for _ in range(number)]


def on_ranks(line, work, model, **options):
    def start(world):
        return work(sw.parallelize(model, line, world, loss=MeanSquaredError(), **options))

    return sw.launch(start, line, ranks="threads")[0]


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-9, rtol=1e-9, msg=name)


# ---- writes to parameters


@torch.no_grad()
def clip(parameters):
    for parameter in parameters:
        parameter.clamp_(-BOUND, BOUND)


def clip_data(parameters):
    for parameter in parameters:
        parameter.data.clamp_(-BOUND, BOUND)


def losses_of(model, data, write, rate=0.1):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=rate), []
    for x, y in data:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        write(model.parameters())
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("write", [clip, clip_data])
@pytest.mark.parametrize("line", ["dp2", "dp2/zero1", "dp2/zero2", "dp2/zero3", "dp2/zero1/offload:disk"])
def test_parameters_written_after_an_evaluation_are_those_of_the_next_step(line, write):
    plainly = plain()
    expected = losses_of(plainly, batches(), write)

    def work(run):
        optimizer, losses = run.optimizer(torch.optim.SGD, lr=0.1), []
        for batch in run.shard(batches()):
            losses.append(run.step(batch).item())
            optimizer.step()
            run.evaluate(next(run.shard(batches(1))))
            write(run.parameters.values())
        return losses, run.state_dict()

    losses, state = on_ranks(line, work, plain())
    assert losses == pytest.approx(expected, abs=1e-9)
    assert_same(state, plainly.state_dict())


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule: eval() and train() move the parameters between the trained point and the mean."""

    def __init__(self, parameters, lr=0.1, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "count": 0})

    def moved(self, weight_of):
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(self.state[p]["z"], weight_of(group["beta"]))

    def eval(self):
        self.moved(lambda beta: 1 - 1 / beta)

    def train(self):
        self.moved(lambda beta: 1 - beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            share = 1 / group["count"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - share) - 1))
                z.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize("line", ["dp2", "dp2/zero1", "dp2/zero2", "dp2/zero3"])
def test_an_optimizer_that_has_modes_writes_parameters_before_and_after_an_evaluation(line):
    plainly = plain()
    optimizer, expected = ScheduleFree(plainly.parameters()), []
    for x, y in batches():
        optimizer.zero_grad()
        functional.mse_loss(plainly(x), y).backward()
        optimizer.step()
        optimizer.eval()
        expected.append(functional.mse_loss(plainly(x), y).item())
        optimizer.train()

    def work(run):
        optimizer, evaluated = run.optimizer(ScheduleFree), []
        for batch in run.shard(batches()):
            run.step(batch)
            optimizer.step()
            optimizer.eval()
            evaluated.append(run.evaluate(batch).item())
            optimizer.train()
        return evaluated, run.state_dict()

    evaluated, state = on_ranks(line, work, plain())
    assert evaluated == pytest.approx(expected, abs=1e-9)
    assert_same(state, plainly.state_dict())


@pytest.mark.parametrize("write", [clip, clip_data])
@pytest.mark.parametrize("line", ["bf16", "dp2 bf16", "fp16"])
def test_weights_of_low_precision_are_rounded_anew_where_a_loop_clips_them_after_the_update(line, write):
    data = [(x.float(), y.float()) for x, y in batches(8)]
    expected = losses_of(plain().float(), data, write, rate=0.5)
    unclipped = losses_of(plain().float(), data, lambda parameters: None, rate=0.5)
    assert max(abs(a - b) for a, b in zip(expected, unclipped, strict=True)) > 0.05

    def work(run):
        optimizer, losses = run.optimizer(torch.optim.SGD, lr=0.5), []
        for batch in run.shard(data):
            losses.append(run.step(batch).item())
            optimizer.step()
            write(run.parameters.values())
        return losses

    assert on_ranks(line, work, plain().float()) == pytest.approx(expected, abs=5e-3)


# ---- averages


def averaged(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def state_of(average):
    return {k.removeprefix("module."): v for k, v in average.state_dict().items() if k != "n_averaged"}


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("line", ["single", "dp2", "dp2/zero1"])
def test_averages_count_steps_whose_gradients_a_closure_computes(line, drops):
    plainly = plain()
    optimizer, average = torch.optim.SGD(plainly.parameters(), lr=0.1, momentum=0.9), averaged(plainly)
    for x, y in batches():

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = functional.mse_loss(plainly(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        average.update_parameters(plainly)

    def work(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        averages = run.average(optimizer, 0.5)
        for batch in run.shard(batches()):
            optimizer.step(lambda batch=batch: run.step(batch))
            if drops:
                optimizer.zero_grad()
        with averages.applied():
            return run.state_dict()

    assert_same(on_ranks(line, work, plain()), state_of(average))


class Probed(nn.Module):
    """A body and a head, of which a probe trains the head alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x, probe):
        hidden = self.body(x)
        return self.head(hidden.detach() if probe else hidden)


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "pp2", "pp2/1f1b mb2"])
def test_averages_of_a_stage_begin_with_the_first_step_though_its_gradients_come_later(line):
    probes = [True] * 3 + [False] * 3
    plainly = Probed().double()
    optimizer, average = torch.optim.SGD(plainly.parameters(), lr=0.1), averaged(plainly)
    for (x, y), probe in zip(batches(), probes, strict=True):
        optimizer.zero_grad()
        functional.mse_loss(plainly(x, probe), y).backward()
        optimizer.step()
        average.update_parameters(plainly)

    def work(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        averages = run.average(optimizer, 0.5)
        for (x, y), probe in zip(batches(), probes, strict=True):
            run.step(next(run.shard([((x, probe), y)])))
            optimizer.step()
            optimizer.zero_grad()
        state = run.state_dict()
        with averages.applied():
            return state, run.state_dict()

    state, averages = on_ranks(line, work, Probed().double(), example=(batches(1)[0][0], True))
    assert_same(state, plainly.state_dict())
    assert_same(averages, state_of(average))


# ---- rates and options


@pytest.mark.parametrize("line", ["single", "dp2", "dp2/zero1"])
def test_rates_that_are_tensors_and_print_alike_stay_apart(line):
    def rate(name):
        return torch.tensor(1e-3 + 1e-8 * int(name.split(".")[0]), dtype=torch.float64)

    plainly = plain()
    optimizer = torch.optim.Adam([{"params": [p], "lr": rate(name)} for name, p in plainly.named_parameters()])
    for x, y in batches():
        optimizer.zero_grad()
        functional.mse_loss(plainly(x), y).backward()
        optimizer.step()

    def work(run):
        optimizer = run.optimizer(torch.optim.Adam, parameters=lambda name, shape: {"lr": rate(name)})
        for batch in run.shard(batches()):
            run.step(batch, update=optimizer)
        return [group["lr"].item() for group in optimizer.param_groups], run.state_dict()

    rates, state = on_ranks(line, work, plain())
    assert sorted(rates) == sorted({rate(name).item() for name, _ in plainly.named_parameters()})
    for name, value in plainly.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-12, rtol=0)


def prepared(world, line, whole, optimizer_of, *, with_schedule=False):
    accelerator, model = sw.Accelerator(line, world=world), copy.deepcopy(whole)
    optimizer = optimizer_of(model.parameters())
    rows = [row for x, y in batches() for row in zip(x, y, strict=True)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)] if with_schedule else []
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4), *schedules)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.0)


@pytest.mark.parametrize("loss", [functional.mse_loss, functional.huber_loss])
@pytest.mark.parametrize("line", ["single", "dp2"])
def test_an_option_of_a_loss_that_its_module_lacks_is_refused_and_not_passed_over(line, loss):
    whole = plain()

    def work(world):
        _, model, _, loader = prepared(world, line, whole, sgd)
        x, y = next(iter(loader))
        with pytest.raises(PlanError, match=rf"{loss.__name__}\(\.\.\., weight=\.\.\.\)"):
            loss(model(x), y, weight=torch.ones_like(y))

    sw.launch(work, line, ranks="threads")


@pytest.mark.parametrize("line", ["single", "dp2"])
def test_an_option_of_a_loss_that_its_module_has_is_taken_over(line):
    whole, (x, y) = plain(), batches(1)[0]
    expected = functional.smooth_l1_loss(whole(x), y, beta=0.3).item()

    def work(world):
        _, model, _, loader = prepared(world, line, whole, sgd)
        x, y = next(iter(loader))
        return functional.smooth_l1_loss(model(x), y, beta=0.3, reduction="mean", size_average=None).item()

    assert sw.launch(work, line, ranks="threads")[0] == pytest.approx(expected, abs=1e-9)


CHANGES = {
    "weight_decay": (adamw, lambda group: group.update(weight_decay=1.0)),
    "lr": (sgd, lambda group: group.update(lr=group["lr"] * 0.1)),
    "momentum": (sgd, lambda group: group.update(momentum=0.9)),
}


@pytest.mark.parametrize("option", CHANGES)
@pytest.mark.parametrize("line", ["single", "dp2"])
def test_an_option_set_on_a_prepared_optimizer_stays_after_its_schedule_steps(line, option):
    optimizer_of, change = CHANGES[option]

    def train(step, optimizer, schedule, data):
        for number, (x, y) in enumerate(data):
            if number == 2:
                for group in optimizer.param_groups:
                    change(group)
            step(x, y)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    whole, plainly = plain(), plain()
    optimizer = optimizer_of(plainly.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(lambda x, y: functional.mse_loss(plainly(x), y).backward(), optimizer, schedule, batches())

    def work(world):
        accelerator, model, optimizer, loader, schedule = prepared(world, line, whole, optimizer_of, with_schedule=True)
        train(lambda x, y: accelerator.backward(functional.mse_loss(model(x), y)), optimizer, schedule, loader)
        return accelerator.get_state_dict(model)

    assert_same(sw.launch(work, line, ranks="threads")[0], plainly.state_dict())
