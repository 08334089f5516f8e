"""Layers smaller than the grid stay whole, with a reason; where nothing else is left the error names grids that fit."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from shardwright import verify, without_values
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig, MeanSquaredError
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job

X = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(0))
GRIDS = ["tp2x2/2d", "tp4x2/2d", "tp2x4/2d", "tp2x2x2/2.5d", "tp2x2x2/3d"]


def pair(hidden):
    return nn.Sequential(nn.Linear(12, hidden), nn.GELU(), nn.Linear(hidden, 12))


class Narrow(nn.Module):
    """Two single layers of ``width`` and a pair of ``hidden`` between layers that every grid here can cut."""

    def __init__(self, width, hidden):
        super().__init__()
        self.first, self.into, self.out = nn.Linear(12, 12), nn.Linear(12, width), nn.Linear(width, 12)
        self.narrow, self.wide, self.last = pair(hidden), pair(24), nn.Linear(12, 12)

    def forward(self, x):
        x = self.out(self.into(self.first(x)).flip(-1))
        return self.last(self.wide(self.narrow(x)))


def plan_of(model, line):
    return make_plan(Job(model, MeanSquaredError()), Layout.parse(line))[0]


@pytest.mark.parametrize("line", [*GRIDS, "tp5"])
@pytest.mark.parametrize(("width", "hidden"), [(1, 12), (12, 1), (3, 2), (2, 3)])
@pytest.mark.sampled(100)
def test_a_model_with_a_layer_that_is_too_narrow_is_cut_elsewhere_and_right(width, hidden, line):
    with without_values():
        model = Narrow(width, hidden)
    plan = plan_of(model, line)
    assert plan.compute["wide.0.weight"].axes
    assert plan.compute["wide.2.weight"].axes
    verdict = verify(model, line, [(X, X.roll(1))], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


NARROW = {
    "a head of five classes": ("gpt2", 24, 5, "tp2x4x2/3d", "head", "24 features to 5, over depth=2 row=4 col=2"),
    "one head on a cube": ("gpt2", 8, 7, "tp3x3x3/3d", "blocks.0.attention.o", "1 heads, over depth=3 row=3 col=3"),
    "one head in parts": (
        "llama", 4, 19, "tp2x2x2/3d", "blocks.0.attention.o", "1 heads of 4 elements, over depth=2 row=2 col=2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NARROW)
@pytest.mark.sampled(0)
def test_what_is_too_small_for_the_grid_stays_whole_and_show_says_why(what):
    style, width, vocabulary, line, layer, size = NARROW[what]
    with without_values():
        config = GPTConfig(style=style, num_layers=1, width=width, num_heads=1, vocabulary=vocabulary, tied=False)
        model = GPT(config)
    plan, _ = make_plan(Job(model, CrossEntropy()), Layout.parse(line))
    assert plan.compute["blocks.0.mlp.down.weight"].axes
    assert not plan.compute[f"{layer}.weight"].axes
    assert f"too small: {size}; every rank computes it whole" in plan.roles[layer].why
    tokens = torch.randint(vocabulary, (5, 7), generator=torch.Generator().manual_seed(1))
    verdict = verify(model, line, [(tokens[:, :-1], tokens[:, 1:])])
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize(
    ("model", "line"),
    [(pair(3), "tp1x4/2d"), (pair(3), "tp4x1/2d"), (pair(2), "tp8"), (pair(5), "tp8"), (pair(2), "tp2x2x2/3d")],
)
def test_a_refusal_names_the_layers_their_sizes_and_grids_that_fit(model, line):
    with pytest.raises(LayoutError) as caught:
        plan_of(model, line)
    text = str(caught.value)
    hidden = model[0].out_features
    assert f"Linear '0' ({hidden}, 12), Linear '2' (12, {hidden})" in text
    suggested = re.search(r"fix: +write (.*)", text)[1].split(", or ")[0].split(", ")
    for each in suggested:
        if each.startswith("tp"):
            plan_of(model, each)


def test_pairs_that_are_turned_are_not_cut_apart_where_another_axis_can_be_used():
    with without_values():
        model = GPT(GPTConfig(style="llama", num_layers=1, width=8, num_heads=1, vocabulary=19))
    plan, _ = make_plan(Job(model, CrossEntropy()), Layout.parse("tp2x8/2d"))
    assert plan.compute["blocks.0.mlp.down.weight"].axes
