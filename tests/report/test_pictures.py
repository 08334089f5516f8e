"""Pictures are valid PNGs, show the right values, and can be drawn of runs with few steps or none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shardwright.layout import Layout
from shardwright.plan.plan import Job
from shardwright.report.description import describe
from shardwright.report.pictures import (
    COLOURS,
    draw_layout,
    draw_loss,
    draw_losses,
    layout_figure,
    losses_figure,
)

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def job():
    with torch.device("meta"):
        return Job(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), nn.Identity())


def metrics(num_steps):
    return [
        {"step": n, "loss": 3.0 / n, "lr": 1e-3, "step_ms": 10.0 + n, "tokens_per_s": 1e4, "memory_bytes": [10, 20]}
        | ({"eval_loss": 3.5 / n} if n % 5 == 0 else {})
        for n in range(1, num_steps + 1)
    ]


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(SIGNATURE)
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def cells(figure):
    return [patch for axes in figure.axes for patch in axes.patches if patch.get_gid()]


@pytest.mark.parametrize(("line", "num_cells"), [("single", 1), ("dp8", 8), ("dp2 tp4", 8), ("dp3 tp2", 6)])
def test_a_layout_has_one_cell_for_each_rank_and_one_colour_for_each_slice(line, num_cells):
    found = describe(job(), Layout.parse(line))
    drawn = cells(layout_figure(found))
    assert [cell.get_gid() for cell in drawn] == [f"rank {rank}" for rank in range(num_cells)]
    colours = {}
    for cell, rank in zip(drawn, found["ranks"], strict=True):
        colours.setdefault(rank["slice"], set()).add(cell.get_facecolor())
    assert all(len(of_slice) == 1 for of_slice in colours.values())
    assert len(set.union(*colours.values())) == len(colours) <= len(COLOURS)


def test_of_thousands_of_ranks_the_first_ones_and_the_last_row_are_drawn():
    drawn = {cell.get_gid() for cell in cells(layout_figure(describe(job(), Layout.parse("dp384 tp8"))))}
    assert len(drawn) == 7 * 8
    assert {"rank 0", "rank 7", "rank 3064", "rank 3071"} <= drawn


def test_bars_of_memory_are_as_long_as_the_bytes_that_they_stand_for():
    found = describe(job(), Layout.parse("tp3"))
    (axes,) = layout_figure(found).axes
    bars = [patch for patch in axes.patches if not patch.get_gid() and math.isclose(patch.get_height(), 0.25)]
    states = [rank[f"{state}_bytes"] for rank in found["ranks"] for state in ("parameter", "gradient", "optimizer")]
    groups = {tuple(states[a : a + 3]): None for a in range(0, 9, 3)}
    expected = [num_bytes for group in groups for num_bytes in group]
    assert len(bars) == len(expected)
    scale = bars[0].get_width() / expected[0]
    assert [bar.get_width() / scale for bar in bars] == pytest.approx(expected)


@pytest.mark.parametrize("line", ["single", "dp2 tp4", "dp384 tp8"])
def test_the_picture_of_a_layout_is_a_png_that_fits_a_page(line, tmp_path):
    path = draw_layout(describe(job(), Layout.parse(line)), tmp_path / "made" / "layout.png")
    width, height = png_size(path)
    assert width == 1500
    assert 300 < height < 2000
    assert 10_000 < path.stat().st_size < 600_000


@pytest.mark.parametrize("num_steps", [0, 1, 2, 50])
def test_the_loss_picture_is_a_png_however_short_the_run(num_steps, tmp_path):
    path = draw_loss(metrics(num_steps), tmp_path / "loss.png")
    assert png_size(path)[0] == 1500
    assert path.stat().st_size > 5_000


def test_a_loss_that_is_missing_or_not_finite_is_left_out(tmp_path):
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": math.nan}, {"step": 3, "loss": None}, {"step": 4}]
    (line,) = losses_figure({"": rows}).axes[0].lines
    assert list(line.get_xdata()) == [1]
    draw_loss([{"step": 1, "loss": math.inf}], tmp_path / "loss.png")


def test_every_run_has_its_line_and_the_title_states_how_far_they_differ(tmp_path):
    apart = [{**row, "loss": row["loss"] + 0.25} for row in metrics(10)[3:]]
    figure = losses_figure({"single": metrics(10), "dp2": apart})
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines["single"] == [row["loss"] for row in metrics(10)]
    assert lines["dp2"] == [row["loss"] for row in apart]
    assert "the runs differ by 2.5e-01 at most" in [text.get_text() for text in figure.texts]
    assert png_size(draw_losses({"single": metrics(10), "dp2": apart}, tmp_path / "losses.png"))[0] == 1500
    draw_losses({}, tmp_path / "none.png")
