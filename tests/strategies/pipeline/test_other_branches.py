"""Batches that take a branch of the code which the example did not take: another head, another tower."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.comm.launch import launch
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.parallelize import parallelize
from shardwright.verify import verify


class Tasks(nn.Module):
    """A model of several heads, of which a keyword of the batch chooses one."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))
        heads = (nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)) for _ in range(3))
        self.heads = nn.ModuleDict(zip(("first", "second", "third"), heads, strict=True))

    def forward(self, x, task="first"):
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        return self.heads[task](h)


class Towers(nn.Module):
    """A model of text that may be given pictures too, as one of both kinds is fed."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 16))
        self.table = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, tokens, pictures=None):
        h = self.table(tokens)
        if pictures is not None:
            h = h + self.tower(pictures)[:, None]
        for block in self.blocks:
            h = h + block(h)
        return self.head(h.mean(1))


def numbers(*shape):
    return torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * 1.7).view(shape)


TARGETS = torch.arange(8) % 3
TASKS = [({"x": numbers(8, 6), "task": task}, TARGETS) for task in ("first", "third", "second", "first")]
TOKENS = torch.arange(8 * 7).view(8, 7) % 11
FED = [
    ({"tokens": TOKENS}, TARGETS),
    ({"tokens": TOKENS, "pictures": numbers(8, 5)}, TARGETS),
    ({"tokens": TOKENS}, TARGETS),
]
LINES = [
    "pp2 mb2/own-statistics", "pp2/interleaved:v2 mb2/own-statistics", "pp4/zb-v mb4/own-statistics",
    "pp2 mb2/own-statistics dp2/zero3", "pp2 mb2/own-statistics dp2/zero1 tp2",
    "pp2/cut:stem,heads.first mb2/own-statistics",
]  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(("kind", "batches"), [(Tasks, TASKS), (Towers, FED)], ids=["tasks", "towers"])
def test_batches_that_take_another_branch_than_the_example(kind, batches, line):
    if kind is Towers:
        line = line.replace("/own-statistics", "").replace("cut:stem,heads.first", "cut:table,head")
    found = verify(kind(), line, batches)
    assert found.equal, found


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x


class Front(Towers):
    """A tower at the front, with statistics and a count of its own, and a norm with statistics at the end.

    It returns a dict, for which stages are cut from a record and not from traced code.
    """

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), Counting())
        self.last = nn.BatchNorm1d(3)

    def forward(self, tokens, pictures=None):
        return {"scores": self.last(super().forward(tokens, pictures))}


def dict_loss(output, targets):
    return nn.functional.cross_entropy(output["scores"], targets, reduction="sum"), len(targets)


@pytest.mark.parametrize("line", ["pp2", "pp2 dp2/zero3", "pp3 dp2"])
def test_buffers_of_a_branch_lie_with_its_parameters(line):
    found = verify(Front(), line, FED, loss=dict_loss)
    assert found.equal, found


class Late(Towers):
    """The tower is registered behind the head, so that the last stage stores it, where the first one would call it."""

    def __init__(self):
        super().__init__()
        tower = self.tower
        del self.tower
        self.tower = tower


class Called(Late):
    """The same, of a kind that cannot be traced."""

    def forward(self, tokens, pictures=None):
        return super().forward(tokens, *(() if pictures is None else (pictures,)))


STORED = r"'tower.* is used on stage 0, and stored on stage 1"


@pytest.mark.parametrize("line", ["pp2 mb2", "pp2 mb2 tp2"])
@pytest.mark.parametrize("kind", [Late, Called])
def test_a_branch_whose_parameters_lie_on_another_stage_is_refused(kind, line):
    model = kind()

    def work(world):
        run = parallelize(model, line, world, example=FED[0][0])
        first, second = run.shard([FED[0], FED[1]])
        run.step(first)
        with pytest.raises(
            LayoutError, match=r"'tower.0'|'tower.*' is used on stage 0, and stored on stage 1"
        ) as found:
            run.step(second)
        assert "example=" in found.value.fix

    launch(work, Layout.parse(line), ranks="threads")
