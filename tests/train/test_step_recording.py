"""What a run's steps are predicted to take stands beside what was measured, in run.json and in plan --replay."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.errors import PlanError
from shardwright.file_locks import lock
from shardwright.parallelize.run import Run
from shardwright.train import measuring
from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.run_figures import note_predicted
from shardwright.train.run_file import parts_of
from shardwright.train.step_recording import LEAST_STEPS, WARM_UP

KEYS = ["step_s", "waterfall", "memory_by_kind", "traffic_by_axis"]
TINY = {"data": "synthetic", "seq": 16, "settings": {"num_layers": 2, "width": 32}, "batch": 8}


def trained(out, line, steps=LEAST_STEPS, *, resume=False, **options):
    train(TrainConfig(layout=line, steps=steps, **{**TINY, **options}), out, resume=resume, ranks="threads")
    return parts_of(out)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two parts: under dp2 tp2 with a cluster, then under pp2 without one."""
    out = tmp_path_factory.mktemp("run")
    trained(out, "dp2 tp2", cluster="a100-80gb")
    return out, trained(out, "pp2/1f1b mb2", 2 * LEAST_STEPS, resume=True)


def test_each_part_of_a_run_has_its_predicted_and_its_measured_figures(run):
    _, parts = run
    assert [part["first_step"] for part in parts] == [0, LEAST_STEPS]
    for part in parts:
        assert list(part["predicted"]) == list(part["measured"]) == KEYS
        assert part["ranks"] == "threads"
    assert parts[0]["predicted"]["step_s"] == pytest.approx(sum(parts[0]["predicted"]["waterfall"].values()))
    assert (parts[1]["predicted"]["step_s"], parts[1]["predicted"]["waterfall"]) == (None, {})


def test_bytes_are_those_predicted_and_memory_within_two_percent(run):
    for part in run[1]:
        predicted, measured = part["predicted"], part["measured"]
        assert measured["traffic_by_axis"] == predicted["traffic_by_axis"]
        # the blocks of shared memory, which processes alone have, are in neither: the ranks are threads
        held, said = (sum(figures["memory_by_kind"].values()) for figures in (measured, predicted))
        assert said == pytest.approx(held, rel=0.02)


def test_what_was_measured_adds_up_to_a_step(run):
    for part in run[1]:
        measured = part["measured"]
        assert sum(measured["waterfall"].values()) == pytest.approx(measured["step_s"])
        assert measured["waterfall"]["matmul"] > 0
    assert run[1][0]["measured"]["waterfall"]["tp"] > 0
    assert run[1][1]["measured"]["waterfall"]["bubble"] > 0


def test_a_part_of_few_steps_measures_its_seconds_alone(tmp_path):
    (part,) = trained(tmp_path, "dp2", LEAST_STEPS - 1)
    assert part["measured"]["step_s"] > 0
    assert part["measured"]["waterfall"] == part["measured"]["memory_by_kind"] == {}
    assert "predicted" not in part


def test_a_cluster_that_cannot_be_read_is_an_error_before_the_first_step(tmp_path):
    with pytest.raises(PlanError, match="no such accelerator"):
        trained(tmp_path / "out", "dp2", cluster="a100-80")
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_the_file_here_toml_is_the_cluster_where_none_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("here.toml").write_text('profile = "a100-80gb"\n')
    (part,) = trained(Path("out"), "dp2")
    assert part["predicted"]["step_s"] > 0


def test_a_run_ends_well_where_its_figures_cannot_be_had(tmp_path, monkeypatch, capsys):
    def fails(*_, **__):
        raise KeyError("no such sample")

    monkeypatch.setattr("shardwright.train.run_figures.predicted_step", fails)
    monkeypatch.setattr("shardwright.ledger.account.MemoryRecording.account", fails)
    (part,) = trained(tmp_path, "dp2")
    assert (part["measured"]["memory_by_kind"], "predicted" in part) == ({}, False)
    assert part["measured"]["traffic_by_axis"]
    said = capsys.readouterr()
    assert "the run's steps are not predicted: KeyError: 'no such sample'" in said.out + said.err


