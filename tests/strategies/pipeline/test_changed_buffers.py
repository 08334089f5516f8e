"""Buffers that the forward of a block changes are those of one device in stages; the model's own are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import verify
from shardwright.errors import LayoutError, PlanError
from shardwright.models.losses import MeanSquaredError

WIDTH = 8


class Keeps(nn.Module):
    """A layer and a buffer that each training forward changes."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), how
        self.register_buffer("kept", torch.zeros(WIDTH))

    def forward(self, x):
        h = self.layer(x - self.kept)
        if self.training:
            self.change(h.detach().mean(0))
        return h

    def change(self, mean):
        if self.how == "replaced":
            self.kept = 0.9 * self.kept + 0.1 * mean
        elif self.how == "written":
            self.kept.copy_(0.9 * self.kept + 0.1 * mean)
        else:
            self.kept = self.kept + 1


class Model(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.enter, self.block, self.leave = nn.Linear(6, WIDTH), Keeps(how), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.leave(torch.tanh(self.block(torch.tanh(self.enter(x)))))


class ItsOwn(Keeps):
    """The same, where the model itself has the buffer."""

    def __init__(self, how):
        super().__init__(how)
        self.enter, self.leave = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.leave(super().forward(torch.tanh(self.enter(x))))


def batches():
    return [(torch.randn(6, 6), torch.randn(6, 4)) for _ in range(3)]


HOW = ["replaced", "written", "counted"]


@pytest.mark.filterwarnings("ignore:'block' takes a mean, with which it changes the buffer")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("line", ["pp2", "pp2/cut:enter,block", "pp2/cut:enter,leave", "pp3", "pp2/1f1b mb3"])
def test_a_buffer_that_a_block_changes_is_that_of_one_device_or_refused_under_mb(how, line):
    torch.manual_seed(0)
    if "mb" in line:
        with pytest.raises(PlanError, match=r"'block\.kept' changes with every call, and 'mb' makes"):
            verify(Model(how), line, batches(), loss=MeanSquaredError())
        return
    verdict = verify(Model(how), line, batches(), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("how", HOW)
def test_a_buffer_that_the_models_own_code_changes_is_refused_in_stages(how):
    torch.manual_seed(0)
    assert verify(ItsOwn(how), "single", batches(), loss=MeanSquaredError()).equal
    with pytest.raises(LayoutError, match=r"the code of ItsOwn writes into"):
        verify(ItsOwn(how), "pp2", batches(), loss=MeanSquaredError())
