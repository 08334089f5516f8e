"""The folder of a run that an early commit wrote: today's code loads it to the last bit, and goes on with it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from checkpoint.runs import held, whole
from shardwright.checkpoint.loading import load
from shardwright.cli.main import app
from shardwright.comm.launch import launch
from shardwright.initial_values import without_values
from shardwright.layout import Layout
from shardwright.parallelize import parallelize
from shardwright.plan.plan import Job
from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics
from shardwright.train.run_file import read_run

EARLY = Path(__file__).parent / "early_run"
EXPECTED = json.loads((EARLY / "expected.json").read_text())


@pytest.fixture
def early(tmp_path, monkeypatch):
    """A copy of the run's folder; its text is found from the current folder, as when the run was started."""
    shutil.copytree(EARLY, tmp_path / "early")
    monkeypatch.chdir(tmp_path / "early")
    return Path("run")


def built():
    with without_values():
        model, loss, _ = TrainConfig(**read_run(EARLY / "run")).build()
    return Job(model, loss)


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def loaded(world, line):
    job = built()
    run = parallelize(job.model, line, world, loss=job.loss, seed=99)
    optimizer = run.optimizer(torch.optim.AdamW, lr=77.0)  # the checkpoint's rate and seed replace these
    load(EARLY / "run" / "checkpoints", run, optimizer)
    return held(run, optimizer, []), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("line", ["single", "pp2/1f1b mb2 tp2", "dp2/zero3 tp2x2/2d"])
def test_a_checkpoint_of_an_early_commit_loads_to_the_bits_that_the_commit_itself_loads(line):
    ranks = launch(loaded, Layout.parse(line), line, ranks="threads")
    tensors = whole(line, [each for each, _ in ranks], built())
    parameters = {name: digest(tensor) for name, tensor in tensors.items() if not name.startswith("optimizer/")}
    assert parameters == EXPECTED["parameters"]
    for kind, expected in EXPECTED["optimizer"].items():
        digests = [digest(tensors[f"optimizer/{name}/{kind}"]) for name in sorted(parameters)]
        assert hashlib.sha256("".join(digests).encode()).hexdigest() == expected, kind
    rate = read_metrics(EARLY / "run")[-1]["lr"]
    for each, lr in ranks:
        assert (each.num_steps, each.seed, lr) == (EXPECTED["num_steps"], 0, rate)
        assert {state["step"][0] for state in each.scalars.values()} == {4.0}


def test_an_early_checkpoint_is_exported_to_the_bits_that_its_own_commit_exports(tmp_path):
    found = CliRunner().invoke(app, ["checkpoint", "export", str(EARLY / "run"), str(tmp_path / "model.safetensors")])
    assert found.exit_code == 0, found.output
    exported = {name: digest(tensor) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert exported == EXPECTED["parameters"]


@pytest.mark.sampled(0)
def test_the_command_resumes_an_early_run_from_its_folder_alone(early):
    found = CliRunner().invoke(app, ["train", "--resume", "--out", str(early), "--ranks", "threads", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["layout"] == "pp2/1f1b mb2 tp2"
    assert [row["loss"] for row in read_metrics(early)] == pytest.approx(EXPECTED["losses"], rel=1e-5)
    assert json.loads((early / "run.json").read_text())["data"].keys() == {"text.txt"}  # compared from now on


@pytest.mark.parametrize("line", ["single", "dp2/zero3 tp2"])
def test_an_early_run_goes_on_under_another_layout_with_the_losses_of_its_own_commit(early, line):
    train(TrainConfig(**{**read_run(early), "layout": line}), early, resume=True, ranks="threads")
    assert [row["loss"] for row in read_metrics(early)] == pytest.approx(EXPECTED["losses"], rel=1e-5)
