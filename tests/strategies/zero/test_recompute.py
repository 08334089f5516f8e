"""Recomputation beside ZeRO stage 3, which frees the weights of a block after each use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from contract import cases
from shardwright import launch, parallelize, verify
from shardwright.layout import Layout

NUM = 6


class Blocks(cases.Blocks):
    def __init__(self, make):
        super().__init__(make, NUM, num_in=6)


def plain():
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))


class Tries(nn.Module):
    """A block whose own code catches every exception, also that by which a recomputation is stopped."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x):
        try:
            h = self.up(x).relu()
        except Exception:
            h = x.repeat(1, 8)
        try:
            return self.down(h.sin())
        except Exception as failure:
            raise ArithmeticError("another one") from failure


def batch():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, generator=draw), torch.randint(5, (4,), generator=draw)


def most_unsharded(line):
    """The most bytes of unsharded weights during the backward of a second step, on any rank."""

    model = Blocks(plain)

    def work(world):
        run = parallelize(model, line, world)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        (kept,) = (each.kept for each in run._applied if each.kept is not None)
        found = [0]
        blocks = [module for name, module in run.model.named_modules() if name.endswith(".0")]
        for module in blocks:
            module.register_full_backward_hook(
                lambda *_: found.append(sum(each.untyped_storage().nbytes() for each in kept()))
            )
        for part in run.shard([batch()] * 2):
            found[:] = [0]
            run.step(part)
            optimizer.step()
        return max(found), len(found)

    return launch(work, Layout.parse(line), ranks="threads")


@pytest.mark.parametrize("word", ["full", "selective"])
def test_no_more_weights_are_unsharded_at_once_than_without_recomputation(word):
    plainly, again = (most_unsharded(f"dp2/zero3/bucket:0{more}") for more in ("", f" recompute:{word}"))
    for (most, num), (most_again, num_again) in zip(plainly, again, strict=True):
        assert num == num_again == NUM + 2
        assert 0 < most_again <= most


@pytest.mark.parametrize(
    "line", ["dp2/zero3/bucket:0 recompute:full", "dp2 recompute:full", "dp2/zero3 mb2 recompute:selective"]
)
def test_a_block_whose_code_catches_exceptions_is_computed_again_rightly(line):
    verdict = verify(Blocks(Tries), line, [batch(), batch()])
    assert verdict.equal, str(verdict)
