"""The example of the GPT-3 layout: planned and drawn, and run scaled down, each at its smallest."""

from __future__ import annotations

import json

import pytest
import torch
from examples.gpt3_layout import run as example

from shardwright.layout import Layout
from shardwright.models import CrossEntropy
from shardwright.parallelize import planning
from shardwright.parallelize.planning import job_for
from shardwright.report.description import describe

TINY = {**example.TINY, "num_layers": 6}


@pytest.mark.sampled(0)
@pytest.mark.timeout(600)
def test_the_layout_is_planned_and_drawn_without_its_ranks(tmp_path, capsys):
    lines = ("pp4/1f1b mb8 dp2/zero1 tp2 bf16", "pp4/1f1b/scatter mb8 dp2/zero1 tp2 bf16")
    example.whole(tmp_path, TINY, 32, lines, "a100-80gb:8x2")
    prices = [json.loads((tmp_path / f"{name}.json").read_text())["layouts"][0] for name in ("copies", "scatter")]
    copies, scatter = (price["traffic_by_axis"]["pp"] for price in prices)
    assert copies > 1.5 * scatter
    assert (tmp_path / "ranks.png").stat().st_size > 10_000 < (tmp_path / "schedule.png").stat().st_size
    assert "s a step" in capsys.readouterr().out


@pytest.mark.sampled(0)
def test_what_it_sends_is_computed_once_for_each_stage_whatever_the_ranks(monkeypatch):
    computed, rehearsed = [], []
    for module, name, calls in ((planning.StepTraffic, "_said_at", computed), (planning, "values_crossing", rehearsed)):
        counting(monkeypatch, module, name, calls)
    for line in ("pp4/1f1b/scatter mb8 dp2/zero1 tp2 bf16", "pp4/1f1b/scatter mb16 dp6/zero1 tp4 bf16"):
        layout = Layout.parse(line)
        inputs = torch.empty(96, TINY["max_tokens"], dtype=torch.long, device="meta")
        job = job_for(example.plain({**TINY, "vocabulary": 96}), CrossEntropy(), layout, inputs)
        found = describe(job, layout, inputs=inputs)
        assert len(found["ranks"]) == layout.num_ranks
        assert (len(computed), len(rehearsed)) == (4, 1)
        computed.clear()
        rehearsed.clear()


def counting(monkeypatch, owner, name, calls):
    real = getattr(owner, name)

    def counted(*given):
        calls.append(given)
        return real(*given)

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("line", example.SMALL)
@pytest.mark.sampled(0)
def test_the_shape_runs_scaled_down_and_sends_what_was_predicted(line, monkeypatch):
    monkeypatch.setattr(example, "SMALL", (line,))
    monkeypatch.setattr(example, "BATCH", 16)
    (row,) = example.small("threads", example.TINY, steps=0)
    assert row["bytes"]["predicted"] == row["bytes"]["measured"]
    assert len(row["bytes"]["measured"]) == 16
    for stage in row["memory"].values():
        assert stage["predicted"] == pytest.approx(stage["measured"], rel=0.02)
    assert 0 < row["bubble"]["predicted"] < 0.6
    assert row["losses"][-1] < row["losses"][0]
    assert f"{row['layout']}\n  bytes    equal on 16 of 16 ranks" in example.table([row])
