"""A pipeline under every schedule that has a name: 1 to 8 stages, beside data and tensor parallelism."""

from __future__ import annotations

import pytest

from contract.cases import CHECKS, DEEP, GPT2, check_equal, line_of
from shardwright.strategies import STRATEGIES
from shardwright.strategies.pipeline.schedules import SCHEDULES

NAMES = (*SCHEDULES, "auto")
WRITTEN = {name: f"{name}:v2" if name == "interleaved" else name for name in NAMES}

EVERY = pytest.mark.parametrize("name", NAMES)


@pytest.mark.sampled(1)
def test_every_schedule_that_a_line_can_name_is_here():
    assert set(STRATEGIES["pipeline"].options) == {*NAMES, "cut", "file", "scatter"}  # no schedules


@EVERY
def test_a_schedule_keeps_the_promises_with_one_to_eight_stages(name):
    assert DEEP.num_microbatches == 3  # fewer than the stages, as many, and more
    for num_stages in range(1, 9):
        line = line_of(DEEP, f"pp{num_stages}/{WRITTEN[name]}")
        for check in CHECKS:  # dropout is on, nothing is refused
            check(line, DEEP)


@EVERY
@pytest.mark.parametrize("beside", ["dp2", "tp2", "tp2x2/2d"])
def test_a_schedule_computes_the_same_beside_data_and_tensor_parallelism(name, beside):
    check_equal(f"pp2/{WRITTEN[name]} {beside} mb3", GPT2)  # the other promises of each pair: test_pairs
