"""Optimizers whose state or options are not as torch's own: what is saved comes back as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import CheckpointError


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    def each(self):
        return ((group, p) for group in self.param_groups for p in group["params"] if p.grad is not None)


class CountsForAll(Own):
    """As MADGRAD: keeps a count under a name of its own, and a table."""

    @torch.no_grad()
    def step(self, closure=None):
        count = self.state.setdefault("count", torch.tensor([0]))
        self.state["seen"] = {"largest": torch.tensor(float(count)), "steps": [int(count)]}
        for group, p in self.each():
            p.sub_(p.grad, alpha=group["lr"] / (1 + count.item()))
        count += 1


class Estimates(Own):
    """As D-Adaptation: keeps estimates among its options, as tensors that it makes in its first step."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            now = group.setdefault("estimate", torch.tensor(1.0, dtype=torch.float64))
            now.lerp_(torch.tensor(2.0, dtype=torch.float64), 0.5)
            group["both"] = [now, now.float().view(1) + 1]
            for _, p in self.each():
                p.sub_(p.grad * (group["lr"] * now.item() * group["both"][1].item()))


class ByRows(Own):
    """As SM3: state has the shape of a bias, and another than that of a matrix."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            now = p.grad.square() if p.dim() < 2 else p.grad.square().mean(1, keepdim=True)
            state = self.state[p]
            state["sums"] = state.get("sums", torch.zeros_like(now)) + now
            p.sub_(p.grad / (state["sums"].sqrt() + 1e-3), alpha=group["lr"])


class ForTheTensor(Own):
    """Keeps one number for each matrix, and a number for each element of a bias."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            now = p.grad.square() if p.dim() < 2 else p.grad.square().mean()
            state = self.state[p]
            state["sum"] = state.get("sum", torch.zeros_like(now)) + now
            p.sub_(p.grad / (state["sum"].sum().sqrt() + 1e-3), alpha=group["lr"])


class CountsInOneElement(Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.each():
            state = self.state[p]
            state["step"] = state.get("step", torch.zeros(1)) + 1
            state["sum"] = state.get("sum", torch.zeros_like(p)) * 0.9 + p.grad
            p.sub_(state["sum"], alpha=group["lr"] / state["step"].item())


class Gated(nn.Module):
    """Has parameters of one element, with one dim and with none."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        x = self.first(x).tanh()
        return self.last(x * self.gate(x)) * self.scale


def batches():
    numbers = torch.Generator().manual_seed(1)
    draw = (torch.randn(8, 6, generator=numbers, dtype=torch.float64) for _ in range(4))
    return [(x, torch.randint(0, 4, (8,), generator=numbers)) for x in draw]


def of_torch(model, kind):
    """The losses of plain torch that goes on from its own state dicts."""
    model, found = copy.deepcopy(model), []
    optimizer = kind(model.parameters())
    for number, (x, target) in enumerate(batches()):
        if number == 2:
            state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
            optimizer = kind(model.parameters())
            optimizer.load_state_dict(state)
            model.load_state_dict(weights)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def resumed(model, kind, folder, before, after):
    def train(world, line, which, save):
        run = sw.parallelize(model, line, world)
        update = run.optimizer(kind)
        if not save:
            sw.load(folder, run, update)
        found = [run.step(each, update=update).item() for each in run.shard(which)]
        if save:
            sw.save(folder, run, update)
        return found

    first = sw.launch(train, before, before, batches()[:2], True, ranks="threads")[0]
    return first + sw.launch(train, after, after, batches()[2:], False, ranks="threads")[0]


WAYS = [("single", "dp2"), ("dp2", "single"), ("dp2", "pp2/1f1b mb2")]
SHARDED = [("single", "dp2/zero3"), ("dp2/zero1", "single"), ("dp3/zero1", "dp2/zero2"), ("dp5/zero3", "pp2/1f1b mb2")]
CASES = [(kind, *way) for kind in (CountsForAll, Estimates, ByRows, ForTheTensor, CountsInOneElement) for way in WAYS]


@pytest.mark.parametrize(
    ("kind", "before", "after"), CASES[:2] + CASES[3:] + [(CountsInOneElement, *way) for way in SHARDED]
)  # a stage counts no steps of all tensors
def test_an_optimizer_goes_on_as_from_its_own_state_dict(kind, before, after, tmp_path):
    torch.manual_seed(0)
    model = Gated().double()
    assert resumed(model, kind, tmp_path, before, after) == pytest.approx(of_torch(model, kind), rel=1e-9)


def test_moments_of_parameters_of_one_element_are_those_of_slices_too(tmp_path):
    torch.manual_seed(0)
    model = Gated().double()
    expected = pytest.approx(of_torch(model, torch.optim.AdamW), rel=1e-9)
    assert resumed(model, torch.optim.AdamW, tmp_path, "single", "dp2/zero3") == expected


@pytest.mark.parametrize(("key", "value"), [(7, 1), ("all", torch.ones(9))])
def test_state_that_may_be_a_ranks_part_or_has_no_name_is_refused(key, value, tmp_path):
    class Odd(Own):
        def step(self, closure=None):
            self.state[key] = value

    with pytest.raises(CheckpointError, match=f"the state '{key}' of the optimizer cannot be saved"):
        resumed(Gated().double(), Odd, tmp_path, "single", "single")


def test_a_load_into_an_optimizer_that_has_stepped_leaves_no_state_of_its_own(tmp_path):
    torch.manual_seed(0)
    model = Gated().double()

    def work(world):
        run = sw.parallelize(model, "dp2", world)
        update = run.optimizer(CountsForAll)
        sw.save(tmp_path, run, update)
        first = [run.step(each, update=update).item() for each in run.shard(batches())]
        sw.load(tmp_path, run, update)
        return first, [run.step(each, update=update).item() for each in run.shard(batches())]

    first, again = sw.launch(work, "dp2", ranks="threads")[0]
    assert again == first
