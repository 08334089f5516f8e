"""Forwards that compute something with the weights of layers, such as penalties: right, or refused with the reason."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.analysis.chunks.forward_events import record_events
from shardwright.errors import LayoutError, PlanError
from shardwright.models.losses import MeanSquaredError
from shardwright.strategies.pipeline.event_units import opened_modules, units_of

WAYS = {
    "norm": lambda model: sum(p.norm() for p in model.parameters()),
    "norm without a gradient": lambda model: sum(p.detach().norm() for p in model.parameters()),
    "largest": lambda model: sum(p.abs().max() for p in model.parameters()),
    "all at once": lambda model: torch.cat([p.flatten() for p in model.parameters()]).norm(),
    "lists of tensors": lambda model: torch.stack(torch._foreach_norm(list(model.parameters()))).sum(),
    "one by its name": lambda model: model.layers[0].weight.norm(),
    "singular values": lambda model: torch.linalg.svdvals(model.layers[0].weight)[0],
    "squares": lambda model: sum((p**2).sum() for p in model.parameters()),
    "means": lambda model: sum(p.abs().mean() for p in model.parameters()),
}


class Penalized(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way = way
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8), nn.Linear(8, 16), nn.Linear(16, 8))

    def forward(self, x):
        return self.layers(x) * (1 + 0.1 * WAYS[self.way](self))


def losses(model, line, **given):
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 8, generator=numbers), torch.randn(8, 8, generator=numbers)
    wanted = functional.mse_loss(copy.deepcopy(model)(x), y).item()

    def work(world):
        run = sw.parallelize(model, line, world, loss=nn.MSELoss(), **({"example": x} if given.get("sees") else {}))
        update = run.optimizer(torch.optim.SGD, lr=0.1)
        return [run.step(each, update=update).item() for each in run.shard([(x, y)])]

    return wanted, sw.launch(work, line, ranks="threads")[0][0]


@pytest.mark.parametrize("line", ["tp2", "pp2/1f1b tp2", "pp2/1f1b mb2 dp2/zero1 tp2", "dp2/zero3", "pp2/1f1b mb2"])
@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_the_loss_is_that_of_one_device_or_the_layout_is_refused(way, sees, line):
    torch.manual_seed(0)
    refusal, wanted, found = "", 0.0, 0.0
    try:
        wanted, found = losses(Penalized(way), line, sees=sees)
    except (LayoutError, PlanError) as refused:
        refusal = str(refused)
    assert not refusal or "tp" in line
    said = "kept whole: its weights are read by other code" if sees else "read by other code|other code than the layer"
    assert not refusal or re.search(said, refusal), refusal
    assert refusal or found == pytest.approx(wanted, rel=1e-5)


def test_squares_of_all_weights_are_summed_over_ranks_by_the_example():
    torch.manual_seed(0)
    wanted, found = losses(Penalized("squares"), "tp2", sees=True)
    assert found == pytest.approx(wanted, rel=1e-5)


def test_a_first_batch_shows_who_else_reads_a_part():
    torch.manual_seed(0)
    with pytest.raises(PlanError, match="other code than the layer reads") as refused:
        losses(Penalized("norm"), "tp2")
    assert "example=" in str(refused.value)


class Holding(nn.Module):
    """Holds parameters of other layers where torch does not look for them."""

    def __init__(self, parameters):
        super().__init__()
        self.held = [parameters]

    def forward(self):
        return sum((each**2).sum() for each in self.held[0])


class HoldsPenalty(nn.Module):
    """Has a module that holds parameters of its layers, or one of its own."""

    def __init__(self, whose):
        super().__init__()
        self.layers, self.scale = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), nn.Parameter(torch.ones(8))
        self.penalty = Holding([*self.layers.parameters()] if whose == "layers" else [self.scale])

    def forward(self, x):
        return self.layers(x * self.scale) * (1 + 0.1 * self.penalty())


@pytest.mark.parametrize("whose", ["layers", "the model"])
@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "pp4/zb-h1 mb4"])
def test_stages_update_parameters_that_another_module_holds(line, whose):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(3)]
    verdict = sw.verify(HoldsPenalty(whose), line, batches, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
    with pytest.raises(LayoutError, match="holds the parameter"):
        losses(HoldsPenalty(whose), line)


class Relative(nn.Module):
    """Adds what it makes of a table that is given to it, as relative positions are in DeBERTa."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x, table):
        assert x.shape[0] in range(99)
        return x + self.down(self.up(x).relu()) + self.drop(table).mean(0)


class SharesTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(6, 8), nn.ModuleList(Relative() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.table.weight)
        return x


