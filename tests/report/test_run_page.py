"""The page of a run shows every part of it: figures, charts with what is seen, layouts, and what it could not read."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from torch import nn

from report.runs import OPTIONS, described, part, row, run, two_parts
from report.test_page import NASTY, checked, read
from shardwright.layout import Layout
from shardwright.models.losses import CrossEntropy
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.report.description import describe
from shardwright.report.layout_sections import layout_html
from shardwright.report.run_page import write_run_page
from shardwright.report.training_runs import record_run
from shardwright.strategies.tensor_parallel.shards_plan import ShardsNote


def charts_of(path):
    """The data of the page's charts of curves, in the order of the page."""
    found = [json.loads(script) for script in read(path).scripts[:-1]]
    return [data for data in found if "curves" in data]


def test_the_page_shows_each_part_of_the_run_with_its_layout_and_its_command(tmp_path):
    path = write_run_page(tmp_path / "made" / "report.html", two_parts())
    text, source = checked(path), path.read_text()
    for shown in (
        *("mlp under dp2 tp2, then pp2 mb2", "4.000 → 2.500", "3.500 → 3.000", "4, then 2", "1.0 k"),
        *("Layout of steps 1 to 2: dp2 tp2", "Layout of steps 3 to 4: pp2 mb2", "Steps 3 to 4: pp2 mb2"),
        *("shardwright train --layout 'pp2 mb2'", "torch=2.13", "widths=[8, 16]"),
        *("16 features to ", "weight 16x8 → 8x8", "Training loss falls from 4 at step 1"),
    ):
        assert shown in text
    assert "tp2</code>, then <code>pp2" in source
    (timeline,) = [json.loads(each) for each in read(path).scripts[:-1] if "timelines" in each]
    assert len(timeline["timelines"][0]["stages"]) == 2


def test_the_charts_have_the_values_of_the_rows_and_the_steps_of_each_resume(tmp_path):
    path = write_run_page(tmp_path / "report.html", two_parts())
    loss, throughput, memory, rate, norm = charts_of(path)
    assert loss["curves"][0]["values"] == [4.0, 3.0, 2.0, 2.5]
    assert (loss["curves"][1]["steps"], loss["curves"][1]["style"]) == ([2, 4], "points")
    assert all(chart["marks"] == [[2, "pp2 mb2"]] for chart in (loss, throughput, memory, rate, norm))
    assert norm["level"] == [1.0, "clipped to 1"]
    assert rate["curves"][0]["values"] == [0.001, 0.002, 0.003, 0.004]
    labels = read(path).labels
    assert any(label.startswith("Training loss falls from 4 at step 1 to 2.5") for label in labels)
    assert sum(label.startswith("Loss, by step.") for label in labels) == 1


def test_each_rank_is_on_the_map_and_the_memory_predicted_stands_beside_the_memory_measured():
    found = described("dp2 tp2")
    text = layout_html(found, [2**20, 2**20, 2**20, 3 * 2**20])
    cells = re.findall(r'<td class="rank c(\d)"><b><span>(\d)</span> <span>(\w)</span>', text)
    assert [(int(colour), int(rank), letter) for colour, rank, letter in cells] == [
        (each["slice"], each["rank"], "AB"[each["slice"]]) for each in found["ranks"]
    ]
    measured = re.search(r">rank 3</th>(.*?)</tr>", text)[1]
    held = found["ranks"][3]["num_parameters"]
    assert re.findall(r">([^<>]+)</td>", measured)[3:] == [f"{held * 16 / 1024:.1f} KiB", "3.0 MiB"]


def test_what_is_sent_for_each_layer_adds_up_to_what_a_rank_sends():
    """Each layer's bytes are those of the rank that sends most, and here all ranks send alike."""
    found = described("dp2 tp2")
    assert {entry["strategy"] for entry in found["layer_traffic"]} == {"tensor_1d", "data_parallel"}
    sent = sum(entry["sent_bytes"] for entry in found["layer_traffic"])
    assert sent == sum(found["ranks"][0]["sent_bytes"].values())
    text = layout_html(found)
    assert "Sent in a step for each layer" in text
    assert "Nothing: no strategy of this layout sends." in layout_html(described("single"))


class Product(nn.Module):
    def __init__(self, given, made):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(given, made))

    def forward(self, x):
        return x @ self.weight


