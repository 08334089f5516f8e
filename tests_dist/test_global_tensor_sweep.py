"""A share of the 20,000 drawn transfers of ``benchmarks/global_tensors``: none is wrong."""

from __future__ import annotations

import pytest
from cases.transfers import draw, pairs, placements, sweep

SHARE = 150
STARTS = (0, 400, 900, 7_000)


@pytest.mark.parametrize("first", STARTS)
def test_drawn_transfers_arrive_whole_and_so_do_their_gradients(pools, first):
    for wrong in pools(4).run(sweep, first, first + SHARE, timeout_s=100.0):
        assert not wrong


def test_the_drawn_transfers_have_every_placement_and_every_pair_of_sbp():
    drawn = [draw(number) for number in range(20_000)]
    every = {*placements(1), *placements(2)}
    assert {each.source for each in drawn} == every
    assert {each.destination for each in drawn} == every
    assert {(each.before, each.after) for each in drawn} == set(pairs())
