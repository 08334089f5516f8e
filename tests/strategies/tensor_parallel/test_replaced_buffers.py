"""A buffer that a forward replaces by a value that tensor parallelism cuts is that of one device, and has its shape."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from shardwright import Layout, launch, parallelize, verify
from shardwright.models.losses import MeanSquaredError
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan

WIDTH, SAMPLES = 8, 4


class Memory(nn.Module):
    """A recurrent cell that keeps its two states in buffers, from one batch to the next."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        for name in ("h", "c"):
            self.register_buffer(name, torch.zeros(SAMPLES, WIDTH))

    def forward(self, x):
        h, c = self.cell(x, (self.h, self.c))
        self.h, self.c = h.detach(), c.detach()
        return h


class Slow(nn.Module):
    """Two layers and a slow average of what is between them, of which tensor parallelism cuts the features."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(4 * WIDTH))

    def forward(self, x):
        h = torch.relu(self.up(x) + self.average)
        self.average = 0.9 * self.average + 0.1 * h.detach()[0]
        return self.down(h)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.enter, self.block, self.leave = nn.Linear(6, WIDTH), block(), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.leave(torch.tanh(self.block(torch.tanh(self.enter(x)))))


def batches():
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(SAMPLES, 6, generator=generator), torch.randn(SAMPLES, 4, generator=generator)) for _ in range(3)
    ]


@pytest.mark.parametrize("block", [Memory, Slow])
@pytest.mark.parametrize("line", ["tp2", "pp2 tp2", "tp3"])
def test_the_buffer_is_whole_after_each_step_and_that_of_one_device(block, line):
    torch.manual_seed(0)
    model, given = Model(block), batches()
    shapes = {name: buffer.shape for name, buffer in model.named_buffers()}

    layout = Layout.parse(line)
    job = job_for(model, MeanSquaredError(), layout, given[0][0])
    traffic = StepTraffic(job, *make_plan(job, layout), given[0][0])

    def work(world):
        run = parallelize(model, line, world, loss=MeanSquaredError(), example=given[0][0])
        for batch in given:
            with world.recorder.recording() as records:
                run.step(next(run.shard([batch])))
        sent = Counter((each.kind, each.num_bytes) for each in records if each.source == "tensor_1d")
        said = traffic.at(run.coord)["tensor_1d"]
        assert sent == sum((Counter({(each.kind, each.num_bytes): each.times}) for each in said), Counter())
        buffers = {name: buffer.shape for name, buffer in run.model.named_buffers()}
        return {name: shape for name, shape in buffers.items() if shape.numel()}  # other stages have none

    found = launch(work, layout.num_ranks, ranks="threads")
    assert any(found)
    assert all(each in ({}, shapes) for each in found)
    verdict = verify(model, line, given, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
