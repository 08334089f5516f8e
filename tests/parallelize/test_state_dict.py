"""The state of a run's model: whole on every rank, or refused where a copy of the model would hold NaN."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize
from shardwright.errors import PlanError
from shardwright.layout import Layout

LINES = (
    *("single", "dp2", "tp2", "dp2/zero1", "dp2/zero2", "dp2/zero3", "dp2 tp2 bf16", "dp2/zero3 tp2", "pp2 mb2"),
    *("pp2 mb2 dp2/zero3", "tp2x2/2d", "dp2x2/zero3", "dp1/zero1/offload:disk"),
)


class Tied(nn.Module):
    """Tied weights, a scalar parameter, buffers that are kept and one that is not."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(5, 4)
        self.up, self.norm, self.down = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, tokens):
        return self.head(self.down(self.norm(self.up(self.token(tokens))).relu()) * self.scale)


def plain():
    torch.manual_seed(0)
    return Tied()


def on_ranks(line, work, model=None):
    model = plain() if model is None else model
    return launch(lambda world: work(parallelize(model, line, world)), Layout.parse(line), ranks="threads")


@pytest.mark.parametrize("line", LINES)
def test_a_whole_state_is_what_torch_returns_of_the_plain_model(line):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    theirs = get_model_state_dict(plain(), options=StateDictOptions(full_state_dict=True))
    for ours in on_ranks(line.replace("mb2", "mb2/own-statistics"), lambda run: run.state_dict()):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert ours[name].dtype == value.dtype, name
            assert torch.equal(ours[name], value), name


@pytest.mark.parametrize(
    "line", ["dp2 bf16", "dp2 tp2 bf16", "dp2/zero1 fp16", "pp2 mb2 bf16", "dp2/zero1", "dp2/zero3"]
)
def test_values_that_the_next_update_would_undo_are_refused(line):
    def work(run):
        with pytest.raises(PlanError, match="would be undone by the next update") as found:
            run.model.load_state_dict(other.state_dict())
        if line == "dp2 bf16":  # a copy, as of averages, is no business of the run's optimizer
            copy.deepcopy(run.model).load_state_dict(other.state_dict())
        return str(found.value)

    model, other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    assert all("write to run.parameters[name] and call run.changed()" in text for text in on_ranks(line, work, model))


@pytest.mark.parametrize("line", ["tp2", "pp2 mb2", "tp2x2/2d", "pp2 mb2 tp2"])
def test_whole_values_are_refused_where_a_rank_holds_parts(line):
    def work(run):
        with pytest.raises(PlanError, match="shapes of a rank's parts") as found:
            run.model.load_state_dict(other.state_dict())
        run.model.load_state_dict({name: p + 1 for name, p in run.model.named_parameters()})
        run.changed()
        return str(found.value), run.state_dict()

    model, other = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2))
    first = {name: value.clone() for name, value in model.state_dict().items()}
    for text, state in on_ranks(line, work, model):
        assert "run.load_state_dict(state)" in text
        assert all(torch.equal(value, first[name] + 1) for name, value in state.items())


@pytest.mark.parametrize("line", ["tp2", "pp2 mb2", "tp2x2/2d", "dp2/zero3", "dp2/zero3 tp2"])
def test_the_state_of_the_model_is_refused_on_every_rank_where_it_would_be_of_parts(line):
    def work(run):
        with pytest.raises(PlanError, match=r"write run\.state_dict\(full=True\)") as found:
            run.model.state_dict()
        assert "sw.save_weights(run, path)" in str(found.value)
        return {name: values.shape for name, values in run.state_dict().items()}

    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    shapes = {name: values.shape for name, values in model.state_dict().items()}
    assert all(found == shapes for found in on_ranks(line, work, model))


def test_the_state_of_the_model_is_read_where_it_is_whole():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert all(
        all(torch.equal(values, found[name]) for name, values in model.state_dict().items())
        for found in on_ranks("dp2", lambda run: run.model.state_dict(), model)
    )


def test_buffers_alone_are_loaded_into_the_model_of_master_weights():
    def work(run):
        run.model.load_state_dict({"1.running_mean": torch.full((4,), 3.0)}, strict=False)
        return run.model.get_buffer("1.running_mean").tolist()

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert on_ranks("dp2 bf16", work, model) == [[3.0] * 4] * 2


