"""The page of a run holds all of it, safely, in one file."""

from __future__ import annotations

import base64
import math
import re
from html.parser import HTMLParser

import pytest
from torch import nn

from shardwright.layout import Layout
from shardwright.plan.plan import Job
from shardwright.report.description import describe
from shardwright.report.page import write_page
from shardwright.report.pictures import draw_loss

RUN = {
    "layout": "dp2 tp2", "model": "mlp", "settings": {"widths": [8, 16]}, "data": "stdlib", "batch": 8, "seq": 16,
    "seed": 0, "world_size": 4, "steps": 2, "started": "2025-01-01", "versions": {"torch": "2.13"},
}  # fmt: skip
ROWS = [
    {"step": 1, "loss": 4.0, "lr": 1e-3, "step_ms": 30.0, "tokens_per_s": 900.0, "memory_bytes": [2**20] * 4},
    {"step": 2, "loss": 3.25, "eval_loss": 3.5, "lr": 1e-3, "grad_norm": 1.0, "step_ms": 10.0, "tokens_per_s": 1100.0,
     "memory_bytes": [2**20, 2**21, 2**20, 3 * 2**20], "time_s": 2.0},
]  # fmt: skip
NASTY = "<script>alert('\"&')</script>"


@pytest.fixture
def description():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return describe(Job(model, nn.Identity()), Layout.parse("dp2 tp2"))


class Checker(HTMLParser):
    """Every tag that is opened is closed, and nothing is fetched from outside."""

    def __init__(self):
        super().__init__()
        self.open, self.outside, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href") and not v.startswith("data:image/png;base64,")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def checked(path):
    checker = Checker()
    checker.feed(path.read_text(encoding="utf-8"))
    checker.close()
    assert not checker.open
    assert not checker.outside
    return " ".join(checker.text)


def test_the_page_is_one_file_with_the_figures_the_layers_the_memory_and_the_pictures(tmp_path, description):
    loss = draw_loss(ROWS, tmp_path / "loss.png")
    path = write_page(tmp_path, title="A run", run=RUN, rows=ROWS, description=description, pictures={"Loss": loss})
    assert path == tmp_path / "report.html"
    text, source = checked(path), path.read_text()
    for shown in ("dp2 tp2", "4.000 → 3.250", "1.0 k", "20 ms", "3.0 MiB", "torch=2.13", "widths=[8, 16]"):
        assert shown in text
    assert "16 features to " in text
    assert "weight 16x8 → 8x8" in text
    assert base64.b64encode(loss.read_bytes()).decode() in source
    assert "prefers-color-scheme: dark" in source


def test_the_memory_predicted_stands_beside_the_memory_measured(tmp_path, description):
    path = write_page(tmp_path, title="A run", run=RUN, rows=ROWS, description=description, pictures={})
    lines = re.findall(r"<tr><td>rank (\d).*?</tr>", path.read_text())
    assert lines == ["0", "1", "2", "3"]
    row = re.search(r"<tr><td>rank 3</td>(.*?)</tr>", path.read_text())[1]
    held = description["ranks"][3]["num_parameters"]
    assert re.findall(r"<td[^>]*>(.*?)</td>", row)[3:] == [f"{held * 16 / 1024:.1f} KiB", "3.0 MiB"]


def test_nothing_on_the_page_comes_from_outside_and_all_text_is_escaped(tmp_path, description):
    run = {**RUN, "data": NASTY, "model": NASTY, "versions": {NASTY: NASTY}}
    evil = {**description, "layers": [{**layer, "why": NASTY, "role": NASTY} for layer in description["layers"]]}
    path = write_page(tmp_path, title=NASTY, run=run, rows=ROWS, description=evil, pictures={})
    source = path.read_text()
    assert "<script" not in source
    assert "<code>&lt;script&gt;alert(&#x27;&quot;&amp;&#x27;)&lt;/script&gt;</code>" in source
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<link", source)
    assert NASTY in checked(path)


@pytest.mark.parametrize(
    "rows", [[], ROWS[:1], [{"step": 1, "loss": math.nan}], [{"step": 1}], [{"step": 1, "loss": None}]]
)
def test_a_run_that_has_hardly_begun_has_a_page_too(tmp_path, rows, description):
    pictures = {"Loss": tmp_path / "never drawn.png"}
    for run in (RUN, {}):
        checked(
            write_page(tmp_path / "new", title="A run", run=run, rows=rows, description=description, pictures=pictures)
        )
