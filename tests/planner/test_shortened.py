"""A model with fewer of its alike blocks keeps all that stands before and behind them."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from shardwright.models.losses import CrossEntropy
from shardwright.planner.outline import ModelPlans
from shardwright.planner.plans import plan_layouts
from shardwright.planner.short import ShortModel


def test_a_model_that_is_shortened_twice_keeps_its_head():
    model = nn.Sequential(nn.Linear(2, 4), *[nn.Linear(4, 4) for _ in range(6)], nn.Linear(4, 1))
    plans = ModelPlans(model)
    assert [len(plans.shortened(number)) for number in (5, 3, 2)] == [7, 5, 4]
    assert plans.shortened(2)[-1].out_features == 1


@pytest.mark.sampled(0)
def test_blocks_of_a_named_sequential_are_known_by_their_names():
    children = {"first": nn.Linear(2, 4), **{f"block{i}": nn.Linear(4, 4) for i in range(6)}, "head": nn.Linear(4, 3)}
    model = nn.Sequential(OrderedDict(children))
    plans = ModelPlans(model)
    assert plans.blocks.names == tuple(f"block{i}" for i in range(6))
    assert [*dict(plans.shortened(2).named_children())] == ["first", "block0", "block1", "head"]
    batch = torch.ones(4, 2), torch.zeros(4, dtype=torch.long)
    for line in ("dp2", "pp2/1f1b mb2"):
        price, numbered = (
            plan_layouts(each, "a100-80gb:1x2", batch, layout=line).best
            for each in (model, nn.Sequential(*children.values()))
        )
        assert not price.records.note
        assert price.waterfall == numbered.waterfall


def test_what_a_stage_sends_is_counted_of_blocks_that_are_called_by_keyword():
    class Blocks(nn.Module):
        def __init__(self, by_keyword):
            super().__init__()
            self.blocks, self.by_keyword = nn.ModuleList(nn.Linear(4, 4) for _ in range(6)), by_keyword

        def forward(self, x):
            for block in self.blocks:
                x = block(input=x) if self.by_keyword else block(x)
            return x

    batch = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
    models = Blocks(False), Blocks(True)
    shorts = (ShortModel(model, CrossEntropy(), batch, "cuda", {}, ModelPlans(model)) for model in models)
    assert [short.sent_bytes for short in shorts] == [16, 16]