class Recorded(nn.Module):
    """A model that is cut by its recorded forward, since no layer of it is of a known class."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(32, 16), Product(16, 32)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": Product(16, 64), "down": Product(64, 16)}) for _ in range(4))

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block["down"](block["up"](x).relu())
        return self.head(x)


@pytest.mark.parametrize("line", ["tp2", "tp2 recompute:full", "pp2/1f1b mb2 tp2", "tp2x2/2d"])
def test_what_a_recorded_model_sends_is_told_by_layer(line):
    inputs = torch.zeros(8, 6, dtype=torch.long)
    layout = Layout.parse(line)
    job = job_for(Recorded(), CrossEntropy(), layout, inputs)
    assert isinstance(make_plan(job, layout)[0].notes[""], ShardsNote)
    found = describe(job, layout, inputs=inputs)
    sent = {entry["layer"]: entry["sent_bytes"] for entry in found["layer_traffic"] if entry["strategy"] != "pipeline"}
    blocks = [f"blocks.{number}" for number in range(4)]
    assert {f"{block}.down" for block in blocks} <= sent.keys(), "the sums of outputs"
    assert {f"{block}.up" for block in blocks} <= sent.keys(), "the sums of gradients of inputs"
    assert len({sent[f"{block}.down"] for block in blocks}) == 1
    assert "" not in sent or sent[""] < 0.5 * sum(sent.values())
    in_all = [sum(size for name, size in rank["sent_bytes"].items() if name != "pipeline") for rank in found["ranks"]]
    if "pp2" not in line:  # where all ranks have all layers
        assert sum(sent.values()) == max(in_all)
    else:
        assert sum(sent.values()) == in_all[0] + in_all[-1]
    assert "blocks.*.down" in layout_html(found)


def test_predicted_figures_stand_beside_measured_ones(tmp_path):
    predicted = {"step_s": 0.5, "waterfall": {"matmul": 0.3, "dp": 0.2}, "memory_by_kind": {"activations": 2048},
                 "traffic_by_axis": {"dp": 1024, "tp": math.nan, "pp": "much"}}  # fmt: skip
    measured = {"step_s": 0.4, "waterfall": {"matmul": 0.4}, "traffic_by_axis": {"dp": 1024}}
    found = run([part("dp2", predicted=predicted, measured=measured)], [row(1, 2.0, 2)])
    path = write_run_page(tmp_path / "report.html", found)
    section = path.read_text().split('id="predicted"')[1].split("</section>")[0]
    rows = [re.sub(r"<[^>]*>", " ", cells).split("  ") for cells in re.findall(r"<tr><th[^>]*>(.*?)</tr>", section)]
    cells = [" ".join(" ".join(each).split()) for each in rows]
    assert cells == [
        "step 500 ms 400 ms +25.0%", "matmul parts of a step 300 ms 400 ms -25.0%", "dp parts of a step 200 ms",
        "activations memory 2.0 KiB", "dp sent in a step 1.0 KiB 1.0 KiB equal",
    ]  # fmt: skip
    checked(path)
    assert 'id="predicted"' not in write_run_page(tmp_path / "without.html", two_parts()).read_text()


def test_the_names_of_a_run_are_shown_and_never_run(tmp_path):
    options = {**OPTIONS, "data": NASTY, "model": NASTY, "layout": NASTY, "settings": {NASTY: NASTY}}
    facts = {**part("dp2"), "options": options, "command": NASTY, "versions": {NASTY: NASTY}, "started": NASTY,
             "predicted": {"waterfall": {NASTY: 1.0}}}  # fmt: skip
    evil = {
        **described("dp2"),
        "layers": [{**each, "why": NASTY, "role": NASTY} for each in described("dp2")["layers"]],
    }
    later = {**facts, "first_step": 1}
    found = record_run(NASTY, [facts, later], [row(1, 2.0, 2), row(2, 1.0, 2)], lambda _: evil)
    path = write_run_page(tmp_path / "report.html", found)
    assert NASTY in checked(path)
    assert len(read(path).scripts) == path.read_text().count("<script")
    assert not any("<script>" in script for script in read(path).scripts)


@pytest.mark.parametrize(
    "rows", [[], [row(1, 2.0)], [{"step": 1, "loss": math.nan}], [{"step": 1}], [{"step": 1, "loss": None}]]
)
def test_a_run_that_has_hardly_begun_has_a_page_too(tmp_path, rows):
    for facts in (part("dp2 tp2"), {"first_step": 0, "options": {"layout": "dp2"}}):
        path = write_run_page(tmp_path / "report.html", run([facts], rows))
        assert ("has taken no step" in checked(path)) == (not rows)
    bare = record_run("a run", [{"first_step": 0}], rows, lambda _: {}["options"])
    assert "Its map cannot be drawn" in checked(write_run_page(tmp_path / "report.html", bare))


def test_the_page_says_what_of_the_metrics_is_not_there(tmp_path):
    found = run([part("dp2")], [row(1, 2.0), row(2, 2.0), row(5, 1.0)], num_damaged=2)
    text = checked(write_run_page(tmp_path / "report.html", found))
    assert "2 lines of metrics.jsonl could not be read and were left out." in text
    assert "2 of the steps from 1 to 5 have no metrics." in text


def test_a_long_run_on_many_ranks_has_a_page_that_is_small(tmp_path):
    rows = [row(step, 2.0 + step % 7, 64) for step in range(1, 3001)]
    path = write_run_page(tmp_path / "report.html", run([part("dp2")], rows))
    assert path.stat().st_size < 250_000
    assert "64 ranks from top to bottom, steps from left to right" in checked(path)
