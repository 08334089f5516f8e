"""A real Slurm of two nodes, which are namespaces: the job saves when it is signalled, queues itself again, goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest
from benchmarks.nodes import ENVIRONMENT, nodes, why_not
from tests_dist.command import FLAGS, losses_of_one_device, temporary_folder, within

from shardwright.train.progress import read_metrics

SBIN = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [name for name in ("slurmctld", "slurmd", "munged", "srun") if shutil.which(name, path=SBIN) is None]
WHY_NOT = f"not installed: {', '.join(MISSING)}" if MISSING else why_not()
STEPS = 400  # both starts run one script, which ends by itself: enough not to end before it is signalled

pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

CONF = """ClusterName=t
SlurmctldHost=n0(10.77.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=30
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=2
NodeName=n[0-1] NodeAddr=10.77.0.[1-2] NodeHostname=n[0-1] CPUs=4
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def serving(*words):
    """A server, for as long as the block runs."""
    process = subprocess.Popen(words, env=os.environ | {"PATH": SBIN}, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def slurm(monkeypatch):
    """A function that runs a command of Slurm on the first node and returns what it says; and a folder."""
    with temporary_folder() as folder, ExitStack() as stack:
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        for name in ("state", "spool.n0", "spool.n1"):
            (folder / name).mkdir()
        folder.chmod(0o755)
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        monkeypatch.chdir(folder)
        made = stack.enter_context(nodes(2, names=folder / "hosts"))
        files = [f"--{each}-file={folder}/munged.{each}" for each in ("pid", "log", "seed")]
        munged = ["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={folder}/munge", *files]
        stack.enter_context(serving(*munged))
        assert within(10, (folder / "munge").exists)
        stack.enter_context(serving(*made[0].inside("slurmctld", "-D")))
        for node in made:
            stack.enter_context(serving(*node.inside("slurmd", "-D", "-N", f"n{node.number}")))

        def run(*words):
            done = subprocess.run(made[0].inside(*words), capture_output=True, text=True, check=False,
                                  env=os.environ | ENVIRONMENT | {"PATH": SBIN})  # fmt: skip
            return done.stdout + done.stderr

        assert within(30, lambda: "idle n[0-1]" in run("sinfo", "--noheader", "--format=%T %N")), run("sinfo")
        yield run, folder
        run("scancel", "--user=root")
        within(20, lambda: not run("squeue", "--noheader").strip())


def test_a_job_of_slurm_saves_at_a_signal_is_queued_again_and_ends_as_on_one_device(slurm):
    run, folder = slurm
    options = [*FLAGS, "--steps", str(STEPS), "--schedule", "constant", "--save-every", "40"]
    launch = [sys.executable, "-m", "shardwright.cli", "launch", "--slurm", "dp2 tp2", "--nodes", "2x2"]
    said = run(*launch, "--time", "30:00", "--name", "real", "--out", f"{folder}/run", "--", *options)
    assert "Submitted batch job" in said
    job = said.split()[-1]

    def log():
        parts = [said, run("scontrol", "show", "job", job)]
        for path in (folder / f"real-{job}.log", *sorted(folder.glob("slurm*.log"))):
            parts += [f"--- {path.name}", path.read_text()[-5000:] if path.exists() else ""]
        return "\n".join(parts)

    assert within(120, lambda: len(read_metrics(folder / "run")) >= 3), log()
    run("scancel", "--signal=USR1", "--batch", job)  # as Slurm does before the limit
    assert within(60, lambda: " PD " in run("squeue", "--noheader", f"--job={job}")), log()
    done = len(read_metrics(folder / "run"))
    assert 3 <= done < STEPS
    assert (folder / "run" / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists(), log()
    # a job that is queued again waits for cred_expire seconds: until then a node refuses what it has just ended
    assert within(120, lambda: " R " in run("squeue", "--noheader", f"--job={job}")), log()
    assert within(300, lambda: "COMPLETED" in run("scontrol", "show", "job", job)), log()
    rows = read_metrics(folder / "run")
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    expected = losses_of_one_device(folder / "run", folder / "whole")
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("dealt", ["block", "cyclic"])
def test_tasks_of_srun_without_a_script_are_equal_to_one_device(slurm, dealt):
    run, folder = slurm
    out, first = folder / dealt, ["env", "MASTER_ADDR=10.77.0.1", "MASTER_PORT=29500"]
    tasks = ["srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", f"--distribution={dealt}"]
    train = [sys.executable, "-m", "shardwright.cli", "train", "--layout", "dp2 tp2", "--steps", "4"]
    said = run(*first, *tasks, *train, "--out", str(out), *FLAGS)
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4], said
    expected = losses_of_one_device(out, folder / f"whole-{dealt}")
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-4)
