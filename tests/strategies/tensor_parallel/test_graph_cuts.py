"""Which features of weights a recorded model lets ranks share, whatever views its code makes of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.recorded.recording import Recorded
from shardwright.models import MeanSquaredError
from shardwright.sharding.tensor_shard import ALL, TensorShard
from shardwright.strategies.tensor_parallel.call_plans import ShardUse, WriteToShardError, plan_call
from shardwright.strategies.tensor_parallel.graph_cuts import _TURNS, graph_cuts
from shardwright.strategies.tensor_parallel.shards_plan import share_cut, work_cut


class Squeezed(nn.Module):
    """Code of its own that reads a weight or a bias through views."""

    def __init__(self, how):
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(16, 64, bias=False), nn.Linear(64, 16)
        self.scores = nn.Parameter(torch.randn(1, 16))

    def forward(self, x):
        hidden = functional.silu(functional.linear(x, self.up.weight))
        return self.down(hidden) + self.how(self.scores)


HOW = {
    "no dim": lambda t: t.squeeze(),
    "a dim": lambda t: t.squeeze(0),
    "a dim from the end": lambda t: t.squeeze(-2),
    "a dim of more than one": lambda t: t.squeeze(1).squeeze(0),
    "dims": lambda t: t.squeeze((0, 1)),
    "transposed": lambda t: t.transpose(0, 1).squeeze(1),
    "a number": lambda t: t[0, 0].squeeze(-1).transpose(0, -1) + t.squeeze(),
    "turned and back": lambda t: t.T.unsqueeze(0).permute(0, 2, 1).squeeze(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_weight_that_code_reads_through_views_keeps_no_other_weight_whole(how):
    torch.manual_seed(0)
    plans = []
    batch = torch.randn(4, 16), torch.randint(16, (4,))
    verdict = verify(Squeezed(how), "tp2", [batch], alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) > 0.95


VIEWS = {
    "t": ((2, 3), lambda t: t.t(), ()),
    "squeeze": ((2, 1, 3), lambda t: t.squeeze(), ()),
    "squeeze of a dim": ((2, 1, 3), lambda t: t.squeeze(1), (1,)),
    "squeeze of a dim of more than one": ((2, 1, 3), lambda t: t.squeeze(0), (0,)),
    "squeeze of dims": ((1, 2, 1, 3), lambda t: t.squeeze((0, -2)), ((0, -2),)),
    "squeeze of a number": ((), lambda t: t.squeeze(-1), (-1,)),
    "transpose of a number": ((), lambda t: t.transpose(0, -1), (0, -1)),
    "unsqueeze": ((2, 3), lambda t: t.unsqueeze(-1), (-1,)),
    "transpose": ((2, 3, 4), lambda t: t.transpose(0, -1), (0, -1)),
    "permute": ((2, 3, 4), lambda t: t.permute(2, 0, 1), ((2, 0, 1),)),
}


@pytest.mark.parametrize(("shape", "view", "args"), VIEWS.values(), ids=VIEWS)
def test_the_dims_of_a_view_are_those_that_its_elements_had(shape, view, args, request):
    name = request.node.callspec.id.split(" ")[0]
    tensor = torch.empty(shape)
    turned = view(tensor)
    dims = _TURNS[name](tuple(range(len(shape))), shape, *args)
    strides = [None if dim == -1 else tensor.stride(dim) for dim in dims]
    assert len(strides) == turned.dim()
    assert all(stride in (None, seen) for stride, seen in zip(strides, turned.stride(), strict=True))


class Places(nn.Embedding):
    """A table of positions, which no rank shares: a sum over the ranks would save little."""

    def forward(self, x):
        return super().forward(torch.arange(x.shape[1], device=x.device))


class MostlyPlaces(nn.Module):
    """Few of the parameters do all of the work."""

    def __init__(self):
        super().__init__()
        self.places = Places(4096, 16)
        self.layers = nn.ModuleList(Squeezed(lambda scores: scores.squeeze()) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = x + self.places(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def test_a_model_that_is_mostly_a_table_of_positions_is_cut_for_its_work_and_the_table_alone():
    torch.manual_seed(0)
    plans = []
    batch = torch.randn(4, 6, 16), torch.randint(4, (4, 6))
    verdict = verify(MostlyPlaces(), "tp2", [batch], alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) > 0.9
    assert plans[0].compute["places.weight"].local_shape({"tp": 0}) == (4096, 8)  # its features, and no rows
    assert work_cut(plans[0]) > 0.9


class JoinedTables(nn.Module):
    """Large tables, whose joined rows a layer that must stay whole maps to features, as in RoCBert."""

    def __init__(self):
        super().__init__()
        self.shapes, self.sounds, self.words = nn.Embedding(2000, 96), nn.Embedding(500, 64), nn.Embedding(40, 16)
        self.into, self.norm = nn.Linear(96 + 64 + 16, 16), nn.LayerNorm(16)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        x = self.norm(self.into(torch.cat([self.words(x), self.shapes(x), self.sounds(x)], -1)))
        hidden = self.up(x)
        if hidden.shape[1] > 1:  # on which layers that are found by a trace of the code stay whole
            hidden = functional.silu(hidden)
        return self.head(self.norm(x + self.down(hidden)))


def test_layers_beside_large_tables_are_cut_though_the_layer_between_them_does_most_of_the_work():
    torch.manual_seed(0)
    plans = []
    batch = torch.randint(40, (4, 6)), torch.randint(4, (4, 6))
    verdict = verify(JoinedTables(), "tp2", [batch], alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) > 0.9
    assert 0.5 > work_cut(plans[0]) > 0.3


class ResidualBlock(nn.Module):
    """A block of a diffusion model: the time is added to the inner channels, and a shortcut joins the outer ones."""

    def __init__(self, channels, out):
        super().__init__()
        self.norm, self.into = nn.GroupNorm(4, channels), nn.Conv2d(channels, out, 3, padding=1)
        self.time = nn.Linear(16, out)
        self.inner, self.out = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x, time):
        hidden = self.into(functional.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        return self.shortcut(x) + self.out(functional.silu(self.inner(hidden)))


class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.into = nn.Linear(1, 16), nn.Conv2d(3, 16, 3, padding=1)
        self.down, self.middle = ResidualBlock(16, 32), ResidualBlock(32, 32)
        self.up, self.out = ResidualBlock(48, 16), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x, time):
        time, x = functional.silu(self.embed(time)), self.into(x)
        low = self.middle(self.down(functional.avg_pool2d(x, 2), time), time)
        return self.out(self.up(torch.cat((functional.interpolate(low, scale_factor=2.0), x), 1), time))


@pytest.mark.parametrize("line", ["tp2", "pp2/1f1b mb2 tp2"])
def test_inner_channels_are_cut_in_place_of_those_between_blocks_where_that_cuts_more(line):
    torch.manual_seed(0)
    plans = []
    batch = ({"x": torch.randn(4, 3, 8, 8), "time": torch.rand(4, 1)}, torch.randn(4, 3, 8, 8))
    verdict = verify(Diffusion(), line, [batch], loss=MeanSquaredError(), alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) > 0.9
    assert work_cut(plans[0]) > 0.9


class SplitAfterNorm(nn.Module):
    """Channels that go through layers of their own after one BatchNorm, but for one, which cannot be cut."""

    def __init__(self, affine):
        super().__init__()
        self.into, self.wide = nn.Conv1d(3, 6, 1), nn.Conv1d(6, 9, 1, bias=False)
        self.norm = nn.BatchNorm1d(9, affine=affine)
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(2))
        self.out = nn.Conv1d(9, 6, 1)

    def forward(self, x):
        x = self.into(x)
        first, second, rest = self.norm(self.wide(x)).relu().split([4, 4, 1], 1)
        return x + self.out(torch.cat((self.layers[0](first), self.layers[1](second), rest), 1))


@pytest.mark.parametrize("affine", [True, False])
def test_statistics_of_which_all_ranks_would_hold_a_part_are_not_cut(affine):
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 5), torch.randn(4, 6, 5)
    plans, model = [], SplitAfterNorm(affine)
    options = {"loss": MeanSquaredError(), "alter": lambda run: plans.append(run.plan)}
    verdict = verify(model, "tp2", [batch, batch], **options)
    assert verdict.equal, str(verdict)
    assert not plans[0].buffers


def test_a_batch_norm_does_not_update_statistics_that_would_be_gathered_for_it():
    cut = bytes([0, 0, 1, 1, ALL, ALL])
    x, w, b, mean, var = (torch.empty(shape, device="meta") for shape in [(4, 6), 6, 6, 6, 6])
    uses = [ShardUse(x, None, True), *(ShardUse(each, TensorShard((6,), (cut,)), False) for each in (w, b, mean, var))]
    device = torch.device("cpu")
    evaluated = plan_call(functional.batch_norm, (x, mean, var, w, b, False), {}, uses, 0, device)
    assert {change.kind for step in evaluated.steps for change in step.changes} == {"gather"}
    with pytest.raises(WriteToShardError):
        plan_call(functional.batch_norm, (x, mean, var, w, b, True), {}, uses, 0, device)


def test_channels_last_pictures_are_pooled_to_one_pixel_on_shards():
    x = torch.empty(2, 6, 4, 4, device="meta").to(memory_format=torch.channels_last)
    part = TensorShard((2, 6, 4, 4), (None, bytes([0, 0, 0, 1, 1, 1]), None, None))
    pooled = plan_call(functional.adaptive_avg_pool2d, (x, 1), {}, [ShardUse(x, part, True)], 0, torch.device("cpu"))
    found = pooled.shards[pooled.results.number]
    assert found is not None
    assert found.shape == (2, 6, 1, 1)
    assert found.local_shape(0) == (2, 3, 1, 1)
    changed = torch.empty(2, 3, device="meta")
    with Recorded() as recorded:
        changed.as_strided_((3, 2), (1, 3))  # another shape: not ignored
    assert [call.name for call in recorded.recording.calls] == ["as_strided_"]


class TwoInputs(nn.Module):
    """A gated layer whose halves read features of different widths."""

    def __init__(self):
        super().__init__()
        self.narrow, self.gate, self.up = nn.Linear(16, 8), nn.Linear(8, 32), nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x):
        other = self.narrow(x).softmax(-1)
        return x + self.down(self.gate(other) * functional.silu(self.up(x)))


@pytest.mark.parametrize("line", ["tp2", "tp2/sp", "tp3", "tp4/2d", "tp2x2x2/2.5d", "tp2x2x2/3d"])
def test_layers_of_which_each_has_an_input_of_its_own_are_cut_together(line):
    torch.manual_seed(0)
    plans = []
    batch = torch.randn(8, 6, 16), torch.randn(8, 6, 16)
    model = nn.Sequential(TwoInputs(), TwoInputs())
    verdict = verify(model, line, [batch], loss=MeanSquaredError(), alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    assert share_cut(plans[0]) > 0.8


class OneKeyHead(nn.Module):
    """Attention, written out, of many heads to one head of keys and values."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.q, self.out = heads, nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(width, width // heads), nn.Linear(width, width // heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores = (q @ self.k(x)[:, None].transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((scores @ self.v(x)[:, None]).transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


def test_heads_are_not_exchanged_for_features_of_a_head_though_one_key_head_stays_whole():
    run = ModelGraph(OneKeyHead().to("meta"), torch.empty(2, 64, 32)).run
    parts = graph_cuts(OneKeyHead(), run.recording, run.axes, 2).shards
    assert parts["q.weight"].local_shape(0) == (16, 32)
    assert parts["q.weight"].cuts[0] == bytes([0] * 16 + [1] * 16), "whole heads"
    assert not {"k.weight", "v.weight"} & parts.keys()


@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm1d(64)])
def test_inner_features_are_not_exchanged_for_those_of_the_output(norm):
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 64), norm).to("meta")
    run = ModelGraph(model, torch.empty(2, 4)).run
    assert {"0.weight", "2.weight"} <= graph_cuts(model, run.recording, run.axes, 2).shards.keys()
