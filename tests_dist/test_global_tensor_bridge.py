"""A run's parameters as global tensors and back, over processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.global_tensor import placement, sbp


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5), nn.Linear(5, 5)).double()


def bridged(world, layout: str) -> None:
    run = sw.parallelize(model(), layout, world)
    plain = dict(model().named_parameters())
    found = run.global_parameters()
    assert set(found) == set(plain)
    for name, tensor in found.items():
        assert torch.equal(tensor.full_tensor(), plain[name].detach()), name
        assert tensor.sbp == (sbp.split(0),)
    two = placement("cpu", ranks=[2, 0])
    doubled = {name: (2 * tensor).to_global(two, sbp.broadcast) for name, tensor in found.items()}
    run.load_global_parameters(doubled)
    for name, tensor in run.global_parameters(two, sbp.partial_sum).items():
        assert torch.equal(tensor.full_tensor(), 2 * plain[name].detach()), name
    with pytest.raises(PlanError, match="is no parameter of the run"):
        run.load_global_parameters({"0.weights": found["0.weight"]})


@pytest.mark.parametrize("layout", ["dp4", "tp4", "dp2 tp2", "tp2x2/2d", "pp2 dp2 mb2", "pp2 tp2 mb2"])
def test_parameters_of_any_layout_are_global_tensors_and_come_back(pools, layout):
    pools(4).run(bridged, layout)
