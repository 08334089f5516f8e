"""A model with fewer of its alike blocks keeps all that stands before and behind them."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from shardwright.planner.outline import ModelPlans
from shardwright.planner.plans import plan_layouts


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
