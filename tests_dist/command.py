"""The command as a person runs it: in a process of its own, with temporary files of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics
from shardwright.train.run_file import options_of

COMMAND = [sys.executable, "-m", "shardwright.cli", "train", "--layout", "dp2 tp2", "--save-every", "3"]
FLAGS = ["--set", "num_layers=1", "--set", "width=16", "--set", "num_heads=4", "--set", "dropout=0.1"]
FLAGS += ["--seq", "16", "--batch", "5"]
TINY = {"settings": {"num_layers": 1, "width": 16, "num_heads": 4, "dropout": 0.1}, "seq": 16, "batch": 5}
"""The options that these flags are; in ``run.json`` the settings are text."""


def start(out, *more, folder=None):
    """A training run into ``out``; what it says goes to ``said``, beside that folder."""
    out.mkdir()
    with (out.parent / "said").open("w") as said:
        return subprocess.Popen(
            [*COMMAND, *FLAGS, *more, "--out", str(out)],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=os.environ | ({"TMPDIR": str(folder)} if folder else {}),
        )


def said_by(out):
    return (out.parent / "said").read_text()


def wait_for_step(process, out, step):
    end = time.monotonic() + 60
    while len(read_metrics(out)) < step:
        assert process.poll() is None, said_by(out)
        assert time.monotonic() < end
        time.sleep(0.01)


def losses_of(out):
    return [row["loss"] for row in read_metrics(out)]


def losses_of_one_device(out, whole, num_steps=None):
    """The losses of the steps that the run in ``out`` has made, or of the first of them, on one device.

    That device trains into ``whole`` under the run's own options, so also under its schedule of learning rates.
    """
    options = options_of(out)
    assert options["settings"] == {name: str(value) for name, value in TINY["settings"].items()}
    assert (options["seq"], options["batch"]) == (TINY["seq"], TINY["batch"])
    num_steps = num_steps or len(read_metrics(out))
    options |= {"layout": "single", "save_every": 0, "stop_at": num_steps}
    train(TrainConfig(**options), whole, ranks="threads")
    losses = losses_of(whole)
    assert len(losses) == num_steps
    return losses


def family_of(process):
    """The launcher and all that it started: the ranks are children of its fork server."""
    launcher = psutil.Process(process.pid)
    return [launcher, *launcher.children(recursive=True)]


def fork_server_of(process):
    """The process from which the ranks of a run were forked."""
    (server,) = psutil.Process(process.pid).children()
    return server


def ranks_in(folder):
    """The processes of the ranks, by number, of the run that has its temporary files in ``folder``."""
    paths = sorted(Path(folder).glob("shardwright-run-*/*.pid"))
    return {int(path.stem): psutil.Process(int(path.read_text())) for path in paths}


@contextmanager
def temporary_folder():
    """A folder for the temporary files of a run, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder)


def left_in(folder):
    """What is still there; torch's own cache, which it keeps for the next process, is not ours."""
    return sorted(str(path) for path in folder.rglob("*") if not path.name.startswith("torchinductor_"))


def within(seconds, holds):
    """Whether ``holds()`` comes true in so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return bool(holds())


def end_all(processes):
    """Whatever a test that failed left running."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
