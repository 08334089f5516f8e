"""A run that ``torchrun --max-restarts`` starts again after a rank was killed goes on from its newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from tests_dist.command import FLAGS, end_all, within
from torch.distributed import HashStore

from shardwright.comm.backends import processes
from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics

STEPS = 30
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--monitor-interval",
            "0.1", "--nproc-per-node", "2", "--module", "shardwright.cli", "train"]  # fmt: skip
TINY = {"settings": {"num_layers": 1, "width": 16, "num_heads": 4, "dropout": 0.1}, "seq": 16, "batch": 5}


def kill_a_rank(process, rank):
    """Kills the process that torchrun gave this number."""
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if child.environ().get("RANK") == str(rank):
                child.kill()
        except psutil.Error:
            continue


def test_each_attempt_has_keys_of_its_own_in_a_store_that_keeps_those_of_the_one_before(monkeypatch):
    kept = HashStore()
    monkeypatch.setattr(processes, "_connected", lambda *_: kept)

    def begin(rank, size, late_s):
        time.sleep(late_s)
        store = processes._new_store(rank, size, timedelta(seconds=20))
        stale = store.check([f"{rank}"])
        store.set(f"{rank}", "here")
        store.wait([str(other) for other in range(size)], timedelta(seconds=20))
        return stale

    for size, late_s in ((3, [0, 0.05, 0]), (3, [0, 0.2, 0.1]), (2, [0.2, 0]), (1, [0])):
        with ThreadPoolExecutor(size) as pool:
            found = pool.map(begin, range(size), [size] * size, late_s)
            assert list(found) == [False] * size


@pytest.mark.timeout(400)
def test_every_attempt_goes_on_from_the_newest_checkpoint(tmp_path):
    out, said = tmp_path / "run", (tmp_path / "said").open("w+")
    command = [*TORCHRUN, "--layout", "dp2", "--save-every", "2", "--steps", str(STEPS), *FLAGS, "--out", str(out)]
    process = subprocess.Popen(command, start_new_session=True, stdout=said, stderr=said,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    family = [psutil.Process(process.pid)]
    try:
        for rank, step in ((1, 4), (0, 12)):
            assert within(120, lambda step=step: len(read_metrics(out)) >= step or process.poll() is not None)
            family += family[0].children(recursive=True)
            kill_a_rank(process, rank)
        assert process.wait(timeout=200) == 0, (tmp_path / "said").read_text()[-3000:]
    finally:
        process.kill()
        end_all(family)
        said.close()
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert json.loads((out / "run.json").read_text())["torchrun"]
    train(TrainConfig(layout="single", steps=STEPS, **TINY), tmp_path / "whole", ranks="threads")
    expected = [row["loss"] for row in read_metrics(tmp_path / "whole")]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-4)


def test_torchrun_that_is_told_to_stop_lets_the_ranks_save(tmp_path):
    out = tmp_path / "run"
    command = [*TORCHRUN, "--layout", "dp2", "--steps", "100000", *FLAGS, "--out", str(out)]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    family = [psutil.Process(process.pid)]
    try:
        assert within(120, lambda: len(read_metrics(out)) >= 3 or process.poll() is not None)
        family += family[0].children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=40)
        time.sleep(0.1)
        assert (out / "checkpoints" / f"step-{len(read_metrics(out)):08d}" / "manifest.json").exists()
    finally:
        process.kill()
        end_all(family)
