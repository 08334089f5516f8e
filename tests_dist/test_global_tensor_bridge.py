"""A run's parameters as global tensors and back, over processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.global_tensor import ones, placement, sbp


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
    check_computes_with_what_was_loaded(world, layout, run, found)
    with pytest.raises(PlanError, match="is no parameter of the run"):
        run.load_global_parameters({"0.weights": found["0.weight"]})
    with pytest.raises(PlanError, match="is not given a global tensor"):
        run.load_global_parameters({"0.bias": torch.ones(9)})
    x = ones(9, placement=placement("cpu", ranks=range(4)), sbp=sbp.split(0))
    gathered = x[2:7]
    x.mul_(5)
    with pytest.raises(PlanError, match="before its base was written to"):
        run.load_global_parameters({"2.bias": gathered})


def check_computes_with_what_was_loaded(world, layout, run, found) -> None:
    """After a step too, when param groups may be unsharded or rounded."""
    inputs, targets = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6), torch.arange(4) % 5
    tripled = model()
    with torch.no_grad():
        for parameter in tripled.parameters():
            parameter.mul_(3)
    fresh = sw.parallelize(tripled, layout, world)
    optimizer = run.optimizer(torch.optim.SGD, lr=1.0)
    (batch,) = run.shard([(inputs, targets)])
    run.step(batch)
    optimizer.step()
    run.step(batch)
    run.load_global_parameters({name: 3 * tensor for name, tensor in found.items()})
    assert run.step(batch).item() == fresh.step(batch).item()


LAYOUTS = ["dp4", "tp4", "dp2 tp2", "tp2x2/2d", "pp2 dp2 mb2", "pp2 tp2 mb2"]
SLICED = ["dp4/zero1", "dp2/zero2 tp2", "dp4/zero3", "dp4 bf16", "dp4/zero1/offload:disk bf16"]


@pytest.mark.parametrize("layout", [*LAYOUTS, *SLICED])
def test_parameters_of_any_layout_are_global_tensors_and_come_back(pools, layout):
    pools(4).run(bridged, layout)
