"""Curves keep what they are thinned from, and sentences say what is seen in them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report.runs import part, row, run, two_parts
from shardwright.report.curves import (
    LEVELS,
    MOST_COLUMNS,
    MOST_LINES,
    curve_of,
    loss_seen,
    memory_curves,
    memory_map,
    memory_seen,
    norm_seen,
    points_of,
    rate_seen,
    throughput_seen,
)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=80), st.integers(1, 30))
def test_a_thinned_curve_keeps_the_lowest_the_highest_and_the_last_step(values, most):
    points = list(enumerate(values, 1))
    curve = curve_of("loss", points, most=most)
    assert len(curve.steps) == min(most, len(points))
    assert curve.steps == sorted(set(curve.steps))
    assert curve.steps[-1] == len(values)
    low, high = curve.low or curve.values, curve.high or curve.values
    assert min(low) == pytest.approx(min(values), rel=1e-5)
    assert max(high) == pytest.approx(max(values), rel=1e-5)
    assert all(a <= b for a, b in zip(low, high, strict=True))


def test_values_that_were_not_measured_or_are_not_finite_are_no_points():
    rows = [{"step": 1, "loss": None}, {"step": 2, "loss": math.nan}, {"step": 3}, {"step": 4, "loss": 2}]
    assert points_of(rows, "loss") == [(4, 2.0)]


def test_a_rank_that_is_not_in_a_part_has_a_gap_in_its_curve():
    curves = {curve.name: curve for curve in memory_curves(two_parts().rows)}
    assert curves["rank 3"].values == [pytest.approx(13 * 2**20, rel=1e-5)] * 2 + [None] * 2
    assert curves["rank 1"].values == pytest.approx([11 * 2**20] * 4, rel=1e-5)
    assert curves["highest peak so far"].values == pytest.approx([14 * 2**20] * 2 + [12 * 2**20] * 2, rel=1e-5)


def test_of_many_ranks_the_curves_are_of_the_most_the_median_and_the_least_and_a_map_has_each():
    rows = [row(step, 1.0, 9) for step in range(1, 4)]
    rows[1]["held_bytes"][4] = 63 * 2**20 + 10 * 2**20
    curves = {curve.name: curve.values for curve in memory_curves(rows)}
    assert [value / 2**20 for value in curves["the rank with most"]] == pytest.approx([18, 73, 18], rel=1e-5)
    assert [value / 2**20 for value in curves["the rank with least"]] == pytest.approx([10] * 3, rel=1e-5)
    found = memory_map(rows)
    assert (found.least_bytes, found.most_bytes, found.steps) == (10 * 2**20, 73 * 2**20, [1, 2, 3])
    shades = [[ord(letter) - 48 for letter in line] for line in found.cells]
    assert shades[4] == [4, LEVELS - 1, 4]
    assert [line[0] for line in shades] == list(range(9))
    assert memory_map([row(1, 1.0, 8)]) is None


def test_a_map_of_ten_thousand_steps_and_a_thousand_ranks_is_small():
    rows = [{"step": step, "held_bytes": [2**30 + rank for rank in range(1000)]} for step in range(1, 401)]
    found = memory_map(rows)
    assert len(found.cells) == 250 <= MOST_LINES
    assert {len(line) for line in found.cells} == {MOST_COLUMNS}
    assert (found.ranks_in_line, found.num_ranks) == (4, 1000)


def test_the_sentences_say_where_a_curve_goes():
    found = two_parts()
    assert loss_seen(found) == (
        "Training loss falls from 4 at step 1 to 2.5 at step 4; the lowest is 2 at step 3. Evaluation loss falls from "
        "3.5 at step 2 to 3 at step 4. Resumed after step 2 under pp2 mb2."
    )
    assert throughput_seen(found) == (
        "Median: 1.0 k tokens/s, 10 ms a step under dp2 tp2 (steps 1 to 2); 1.0 k tokens/s, 10 ms a step under pp2 mb2 "
        "(steps 3 to 4)."
    )
    assert rate_seen(found.rows) == "The learning rate rises to 0.004 at step 4, and is 0.004 at step 4."
    assert norm_seen(found.rows, 1.0) == (
        "The gradient norm is 1.25 in the median, and 2 at most, at step 4. 2 of 4 steps were clipped to 1."
    )
    assert memory_seen(found) == (
        "After step 4, 2 ranks hold 10.0 MiB (rank 0) to 11.0 MiB (rank 1). The highest peak is 14.0 MiB, on rank 3 "
        "under dp2 tp2."
    )


def test_an_evaluation_of_averages_is_said_to_be_one():
    for ema, text in ((0.99, "Evaluation loss of averages is 3.5"), (0.0, "Evaluation loss is 3.5")):
        start = part("dp2")
        found = run([{**start, "options": {**start["options"], "ema": ema}}], [{**row(1, 4.0), "eval_loss": 3.5}])
        assert text in loss_seen(found)


def test_the_sentences_say_what_is_missing():
    bare = run([part("dp2")], [{"step": 1, "loss": None}, {"step": 2, "loss": math.inf}])
    assert loss_seen(bare) == "No step has a loss that is finite."
    diverged = run([part("dp2")], [row(1, 2.0), row(2, 3.0), row(3, None)])
    assert (
        loss_seen(diverged) == "Training loss rises from 2 at step 1 to 3 at step 2. The loss of step 3 is not finite."
    )
    assert throughput_seen(bare) == "Throughput was not measured."
    assert memory_seen(bare) == "Memory was not measured."
    assert "not recorded" in rate_seen(bare.rows)
    assert "not measured" in norm_seen(bare.rows, 0.0)
