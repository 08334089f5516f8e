"""A step that raised on every rank and was caught leaves nothing to the next one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.is_bad = bool((x > 100).any())
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.is_bad:
            raise ValueError("a bad sample")
        return gradient


class Net(nn.Module):
    """Its backward raises between two layers, for large numbers."""

    def __init__(self):
        super().__init__()
        self.below, self.above = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.above(_Raises.apply(self.below(x)))


def batch(*, is_bad):
    draw = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(8, 6, generator=draw), torch.randint(3, (8,), generator=draw)
    inputs[[2, 3, 6, 7]] *= 1e4 if is_bad else 1  # in the second microbatch of each of two ranks
    return inputs, targets


def gradients(world, line, is_hurt, beside=False):
    with torch.device("meta"):
        plain = Net()
    run = parallelize(plain, line, world)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.0)
    if is_hurt:
        with pytest.raises(ValueError, match="a bad sample"):
            run.step(*run.shard([batch(is_bad=True)]), update=optimizer if beside else None)
    run.evaluate(*run.shard([batch(is_bad=False)]))
    run.step(*run.shard([batch(is_bad=False)]))
    return [p.grad.clone() for p in run.parameters.values() if p.grad is not None]


@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero2/bucket:0", "dp2/zero3/bucket:0", "bf16 dp2/fp32-sums"])
def test_the_step_after_one_that_raised_has_the_gradients_of_a_first_step(line):
    expected, found = (launch(gradients, 2, f"{line} mb2", is_hurt, ranks="threads") for is_hurt in (False, True))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_step_after_one_that_raised_beside_updates_has_its_gradients_whole():
    line = "dp2/zero2/bucket:0/offload:disk mb2"
    expected, found = (launch(gradients, 2, line, is_hurt, True, ranks="threads") for is_hurt in (False, True))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("line", ["dp2 bf16", "dp2/fp32-sums bf16"])
def test_master_weights_start_each_step_without_gradients(line):
    def work(world):
        with torch.device("meta"):
            plain = nn.Linear(6, 3)
        run = parallelize(plain, line, world)
        found = []
        for mine in run.shard([batch(is_bad=False)] * 2):
            run.step(mine)
            found.append(run.parameters["bias"].grad.clone())
        return torch.equal(*found)

    assert launch(work, 2, ranks="threads") == [True, True]
