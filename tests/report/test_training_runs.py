"""A run is put together from what its folder has, whatever is missing, repeated or out of order there."""

from __future__ import annotations

from report.runs import described, part, row, run, two_parts
from shardwright.report.training_runs import record_run


def test_each_step_belongs_to_the_part_that_took_it():
    found = two_parts()
    assert [(each.layout, each.steps, each.last_step) for each in found.parts] == [
        ("dp2 tp2", "steps 1 to 2", 2), ("pp2 mb2", "steps 3 to 4", 4)
    ]  # fmt: skip
    assert (found.layouts, found.resumes, found.seconds) == ("dp2 tp2, then pp2 mb2", [(2, "pp2 mb2")], 2.0)


def test_parts_that_took_no_step_are_not_shown_unless_none_did():
    parts = [part("dp2"), part("tp2", 2), part("single", 4)]
    found = run(parts, [row(1, 1.0), row(2, 1.0)])
    assert [each.layout for each in found.shown] == ["dp2"]
    assert found.resumes == []
    assert [each.layout for each in run(parts).shown] == ["single"]
    assert run(parts).shown[0].description is described("single")


def test_of_rows_of_one_step_the_last_counts_and_the_order_of_lines_does_not():
    found = run([part("dp2")], [row(2, 9.0), row(1, 4.0), row(2, 3.0)])
    assert [each["loss"] for each in found.rows] == [4.0, 3.0]


def test_a_layout_that_cannot_be_described_is_a_problem_of_its_part_alone():
    def describe(facts):
        if facts["options"]["layout"] == "tp2":
            raise ValueError("no such model\nhere")
        return described("dp2")

    found = record_run("a run", [part("tp2"), part("dp2", 1)], [row(1, 1.0), row(2, 1.0)], describe)
    assert [each.problem for each in found.parts] == ["no such model", ""]


def test_parts_of_one_layout_are_described_once():
    calls = []
    parts = [part("dp2"), part("dp2", 1), part("tp2", 2), part("dp2", 3, seconds={"0": 1.0})]
    record_run(
        "a run", parts, [row(n, 1.0) for n in range(1, 5)], lambda facts: calls.append(facts) or described("dp2")
    )
    assert [each["options"]["layout"] for each in calls] == ["dp2", "tp2", "dp2"]