@pytest.mark.parametrize("line", ["pp2/1f1b mb2 dp2/zero1 tp2", "pp2/1f1b mb2 dp2/zero3", "pp2/1f1b mb2 dp2/zero1"])
def test_a_parameter_that_modules_get_as_an_argument_is_unsharded_for_them(line):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(2)]
    verdict = sw.verify(SharesTable(), line, batches, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class ReadsBias(nn.Module):
    """Reads a bias that every rank has whole, beside weights of which ranks have parts."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.layers(x) + self.layers[2].bias


@pytest.mark.parametrize("sees", [True, False])
def test_a_whole_parameter_of_a_layer_that_is_cut_may_be_read(sees):
    torch.manual_seed(0)
    wanted, found = losses(ReadsBias(), "pp2/1f1b mb2 tp2", sees=sees)
    assert found == pytest.approx(wanted, rel=1e-6)


class Measures(nn.Module):
    """Divides by how many elements its weights have, of which a rank may have fewer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.layers(x) * (100 / sum(each.shape[0] for each in self.layers.parameters()))


def test_a_layer_whose_shape_other_code_reads_is_cut_so_that_it_finds_the_whole_one_or_not_at_all():
    torch.manual_seed(0)
    wanted, found = losses(Measures(), "tp2", sees=True)
    assert found == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(PlanError, match="other code than the layer reads"):
        losses(Measures(), "tp2")


class Tied(nn.Module):
    """Uses its table as the output layer, by a function."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(300, 64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, tokens):
        x = self.table(tokens)
        return functional.linear(x + self.down(self.up(x).relu()), self.table.weight)


def test_a_table_that_code_uses_as_the_output_layer_is_cut_by_parts():
    batch = torch.randint(300, (4, 6)), torch.randint(300, (4, 6))
    loss = sw.MeanLoss(lambda output, targets: functional.cross_entropy(output.transpose(1, 2), targets))
    verdict = sw.verify(Tied(), "tp2", [batch, batch], loss=loss)
    assert verdict.equal, str(verdict)
    assert verdict.shares["tp2"] > 0.9


class Cell(nn.Module):
    """A recurrent cell that reads its parameters from a dict, as those of neural circuit policies do."""

    def __init__(self):
        super().__init__()
        self.own, self.gate = {}, nn.Softplus()
        for name, shape in (("in", (4, 8)), ("back", (8, 8)), ("bias", (8,))):
            self.own[name] = nn.Parameter(torch.randn(shape) * 0.3)
            self.register_parameter(f"w_{name}", self.own[name])

    def forward(self, x, h):
        return torch.tanh(x @ self.own["in"] + h @ self.gate(self.own["back"]) + self.gate(self.own["bias"]))


class Recurrent(nn.Module):
    def __init__(self, *, calls):
        super().__init__()
        self.cell, self.out, self.calls = Cell(), nn.Linear(8, 4), calls

    def forward(self, x):
        _, *_ = [*x.shape]  # so that it is cut by a record
        h, found = x.new_zeros(len(x), 8), []
        for step in x.unbind(1):
            h = self.cell(step, h) if self.calls else self.cell.forward(step, h)
            found.append(self.out(h))
        return torch.stack(found, 1)


@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "pp4/1f1b mb2"])
def test_a_cell_with_a_dict_of_its_parameters_runs_on_one_stage(line):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4, 4), torch.randn(8, 4, 4)) for _ in range(2)]
    verdict = sw.verify(Recurrent(calls=True), line, batches, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
    with pytest.raises(LayoutError, match="'cell' holds its parameters in a plain attribute too"):
        sw.verify(Recurrent(calls=False), line, batches, loss=MeanSquaredError())


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.rest = nn.Linear(4, 8), nn.Linear(8, 4), nn.LSTM(8, 8)

    def forward(self, x):
        _, *_ = [*x.shape]
        return self.last(torch.relu(self.first(x)))


def test_a_recurrent_layer_that_no_forward_calls_is_no_obstacle_to_stages():
    torch.manual_seed(0)
    verdict = sw.verify(Unused(), "pp2/1f1b mb2", [(torch.randn(8, 4), torch.randn(8, 4))], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = nn.Parameter(torch.rand(8), requires_grad=False)

    def forward(self, x):
        return x * torch.cos(self.rates)


class SharedLast(nn.Module):
    """Blocks whose first name of a shared module is not the one by which they call it."""

    def __init__(self):
        super().__init__()
        self.shared, self.norms = Rotary(), nn.ModuleList([nn.LayerNorm(8) for _ in range(3)])
        self.blocks = nn.ModuleList([nn.ModuleList([self.shared, nn.Linear(8, 8)]) for _ in range(3)])

    def forward(self, x):
        _, *_ = [*x.shape]
        for norm, (shared, layer) in zip(self.norms, self.blocks, strict=True):
            x = x + layer(shared(norm(x)))
        return x


def test_a_module_of_several_names_is_one_unit():
    model = SharedLast().to("meta")
    record = record_events(model, torch.empty(4, 8, device="meta"))
    units = units_of(model, record, opened_modules(model, record, 5, (), (), 0.5))
    found = [model.get_submodule(path) for path in units]
    assert len(found) == len({*found})
    assert model.shared in found
