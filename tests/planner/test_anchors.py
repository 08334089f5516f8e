"""Runs that a user has correct the prices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.errors import LayoutError, PlanError
from shardwright.planner.anchors import TimeScale, parse_anchor, scale_of
from shardwright.planner.plans import plan_layouts

BATCH = torch.ones(8, 16), torch.zeros(8, dtype=torch.long)


def model():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def plans(**given):
    return plan_layouts(model(), "a100-80gb:1x2", BATCH, layout="dp2", **given)


def test_one_run_scales_all_and_the_layout_that_ran_takes_its_seconds():
    found = plans(anchors={"dp2": 1.5})
    assert found.best.step_s == pytest.approx(1.5)
    assert sum(found.best.waterfall.values()) == found.best.step_s
    assert {row["source"] for row in found.constants() if row["name"].startswith("anchored")} == {"fitted"}


def test_two_runs_tell_operators_from_messages():
    price = plans().best
    known = [price._replace(waterfall={"matmul": a, "dp": b, "bubble": 0.0}, step_s=a + b) for a, b in ((4, 1), (3, 3))]
    true = TimeScale(1.2, 2.0)
    found = scale_of([(each, true.of(each).step_s) for each in known])
    assert 1.1 < found.operators < 1.4 < found.messages  # between the true factors and one common to both
    common = scale_of([(known[0], true.of(known[0]).step_s)])
    off = [abs(each.of(known[1]).step_s / true.of(known[1]).step_s - 1) for each in (found, common)]
    assert off[0] < off[1] / 2


@pytest.mark.parametrize("text", ["dp2", "=3", "dp2=fast", "dp2=-1"])
def test_an_anchor_without_seconds_is_refused(text):
    with pytest.raises(PlanError, match="LINE=SECONDS"):
        parse_anchor(text)


def test_an_anchor_that_cannot_be_on_the_cluster_is_refused():
    with pytest.raises(LayoutError, match="another number of ranks"):
        plans(anchors={"dp4": 1.0})
