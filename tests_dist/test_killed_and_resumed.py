"""The promise that matters most: a run killed at any step goes on under another layout as if nothing had happened.

Losses are float32 means of the same numbers added in another order, and differ by some 1e-7; AdamW carries that along.
Over these steps 1e-4 is a hundred times what was seen, and a thousandth of what a wrong sample or mask would make.
"""

import os
import random
import shutil
import signal
import subprocess

import pytest
from tests_dist.command import COMMAND, ranks_in, said_by, start, temporary_folder, wait_for_step

from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics

STEPS = 30
TINY = {
    "settings": {"num_layers": 1, "width": 16, "num_heads": 4, "dropout": 0.1},
    "seq": 16,
    "batch": 5,
    "steps": STEPS,
}
FLAGS = ["--steps", str(STEPS)]


def losses_of(out):
    return [row["loss"] for row in read_metrics(out)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    train(TrainConfig(layout="single", **TINY), out, ranks="threads")
    return losses_of(out)


def test_a_run_killed_at_a_random_step_follows_the_uninterrupted_curve_under_any_layout(tmp_path, uninterrupted):
    out = tmp_path / "run"
    with temporary_folder() as folder:
        process = start(out, *FLAGS, folder=folder)
        wait_for_step(process, out, 4 + random.randrange(12))
        rank, killed = random.choice([*ranks_in(folder).items()])
        killed.kill()
        assert process.wait(timeout=30) == 1
    assert f"rank {rank} was killed by SIGKILL" in said_by(out)
    shutil.copytree(out, tmp_path / "copy")
    before = len(losses_of(out))
    assert before < STEPS, "it was killed too late to show anything"
    train(TrainConfig(layout="tp4", **TINY), out, resume=True)
    train(TrainConfig(layout="single", **TINY), tmp_path / "copy", resume=True, ranks="threads")
    for each in (out, tmp_path / "copy"):
        assert losses_of(each) == pytest.approx(uninterrupted, rel=1e-4)


def test_ctrl_c_saves_and_the_run_can_go_on(tmp_path, uninterrupted):
    out = tmp_path / "run"
    process = start(out, *FLAGS)
    wait_for_step(process, out, 2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
    done = len(losses_of(out))
    assert (out / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()
    train(TrainConfig(layout="dp2", **TINY), out, resume=True, ranks="threads")
    assert losses_of(out) == pytest.approx(uninterrupted, rel=1e-4)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    out = tmp_path / "run"
    process = start(out, "--steps", "100000")
    try:
        wait_for_step(process, out, 1)
        again = [*COMMAND, "--resume", "--out", str(out)]
        second = subprocess.run(again, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2, second.stderr
        assert "is in use" in second.stderr
    finally:
        process.terminate()  # killed together with all its ranks it would leave its files to nobody
        process.wait(timeout=30)
