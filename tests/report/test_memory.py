"""The ledger as a table, as data and as a picture."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

from shardwright.layout import Layout
from shardwright.models import CrossEntropy
from shardwright.plan.plan import Job
from shardwright.report.memory import draw_memory, memory_data, memory_figure, memory_text, predicted_accounts

MODEL = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
BATCH = (torch.ones(8, 16), torch.zeros(8, dtype=torch.int64))


@pytest.fixture(scope="module")
def predicted():
    return predicted_accounts(Job(MODEL, CrossEntropy()), Layout.parse("dp2 tp2"), BATCH)


def test_every_kind_that_is_held_at_a_peak_has_a_column(predicted):
    text = memory_text(predicted, width=80)
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines[2:]] == [[str(rank), "predicted"] for rank in range(4)]
    assert "params" in lines[0]
    assert "off by" not in text


def test_the_table_of_both_says_how_far_they_are_apart(predicted):
    text = memory_text(predicted, predicted, width=80)
    assert text.count("measured") == 4
    assert text.endswith("off by +0.00 %, at most.\n")


def test_the_data_add_up(predicted):
    for entry in json.loads(json.dumps(memory_data(predicted, predicted))):
        assert sum(entry["predicted"]["at_peak"].values()) == entry["predicted"]["peak_bytes"]
        assert entry["measured"] == entry["predicted"]


def test_the_picture_is_drawn(predicted, tmp_path):
    path = draw_memory(tmp_path / "memory.png", "dp2 tp2", predicted, predicted)
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("line", ["dp2 tp2", "pp2 mb4", "pp2 mb16"])
def test_no_two_labels_below_a_picture_lie_on_each_other(line):
    accounts = predicted_accounts(
        Job(MODEL, CrossEntropy()), Layout.parse(line), (BATCH[0].repeat(2, 1), BATCH[1].repeat(2))
    )
    figure = memory_figure(line, accounts, accounts)
    figure.canvas.draw()
    for axes in figure.axes:
        labels = [each for each in axes.get_xticklabels() if each.get_text()]
        assert len(labels) > 2 or "pp" not in line
        boxes = [each.get_window_extent() for each in labels]
        assert all(one.x1 < other.x0 for one, other in pairwise(boxes))
