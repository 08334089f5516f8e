"""Published runs are predicted by what they are, and their order is compared as statistics has it."""

from __future__ import annotations

import random

import pytest
from benchmarks.planner import run as replays


def test_ids_of_runs_change_no_prediction():
    runs = replays.synthetic()
    numbers = [*range(len(runs))]
    random.Random(1).shuffle(numbers)
    found = []
    for ids in (range(len(runs)), numbers):
        named = [replays.Run({**run.row, "id": f"made/{number}"}) for run, number in zip(runs, ids, strict=True)]
        predicted, constants = replays.both(replays.MULTI, named[:6], named[6:])
        found.append(([each[1:] for each in predicted], constants))
    assert found[0] == found[1]


def test_places_of_equal_runs_are_shared_in_a_rank_correlation():
    assert replays.rank_correlation([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]) == pytest.approx(1.0)
    assert replays.rank_correlation([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert replays.rank_correlation([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(3**0.5 / 2)
    assert replays.rank_correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) == 0.0
