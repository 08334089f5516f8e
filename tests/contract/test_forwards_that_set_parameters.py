"""Forwards that put other values in the place of a parameter's: right, or refused with the reason, never lost."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import shardwright as sw
from shardwright.errors import LayoutError, PlanError
from shardwright.models.losses import MeanSquaredError

SET = {
    "data": lambda parameter, value: setattr(parameter, "data", value),
    "set_": lambda parameter, value: parameter.set_(value),
    "copy_": lambda parameter, value: parameter.copy_(value),
    "data.copy_": lambda parameter, value: parameter.data.copy_(value),
    "a constant": lambda parameter, value: setattr(parameter, "data", torch.full(value.shape, 0.5).to(value)),
}


class ActNorm(nn.Module):
    """Takes its scale from the statistics of the first batch over tokens, as flows do."""

    def __init__(self, width, way):
        super().__init__()
        self.shift, self.way = nn.Parameter(torch.zeros(1, width)), way
        self.register_buffer("done", torch.tensor(False))

    def forward(self, x):
        if not self.done:
            with torch.no_grad():
                SET[self.way](self.shift, x[:1].mean(1))  # of the first sample
                self.done = torch.tensor(True)
        return x - self.shift


class Flow(nn.Module):
    """With ``inner`` between two layers that tensor parallelism cuts, or around them."""

    def __init__(self, way, *, inner):
        super().__init__()
        self.inner, self.norm = inner, ActNorm(32 if inner else 8, way)
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        if self.inner:
            return self.last(torch.tanh(self.norm(self.first(x))))
        x = self.norm(x)
        return self.last(torch.tanh(self.first(self.norm(x * torch.sigmoid(x)))))


class Normalized(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.last, self.way = nn.Linear(8, 16), nn.Linear(16, 8), way

    def forward(self, x):
        with torch.no_grad():
            SET[self.way](self.first.weight, functional.normalize(self.first.weight.detach(), dim=1))
        return self.last(torch.relu(self.first(x)))


BUILT = {
    "first batch, inner": lambda way: Flow(way, inner=True),
    "first batch, around": lambda way: Flow(way, inner=False),
    "each step": Normalized,
}


def losses(model, line, batches, **given):
    def work(world):
        run = sw.parallelize(model, line, world, loss=MeanSquaredError(), **given)
        update = run.optimizer(torch.optim.SGD, lr=0.05)
        return [run.step(each, update=update).item() for each in run.shard(batches)]

    return sw.launch(work, line, ranks="threads")[0]


WHOLE_BATCH = ("tp2", "tp4", "dp1/zero1", "dp1/zero3", "pp2/1f1b", "dp1 bf16")
CUT_BATCH = ("dp2/zero2", "dp2/zero3", "tp4/2d", "pp2/1f1b mb2 tp2")
CASES = [(kind, line) for kind in BUILT for line in (*WHOLE_BATCH, *(CUT_BATCH if kind == "each step" else ()))]


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("way", SET)
@pytest.mark.parametrize(("kind", "line"), CASES)
def test_what_a_forward_puts_in_the_place_of_a_parameter_trains_as_on_one_device_or_is_refused(kind, way, sees, line):
    torch.manual_seed(0)
    model = BUILT[kind](way)
    batches = [(torch.randn(8, 6, 8), torch.randn(8, 6, 8)) for _ in range(3)]
    one, wanted = copy.deepcopy(model), []
    update = torch.optim.SGD(one.parameters(), lr=0.05)
    for x, y in batches:
        update.zero_grad()
        loss = functional.mse_loss(one(x), y)
        loss.backward()
        update.step()
        wanted.append(loss.item())
    try:
        found = losses(model, line, batches, **({"example": batches[0][0]} if sees else {}))
    except (LayoutError, PlanError):
        return
    assert found == pytest.approx(wanted, rel=2e-2 if "bf16" in line else 1e-5)


@pytest.mark.parametrize("way", ["data", "set_"])
@pytest.mark.parametrize("line", ["dp1/zero1", "dp1/zero2", "dp1/zero3"])
def test_a_replaced_copy_of_a_shard_is_an_error_on_one_rank_too(line, way):
    batches = [(torch.randn(8, 8), torch.randn(8, 8))]
    with pytest.raises(PlanError, match=re.escape("what was written to 'first.weight' of run.model would be lost")):
        losses(Normalized(way), line, batches)


class Around(nn.Module):
    """Changes a weight for the forward, and puts back what it was: code that runs before and after all layers."""

    def __init__(self, way):
        super().__init__()
        self.first, self.last, self.way = nn.Linear(8, 16), nn.Linear(16, 8), way

    def forward(self, x):
        weight, before = self.first.weight, self.first.weight.data.clone()
        with torch.no_grad():
            if self.way == "all at once":
                torch._foreach_mul_(list(self.parameters()), 0.99)
            elif self.way == "data":
                weight.data = before * 0.5
            else:
                weight.data.add_(0.1)
        y = self.last(torch.relu(self.first(x)))
        if self.way != "all at once":
            weight.data.copy_(before)
        return y


@pytest.mark.parametrize("way", ["data", "data.add_", "all at once"])
@pytest.mark.parametrize("line", ["pp2/1f1b", "pp2/1f1b mb2 dp2"])
@pytest.mark.parametrize("sees", [True, False])
def test_writes_between_the_modules_of_stages_are_refused(way, line, sees):
    batches = [(torch.randn(8, 8), torch.randn(8, 8))]
    with pytest.raises((LayoutError, PlanError)):
        losses(Around(way), line, batches, **({"example": batches[0][0]} if sees else {}))


class Moved(nn.Module):
    """Puts the same values elsewhere in memory, as recurrent layers do on CUDA by ``flatten_parameters``."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


