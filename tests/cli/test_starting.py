"""How a command is started: a folder to start from, completion, examples, packages of the current folder."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from click.shell_completion import ShellComplete
from typer.testing import CliRunner

from shardwright import launch
from shardwright.cli.main import app
from shardwright.cli.starting import FILES
from shardwright.train.progress import StatusLog

TINY = ["--set", "num_layers=2", "--set", "width=8", "--set", "num_heads=2", "--seq", "8", "--batch", "2"]


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def started(folder, *words):
    """Runs the command in a folder that is not on Python's path, as the console script does."""
    script = "import sys; sys.argv[0] = 'shardwright'; from shardwright.cli import main; main()"
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PYTHONSAFEPATH": "1"}
    return subprocess.run([sys.executable, "-c", script, *words], cwd=folder, env=here, capture_output=True, text=True)


@pytest.mark.sampled(0)
@pytest.mark.timeout(300)  # a process of its own imports torch
def test_what_init_writes_trains_by_the_command_from_its_own_folder(tmp_path):
    folder = tmp_path / "first"
    assert json.loads(run("init", folder, "--json").stdout)["files"] == [str(folder / name) for name in FILES]
    options = ["--ranks", "threads", "--steps", "2", "--warmup", "1", "--save-every", "0", "--eval-every", "0"]
    found = started(folder, "train", "--config", "run.toml", *options, "--set", "width=8", "--set", "num_layers=1")
    assert found.returncode == 0, found.stderr
    assert "trained dp2 on 2 ranks: 2 steps" in found.stdout


@pytest.mark.sampled(0)
def test_the_model_that_init_writes_can_be_planned_in_bf16(tmp_path, monkeypatch):
    assert run("init", tmp_path).exit_code == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["--model", "my_model:build", "--data", "my_model:data", "--layout", "dp2 bf16"]
    for words in (["show", *own, "--memory"], ["plan", *own, "--cluster", "a100-80gb:1x2", "--fresh"]):
        found = run(*words)
        assert found.exit_code == 0, found.output


def test_the_loop_that_init_writes_trains(tmp_path, monkeypatch):
    assert run("init", tmp_path).exit_code == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    script = runpy.run_path("train.py", run_name="train")
    script["work"].__globals__["STEPS"] = 4
    losses = launch(script["work"], "dp2", "dp2", ranks="threads")
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    assert (tmp_path / "runs" / "mine").is_dir()


def test_init_overwrites_nothing(tmp_path):
    (tmp_path / "train.py").write_text("mine")
    found = run("init", tmp_path)
    assert found.exit_code == 2
    assert "has train.py already" in found.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == "mine"


def test_a_shell_completes_verbs():
    assert "--install-completion" in run("--help").stdout
    complete = ShellComplete(typer.main.get_command(app), {}, "shardwright", "_SHARDWRIGHT_COMPLETE")
    assert [each.value for each in complete.get_completions([], "eva")] == ["evaluate"]


def every_command(command, path=()):
    for name, sub in getattr(command, "commands", {}).items():
        yield from every_command(sub, (*path, name))
    if not hasattr(command, "commands"):
        yield path, command


def test_every_command_shows_examples_of_which_each_word_is_an_option_of_it():
    commands = dict(every_command(typer.main.get_command(app)))
    for path, command in commands.items():
        lines = [line.strip() for line in (command.epilog or "").splitlines()[2:]]
        assert lines, f"{' '.join(path)} has no examples"
        for line in lines:
            words = line.replace("cd first && ", "").split(" > ")[0].split(" -- ")[0].split()
            verb = next(each for each in commands if tuple(words[1 : 1 + len(each)]) == each)
            known = {name for each in commands[verb].params for name in (*each.opts, *each.secondary_opts)}
            flags = {word for word in words if word.startswith("--")}
            assert words[0] == "shardwright"
            assert flags <= known, line
            if "--ranks" in words and "--ranks" in [name for each in commands[verb].params for name in each.opts]:
                assert verb == ("plan",) or words[words.index("--ranks") + 1] in ("threads", "processes"), line


