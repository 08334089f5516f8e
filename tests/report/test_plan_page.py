"""The picture and the page of priced layouts show every part to scale, and hold text safely."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from html import escape

import pytest
import torch
from torch import nn

from report.test_page import checked
from shardwright.planner.explain import parts_of_step
from shardwright.planner.plans import plan_layouts
from shardwright.report.plan_page import write_plan_page
from shardwright.report.plan_picture import draw_plans, plans_figure


@cache
def plans():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    batch = torch.ones(16, 64), torch.zeros(16, dtype=torch.int64)
    each = [plan_layouts(model, "a100-80gb:1x2", batch, layout=line) for line in ("dp2 bf16", "pp2/1f1b mb4 bf16")]
    return replace(each[0], layouts=(each[0].best, each[1].best))


def bars(figure):
    return {patch.get_gid(): patch.get_width() for patch in figure.axes[0].patches if patch.get_gid()}


def test_the_bars_of_a_step_are_as_long_as_its_parts_and_those_of_memory_as_what_is_taken():
    found = bars(plans_figure(plans()))
    for price in plans().layouts:
        said = {name: found[f"{price.layout}: {name}"] for name in parts_of_step(price.waterfall)}
        share = sum(said.values()) / price.step_s
        assert said == pytest.approx({name: price.waterfall[name] * share for name in said})
    one, two = (found[f"{price.layout}: memory of a device"] for price in plans().layouts)
    assert one / two == pytest.approx(plans().layouts[0].memory_bytes / plans().layouts[1].memory_bytes)


def test_a_layout_that_does_not_fit_is_marked_so(tmp_path):
    few = replace(plans(), memory_limit=1e-6)
    assert any("does not fit" in text.get_text() for text in plans_figure(few).axes[0].texts)
    assert not any("does not fit" in text.get_text() for text in plans_figure(plans()).axes[0].texts)
    assert draw_plans(few, tmp_path / "a" / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_every_layout_part_stage_and_constant_in_one_file(tmp_path):
    path = write_plan_page(tmp_path / "p.html", plans(), [plans().compare(plans().layouts[1])], title="<Plan>")
    text = checked(path)
    assert "<Plan>" in text
    for row in (*plans().constants(), *(plans().row(price) for price in plans().layouts)):
        assert row.get("name", row.get("layout")) in text
    assert f"{plans().num_parameters:,} parameters" in text
    assert all(escape(f"{name}: {said}") in text for name, said in plans().notes())
    assert "Why not pp2/1f1b mb4 bf16?" in text
    assert "The runner-up" in text
