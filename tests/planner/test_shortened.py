"""A model with fewer of its alike blocks keeps all that stands before and behind them."""

from __future__ import annotations

from torch import nn

from shardwright.planner.outline import ModelPlans


def test_a_model_that_is_shortened_twice_keeps_its_head():
    model = nn.Sequential(nn.Linear(2, 4), *[nn.Linear(4, 4) for _ in range(6)], nn.Linear(4, 1))
    plans = ModelPlans(model)
    assert [len(plans.shortened(number)) for number in (5, 3, 2)] == [7, 5, 4]
    assert plans.shortened(2)[-1].out_features == 1