@pytest.mark.sampled(0)
@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_trained_run_is_evaluated_and_predicted_from_its_folder(tmp_path, verb):
    out = tmp_path / "run"
    assert run("train", "--steps", "1", "--ranks", "threads", "--out", out, *TINY).exit_code == 0
    found = run(verb, "--from", out, "--layout", "tp2", "--num", "2")
    assert found.exit_code == 0, found.stderr
    text = "2 samples of eval, step 1, under tp2" if verb == "evaluate" else r"\n1: ['\"].* \(is ['\"]"  # decoded
    assert re.search(text, found.stdout)
    assert run(verb, out, "--layout", "tp2", "--num", "2").stdout == found.stdout
    assert "a command is about one run" in run(verb, out, "--from", tmp_path).stderr
    for wrong, text in (("--split", "no such split"), ("--num", "'num' is out of range")):
        refused = run(verb, "--from", out, wrong, "test" if wrong == "--split" else "-1")
        assert refused.exit_code == 2
        assert text in refused.stderr


@pytest.mark.sampled(0)
def test_a_run_of_ones_own_is_evaluated_and_predicted_by_the_file_of_its_options(tmp_path, monkeypatch):
    assert run("init", tmp_path).exit_code == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    options = ["--config", "run.toml", "--steps", "1", "--eval-every", "0", "--ranks", "threads", "--set", "width=8"]
    trained = run("train", *options)
    assert trained.exit_code == 0, trained.output
    for verb in ("evaluate", "predict"):
        found = run(verb, "runs/train", "--config", "run.toml", "--num", "2", "--json")
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["layout"] == "dp2", "as the file says"
        refused = run(verb, "runs/train")
        assert refused.exit_code == 2
        assert "add --model my_model:build --data my_model:data" in refused.stderr
    text = "note: run.toml in this folder is not read: --config run.toml reads it"
    assert run("verify", "--steps", "1", *TINY).stderr.startswith(text)
    assert "note" not in run("verify", "--config", "run.toml", "--layout", "dp0").stderr


def test_all_options_that_a_command_does_not_have_are_named_at_once():
    found = run("train", "--layer", "dp2", "--steps", "3", "--stps=4", "--ouput", "x")
    assert found.exit_code == 2
    for text in ("--layer", "--layout", "--stps", "--steps", "--ouput"):
        assert text in found.stderr
    assert found.stderr.count("No such option") == 3
    assert run("checkpoint", "export", "a", "b", "--x", "--y").stderr.count("No such option") == 2
    assert run("verify", "--x").stderr.count("No such option") == 1


@pytest.mark.sampled(0)
def test_a_report_takes_its_run_by_from_too_and_more_steps_say_how_the_rate_moves(tmp_path):
    out = tmp_path / "run"
    assert run("train", "--steps", "2", "--warmup", "0", "--ranks", "threads", "--out", out, *TINY).exit_code == 0
    resumed = run("train", "--steps", "4", "--resume", "--ranks", "threads", "--out", out)
    line = "the cosine schedule now ends at step 4, not 2: the learning rate goes on at 0.00055, where it was 0.0001"
    assert line in resumed.stderr
    assert "schedule" not in run("train", "--steps", "4", "--resume", "--ranks", "threads", "--out", out).stderr
    assert run("report", "--from", out).stdout == run("report", out).stdout


@pytest.mark.sampled(0)
def test_work_that_takes_long_tells_its_progress(monkeypatch, capsys):
    monkeypatch.setattr("shardwright.train.progress._LINE_EVERY_S", 0.0)
    for what in ("evaluated of eval", ""):
        waited = StatusLog(what, 4, "samples")
        for done in (2, 4):
            waited.show(done)
    assert capsys.readouterr().err == "evaluated of eval: 2 of 4 samples, 0 s left\n"
    assert run("doctor").stderr.splitlines()[0] == "measuring matrix products ..."
