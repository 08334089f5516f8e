"""Models whose code transforms functions with torch.func: what runs is equal, and what cannot is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import verify
from shardwright.errors import LayoutError, PlanError

WIDTH = 8
BATCHES = [(torch.randn(8, 4, WIDTH), torch.randn(8, 4, WIDTH)) for _ in range(2)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Mapped(nn.Module):
    """Calls its first blocks in ``torch.vmap``, as modules or as functions over their layers, and its last without."""

    def __init__(self, *, layers):
        super().__init__()
        self.layers = layers
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(2)), Block()

    def forward(self, x):
        for block in self.blocks:
            call = (lambda t, block=block: block.down(torch.relu(block.up(t)))) if self.layers else block
            x = torch.vmap(call)(x)
        return self.last(x)


def plain_mlp():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


class Ensemble(nn.Module):
    """Runs stacked parameters of its members through the code of the first, as torch's text on ensembles does."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(plain_mlp() for _ in range(3))

    def forward(self, x):
        first, *_ = self.members
        stacked = {
            name: torch.stack([member.get_parameter(name) for member in self.members])
            for name, _ in first.named_parameters()
        }
        each = torch.vmap(lambda own, y: torch.func.functional_call(first, own, (y,)), (0, None))(stacked, x)
        return each.mean(0)


class AroundEnsemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.ensemble, self.last = nn.Linear(WIDTH, WIDTH), Ensemble(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.ensemble(self.first(x)))


@pytest.mark.parametrize("kind", [Ensemble, AroundEnsemble])
@pytest.mark.parametrize("line", ["tp2/sp", "dp2/zero3"])
def test_an_ensemble_of_stacked_parameters_is_equal(line, kind):
    verdict = verify(kind(), line, BATCHES, loss=nn.MSELoss())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("kind", [Ensemble, AroundEnsemble])
def test_members_that_no_code_calls_but_whose_weights_it_stacks_are_whole_like_the_one_it_calls(kind):
    with pytest.raises(LayoutError, match="kept whole: its weights are read by other code"):
        verify(kind(), "tp2", BATCHES, loss=nn.MSELoss())


class Force(nn.Module):
    """Minus the gradient of an energy, as models of molecules compute it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        return -torch.func.grad(lambda t: self.second(torch.tanh(self.first(t))).square().sum())(x)


@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize(
    "line", ["dp2/zero3", "tp2", "tp2/sp", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d", "dp2/zero3 tp2/sp"]
)
def test_layers_that_are_called_in_vmap_are_equal(line, layers):
    verdict = verify(Mapped(layers=layers), line, BATCHES, loss=nn.MSELoss())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("model", [lambda: Mapped(layers=True), lambda: Mapped(layers=False), Force])
def test_modules_called_in_a_transform_are_not_cut_into_stages(model):
    with pytest.raises(LayoutError, match=r"torch runs code of (Mapped|Force) as a whole"):
        verify(model(), "pp2 mb2", BATCHES, loss=nn.MSELoss())


def test_a_gradient_in_the_forward_is_equal_where_no_layer_is_shared_and_else_refused():
    assert verify(Force(), "dp2/zero1", BATCHES, loss=nn.MSELoss()).equal
    for line in ("tp2", "tp2/sp", "tp2x2/2d"):
        with pytest.raises(PlanError, match="ranks cannot exchange tensors inside of a transform"):
            verify(Force(), line, BATCHES, loss=nn.MSELoss())
    with pytest.raises(PlanError, match="write zero2 in the place of zero3"):
        verify(Force(), "dp2/zero3", BATCHES, loss=nn.MSELoss())


class Generated(nn.Module):
    """Runs a network with weights that another network makes."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)).requires_grad_(False)
        self.sizes = {name: each.shape for name, each in self.network.named_parameters()}
        self.seed = nn.Parameter(torch.randn(6))
        self.maker = nn.Sequential(
            nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, sum(map(torch.Size.numel, self.sizes.values())))
        )

    def forward(self, x):
        parts = self.maker(self.seed).split([size.numel() for size in self.sizes.values()])
        made = {name: part.view(size) for (name, size), part in zip(self.sizes.items(), parts, strict=True)}
        return torch.func.functional_call(self.network, made, (x,))


@pytest.mark.parametrize("line", ["dp2/zero3", "tp2"])
def test_a_network_whose_weights_another_makes_stays_whole(line):
    verdict = verify(Generated(), line, BATCHES, loss=nn.MSELoss())
    assert verdict.equal, str(verdict)
