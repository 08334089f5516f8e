"""Models whose code writes into what a layer gave: as on one device, in every mode."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import launch, parallelize, save, verify
from shardwright.errors import PlanError, RankFailedError
from shardwright.layout import Layout
from shardwright.models.losses import MeanSquaredError

LINES = [
    "tp2", "tp2/sp", "tp2x2/2d", "tp2x2/2d:summa", "tp2x2/2d/regather", "tp2x2x2/2.5d", "tp2x2x2/3d",
    "tp2x2x2/3d:classic", "pp2/zb-h1 mb2",
]  # fmt: skip
WIDTH = 8


def sequence(norm=None):
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 16), nn.ReLU(inplace=True)]
    layers += [nn.Linear(16, WIDTH)]
    return nn.Sequential(*layers, *([norm, nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)] if norm else []))


class Multiplying(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.down, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        y = self.down(torch.relu(self.gate(x)) * self.up(x))
        y += x
        y.mul_(2.0)
        return self.last(y)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        x = self.first(x)
        y = self.attention(x, x, x, need_weights=False)[0]
        return self.last(y.add_(x).relu_())


class Pictures(nn.Module):
    def __init__(self, groups):
        super().__init__()
        self.up, self.down = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1, groups=groups)
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, WIDTH)

    def forward(self, x):
        x = functional.relu(self.down(functional.relu(self.up(x), inplace=True)), inplace=True)
        return self.out(functional.relu(self.norm(x), inplace=True))


MODELS = {
    "layers": sequence,
    "LayerNorm": lambda: sequence(nn.LayerNorm(WIDTH)),
    "LayerNorm without weights": lambda: sequence(nn.LayerNorm(WIDTH, elementwise_affine=False)),
    "RMSNorm": lambda: sequence(nn.RMSNorm(WIDTH)),
    "RMSNorm without weights": lambda: sequence(nn.RMSNorm(WIDTH, elementwise_affine=False)),
    "a product": Multiplying,
    "attention": Attending,
    "convolutions": lambda: Pictures(1),
    "convolutions in groups": lambda: Pictures(4),
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(23)
def test_what_a_layer_gives_may_be_written_into(name, line):
    if "convolutions" in name and ("mb" in line or line == "tp2/sp"):
        return  # microbatches of a BatchNorm are refused, and /sp cuts no Linear that stands alone
    torch.manual_seed(0)
    x = torch.randn(6, 3, WIDTH)
    shape = (6, 8, WIDTH) if "convolutions" in name else x.shape
    verdict = verify(MODELS[name](), line, [(x, torch.randn(shape))] * 2, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class Overwriting(nn.Module):
    """Not elementwise, so it takes in whole features; and it changes them for others."""

    def forward(self, x):
        x.mul_(2.0)
        return x.softmax(-1)


class SeesWhatWasOverwritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(WIDTH, WIDTH), Overwriting(), nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        return self.last(self.mix(x)) + self.other(x)


@pytest.mark.parametrize("line", ["tp1x2/2d", "tp2x2/2d"])
def test_a_module_that_overwrites_features_gathered_for_it_alone_is_named(line):
    batch = (torch.randn(4, 3, WIDTH), torch.randn(4, 3, WIDTH))
    with pytest.raises((PlanError, RankFailedError), match="'mix' writes into its input"):
        verify(SeesWhatWasOverwritten(), line, [batch], loss=MeanSquaredError())
    assert verify(SeesWhatWasOverwritten(), "dp2", [batch], loss=MeanSquaredError()).equal


class Positions(nn.Module):
    """Computes a table when it meets a new length, and keeps it in place of a buffer or of an attribute."""

    def __init__(self, kept):
        super().__init__()
        self.kept, self.layer = kept, nn.Linear(WIDTH, WIDTH)
        if kept == "attribute":
            self.table = None
        else:
            self.register_buffer("table", torch.zeros(1, 3), persistent=kept == "buffer")

    def forward(self, x):
        if self.table is None or len(self.table) != x.shape[1]:
            table = torch.zeros(x.shape[1], 3)
            table[:, 1] = torch.arange(x.shape[1], dtype=torch.float32)
            table[:, 2] = 1
            if self.kept == "data of a buffer":
                self.table.data = table.to(self.layer.weight.dtype)
            else:
                self.table = table.to(self.layer.weight.dtype)
        return x + self.layer(x).tanh() * self.table.sum(-1, keepdim=True)


class InTurn(nn.Module):
    def __init__(self, kept):
        super().__init__()
        self.blocks = nn.ModuleList(Positions(kept) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class NotTraced(InTurn):
    def forward(self, x):
        return super().forward(x) if isinstance(x, torch.Tensor) and float(x.shape[0]) else x


@pytest.mark.parametrize("line", ["dp2/zero3", "pp2/gpipe mb1", "pp2/1f1b mb4", "pp4/zb-h1 mb4", "pp2 mb2 dp2/zero1"])
@pytest.mark.parametrize("kept", ["buffer", "buffer that is not saved", "data of a buffer", "attribute"])
@pytest.mark.parametrize("kind", [InTurn, NotTraced])
def test_a_forward_may_replace_a_buffer_by_one_of_another_shape(kind, kept, line):
    torch.manual_seed(0)
    batch = torch.randn(8, 5, WIDTH), torch.randn(8, 5, WIDTH)
    verdict = verify(kind(kept), line, [batch, batch], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["single", "pp2 mb2"])
def test_a_buffer_that_the_forward_has_replaced_is_saved_with_its_new_shape(line, tmp_path):
    model = InTurn("buffer")
    inputs, targets = torch.randn(8, 5, WIDTH), torch.randn(8, 5, WIDTH)

    def work(world):
        run = parallelize(model, line, world, loss=MeanSquaredError(), example=inputs)
        for part in run.shard([(inputs, targets)]):
            run.step(part)
        save(tmp_path, run)
        return {name: list(tensor.shape) for name, tensor in run.state_dict().items() if "table" in name}

    expected = {f"blocks.{number}.table": [5, 3] for number in range(4)}
    for found in launch(work, Layout.parse(line).num_ranks, ranks="threads"):
        assert found == expected
    entries = json.loads(next(tmp_path.rglob("manifest.json")).read_text())["tensors"]
    assert {name: each["shape"] for name, each in entries.items() if "table" in name} == expected
