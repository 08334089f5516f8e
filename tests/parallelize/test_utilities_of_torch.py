"""What torch's utilities and a loop's own code do to ``run.model``: as on one device, or an error with the line.

Never NaN, one rank's part in place of the whole, or a write that is lost.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, prune

from shardwright.comm.launch import launch
from shardwright.errors import PlanError
from shardwright.parallelize import parallelize

BATCH = torch.linspace(-1, 1, 24).view(4, 6), torch.arange(4) % 3


def plain():
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter).sin() * (number + 1) / 4)
    return model


def flat(state):
    return torch.cat([value.reshape(-1) for value in state.values()])


def on_ranks(line, work, *, steps=0):
    """What ``work(run, optimizer)`` returns on each rank, after so many forwards and backwards."""

    def each(world, model):
        run = parallelize(model, line, world, loss=nn.CrossEntropyLoss())
        optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
        for _ in range(steps):
            run.step(next(run.shard([BATCH])))
        return work(run, optimizer)

    return launch(each, line, plain(), ranks="threads")


def halve(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def clamp(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def set_data(model):
    for parameter in model.parameters():
        parameter.data = torch.ones_like(parameter)


READS = {
    "parameters_to_vector": lambda model: utils.parameters_to_vector(model.parameters()),
    "vector_to_parameters": lambda model: utils.vector_to_parameters(torch.ones(83), model.parameters()),
}
OF_SHARDS = {
    "norm": lambda model: sum(p.norm() ** 2 for p in model.parameters()),
    "penalty": lambda model: sum((p**2).sum() for p in model.parameters()),
    "averages": lambda model: [p.detach().clone() for p in model.parameters()],
    "stack_module_state": lambda model: torch.func.stack_module_state([model]),
    "halve": halve,
    "clamp": clamp,
    "set data": set_data,
    "half": nn.Module.half,
    "to": lambda model: model.to(torch.float64),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero3", "tp2", "pp2", "dp2 bf16"])
def test_a_vector_of_all_parameters_is_refused_where_a_rank_has_a_part_or_copies(line, name):
    def work(run, _):
        with pytest.raises(PlanError, match=r"torch.cat\(.*run.state_dict\(\).values"):
            READS[name](run.model)
        if "bf16" not in line:
            with pytest.raises(PlanError, match="a rank's part of the parameters"):
                utils.parameters_to_vector(run.parameters.values())
        return flat(run.state_dict())

    for found in on_ranks(line, work):
        torch.testing.assert_close(found, flat(plain().state_dict()))


def test_a_vector_of_whole_parameters_is_taken_and_set():
    def work(run, _):
        vector = utils.parameters_to_vector(run.model.parameters())
        utils.vector_to_parameters(2 * vector, run.model.parameters())
        return flat(run.state_dict())

    for found in on_ranks("dp2", work):
        torch.testing.assert_close(found, 2 * flat(plain().state_dict()))


@pytest.mark.parametrize("name", OF_SHARDS)
@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero3"])
def test_parameters_of_which_a_rank_has_a_shard_are_neither_read_nor_written_between_steps(line, name):
    def work(run, _):
        with pytest.raises(PlanError, match=r"run.parameters\['0.weight'\]"):
            OF_SHARDS[name](run.model)
        assert [p.shape for p in run.model.parameters()] == [p.shape for p in plain().parameters()]
        return flat(run.state_dict())

    for found in on_ranks(line, work):
        torch.testing.assert_close(found, flat(plain().state_dict()))


@pytest.mark.parametrize(
    "read",
    [
        lambda model: [p.grad for p in model.parameters()],
        lambda model: utils.clip_grad_value_(model.parameters(), 0.1),
        lambda model: utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
    ],
    ids=["grad", "clip_grad_value_", "get_total_norm"],
)
def test_the_gradient_of_a_parameter_that_has_it_in_shards_is_refused_and_named(read):
    def work(run, _):
        with pytest.raises(PlanError, match=r"run.parameters\['0.weight'\].grad"):
            read(run.model)

    on_ranks("dp2/zero3", work, steps=1)


@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero3", "tp2", "pp2"])
def test_the_norm_of_a_ranks_part_of_the_gradients_is_refused(line):
    def work(run, _):
        with pytest.raises(PlanError, match=r"write run\.clip_grad_norm_"):
            utils.get_total_norm([p.grad for p in run.parameters.values()])
        utils.clip_grad_value_(run.parameters.values(), 0.1)  # each element alone

    on_ranks(line, work, steps=1)


@pytest.mark.parametrize("line", ["dp2", "dp2/zero1", "dp2/zero3", "tp2"])
def test_gradients_that_zero_grad_of_the_model_clears_are_not_stepped(line):
    def work(run, optimizer):
        run.model.zero_grad()
        optimizer.step()
        return flat(run.state_dict())

    for found in on_ranks(line, work, steps=1):
        torch.testing.assert_close(found, flat(plain().state_dict()))


def test_a_write_to_an_unsharded_copy_is_no_silent_loss():
    def work(run, _):
        nn.init.constant_(run.model[0].weight, 0.25)  # reading it so unshards it
        with pytest.raises(PlanError, match=r"what was written to '0.weight' of run.model would be lost"):
            run.step(next(run.shard([BATCH])))

    on_ranks("dp2/zero3", work)


def replace(model):
    model[2] = nn.Linear(8, 3)


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: prune.l1_unstructured(model[0], "weight", amount=0.5),
        lambda model: parametrizations.weight_norm(model[0]),
        replace,
    ],
    ids=["prune", "weight_norm", "another layer"],
)
def test_a_model_that_was_changed_after_it_was_laid_out_does_not_train_on(line, change):
    def work(run, _):
        change(run.model)
        with pytest.raises(PlanError, match="was replaced or removed since the model was laid out"):
            run.step(next(run.shard([BATCH])))

    on_ranks(line, work)