@pytest.mark.parametrize("other", ["is begun", "has the lock", "has gone"])
def test_a_prediction_is_not_written_into_a_run_that_another_has_taken_over(run, tmp_path, monkeypatch, other):
    kept = json.loads((run[0] / "run.json").read_text())
    del kept["parts"][-1]["predicted"]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(kept))
    (tmp_path / ".lock").touch()
    config = TrainConfig(layout="dp2", **TINY)

    def predicted(*_):
        if other == "is begun":
            kept["parts"].append({**kept["parts"][-1], "first_step": 99})
            file.write_text(json.dumps(kept))
        return {"step_s": 7.0}

    monkeypatch.setattr("shardwright.train.run_figures.predicted_step", predicted)
    with (tmp_path / ".lock").open() as held:
        if other == "has the lock":
            assert lock(held)
        elif other == "has gone":
            (tmp_path / ".lock").unlink()
        note_predicted(config, tmp_path, "threads", 2 * LEAST_STEPS)
    assert json.loads(file.read_text()) == kept
    (tmp_path / ".lock").touch()
    monkeypatch.setattr("shardwright.train.run_figures.predicted_step", lambda *_: {"step_s": 7.0})
    note_predicted(config, tmp_path, "threads", 200)
    assert parts_of(tmp_path)[-1]["predicted"] == {"step_s": 7.0}


def replay(*options):
    return CliRunner().invoke(app, ["plan", "--replay", *map(str, options)])


@pytest.mark.sampled(0)
def test_a_replay_predicts_each_part_again_and_gives_the_anchor_that_corrects_it(run):
    out, parts = run
    found = json.loads(replay(out, "--cluster", "h100-80gb", "--json").stdout)
    assert [part["layout"] for part in found["parts"]] == ["dp2 tp2", "pp2/1f1b mb2"]
    for part, kept in zip(found["parts"], parts, strict=True):
        assert part["measured"] == kept["measured"]
        assert part["off"]["step_s"] == pytest.approx(part["predicted"]["step_s"] / part["measured"]["step_s"] - 1)
        assert set(part["off"]["traffic_by_axis"].values()) == {0.0}
        line, _, seconds = part["anchor"].rpartition("=")
        assert (line, float(seconds)) == (
            kept["options"]["layout"],
            pytest.approx(kept["measured"]["step_s"], rel=1e-5),
        )
    text = replay(out).stdout  # the first part by its own cluster, the second by none
    assert "on a100-80gb" in text
    assert "--anchor 'dp2 tp2=" in text
    assert "seconds are not predicted: name a --cluster" in text


def test_a_replay_of_what_is_no_measured_run_says_so(run, tmp_path):
    result = replay(tmp_path)
    assert (result.exit_code, "there is no run at" in result.stderr) == (2, True)
    kept = json.loads((run[0] / "run.json").read_text())
    for part in [kept, *kept["parts"]]:
        del part["measured"]
    (tmp_path / "run.json").write_text(json.dumps(kept))
    result = replay(tmp_path)
    assert (result.exit_code, "no part of the run" in result.stderr) == (2, True)
    for option, value in (("--batch", 4), ("--html", tmp_path / "plan.html"), ("--fix", "dp2")):
        result = replay(run[0], option, value)
        assert (result.exit_code, "a replay takes the options of the run" in result.stderr) == (2, True)
        assert f"given:   {option}" in result.stderr


def test_a_replay_runs_no_code_that_only_the_folder_names(run, tmp_path):
    kept = json.loads((run[0] / "run.json").read_text())
    for part in [kept, *kept["parts"]]:
        part["options"]["model"] = "antigravity:fly"
    (tmp_path / "run.json").write_text(json.dumps(kept))
    result = replay(tmp_path)
    assert (result.exit_code, "names code that would run" in result.stderr) == (2, True)
    result = replay(tmp_path, "--model", "gpt")
    assert (result.exit_code, "another model" in result.stderr) == (2, True)
    kept["options"]["model"] = "gpt"  # and the parts still name a factory
    (tmp_path / "run.json").write_text(json.dumps(kept))
    result = replay(tmp_path)
    assert (result.exit_code, "add --model antigravity:fly" in result.stderr) == (2, True)


def test_a_profile_begins_after_the_steps_that_are_recorded_and_so_slower(tmp_path, monkeypatch):
    seen = []
    plain = Run.profile
    monkeypatch.setattr(Run, "profile", lambda run, path: (seen.append(run.num_steps), plain(run, path))[1])
    trained(tmp_path, "single", LEAST_STEPS, profile=1)
    assert seen == [WARM_UP + 2]


def test_the_memory_of_each_step_is_read_through_one_handle_of_the_process(monkeypatch):
    made, plain = [], psutil.Process
    monkeypatch.setattr(psutil, "Process", lambda number: (made.append(number), plain(number))[1])
    measuring._process.cache_clear()
    peak, held = zip(*[measuring._memory_here(torch.device("cpu")) for _ in range(3)], strict=True)
    assert made == [os.getpid()]
    assert min(held) > 0
    assert all(most >= now for most, now in zip(peak, held, strict=True))
