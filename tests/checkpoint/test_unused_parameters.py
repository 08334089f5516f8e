"""A parameter without a gradient has no state in a checkpoint of any layout; one with some has the count of its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from shardwright import MeanSquaredError
from shardwright.checkpoint.loading import load
from shardwright.checkpoint.manifest import MANIFEST, find, read
from shardwright.checkpoint.saving import save
from shardwright.comm.launch import launch
from shardwright.parallelize import parallelize

NUM_STEPS, SAVED_AT = 5, 2
ADAMW = (torch.optim.AdamW, {})
KINDS = [
    ADAMW,
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adam, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {"momentum": 0.5}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.SGD, {"momentum": 0.5}),
]
ZERO = ["dp2/zero1", "dp2/zero2 mb2", "dp2/zero3", "dp2x2/zero1", "dp2/zero3/offload"]
LINES = ["single", "dp2", "tp2", "dp3/zero3", *ZERO]


class Net(nn.Module):
    """Layers that each step, the first step, later ones or none use, a frozen one, and a scale that none uses."""

    def __init__(self):
        super().__init__()
        self.up, self.unused, self.early = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.late, self.frozen, self.last_unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.down = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        h = self.frozen(torch.tanh(self.up(x[:, :4])))
        if x[:, 4].any():
            h = h + self.early(h) * x[:, 4:5]
        if x[:, 5].any():
            h = h + self.late(h) * x[:, 5:]
        return self.down(h)


def model():
    """A model in which the same parameters have the same values however many ranks make it at once."""
    net = Net().double()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2)
    return net


def batch(step, num_late=6):
    """Six samples, of which the first step's use ``early``, and ``num_late`` of those from step 3 on ``late``."""
    draw = torch.Generator().manual_seed(step)
    x, y = (torch.randn(6, n, generator=draw, dtype=torch.float64) for n in (6, 3))
    x[:, 4], x[:, 5] = step == 0, 0
    x[:num_late, 5] = step > SAVED_AT
    return x, y


def go(run, optimizer, until, num_late=6):
    while run.num_steps < until:
        run.step(next(run.shard([batch(run.num_steps, num_late)])))
        optimizer.step()


def start(world, line, kind):
    run = parallelize(model(), line, world, loss=MeanSquaredError(), example=batch(0)[0])
    return run, run.optimizer(kind[0], lr=0.01, **kind[1])


def saving(world, line, kind, folder, until=SAVED_AT, num_late=6):
    run, optimizer = start(world, line, kind)
    go(run, optimizer, until, num_late)
    save(folder, run, optimizer)


def going_on(world, line, kind, folder, num_late=6):
    """Goes on from a checkpoint to the last step; the whole parameters."""
    run, optimizer = start(world, line, kind)
    load(folder, run, optimizer)
    go(run, optimizer, NUM_STEPS, num_late)
    save(folder / "after", run, optimizer)
    return run.state_dict()


def state_in(folder):
    """The scalars of a checkpoint, and the names and shapes of its tensors."""
    manifest = read(find(folder))
    return manifest.scalars, {name: entry[:2] for name, entry in manifest.tensors.items()}


def ranks_go_on(line, kind, folder, *args):
    return launch(going_on, line, line, kind, folder, *args, ranks="threads")[0]


def plain(kind, until, num_late=6):
    """The plain model and torch's optimizer on one device, after so many steps."""
    net = model()
    optimizer = kind[0]([p for p in net.parameters() if p.requires_grad], lr=0.01, **kind[1])
    for step in range(until):
        x, y = batch(step, num_late)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return net, optimizer


def assert_equals_plain(found, folder, kind, num_late=6):
    """Asserts that parameters and step counts are those of one device after the last step."""
    net, optimizer = plain(kind, NUM_STEPS, num_late)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-7, atol=1e-9)
    steps = {name: optimizer.state.get(p, {}).get("step") for name, p in net.named_parameters()}
    scalars, _ = state_in(folder / "after")
    assert {name: state["step"][1] for name, state in scalars.items() if "step" in state} == {
        name: float(step) for name, step in steps.items() if step is not None
    }


