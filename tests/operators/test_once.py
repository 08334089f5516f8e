"""Gradients of gradients: autograd does not see what backwards send, so they are refused, not left out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import Function

import shardwright
from shardwright import verify
from shardwright.errors import PlanError, RankFailedError
from shardwright.models.losses import MeanSquaredError

FOLLOWED = ("_ToGlobal",)
"""Their backward is made of functions that have gradients themselves: ``tests_dist`` differentiates it."""

PENALISED = (torch.randn(6, 3, 8), torch.randn(6, 3, 8))


class Energy(nn.Module):
    """Its output is the gradient of an energy, whose training differentiates twice."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)
        return gradient


def functions():
    """Every function of the package with a backward of its own, but for those that autograd follows."""
    ours = [kind for kind in Function.__subclasses__() if kind.__module__.startswith(f"{shardwright.__name__}.")]
    return [kind for kind in ours if kind.__qualname__ not in FOLLOWED]


@pytest.mark.parametrize("kind", functions(), ids=lambda kind: kind.__qualname__)
def test_every_backward_of_the_package_refuses_to_be_differentiated(kind):
    with torch.enable_grad(), pytest.raises(PlanError, match="create_graph=True"):
        kind.backward(None, torch.ones(1))


def test_there_are_functions_to_ask():
    assert len(functions()) > 12


@pytest.mark.parametrize("line", ["tp2", "tp2/sp", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d"])
def test_a_gradient_inside_a_model_is_refused_where_its_layers_are_cut(line):
    with pytest.raises((PlanError, RankFailedError), match="does not go through layers that ranks share"):
        verify(Energy(), line, [PENALISED], loss=MeanSquaredError())


@pytest.mark.parametrize("line", ["single", "dp2", "dp3"])
def test_a_gradient_inside_a_model_equals_one_device_where_layers_are_whole(line):
    verdict = verify(Energy(), line, [PENALISED], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
