"""A comparison has the curves of all runs, what differs between them, and says what keeps them from being compared."""

from __future__ import annotations

import json

from report.runs import OPTIONS, part, row, run, two_parts
from report.test_page import NASTY, checked, read
from shardwright.report.compare_page import compare_runs, write_comparison_page


def other(name="other", losses=(4.0, 3.0, 2.0, 2.0), **changed):
    facts = part("tp2")
    facts["options"] = {**facts["options"], **changed}
    return run([facts], [row(n, loss, 2, eval_loss=loss) for n, loss in enumerate(losses, 1)], name)


def test_the_figures_and_differences_are_those_of_the_runs():
    found = compare_runs([two_parts(), other(seed=1)])
    assert [each["layouts"] for each in found["runs"]] == ["dp2 tp2, then pp2 mb2", "tp2"]
    assert [each["last_loss"] for each in found["runs"]] == [2.5, 2.0]
    assert [each["peak_memory_bytes"] for each in found["runs"]] == [12 * 2**20, 12 * 2**20]
    assert found["losses"] == {"steps": 4, "most_apart": 0.5, "at_step": 4, "last_apart": 0.5}
    assert found["differences"] == [
        {"option": "layout", "values": ["pp2 mb2", "tp2"]}, {"option": "seed", "values": [None, "1"]}
    ]  # fmt: skip
    assert found["remarks"] == []


def test_all_curves_of_a_chart_have_their_run_s_colour(tmp_path):
    first = run([part("dp2")], [row(1, 2.0, 2), row(2, 1.5, 2)], "first")  # without an evaluation
    path = write_comparison_page(tmp_path / "made" / "c.html", [first, other(), other("third")])
    charts = [json.loads(script) for script in read(path).scripts[:-1]]
    assert [[curve["colour"] for curve in chart["curves"]] for chart in charts[:2]] == [[0, 1, 2], [1, 2]]
    assert [curve["name"] for curve in charts[0]["curves"]] == ["first", "other", "third"]
    text = checked(path)
    assert "first goes from 2 to 1.5 at step 2" in text
    assert "At the 2 steps that all have, they differ by 2 at most, at step 1" in text


def test_equal_runs_are_said_to_be_equal(tmp_path):
    text = checked(write_comparison_page(tmp_path / "c.html", [other("one"), other("two")]))
    assert "the losses are equal" in text
    assert "All options, versions and machines are equal." in text


def test_runs_of_different_models_are_compared_as_far_as_they_can_be(tmp_path):
    runs = [two_parts(), other(model="gpt", batch=16), run([part("dp2")], [], "empty", num_damaged=1)]
    found = compare_runs(runs)
    assert found["remarks"] == [
        "These are runs of different models (model: mlp, gpt): their losses do not say which is better trained.",
        "A step is not the same work in each (batch: 8, 16): compare throughput, not step time.",
        "empty has taken no step, so it has no curve.",
        "1 line of the metrics of empty could not be read and were left out.",
    ]
    text = checked(write_comparison_page(tmp_path / "c.html", runs))
    assert all(remark in text for remark in found["remarks"])
    assert "Training loss" in text


def test_runs_without_any_step_have_a_page(tmp_path):
    runs = [run([part("dp2")], [], "one"), run([part("tp2")], [], NASTY)]
    assert compare_runs(runs)["losses"]["steps"] == 0
    assert NASTY in checked(write_comparison_page(tmp_path / "c.html", runs))


def test_settings_are_compared_one_by_one():
    found = compare_runs([other(), other(settings={**OPTIONS["settings"], "bias": "no"})])
    assert found["differences"] == [{"option": "settings.bias", "values": [None, "no"]}]
