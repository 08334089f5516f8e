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
from tests_dist.command import (
    COMMAND,
    losses_of,
    losses_of_one_device,
    ranks_in,
    said_by,
    start,
    temporary_folder,
    wait_for_step,
)

from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.run_file import options_of

ENDLESS = ["--steps", "100000", "--schedule", "constant"]  # however fast it is, it is under way when it is stopped
MORE = 10


def go_on(out, layout, **where):
    """Resumes a run for some more steps; the number of steps that it had made, and all losses after that."""
    before = len(losses_of(out))
    train(TrainConfig(**options_of(out) | {"layout": layout, "stop_at": before + MORE}), out, resume=True, **where)
    found = losses_of(out)
    assert len(found) == before + MORE
    return before, found


def test_a_run_killed_at_a_random_step_follows_the_uninterrupted_curve_under_any_layout(tmp_path):
    out = tmp_path / "run"
    with temporary_folder() as folder:
        process = start(out, *ENDLESS, folder=folder)
        wait_for_step(process, out, 4 + random.randrange(12))
        rank, killed = random.choice([*ranks_in(folder).items()])
        killed.kill()
        assert process.wait(timeout=30) == 1
    assert f"rank {rank} was killed by SIGKILL" in said_by(out)
    shutil.copytree(out, tmp_path / "copy")
    step, found = go_on(out, "tp4")
    _, copied = go_on(tmp_path / "copy", "single", ranks="threads")
    expected = losses_of_one_device(out, tmp_path / "whole")
    for each in (found, copied):
        assert each == pytest.approx(expected, rel=1e-4), f"rank {rank} was killed after step {step}"


def test_ctrl_c_saves_and_the_run_can_go_on(tmp_path):
    out = tmp_path / "run"
    process = start(out, *ENDLESS)
    wait_for_step(process, out, 2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
    done = len(losses_of(out))
    assert (out / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()
    _, found = go_on(out, "dp2", ranks="threads")
    assert found == pytest.approx(losses_of_one_device(out, tmp_path / "whole"), rel=1e-4)


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
