"""What a model's own code does to gradients beside operators holds under every cut into stages, or is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import verify
from shardwright.analysis.chunks.forward_events import record_events
from shardwright.errors import LayoutError
from shardwright.models.losses import MeanSquaredError

WIDTH = 8


class AddsLoss(torch.autograd.Function):
    """Returns its argument as it is, and gives an auxiliary loss a gradient, as in mixtures of experts."""

    @staticmethod
    def forward(ctx, x, loss):
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy, torch.ones((), dtype=dy.dtype, device=dy.device)


class Scales(torch.autograd.Function):
    """Scales the gradient alone, as a reversal of gradients does."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy * -0.1


def adds_loss(x, h):
    return AddsLoss.apply(x, 0.1 * h.square().sum())


def scales(x, h):
    return Scales.apply(x) + h


def hooks(x, h):
    if x.requires_grad:
        x.register_hook(lambda dy: dy * 0.1)
    return x + h


class Block(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.first, self.second, self.change = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), change

    def forward(self, x):
        h = self.first(x)
        return self.change(torch.tanh(self.second(h)), h)


class Blocks(nn.Module):
    def __init__(self, change, outside=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(change) for _ in range(4))
        self.outside = outside

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.outside is not None:
                x = self.outside(torch.tanh(x), x)
        return x


def batch():
    return torch.randn(6, WIDTH), torch.randn(6, WIDTH)


LINES = [
    "pp2",
    "pp2/1f1b mb2",
    "pp3/1f1b mb3",
    "pp2/zb-v mb4 dp2/zero1",
    "pp2/interleaved:v2 mb2",
    "pp2/cut:blocks.0,blocks.1",
]


@pytest.mark.filterwarnings("ignore:the backward of 'AddsLoss' adds a term")  # a sum over samples, which is right
@pytest.mark.parametrize("line", [*LINES, "dp2/zero3", "mb2 recompute:full"])
@pytest.mark.parametrize("change", [adds_loss, scales, hooks])
@pytest.mark.sampled(6)
def test_gradients_that_the_code_of_a_block_changes_are_those_of_one_device(change, line):
    torch.manual_seed(0)
    verdict = verify(Blocks(change), line, [batch()], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("change", [adds_loss, scales, hooks])
def test_a_record_says_whose_code_changes_gradients(change):
    x = torch.empty(6, WIDTH, device="meta")
    inside = record_events(Blocks(change).to("meta"), x)
    assert inside.own_backward == {f"blocks.{number}" for number in range(4)}
    assert record_events(Blocks(lambda x, h: x + h, change).to("meta"), x).own_backward == {""}


@pytest.mark.parametrize("outside", [adds_loss, scales, hooks])
def test_gradients_that_code_between_blocks_changes_are_refused(outside):
    torch.manual_seed(0)
    with pytest.raises(LayoutError, match=r"runs code of Blocks as a whole(.*\n)*.*hook on the gradient"):
        verify(Blocks(lambda x, h: x + h, outside), "pp2/1f1b mb2", [batch()], loss=MeanSquaredError())
