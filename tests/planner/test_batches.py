"""Plans of several global batches: the one of the most tokens a second, and those that no layout fits."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.errors import LayoutError
from shardwright.planner.batches import BatchPlans, plan_batches
from shardwright.planner.plans import plan_layouts


def model():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def plans_of(size, layout="dp4", cluster="a100-80gb:1x4"):
    return plan_layouts(model(), cluster, (torch.ones(size, 64), torch.zeros(size, dtype=torch.long)), layout=layout)


def test_the_best_batch_trains_the_most_samples_a_second():
    found = plan_batches((4, 8, 64), plans_of)
    rows = found.rows()
    assert [row["batch"] for row in rows] == [4, 8, 64]
    assert rows[-1]["tokens_per_s"] == max(row["tokens_per_s"] for row in rows)
    assert found.best == 64
    assert "of these batches 64 samples train the most samples a second" in found.text()


def made(tokens, step_s, fits):
    """A stand-in for the plans of a batch."""
    row = {"layout": "dp2", "step_s_expected": step_s, "tokens_per_s": tokens / step_s, "memory_bytes": 1}
    return SimpleNamespace(best=None, row=lambda _: {**row, "fits": fits, "why": ""})


@pytest.mark.parametrize(
    ("plans", "best"),
    [
        ({8: made(8, 1, True), 16: made(16, 1, True), 32: made(32, 1, False)}, 16),
        ({8: made(8, 1, True), 16: made(16, 2, True)}, 8),
        ({8: made(8, 1, False), 16: made(16, 1, False)}, 8),
    ],
    ids=["the largest does not fit", "of equal ones the smallest", "none fits"],
)
def test_which_batch_is_best(plans, best):
    assert BatchPlans(plans, {}).best == best


def test_a_batch_of_fewer_samples_than_ranks_is_listed_with_the_reason_unless_all_are():
    found = plan_batches((2, 8), plans_of)
    few, enough = found.rows()
    assert (few["layout"], few["fits"], enough["layout"]) == (None, False, "dp4")
    assert "samples" in few["why"]
    assert found.best == 8
    with pytest.raises(LayoutError, match="samples"):
        plan_batches((1, 2), plans_of)


def test_the_command_plans_the_best_of_several_batches():
    line = ["plan", "--model", "mlp", "--layout", "dp2", "--cluster", "a100-80gb:1x2", "--fresh", "--json", "--batch"]
    said = json.loads(CliRunner().invoke(app, [*line, "auto:2-8"]).stdout)
    assert [row["batch"] for row in said["by_batch"]] == [2, 4, 8]
    alone = json.loads(CliRunner().invoke(app, [*line, str(said["batch"])]).stdout)
    assert said["batch"] == 8
    assert [row["step_s"] for row in said["layouts"]] == [row["step_s"] for row in alone["layouts"]]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--batch", "auto:8"], "no such size of a batch"),
        (["--batch", "auto:8-4"], "no such size of a batch"),
        (["--batch", "many"], "no such size of a batch"),
        (["--batch", "auto:2-8", "--ranks", "1,2"], "one of the two varies"),
        (["--batch", "auto:2-8", "--anchor", "dp2=0.1"], "an anchor is of one batch"),
        (["--batch", "auto:2-8", "--replay", "run"], "a run has one batch"),
    ],
)
def test_what_is_no_batch_is_refused(given, what):
    found = CliRunner().invoke(app, ["plan", "--model", "mlp", "--cluster", "a100-80gb:1x2", *given])
    assert found.exit_code == 2
    assert what in found.stderr