@pytest.mark.parametrize("line", ["dp2", "dp2 mb2"])
def test_values_that_are_loaded_into_the_model_stay_where_its_own_parameters_are_updated(line):
    model, other = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def work(run):
        run.model.load_state_dict(other.state_dict())
        optimizer = run.optimizer(torch.optim.SGD, lr=0.0)
        run.step(next(run.shard([(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))])))
        optimizer.step()
        return run.state_dict()["weight"]

    for found in on_ranks(line, work, model):
        assert torch.equal(found, other.weight)


@pytest.mark.parametrize("line", LINES)
def test_the_full_state_is_that_which_the_plain_model_loads(line):
    line = line.replace("mb2", "mb2/own-statistics")
    model = plain()
    expected = model.state_dict()
    for state in on_ranks(line, lambda run: run.state_dict(), model):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
        assert state["head.weight"] is state["token.weight"]
        plain().load_state_dict(state)


@pytest.mark.parametrize("line", LINES)
def test_the_full_state_after_a_step_predicts_as_the_run_does(line):
    line = line.replace("mb2", "mb2/own-statistics")
    batch = torch.arange(6) % 5, torch.arange(6) % 3

    def work(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
        run.step(next(run.shard([batch])))
        optimizer.step()
        return run.state_dict(), run.state_dict(full=False), run.predict(batch[0]), run.parameters

    for state, part, expected, parameters in on_ranks(line, work):
        other = Tied()
        other.load_state_dict(state)
        tolerance = 5e-2 if "bf16" in line else 1e-5
        torch.testing.assert_close(other.eval()(batch[0]), expected.to(torch.float32), rtol=tolerance, atol=tolerance)
        assert part.keys() <= state.keys()
        assert all(part[name].data_ptr() == parameters[name].data_ptr() for name in parameters)


TAKES = {
    "state_dict": lambda model: model.state_dict(),
    "state_dict of a module": lambda model: model.token.state_dict(),
    "deepcopy": copy.deepcopy,
    "deepcopy of a module": lambda model: copy.deepcopy(model.token),
    "pickle": pickle.dumps,
    "save": lambda model: torch.save(model, io.BytesIO()),
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
}
LINES_OF_PARTS = ("dp2/zero1", "dp2/zero3", "tp2", "tp2x2/2d", "tp2 bf16", "pp2")


@pytest.mark.parametrize(
    ("line", "take"),
    # a stage has its own modules whole
    [(line, take) for line in LINES_OF_PARTS for take in TAKES if not (line == "pp2" and "of a module" in take)],
)
def test_what_would_hold_a_ranks_part_is_refused_with_the_line_to_write(line, take):
    def work(run):
        with pytest.raises(PlanError) as caught:
            TAKES[take](run.model)
        return str(caught.value)

    for text in on_ranks(line, work):
        assert "write run.state_dict(full=True)" in text
        assert "averages = run.average(optimizer, decay=0.999)" in text


def test_averages_of_run_parameters_are_those_of_the_whole_model():
    batch = torch.arange(6) % 5, torch.arange(6) % 3

    def work(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
        averages = [p.detach().clone() for p in run.parameters.values()]
        (part,) = run.shard([batch])
        run.step(part)
        optimizer.step()
        torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)(averages, list(run.parameters.values()), None)
        for parameter, average in zip(run.parameters.values(), averages, strict=True):
            parameter.data.copy_(average)
        run.changed()
        return run.state_dict()

    (one,), several = on_ranks("single", work), on_ranks("dp2/zero3", work)
    for state in several:
        for name, value in one.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


class SharedLayers(nn.Module):
    """One block, which torch lists under three names, as a model with shared layers has it."""

    def __init__(self):
        super().__init__()
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.blocks, self.out = nn.ModuleList([block, block, block]), nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return self.out(x)


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3"])
def test_a_module_under_several_names_is_in_the_state_under_each(line):
    model, other = SharedLayers(), SharedLayers()

    def work(world):
        run = parallelize(model, line, world, loss=nn.MSELoss())
        before = run.state_dict()
        run.load_state_dict(other.state_dict())
        return before, run.state_dict()

    (before, after), _ = launch(work, 2, ranks="threads")
    assert before.keys() == model.state_dict().keys()
    copy.deepcopy(model).load_state_dict(before)
    assert all(torch.equal(after[name], value) for name, value in other.state_dict().items())
