"""Why a layout is not the best: parts that add up, a sentence about memory or time, and errors as they are."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.planner.explain import how_much_slower, simplest_first, where_it_loses
from shardwright.planner.plans import plan_layouts

TINY = ["--set", "num_layers=3", "--set", "width=32", "--set", "num_heads=4", "--set", "max_tokens=16", "--seq", "16"]
PLAN = ["plan", *TINY, "--batch", "16", "--cluster", "a100-80gb:1x2"]


@cache
def priced(line, memory_limit=0.92):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    batch = torch.ones(16, 64), torch.zeros(16, dtype=torch.int64)
    return plan_layouts(model, "a100-80gb:1x2", batch, layout=line, memory_limit=memory_limit)


@pytest.mark.parametrize("line", ["dp2/zero3", "tp2", "pp2/1f1b mb4", "dp2 recompute:full"])
def test_what_a_layout_loses_part_by_part_adds_up_to_the_difference_of_the_steps(line):
    best, other = priced("dp2 bf16"), priced(f"{line} bf16").best
    compared = best.compare(other)
    assert sum(each.more_s for each in compared.differences()) == pytest.approx(
        other.step_s - best.best.step_s, rel=1e-9
    )
    assert {each.part for each in compared.differences()} >= {"matmul", "optimizer", "other"}
    said = compared.to_dict()
    assert sum(row["this_s"] for row in said["parts"]) == pytest.approx(said["step_s"], rel=1e-9)
    assert json.loads(json.dumps(said)) == said


def test_the_sentence_names_how_much_slower_a_layout_is_and_where_it_loses_most():
    best, other = priced("dp2 bf16"), priced("pp2/1f1b mb4 bf16").best
    most = max(best.compare(other).differences(), key=lambda each: each.more_s)
    assert best.compare(other).why() == (
        f"pp2/1f1b mb4 bf16 is {other.step_s / best.best.step_s - 1:.1%} slower than dp2 bf16, "
        f"most of it {most.part} ({most.more_s:+.3g} s)"
    )
    assert priced("pp2/1f1b mb4 bf16").compare(best.best).why().startswith("dp2 bf16 is ")
    assert "faster than pp2/1f1b mb4 bf16" in priced("pp2/1f1b mb4 bf16").compare(best.best).why()
    assert best.compare(best.best).why() == "dp2 bf16 is the best layout found"


def test_how_much_slower_a_runner_up_is_has_a_decimal_below_a_percent():
    best = priced("dp2 bf16").best
    said = {times: how_much_slower(best, best._replace(step_s=times * best.step_s)) for times in (1.0004, 1.004, 1.04)}
    assert said == {1.0004: "as fast", 1.004: "+0.4%", 1.04: "+4%"}


@pytest.mark.parametrize(("times", "is_first"), [(0.995, False), (0.98, True)])
@pytest.mark.parametrize(
    ("simple", "other"),
    [("dp2 bf16", "dp2/zero1 bf16"), ("mb4 dp2/zero3 recompute:full bf16", "dp2/zero1/offload bf16")],
)
def test_of_layouts_as_fast_the_simplest_is_the_best(simple, other, times, is_first):
    plain = priced(simple).best
    faster = priced(other).best._replace(step_s=times * plain.step_s)
    slower = plain._replace(step_s=1.5 * plain.step_s)
    order = [faster, plain, slower] if is_first else [plain, faster, slower]
    assert [*simplest_first([faster, plain, slower])] == order
    said = priced(simple).compare(faster).why()
    assert ("less than prices tell apart" in said) is not is_first
    assert f"{1 - times:.1%} faster than {plain.layout}" in said


def test_the_sentence_about_a_layout_that_does_not_fit_names_its_memory_and_most_of_it():
    said = priced("dp2 bf16", memory_limit=1e-6).compare(priced("dp2").best).why()
    assert said.startswith("dp2 does not fit: ")
    assert "on the fullest device, of 80 kB that it may take; most of it " in said


@pytest.mark.sampled(0)
def test_the_command_explains_layouts_that_lose_that_fail_and_writes_a_picture_and_a_page(tmp_path):
    files = ["--png", str(tmp_path / "new" / "p.png"), "--html", str(tmp_path / "p.html")]
    words = [*PLAN, "--layout", "dp2 bf16", "--explain", "tp2 bf16", "--explain", "dp3", *files]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert "tp2 bf16 is " in found.stdout
    assert "dp3 cannot be: the cluster has another number of ranks" in found.stdout
    assert (tmp_path / "new" / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "Why not tp2 bf16?" in (tmp_path / "p.html").read_text()
    said = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["explained"]
    assert [row["layout"] for row in said] == ["tp2 bf16", "dp3"]
    assert not said[1]["fits"]
    assert "another number of ranks" in said[1]["why"]


@pytest.mark.sampled(0)
def test_a_layout_in_the_file_of_a_run_is_laid_beside_the_best_of_a_search(tmp_path):
    (tmp_path / "run.toml").write_text('model = "mlp"\nlayout = "dp2/zero3"\nbatch = 8\n')
    words = ["plan", "--config", str(tmp_path / "run.toml"), "--fresh", "--most-priced", "2"]
    found = CliRunner().invoke(app, [*words, "--fix", "dp2", "--json"])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert said["cluster"] == "a100-80gb:1x2", "as many ranks as the file's layout has"
    assert said["searched"] > said["priced"] == 2
    assert [row["layout"] for row in said["explained"]] == ["dp2/zero3"]
    assert "the layout in " in CliRunner().invoke(app, [*words, "--without", "zero3"]).stdout
    alone = json.loads(CliRunner().invoke(app, [*words, "--layout", "tp2", "--json"]).stdout)
    assert [row["layout"] for row in alone["layouts"]] == ["tp2"]
    assert "explained" not in alone


def test_a_line_to_explain_that_is_no_layout_is_refused_before_a_search(monkeypatch):
    monkeypatch.setattr("shardwright.planner.plans.search", None)  # which a search would call
    found = CliRunner().invoke(app, [*PLAN, "--explain", "nonsense"])
    assert (found.exit_code, found.stdout) == (2, "")
    assert "nonsense" in found.stderr


def test_pictures_of_several_numbers_of_ranks_are_refused(tmp_path):
    found = CliRunner().invoke(app, [*PLAN, "--ranks", "1,2", "--png", str(tmp_path / "p.png")])
    assert found.exit_code == 2
    assert "leave out --ranks" in found.stderr


def test_a_layout_that_fits_is_not_called_slower_than_a_nearest_one_that_does_not():
    best, other = priced("dp2", memory_limit=0.0033), priced("dp2/zero3 bf16").best
    best = best if best.best.memory_bytes > other.memory_bytes else priced("dp2")
    limit = (best.best.memory_bytes + other.memory_bytes) / 2
    found = best.compare(other)._replace(limit_bytes=limit)
    assert found.why() == "dp2/zero3 bf16 fits, and dp2, the nearest to fit of those that were priced, does not"


def test_a_file_that_cannot_be_written_loses_no_prices(tmp_path):
    (tmp_path / "file").write_text("")
    found = CliRunner().invoke(app, [*PLAN, "--layout", "dp2 bf16", "--html", str(tmp_path / "file" / "p.html")])
    assert found.exit_code == 2
    assert "dp2 bf16: " in found.stdout


def test_a_part_that_loses_more_than_the_step_is_named_beside_what_is_gained():
    best = priced("dp2 bf16").best
    waterfall = {**best.waterfall, "bubble": 3 * best.step_s, "matmul": best.waterfall["matmul"] - 2.5 * best.step_s}
    other = best._replace(waterfall=waterfall, step_s=sum(waterfall.values()))
    said = where_it_loses(best, other)
    assert said == f"bubble {3 * best.step_s:+.3g} s, all other parts {-2.5 * best.step_s:+.3g} s"