@pytest.mark.parametrize("line", ["dp2", *ZERO])
@pytest.mark.sampled(100)
def test_a_checkpoint_says_the_same_of_parameters_without_gradients_as_one_device_under_every_layout(tmp_path, line):
    for each, until in ((line, SAVED_AT), (line, NUM_STEPS), ("single", SAVED_AT), ("single", NUM_STEPS)):
        launch(saving, each, each, ADAMW, tmp_path / f"{each == line} {until}", until, ranks="threads")
    for until in (SAVED_AT, NUM_STEPS):
        assert state_in(tmp_path / f"True {until}") == state_in(tmp_path / f"False {until}")
    scalars, tensors = state_in(tmp_path / f"True {SAVED_AT}")
    stateful = {f"{name}.{key}" for name in ("up", "early", "down") for key in ("weight", "bias")}
    assert set(scalars) == stateful == {n.split("/")[1] for n in tensors if n.startswith("optimizer/")}
    assert scalars["early.bias"]["step"][1] == 1.0


@pytest.mark.parametrize("target", LINES)
@pytest.mark.parametrize("source", ["dp2", *ZERO])
@pytest.mark.sampled(100)
def test_what_one_layout_saved_goes_on_under_another_as_on_one_device(tmp_path, source, target):
    launch(saving, source, source, ADAMW, tmp_path, ranks="threads")
    assert_equals_plain(ranks_go_on(target, ADAMW, tmp_path), tmp_path, ADAMW)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].__name__} {kind[1]}")
@pytest.mark.sampled(100)
def test_every_optimizer_goes_on_with_the_state_that_it_keeps(tmp_path, kind):
    launch(saving, "dp2/zero3", "dp2/zero3", kind, tmp_path, ranks="threads")
    for line in ("single", "dp2/zero3"):
        assert_equals_plain(ranks_go_on(line, kind, tmp_path), tmp_path, kind)


@pytest.mark.parametrize("line", ["dp3/zero1", "dp3/zero2 mb2"])
def test_a_parameter_that_only_some_ranks_samples_reach_goes_on_as_on_one_device(tmp_path, line):
    launch(saving, line, line, ADAMW, tmp_path, SAVED_AT + 2, 1, ranks="threads")
    for target in ("single", line):
        assert_equals_plain(ranks_go_on(target, ADAMW, tmp_path, 1), tmp_path, ADAMW, 1)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.sampled(100)
def test_a_step_count_alone_as_earlier_versions_saved_it_is_no_state(tmp_path, line):
    launch(saving, "dp2/zero3", "dp2/zero3", ADAMW, tmp_path, ranks="threads")
    path = find(tmp_path) / MANIFEST
    manifest = read(find(tmp_path))
    alone = {name: {"step": ["float32", 2.0]} for name in ("unused.bias", "late.weight", "scale")}
    path.write_text(dataclasses.replace(manifest, scalars={**manifest.scalars, **alone}).to_json())
    assert_equals_plain(ranks_go_on(line, ADAMW, tmp_path), tmp_path, ADAMW)


def test_scalars_without_which_no_step_fails_are_kept(tmp_path):
    """An optimizer may keep a count alone of some parameters."""

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1

    kind = (Counting, {})
    launch(saving, "dp2/zero1", "dp2/zero1", kind, tmp_path, ranks="threads")

    def counts(world):
        run, optimizer = start(world, "dp2", kind)
        load(tmp_path, run, optimizer)
        return {name: optimizer.state[p]["count"] for name, p in run.parameters.items() if p in optimizer.state}

    every = {"up": 2, "early": 1, "down": 2}
    assert launch(counts, 2, ranks="threads")[1] == {
        f"{name}.{key}": count for name, count in every.items() for key in ("weight", "bias")
    }
