"""The price of one more layout, from rehearsals that are at hand: few actions, whatever the stages, and little time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.test_plan import recorded
from processor_time import takes_less
from shardwright.cost.cluster import Cluster
from shardwright.planner.memory import memory_by_stage
from shardwright.planner.price import Pricing, traffic_by_stage

LAYOUTS = {"pp8/1f1b mb96 bf16": 26, "pp4/zb-v mb24 bf16": 26, "pp32/1f1b mb96 bf16": 98}
"""Layouts, and how many repeated blocks a model has of which their stages have one more or one less."""


@pytest.mark.parametrize(("line", "blocks"), LAYOUTS.items())
def test_one_more_layout_takes_five_milliseconds_of_the_processor(line, blocks):
    layout, _, _, records = recorded(line, blocks)
    assert not records.note, "from few blocks"
    pricing = Pricing(Cluster.parse(f"a100-80gb:{layout.num_ranks}x1"))
    wanted = pricing.price(layout, records)

    def price():
        found = pricing.price(layout, replace(records))  # of which nothing is kept from an earlier price
        assert found.step_s == wanted.step_s

    assert takes_less(0.005, price, tries=9)


def test_actions_that_differ_are_priced_once_however_many_stages_there_are():
    several, many = (recorded(line, LAYOUTS[line])[-1].step for line in LAYOUTS if "1f1b" in line)
    assert len(several.actions) == len(many.actions)
    assert many.times.shape == (32, len(many.actions))
    # forwards and backwards of all microbatches on every stage, and the optimizer's step
    assert many.times.sum(axis=1).tolist() == [2 * 96 + 1] * 32


def test_numbers_at_other_blocks_are_extended_from_both_rehearsals_and_not_from_one_of_all():
    layout, _, _, whole = recorded("pp2/1f1b mb5 bf16", 6, whole=True)
    step = whole.step
    rows = [[float(n), 7.0] for n in range(len(step.actions))]
    assert np.array_equal(step.at_blocks(rows, rows), np.array(rows))
    few = recorded(str(layout), 6)[-1]
    number = len(few.step.actions)
    for action, (at,) in zip(few.step.actions, few.step.at_blocks([[2.0]] * number, [[5.0]] * number), strict=True):
        low, high, own = action.span
        assert at == 2 + 3 * (own - low) / (high - low)
    assert [each.num_bytes for each in memory_by_stage(few)] == [each.num_bytes for each in memory_by_stage(whole)]
    assert traffic_by_stage(few) == traffic_by_stage(whole)
