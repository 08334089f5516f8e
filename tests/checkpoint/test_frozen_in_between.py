"""Parameters that are frozen or unfrozen between a save and a load: moments are kept where there are some."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from shardwright.checkpoint.loading import load
from shardwright.checkpoint.saving import save
from shardwright.comm.launch import launch
from shardwright.errors import CheckpointError
from shardwright.layout import Layout
from shardwright.models.model_loss import MeanLoss
from shardwright.parallelize import parallelize

TRAINED = (("4", "2"), ("4", "2", "0"), ("2", "0"))
"""Which layers each of three runs trains: the first layer is unfrozen for the second, the last is frozen after it."""


def made(trained):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    state = {name: torch.sin(torch.arange(p.numel()) + 1.0).view_as(p) / 3 for name, p in model.named_parameters()}
    model.load_state_dict(state)
    for name, layer in model.named_children():
        layer.requires_grad_(name in trained)
    return model


def batches():
    inputs = torch.cos(torch.arange(8 * 6, dtype=torch.float64)).view(8, 6)
    return [(inputs + number, (torch.arange(8) + number) % 3) for number in range(2)]


def plain():
    """One device: moments stay with a parameter until it is frozen, and begin when it is first trained."""
    model, states = made(TRAINED[0]), {}
    for trained in TRAINED:
        for name, layer in model.named_children():
            layer.requires_grad_(name in trained)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(named.values(), lr=0.02)
        optimizer.state.update((p, states[name]) for name, p in named.items() if name in states)
        for inputs, targets in batches():
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        states = {name: copy.deepcopy(optimizer.state[p]) for name, p in named.items()}
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("lines", [
    ("dp2", "dp2", "dp2"),
    ("dp2/zero3", "tp2", "pp2 mb2"),
    ("pp2 mb2", "pp2 mb2", "pp2 mb2"),
    ("single", "pp2 mb2 dp2/zero1", "dp2/zero1/offload"),
])  # fmt: skip
def test_a_run_that_trains_other_parameters_takes_up_the_optimizer(tmp_path, lines):
    def work(world, line, number):
        run = parallelize(made(TRAINED[number]), line, world, loss=MeanLoss(cross_entropy), example=batches()[0][0])
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.02)
        if number:
            load(tmp_path, run, optimizer)
        for batch in run.shard(batches()):
            run.step(batch, update=optimizer)
        save(tmp_path, run, optimizer)
        return run.state_dict()

    for number, line in enumerate(lines):
        found = launch(work, Layout.parse(line).num_ranks, line, number, ranks="threads")[0]
    for name, expected in plain().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-11, atol=1e-12)


def test_parameters_that_the_saved_optimizer_left_out_are_refused_unless_they_were_frozen(tmp_path):
    def left_out(name, shape):
        return None if name.startswith("0.") else {}

    def work(world, parameters):
        run = parallelize(made(TRAINED[1]), "dp2", world, loss=MeanLoss(cross_entropy))
        optimizer = run.optimizer(torch.optim.AdamW, parameters=parameters)
        if parameters is not None:
            run.step(next(run.shard(batches())), update=optimizer)
            save(tmp_path, run, optimizer)
            return
        with pytest.raises(CheckpointError, match="divides the parameters into other groups"):
            load(tmp_path, run, optimizer)

    for parameters in (left_out, None):
        launch(work, 2, parameters, ranks="threads")
