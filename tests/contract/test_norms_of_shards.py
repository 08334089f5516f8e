"""Layer norms between layers that tp cuts, as after the activation of an MLP or before the output of attention."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.contract.cases import CHECKS
from tests.contract.test_on_shards import TOKENS, WIDTH, WORDS, OwnCase
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from shardwright.comm.launch import run_on_threads
from shardwright.mesh import Mesh
from shardwright.models.losses import CrossEntropy
from shardwright.sharding.tensor_shard import shard_of, tag
from shardwright.strategies.tensor_parallel.shards_mode import ShardsMode
from shardwright.verify import verify

LINES = ["tp2", "tp3", "tp2 mb2", "dp2/zero1 tp2", "dp2/zero3 tp2", "pp2 mb2 tp2", "tp2 recompute:full"]


def hooked_weight_norm(layer):
    with warnings.catch_warnings(action="ignore"):  # torch advises the other one
        return nn.utils.weight_norm(layer)


class Feedforward(nn.Module):
    def __init__(self, width=24, **options):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 48)
        self.inner, self.down = nn.LayerNorm(48, **options), nn.Linear(48, width)

    def forward(self, x):
        return x + self.down(self.inner(functional.gelu(self.up(self.norm(x)))))


class Attention(nn.Module):
    """Normalizes what the heads have computed, all of them at once."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(24), nn.LayerNorm(24)
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (6, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.o(self.inner(heads))


class Pictures(nn.Module):
    """Convolutions with a norm over channels and places between them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv1d(6, 24, 3, padding=1), nn.Conv1d(24, 6, 3, padding=1)
        self.inner = nn.LayerNorm((24, 24))

    def forward(self, x):
        return x + self.down(functional.relu(self.inner(self.up(x))))


class Normed(nn.Module):
    """Convolutions whose weights are a direction and a norm for each channel that they give."""

    def __init__(self, normed):
        super().__init__()
        self.up, self.down = normed(nn.Conv1d(6, 24, 3, padding=1)), normed(nn.Conv1d(24, 6, 1))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(torch.relu(x))))


class ByHand(nn.Module):
    """Convolutions with a norm over the channels between them, as code writes it itself."""

    def __init__(self, how):
        super().__init__()
        self.up, self.down, self.how = nn.Conv1d(6, 24, 3, padding=1), nn.Conv1d(24, 6, 3, padding=1), how
        self.gain = nn.Parameter(torch.rand(1, 24, 1) + 0.5)

    def forward(self, x):
        return x + self.down(functional.silu(self.how(self.up(x)) * self.gain))


BY_HAND = {
    "normalize": lambda h: functional.normalize(h, dim=1) * 24**0.5,
    "var and mean": lambda h: (h - h.mean(1, keepdim=True)) * (h.var(1, unbiased=False, keepdim=True) + 1e-5).rsqrt(),
    "std": lambda h: h / (torch.std(h, dim=1, keepdim=True) + 0.1),
    "var_mean": lambda h: (lambda var, mean: (h - mean) / (var + 1e-5).sqrt())(*torch.var_mean(h, 1, keepdim=True)),
    "std_mean": lambda h: (lambda std, mean: (h - mean) / (std + 1e-5))(*torch.std_mean(h, 1, keepdim=True)),
    "norm": lambda h: h / h.norm(dim=1, keepdim=True).clamp(min=1e-6),
    "norm of two": lambda h: h / torch.norm(h, 2, 1).add(1.0).unsqueeze(1),
    "vector norm": lambda h: h / (torch.linalg.vector_norm(h, dim=(1, 2), keepdim=True) + 1e-6),
}
KINDS = {
    **{name: lambda how=how: ByHand(how) for name, how in BY_HAND.items()},
    "weights with norms": lambda: Normed(parametrizations.weight_norm),
    "weights with norms, by hooks": lambda: Normed(hooked_weight_norm),
    "feedforward": Feedforward,
    "without a bias": lambda: Feedforward(bias=False),
    "without weights": lambda: Feedforward(elementwise_affine=False),
    "attention": Attention,
    "pictures": Pictures,
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_around_a_norm_are_cut_and_equal(kind, line):
    model = nn.Sequential(*(KINDS[kind]() for _ in range(2)))
    numbers = 5 + torch.sin(torch.arange(2 * 4 * 6 * 24, dtype=torch.float64) * 1.3).view(2, 4, 6, 24)
    found = verify(model, line, [(x, x.cos()) for x in numbers], loss=lambda y, x: ((y - x).square().sum(), len(x)))
    assert found.equal, found
    assert found.shares[f"tp{line.partition('tp')[2][0]}"] > 0.9, found


@pytest.mark.sampled(7)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("line", ["tp2", "tp2/sp", "dp2 tp3", "dp2/zero3 tp2", "tp2x2/2d", "tp2 recompute:full"])
def test_a_model_with_such_norms_keeps_all_promises(line, check):
    torch.manual_seed(1)
    blocks = (Feedforward(WIDTH) for _ in range(2))
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))
    check(line, OwnCase("norms", model, CrossEntropy(), num_tokens=TOKENS))


@pytest.mark.parametrize(
    "function", [functional.normalize, lambda x: x / (x.std(1, keepdim=True) + 1), lambda x: x.norm()]
)
def test_a_norm_of_zeros_has_no_gradient_that_is_no_number(function):
    x = torch.zeros(2, 4)

    def work(axes):
        part = x[:, 2 * axes["tp"].index :][:, :2].clone().requires_grad_()
        tag(part, shard_of((2, 4), (None, bytes([0, 0, 1, 1]))))
        with ShardsMode(axes["tp"]):
            found = function(part).sum()
        found.backward()
        return part.grad

    assert all(not each.isnan().any() for each in run_on_threads(Mesh(tp=2), work))


OTHERS = [
    lambda x: functional.normalize(x, p=1.0, dim=1),
    lambda x: x.norm(p=1, dim=1),
    lambda x: x.to(torch.complex64).norm(dim=1),
    lambda x: torch.linalg.vector_norm(x, dim=1, dtype=torch.float64),
    lambda x: torch.linalg.norm(x, ord=2),
    lambda x: x.var(1, correction=9),  # more than there are elements
]


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("function", OTHERS)
def test_other_norms_of_parts_are_those_of_the_whole(function):
    x = torch.randn(3, 4)

    def work(axes):
        part = x[:, 2 * axes["tp"].index :][:, :2].clone()
        tag(part, shard_of((3, 4), (None, bytes([0, 0, 1, 1]))))
        with ShardsMode(axes["tp"]) as mode:
            found = function(part)
        return mode.whole(found)

    for found in run_on_threads(Mesh(tp=2), work):
        torch.testing.assert_close(found, function(x))