@pytest.mark.parametrize("line", ["dp1/zero1", "dp2/zero2", "dp2/zero3", "dp2/zero1/offload"])
def test_weights_that_only_lie_elsewhere_are_no_write(line):
    torch.manual_seed(0)
    model, batches = Moved(), [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(2)]

    def work(world, moves):
        run = sw.parallelize(model, line, world, loss=MeanSquaredError())
        update = run.optimizer(torch.optim.SGD, lr=0.05)
        inside = run.model.first.register_forward_pre_hook(
            lambda layer, _: setattr(layer.weight, "data", layer.weight.data.clone()) if moves else None
        )
        found = [run.step(each, update=update).item() for each in run.shard(batches)]
        inside.remove()
        return found

    assert sw.launch(work, line, True, ranks="threads") == sw.launch(work, line, False, ranks="threads")


class Pruned(nn.Module):
    """Stages of ``is_traced`` code are cut from a trace, and others from a record."""

    def __init__(self, *, is_traced):
        super().__init__()
        self.layers, self.is_traced = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6)), is_traced
        prune.l1_unstructured(self.layers[0], "weight", 0.5)
        prune.random_unstructured(self.layers[2], "weight", 0.3)

    def forward(self, x):
        if not self.is_traced:
            _, *_ = [*x.shape]
        return self.layers(x)


@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "pp2/1f1b tp2", "pp2/1f1b mb2 dp2/zero1", "pp2 tp4/2d", "tp2 bf16"])
def test_pruned_layers_on_other_stages_keep_their_masks(line, is_traced):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 6, 6), torch.randn(8, 6, 6)) for _ in range(2)]
    verdict = sw.verify(Pruned(is_traced=is_traced), line, batches, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class Moving(nn.Module):
    """Calls ``to`` of its layer in each forward, with ``given``."""

    def __init__(self, *given):
        super().__init__()
        self.first, self.last, self.given = nn.Linear(8, 16), nn.Linear(16, 8), given

    def forward(self, x):
        if self.given:
            self.first.to(*self.given)
        return self.last(torch.relu(self.first(x)))


@pytest.mark.parametrize("line", ["dp2", "dp2 bf16", "tp2 bf16", "dp2/zero3", "dp2/zero1 bf16", "pp2/1f1b bf16"])
def test_a_move_to_the_device_that_a_layer_is_on_already_is_no_write(line):
    torch.manual_seed(0)
    moving, batches = Moving("cpu"), [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(2)]
    still = Moving()
    still.load_state_dict(moving.state_dict())
    given = {"example": batches[0][0]}
    assert losses(moving, line, batches, **given) == losses(still, line, batches, **given)


def test_a_conversion_of_rounded_weights_is_still_refused():
    batches = [(torch.randn(8, 8), torch.randn(8, 8))]
    with pytest.raises(LayoutError, match=r"the forward writes to the parameter 'first\.bias'"):
        losses(Moving("cpu", torch.float32), "dp2 bf16", batches, example=batches[0][0])
