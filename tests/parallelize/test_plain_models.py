"""Plain models of kinds that people bring are equal to one device; each has one thing that planning must see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.errors import LayoutError, PlanError, RankFailedError
from shardwright.models.losses import MeanSquaredError
from shardwright.strategies.tensor_parallel.graph_cuts import graph_cuts

LOSS = MeanSquaredError()
WIDTH = 8


def pair():
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))


class Spectral(nn.Module):
    """Hooks compute weights before the layers' forwards, from parameters of which the ranks of a grid store parts."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x):
        return self.last(nn.functional.leaky_relu(self.first(x), 0.2))


class WeightNorm(nn.Module):
    """As ``Spectral``, and the hook has left a weight with a history before the first forward."""

    def __init__(self):
        super().__init__()
        self.layer, self.pair = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), pair()

    def forward(self, x):
        return self.pair(self.layer(x))


class Filled(nn.Module):
    """Code between modules writes into one tensor, the results of several stages."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        found = torch.empty(len(x), 4, WIDTH, dtype=x.dtype, device=x.device)
        for number, step in enumerate(self.steps):
            x = step(x).tanh()
            found[:, number] = x
        return found.sum(1)


class Mapped(nn.Module):
    """``torch.vmap`` over a stack of weights, of which a rank could hold some if its code could be seen."""

    def __init__(self):
        super().__init__()
        self.pair, self.stack = pair(), nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x):
        x = self.pair(x)
        return torch.vmap(lambda w: torch.tanh(x @ w))(self.stack).mean(0)


class Tied(nn.Module):
    """Code reads the table of an embedding as its head, beside an attention of torch."""

    def __init__(self):
        super().__init__()
        self.table, self.bias = nn.Embedding(32, WIDTH), nn.Parameter(torch.zeros(32))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True) for _ in range(2))

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(x, self.table.weight, self.bias)


class Force(nn.Module):
    """The forward takes a gradient of its own, of an energy by positions."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


class ForceInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.force, self.last = pair(), Force(), pair()

    def forward(self, x):
        return self.last(self.force(self.first(x)))


class Graph(nn.Module):
    """Messages along edges are added up at their targets, as in graph networks."""

    def __init__(self):
        super().__init__()
        self.send, self.take = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        nodes = x.view(-1, 2, WIDTH // 2).repeat(1, 1, 2)
        sent = self.send(nodes)
        added = torch.zeros(len(x), 2, 16, dtype=x.dtype).index_add(1, torch.tensor([1, 1]), sent)
        return self.take(added.relu()).mean(1)


class Rotary(nn.Module):
    """Pairs of features are turned as complex numbers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        pairs = torch.view_as_complex(self.up(x).view(-1, 4, 2, 2)) * torch.polar(torch.ones(2), torch.ones(2))
        return self.down(torch.view_as_real(pairs).flatten(1).to(x.dtype))


class Spectrum(nn.Module):
    """A Fourier transform along places, channels apart."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.down(torch.fft.irfft(torch.fft.rfft(self.up(x[..., None]), dim=1), n=WIDTH, dim=1))[..., 0]


def floats():
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH)


def tokens():
    return torch.randint(32, (8, 5)), torch.randn(8, 5, 32)


CASES = [
    (Spectral, "tp4/2d"), (Spectral, "dp2/zero3"), (WeightNorm, "dp2"), (WeightNorm, "tp4/2d"), (WeightNorm, "tp2"),
    (WeightNorm, "pp2/1f1b mb2"), (Filled, "pp2/1f1b mb2"), (Mapped, "tp2"), (Tied, "tp2"),
    (ForceInside, "pp2/1f1b mb2"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm", "ignore:.*tp2")
@pytest.mark.parametrize(("model", "line"), CASES)
def test_a_plain_model_is_equal_to_one_device(model, line):
    torch.manual_seed(0)
    batch = tokens() if model is Tied else floats()
    verdict = verify(model(), line, [batch, batch], loss=LOSS)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("model", [Graph, Rotary, Spectrum])
def test_features_stay_cut_where_other_dims_are_mixed(model):
    torch.manual_seed(0)
    batch, plain = floats(), model()
    run = ModelGraph(plain, batch[0]).run
    cuts = graph_cuts(plain, run.recording, run.axes, 2)
    assert set(cuts.shards) == {name for name in dict(plain.named_parameters()) if name.endswith("weight")} | {
        f"{next(iter(dict(plain.named_children())))}.bias"
    }
    verdict = verify(plain, "tp2", [batch], loss=LOSS)
    assert verdict.equal, str(verdict)


def test_a_gradient_that_the_models_own_code_takes_is_refused_where_stages_are_cut():
    with pytest.raises((LayoutError, PlanError), match="torch runs code of Force as a whole"):
        verify(Force(), "pp2/1f1b mb2", [floats()], loss=LOSS)


class Reshaped(nn.Module):
    """Gives a tensor another dim in place, between layers that tensor parallelism cuts."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        hidden = torch.view_as_real(torch.view_as_complex(self.up(x).view(-1, 8, 2))).flatten(1)
        return self.down(hidden.unsqueeze_(1)).mean(1)


def test_a_part_that_is_reshaped_in_place_is_refused():
    with pytest.raises((PlanError, RankFailedError), match="'unsqueeze_' writes to a tensor"):
        verify(Reshaped(), "tp2", [floats()], loss=LOSS)


class Pictures(nn.Module):
    """As U-Nets of medicine: instance norms, and a rectifier with one slope, which torch computes by a kernel."""

    def __init__(self, *, tracks=False):
        super().__init__()
        self.up, self.down = nn.Conv2d(2, 16, 3, padding=1), nn.Conv2d(16, 2, 3, padding=1)
        self.norm, self.act = nn.InstanceNorm2d(16, affine=True, track_running_stats=tracks), nn.PReLU()

    def forward(self, x):
        return x + self.down(self.act(self.norm(self.up(x))))


def pictures():
    return torch.randn(4, 2, 6, 6), torch.randn(4, 2, 6, 6)


def test_channels_stay_cut_through_instance_norm_and_prelu():
    torch.manual_seed(0)
    verdict = verify(Pictures(), "tp2", [pictures()] * 2, loss=LOSS)
    assert verdict.equal, str(verdict)
    assert verdict.shares["tp2"] > 0.9


def test_an_instance_norm_that_averages_over_samples_is_refused_in_own_code_too():
    with pytest.raises(LayoutError, match="'norm' computes statistics over the batch, which 'dp2' cuts"):
        verify(Pictures(tracks=True), "dp2", [pictures()], loss=LOSS)


class Heads(nn.Module):
    """An attention that spreads its mask over heads by the size of the scores, of which each rank has some heads."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).view(len(x), -1, 4, 4).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3)
        later = torch.ones(x.shape[1], x.shape[1]).triu(1) == 1
        scores.masked_fill_(later.view(1, 1, *later.shape).expand_as(scores), -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_mask_that_takes_the_size_of_a_part_takes_that_of_the_whole():
    torch.manual_seed(0)
    verdict = verify(Heads(), "tp2", [(torch.randn(4, 5, 16), torch.randn(4, 5, 16))], loss=LOSS)
    assert verdict.equal, str(verdict)
    assert verdict.shares["tp2"] > 0.9
