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
from tests_dist.command import FLAGS, end_all, losses_of_one_device, within
from torch.distributed import HashStore

from shardwright.comm.backends import processes
from shardwright.train.progress import read_metrics

STEPS = 120  # every attempt runs one command, which ends by itself: enough not to end before a rank is killed
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3", "--monitor-interval",
            "0.1", "--nproc-per-node", "2", "--module", "shardwright.cli", "train"]  # fmt: skip


def kill_a_rank(process, rank):
    """Kills the process that torchrun gave this number, and says whether there was one."""
    killed = False
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if child.environ().get("RANK") == str(rank):
                child.kill()
                killed = True
        except psutil.Error:
            continue
    return killed


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
    command = [*TORCHRUN, "--layout", "dp2", "--save-every", "4", "--steps", str(STEPS), "--schedule", "constant",
               *FLAGS, "--out", str(out)]  # fmt: skip
    process = subprocess.Popen(command, start_new_session=True, stdout=said, stderr=said,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    family = [psutil.Process(process.pid)]
    try:
        for rank, step in ((1, 5), (0, 12)):
            assert within(120, lambda step=step: len(read_metrics(out)) >= step or process.poll() is not None)
            family += family[0].children(recursive=True)
            begun = (out / "run.json").stat().st_mtime_ns
            assert kill_a_rank(process, rank), (tmp_path / "said").read_text()[-3000:]
            # every attempt writes that file before its first step: only then is there a process to kill again
            assert within(120, lambda begun=begun: (out / "run.json").stat().st_mtime_ns != begun)
        assert process.wait(timeout=200) == 0, (tmp_path / "said").read_text()[-3000:]
    finally:
        process.kill()
        end_all(family)
        said.close()
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert json.loads((out / "run.json").read_text())["torchrun"]
    expected = losses_of_one_device(out, tmp_path / "whole", STEPS)
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
        # torchrun may end before its ranks do
        assert within(30, lambda: (out / "checkpoints" / f"step-{len(read_metrics(out)):08d}/manifest.json").exists())
    finally:
        process.kill()
        end_all(family)


def under_torchrun(num_ranks, out, said, *more):
    """A run under torchrun with one name for all starts, as a scheduler gives a job that it starts again."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-id", "a job", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", "localhost:0", "--nproc-per-node", str(num_ranks), "--module",
                "shardwright.cli", "train", "--schedule", "constant"]  # fmt: skip
    return subprocess.Popen(
        [*torchrun, *more, *FLAGS, "--out", str(out)], start_new_session=True, stdout=said, stderr=said,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.timeout(400)
def test_a_job_that_starts_again_with_fewer_or_more_ranks_fits_its_layout_to_them_and_goes_on(tmp_path):
    out, num_steps = tmp_path / "run", 24
    starts = {2: 6, 1: 12, 3: num_steps}
    texts = []
    for num_ranks, last in starts.items():
        path = tmp_path / f"said-{num_ranks}"
        with path.open("w") as said:
            process = under_torchrun(num_ranks, out, said, "--layout", "dp2 auto-fit", "--save-every", "3",
                                     "--steps", str(num_steps), "--stop-at", str(last))  # fmt: skip
            family = [psutil.Process(process.pid)]
            try:
                assert process.wait(timeout=120) == 0, path.read_text()[-3000:]
            finally:
                process.kill()
                end_all(family)
        texts.append(path.read_text())
    assert "auto-fit: dp2, for the 2 ranks that there are" in texts[0]
    assert "auto-fit: dp2 -> dp1, for the 1 ranks that there are" in texts[1]
    assert "auto-fit: dp1 -> dp3, for the 3 ranks that there are" in texts[2]
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [*range(1, num_steps + 1)]
    assert [row["loss"] for row in rows] == pytest.approx(losses_of_one_device(out, tmp_path / "whole"), rel=1e-4)
