"""``verify`` where an accelerator rounds other than the CPU, on which one device is trained."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.comm.launch import run_threads
from shardwright.verify import verify

ROUNDING = torch.finfo(torch.float32).eps


class Turned(nn.Module):
    """Two layers with a factor in float32 between them, which is another neighboring number on the device."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        factor = torch.full((8,), 0.75, device=x.device)
        if x.device.type != "cpu":
            factor = factor * (1 + ROUNDING)
        return self.last(self.first(x).tanh() * factor.to(x.dtype))


BATCHES = [(torch.randn(5, 6), torch.randint(3, (5,)))] * 2


def verdict_of(accelerator, line, alter=None):
    def on_the_device(work, *args):
        return run_threads(work, 2, *args, device=accelerator.device)

    return verify(Turned(), line, BATCHES, launcher=on_the_device, alter=alter)


@pytest.mark.pretended
@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2 bf16"])
def test_a_device_that_rounds_in_its_own_way_equals_the_cpu_within_what_one_such_device_differs(accelerator, line):
    verdict = verdict_of(accelerator, line)
    assert verdict.equal, str(verdict)
    if "bf16" not in line:
        assert ROUNDING / 100 < verdict.own_error < 2 * ROUNDING
        assert verdict.allowed < 10 * ROUNDING


@pytest.mark.pretended
def test_a_fault_on_such_a_device_is_still_found(accelerator):
    def alter(run):
        run.parameters["last.bias"].data.add_(1e-5)

    verdict = verdict_of(accelerator, "dp2", alter)
    assert not verdict.equal
    assert verdict.max_relative_error > 10 * verdict.own_error
