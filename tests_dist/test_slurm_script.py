"""The sbatch script runs to its end, and over a limit, with programs that do what Slurm's do on one node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest
from tests_dist.command import FLAGS, end_all, losses_of_one_device, within

from shardwright.cluster.job import ClusterJob
from shardwright.cluster.slurm import sbatch_script
from shardwright.nodes import Nodes
from shardwright.train.progress import read_metrics

STEPS = 200  # both starts run one script, which ends by itself: enough not to end before it is stopped

SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[sys.argv.index("bash"):]
places = [{{"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}} for n in range(2)]
tasks = [subprocess.Popen(words, env=os.environ | place) for place in places]
open("tasks", "w").write(" ".join(str(task.pid) for task in tasks))
sys.exit(max(task.wait() for task in tasks))
"""
SCANCEL = """#!/bin/sh
[ "$1" = --signal=TERM ] && kill -TERM $(cat tasks)
"""
SCONTROL = """#!/bin/sh
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> requeued; fi
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Starts the script of a job, as Slurm would on one node of two ranks."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": SRUN.format(python=sys.executable), "scancel": SCANCEL, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    place = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "here"}
    environment = os.environ | place | {"PATH": f"{programs}:{os.environ['PATH']}"}
    options = (*FLAGS, "--steps", str(STEPS), "--schedule", "constant", "--save-every", "5")
    job = ClusterJob(layout="dp2", nodes=Nodes(1, 2), out="run", options=options, restarts=1)
    (tmp_path / "job.sh").write_text(sbatch_script(job))
    family = []

    def start():
        with (tmp_path / "said").open("a") as said:
            process = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environment, stdout=said, stderr=said,
                                       start_new_session=True)  # fmt: skip
        family.append(psutil.Process(process.pid))
        return process

    yield start
    for process in list(family):
        family += process.children(recursive=True) if process.is_running() else []
    end_all(family)


def tasks_in(folder):
    return [psutil.Process(int(word)) for word in (folder / "tasks").read_text().split()]


def check_like_one_device(folder):
    rows = read_metrics(folder / "run")
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    expected = losses_of_one_device(folder / "run", folder / "whole")
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-4)


@pytest.mark.timeout(300)
def test_a_signal_before_the_limit_saves_and_queues_the_job_again_which_then_goes_on(slurm, tmp_path):
    first = slurm()
    assert within(120, lambda: len(read_metrics(tmp_path / "run")) >= 3 or first.poll() is not None)
    first.send_signal(signal.SIGUSR1)  # to the shell alone, as B:USR1 asks
    code = first.wait(timeout=60)
    said = (tmp_path / "said").read_text()
    assert code != 0, said
    done = len(read_metrics(tmp_path / "run"))
    assert (tmp_path / "requeued").read_text().startswith("requeue "), said
    assert (tmp_path / "run" / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists(), said
    assert slurm().wait(timeout=200) == 0, (tmp_path / "said").read_text()[-3000:]
    check_like_one_device(tmp_path)


@pytest.mark.timeout(300)
def test_ranks_of_which_one_is_killed_are_started_again_within_the_job(slurm, tmp_path):
    process = slurm()
    assert within(120, lambda: len(read_metrics(tmp_path / "run")) >= 7 or process.poll() is not None)
    tasks_in(tmp_path)[1].kill()
    assert process.wait(timeout=200) == 0, (tmp_path / "said").read_text()[-3000:]
    assert "start 1 of 1 more, from the newest checkpoint" in (tmp_path / "said").read_text()
    assert not (tmp_path / "requeued").exists()
    check_like_one_device(tmp_path)
