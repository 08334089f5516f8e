"""Reductions of a tensor of which each rank holds a part have the values and gradients of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.comm.launch import run_on_threads
from shardwright.mesh import Mesh
from shardwright.models.model_loss import MeanLoss
from shardwright.sharding.tensor_shard import shard_of, tag
from shardwright.strategies.tensor_parallel.shards_mode import ShardsMode

SHAPE = 4, 6

REDUCTIONS = {
    "sum": lambda x: x.square().sum(),
    "sum of dims": lambda x: x.square().sum((0, 1)),
    "mean": lambda x: x.square().mean(),
    "mean of one dim": lambda x: x.square().mean(1).sum() + x.mean(0).square().sum(),
    "mean of dims": lambda x: x.square().mean(dim=(0, 1), keepdim=True).sum(),
    "mean in another dtype": lambda x: x.mean(dtype=torch.float64),
    "norm": lambda x: x.norm() + torch.linalg.vector_norm(x, 1),
    "variance": lambda x: x.var() + x.std(unbiased=False),
    "largest": lambda x: x.max() + x.amin(),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "mean square": lambda x: functional.mse_loss(x, torch.zeros_like(x)),
    "sum of squares": lambda x: functional.mse_loss(x, torch.zeros_like(x), reduction="sum"),
    "binary cross entropy": lambda x: functional.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
    "dot": lambda x: x.flatten() @ x.flatten(),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_of_parts_is_that_of_the_whole(name, dim):
    whole = torch.arange(1.0, 25.0, dtype=torch.float64).view(SHAPE).requires_grad_()
    value = REDUCTIONS[name](whole)
    value.backward()
    half = SHAPE[dim] // 2
    cut = bytes([0] * half + [1] * half)

    def work(axes):
        rank = axes["tp"].index
        x = whole.detach().narrow(dim, rank * half, half).clone().requires_grad_()
        tag(x, shard_of(SHAPE, (cut, None) if dim == 0 else (None, cut)))
        with ShardsMode(axes["tp"]):
            found = REDUCTIONS[name](x)
        found.backward()
        return found, x.grad

    ranks = run_on_threads(Mesh(tp=2), work)
    for found, _ in ranks:
        torch.testing.assert_close(found, value.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient in ranks], dim), whole.grad)


class WithPenalty(nn.Module):
    """Returns one of its weights, for a penalty in the loss."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 4)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x):
        return self.leave(self.inner(torch.tanh(self.enter(x)))), self.enter.weight


def penalized(output, targets):
    return functional.mse_loss(output[0], targets) + 0.1 * output[1].square().mean()


@pytest.mark.parametrize(
    "line", ["tp2", "tp2/sp", "tp2x2/2d", "tp2x2/2d mb2", "tp2x2x2/2.5d", "tp2x2x2/3d", "dp2/zero3"]
)
def test_a_weight_that_the_model_returns_has_the_gradient_of_the_loss(line):
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randn(8, 4)
    verdict = verify(WithPenalty(), line, [batch], loss=MeanLoss(penalized))
    assert verdict.equal, str(verdict)
