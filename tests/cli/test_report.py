"""``shardwright report`` makes the page of a run from its folder alone, compares runs, and refuses what is no run."""

from __future__ import annotations

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import _print_summary, app

TINY = ["--set", "num_layers=1", "--set", "width=16", "--set", "num_heads=2", "--seq", "16", "--batch", "4"]


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def report(*arguments):
    found = run("report", "--json", *arguments)
    assert found.exit_code == 0, (found.output, found.exception)
    return json.loads(found.stdout), found.stderr


def refused(*arguments):
    found = run("report", *arguments)
    assert found.exit_code == 2, (found.output, found.exception)
    assert all(word in found.stderr for word in ("error: ", "given:", "allowed:", "fix:")), found.stderr
    return found.stderr


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run of three steps under dp2, and one more under a pipeline."""
    out = tmp_path_factory.mktemp("resumed") / "run"
    train = ["train", "--ranks", "threads", "--out", out]
    assert run(*train, "--layout", "dp2", "--steps", "4", "--stop-at", "3", *TINY).exit_code == 0
    assert run(*train, "--layout", "pp2 mb2", "--resume", "--stop-at", "4").exit_code == 0
    return out


@pytest.fixture
def copied(resumed, tmp_path):
    return shutil.copytree(resumed, tmp_path / "copied")


@pytest.mark.sampled(0)
def test_the_page_of_a_run_is_made_again_from_its_folder(copied):
    before = (copied / "report.html").read_text()
    (copied / "report.html").unlink()
    found, _ = report(copied)
    assert (copied / "report.html").read_text() == before
    assert "Layout of steps 1 to 3: dp2" in before
    assert "Layout of step 4: pp2 mb2" in before
    assert [(part["first_step"], part["last_step"], part["layout"]) for part in found["parts"]] == [
        (0, 3, "dp2"), (3, 4, "pp2 mb2")
    ]  # fmt: skip
    assert found["steps"] == 4
    assert found["remarks"] == []


def test_runs_are_compared_into_one_page_and_their_folders_stay_as_they_are(resumed, copied, tmp_path):
    (copied / "report.html").unlink()
    found, _ = report("--compare", resumed, copied, "--out", tmp_path / "both.html")
    assert [each["name"] for each in found["runs"]] == ["run", "copied"]
    assert found["losses"]["most_apart"] == 0
    assert "the losses are equal" in (tmp_path / "both.html").read_text()
    assert not (copied / "report.html").exists()


def test_a_run_without_steps_and_damaged_metrics_are_said_and_shown(copied):
    rows = (copied / "metrics.jsonl").read_text().splitlines()
    (copied / "metrics.jsonl").write_text("\n".join([rows[0], "{broken", '{"step": "two"}', rows[3]]) + "\n")
    found, said = report(copied)
    assert (found["damaged"], found["steps"]) == (2, 4)
    assert "warning: 2 damaged lines of the metrics of copied were left out" in said
    assert "2 lines of metrics.jsonl could not be read" in (copied / "report.html").read_text()
    (copied / "metrics.jsonl").unlink()
    found, said = report(copied)
    assert "copied has taken no step" in said
    assert "This run has taken no step" in (copied / "report.html").read_text()


def test_what_is_no_run_is_refused(tmp_path, copied):
    assert "there is no run at" in refused(tmp_path)
    assert "there is no run at" in refused(tmp_path / "missing")
    assert "there is no run at" in refused("--compare", copied, tmp_path)
    assert "a report is of one run" in refused(copied, tmp_path)
    assert "two or more different runs" in refused("--compare", copied)
    assert "two or more different runs" in refused("--compare", copied, copied)
    (copied / "report.html").unlink()
    (copied / "report.html").symlink_to(tmp_path / "elsewhere")
    assert "is no regular file" in refused(copied)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("parts", [None, "x", [], [1], [{"first_step": 0}], [{"first_step": -1, "options": {}}]])
def test_a_folder_whose_parts_are_missing_or_damaged_has_a_page_of_one_layout(copied, parts):
    kept = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps({**kept, "parts": parts}))
    found, _ = report(copied)
    assert [(part["first_step"], part["layout"]) for part in found["parts"]] == [(0, "pp2 mb2")]


@pytest.mark.parametrize("source", ["timed layers", "layers predicted for a100-80gb"])
def test_a_page_says_whether_seconds_of_layers_were_timed_or_predicted(copied, source):
    kept = json.loads((copied / "run.json").read_text())
    part = kept["parts"][1]
    part["seconds"] = {"head": 0.1}
    part["options"] |= {"cluster": "a100-80gb", "measured_costs": source == "timed layers"}
    (copied / "run.json").write_text(json.dumps(kept))
    report(copied)
    assert f"predicted from {source};" in (copied / "report.html").read_text()


def test_code_that_only_a_folder_names_is_not_run_and_the_page_says_how_to_allow_it(copied, tmp_path):
    kept = json.loads((copied / "run.json").read_text())
    for part in kept["parts"]:
        part["options"] |= {"model": "subprocess:Popen", "settings": {"args": f"('touch', '{tmp_path / 'executed'}')"}}
    (copied / "run.json").write_text(json.dumps(kept))
    found, _ = report(copied)
    assert not (tmp_path / "executed").exists()
    assert "add --model subprocess:Popen" in " ".join(found["remarks"])
    assert "add --model subprocess:Popen" in (copied / "report.html").read_text()
    own = ["--model", "torch.nn:Embedding", "--set", "num_embeddings=256", "--set", "embedding_dim=256"]
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    data = ["--data", tmp_path / "text", "--seq", "8", "--batch", "2", "--ranks", "threads", "--out", tmp_path / "own"]
    assert run("train", "--steps", "1", *own, *data).exit_code == 0
    assert report(tmp_path / "own", "--model", "torch.nn:Embedding")[0]["remarks"] == []
    assert report(tmp_path / "own")[0]["remarks"] != []


def test_a_page_that_cannot_be_made_of_a_damaged_run_is_no_error_of_the_run(tmp_path, capsys, monkeypatch):
    (tmp_path / "run.json").write_text("{")
    monkeypatch.setattr(sys.modules["shardwright.cli.main"], "_summary_text", lambda *_: "")
    summary = {"diverged": None, "stopped": False}
    _print_summary(summary, tmp_path, SimpleNamespace(model=None, data="stdlib"), as_json=True)
    assert json.loads(capsys.readouterr().out)["report"].startswith("not written: ")
