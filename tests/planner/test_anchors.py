"""Runs that a user has correct the prices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.cost.cluster import Cluster
from shardwright.cost.device import profiles
from shardwright.errors import LayoutError, PlanError
from shardwright.planner.anchors import INTERVAL, UNKNOWN, UNMEASURED, TimeScale, parse_anchor, scale_of
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


def priced(**waterfall):
    """A price whose step takes these seconds."""
    return plans().best._replace(waterfall=waterfall, step_s=sum(waterfall.values()))


MUCH_TP = {"matmul": 6, "tp": 4}
TRUE = {
    "messages": (TimeScale(1.0, 1.0, 2.0), {"matmul": 4, "dp": 1}, {"matmul": 3, "dp": 3}, {"matmul": 2, "dp": 4}),
    "fused": (
        TimeScale(1.0, 0.4, 1.0), {"matmul": 9, "memory": 1}, {"matmul": 6, "memory": 4}, {"attention": 5, "memory": 5}
    ),
    "all": (TimeScale(3.0, 3.0, 3.0), {"matmul": 9, "memory": 1, "bubble": 2}, MUCH_TP, {"matmul": 1, "tp": 1}),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", TRUE)
def test_two_runs_tell_what_takes_longer_or_less_long_than_predicted(what):
    true, *known, other = (priced(**each) if isinstance(each, dict) else each for each in TRUE[what])
    runs = [(each, true.of(each).step_s) for each in known]
    both, one = scale_of(runs), scale_of(runs[:1])
    off = [abs(each.of(other).step_s / true.of(other).step_s - 1) for each in (both, one)]
    assert off[0] < 0.2
    assert off[0] < 0.7 * off[1] or what == "all"


def test_a_bubble_takes_as_much_longer_as_the_operators_of_a_stage():
    found = TimeScale(2.0, 1.0, 5.0).of(priced(matmul=1.0, memory=3.0, bubble=4.0, tp=1.0))
    assert found.waterfall == {"matmul": 2.0, "memory": 3.0, "bubble": 5.0, "tp": 5.0}
    assert found.step_s == 15.0


@pytest.mark.parametrize("text", ["dp2", "=3", "dp2=fast", "dp2=-1"])
def test_an_anchor_without_seconds_is_refused(text):
    with pytest.raises(PlanError, match="LINE=SECONDS"):
        parse_anchor(text)


def test_an_anchor_faster_than_the_peak_of_the_device_is_refused():
    with pytest.raises(PlanError, match="no step can take as few seconds"):
        plans(anchors={"dp2": 1e-15})


def test_anchors_far_from_the_prediction_are_warned_of():
    assert any("give the seconds of one step" in each for each in plans(anchors={"dp2": 84_000.0}).warnings())
    assert not any("anchors" in each for each in plans(anchors={"dp2": 2 * plans().best.step_s}).warnings())


def test_where_nothing_was_measured_the_interval_is_that_of_published_runs_and_the_text_says_so():
    found, anchored = plans(), plans(anchors={"dp2": 0.01})
    low, median, high = UNMEASURED["a100-80gb"][:3]
    assert found.interval(1.0) == (min(low, median / (1 + INTERVAL)), max(high, median / (1 - INTERVAL)))
    assert "never measured on a100-80gb with this library" in found.why(found.best)
    assert "nine in ten took 0.92 to 1.20 times as long as predicted; 17% either way at least" in found.text()
    assert "fitted            matmul_efficiency 0.694, attention_efficiency 0.476" in found.text()
    elsewhere = plan_layouts(model(), "b200:1x2", BATCH, layout="dp2")
    assert elsewhere.interval(1.0) == (UNKNOWN.low, UNKNOWN.high)
    assert "guesses, which published runs on A100s and H100s exceeded" in elsewhere.why(elsewhere.best)
    assert "took longer than predicted: nine in ten 1.08 to 1.89 times as long" in elsewhere.text()
    assert "fitted" not in dict(elsewhere.notes())
    assert anchored.interval(1.0)[1] == pytest.approx(1 / (1 - anchored.scale.error))
    assert "never measured" not in anchored.text()


def test_the_step_to_reckon_with_lies_within_its_interval_in_text_and_data():
    alone, anchored = plans(), plans(anchors={"dp2": 0.01})
    for found, times in ((alone, UNMEASURED["a100-80gb"].median), (anchored, 1.0)):
        row = found.to_dict()["layouts"][0]
        assert row["step_s_expected"] == pytest.approx(times * row["step_s"])
        assert row["step_s_low"] < row["step_s_expected"] < row["step_s_high"]
        assert row["tokens_per_s"] * row["step_s_expected"] == pytest.approx(found.tokens)
        first = f"expect {row['step_s_expected']:.3g} s a step ({row['step_s_low']:.3g} to {row['step_s_high']:.3g})"
        assert first in row["why"]
        assert first in found.text()
    assert "its parts add up to" in alone.text()
    assert "its parts add up to" not in anchored.text()


def test_the_error_where_nothing_was_measured_is_that_of_the_newest_rows():
    found = newest_rows()
    by_default, fitted = (
        {row["gpu"]: [round(row[name], 2) for name in ("p5", "median", "p95")] for row in found["table"]
         if row["predicted_by"].startswith(said)}
        for said in ("default", "constants fitted")
    )  # fmt: skip
    fitted.pop("all")
    assert {name: [*each[:3]] for name, each in UNMEASURED.items()} == {**fitted, "h200-141gb": fitted["h100-80gb"]}
    _, median, _ = by_default.pop("all")
    lowest, highest = min(each[0] for each in by_default.values()), max(each[2] for each in by_default.values())
    assert UNKNOWN[:3] == (lowest, median, highest)


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ('profile = "h100-80gb"\n[constants]\nmatmul_efficiency = 0.559\n', UNMEASURED["h100-80gb"]),
        ('profile = "h100-80gb"\nbetween_nodes_GB_per_s = 50\n', UNMEASURED["h100-80gb"]),
        ('profile = "b200"\n', UNKNOWN),
        ('profile = "h100-80gb"\n[constants]\nmatmul_efficiency = 0.7\n', None),
        ('profile = "b200"\n[constants]\nsource = "published"\nmatmul_efficiency = 0.5\n', None),
    ],
)
def test_published_runs_stand_only_for_the_constants_that_they_were_priced_with(tmp_path, text, times):
    path = tmp_path / "here.toml"
    path.write_text(text)
    found = plan_layouts(model(), f"{path}:1x2", BATCH, layout="dp2")
    assert found.published == times
    if times is None:
        assert found.expected_s(1.0) == 1.0
        assert "by the datasheet and the constants of the cluster file" in found.text()
        assert {"interval", "fitted"}.isdisjoint(dict(found.notes()))


def test_profiles_have_the_constants_that_were_fitted_to_the_newest_rows():
    fitted = newest_rows()["constants"]
    with_constants = [name for name in profiles() if Cluster.parse(f"{name}:1x8").constants.sources]
    assert sorted(with_constants) == sorted(UNMEASURED)
    for name in with_constants:
        constants = Cluster.parse(f"{name}:1x8").constants
        kind = name.partition("-")[0].replace("h200", "h100")  # the same chip
        assert {each: getattr(constants, each) for each in constants.sources} == fitted[kind]


def newest_rows():
    folder = Path(__file__).resolve().parents[2] / "benchmarks" / "planner_unmeasured" / "results"
    return json.loads(max(folder.glob("*.json")).read_text())


def test_an_anchor_that_cannot_be_on_the_cluster_is_refused():
    with pytest.raises(LayoutError, match="another number of ranks"):
        plans(anchors={"dp4": 1.0})


@pytest.mark.parametrize(("value", "said"), [(1.0, True), (0.7, False)])
def test_a_fitted_constant_at_its_bound_is_warned_of(value, said):
    cluster = Cluster.parse("a100-80gb:1x2")
    cluster = replace(cluster, constants=cluster.constants.with_values("fitted", matmul_efficiency=value))
    found = plan_layouts(model(), cluster, BATCH, layout="dp2")
    assert said == any("matmul_efficiency is at its bound" in each for each in found.warnings())
    assert said == ("warning: the constant matmul_efficiency" in found.text())
