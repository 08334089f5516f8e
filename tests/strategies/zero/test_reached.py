"""A parameter that some ranks' samples reach has a gradient on every rank; one that none reach has none on any."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import Layout, launch, parallelize


class Net(nn.Module):
    """Tables that only samples of the first rank look at: one with gradients in some rows, one with none but zeros."""

    def __init__(self):
        super().__init__()
        self.every, self.rows, self.zeros = nn.Linear(4, 3), nn.Embedding(8, 3), nn.Embedding(5, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        h, special = self.every(x[:, :4]), x[:, 4].long()
        if bool((special >= 0).any()):
            looked_up = self.rows(special.clamp(min=0)) - 0.0 * self.zeros(special.clamp(min=0))
            h = h + looked_up * (special >= 0)[:, None]
        return h


def stepped(world, line):
    draw = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(8, 5, generator=draw), torch.randint(3, (8,), generator=draw)
    inputs[:, 4] = -1
    inputs[0, 4] = 1
    with torch.device("meta"):
        plain = Net()
    run = parallelize(plain, line, world)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    for batch in run.shard([(inputs, targets)] * 2):
        run.step(batch)
        optimizer.step()
    return {name: p.detach().flatten().clone() for name, p in run.parameters.items()}


LINES = ["dp3", "dp3/zero1 mb2", "dp3/zero2 mb2", "dp2x2/zero1"]


@pytest.mark.parametrize("line", LINES)
def test_what_some_ranks_reach_decays_on_every_rank_as_on_one_device(line):
    (expected,) = launch(stepped, 1, "single", ranks="threads")
    parts = launch(stepped, Layout.parse(line).num_ranks, line, ranks="threads")
    num_slices = 1 if line == "dp3" else 3 if line.startswith("dp3") else 2
    for start in range(0, len(parts), num_slices):
        for name, whole in expected.items():
            found = torch.cat([part[name] for part in parts[start : start + num_slices]])
            torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


class Waves(nn.Module):
    """Complex parameters, one of which no forward reaches."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = (nn.Parameter(torch.randn(4, dtype=torch.complex64)) for _ in range(2))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.used, n=6))


@pytest.mark.parametrize("line", ["single", "dp2", "dp2/zero1", "dp2/zero3"])
def test_complex_gradients_are_clipped_by_all_of_their_norm_and_one_that_no_forward_reaches_is_none(line):
    torch.manual_seed(0)
    model, inputs, targets = Waves(), torch.randn(8, 6), torch.arange(8) % 3
    nn.functional.cross_entropy(model(inputs), targets).backward()
    expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    model.zero_grad()

    def work(world):
        run = parallelize(model, line, world)
        run.step(next(run.shard([(inputs, targets)])))
        assert run.parameters["unused"].grad is None or not run.parameters["unused"].numel()
        torch.testing.assert_close(run.clip_grad_norm_(0.1).float(), expected)

    launch(work, Layout.parse(line), ranks="threads")
