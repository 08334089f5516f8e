"""Saves that end before they are done: at every call to the system, and where the system refuses to write more.

Run as a script, which has one thread and may fork: each attempt is a child that dies by itself. It prints what was
found after each as JSON. Only the first rank renames and removes, so one rank stands for all.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.checkpoint import saving
from shardwright.checkpoint.loading import load
from shardwright.checkpoint.manifest import find
from shardwright.checkpoint.saving import save
from shardwright.comm.launch import launch
from shardwright.errors import CheckpointError
from shardwright.initial_values import without_values
from shardwright.parallelize import parallelize

torch.set_num_threads(1)
KILLED, REFUSED = 9, 7
CALLS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "open", "shutil.rmtree")


def state(world, value: float, num_steps: int):
    """A run whose every element is ``value``."""
    with without_values():  # ranks on threads share the generator of random numbers
        plain = nn.Linear(40, 30)
    run = parallelize(plain, "single" if world.size == 1 else f"dp{world.size}", world)
    optimizer = run.optimizer(torch.optim.AdamW)
    for parameter in run.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in run.parameters.values():
        parameter.data.fill_(value)
        optimizer.state[parameter]["exp_avg"].fill_(value)
    run.num_steps = num_steps
    return run, optimizer


def write(folder: Path, value: float, num_steps: int, *, keep: int = 0, ranks: int = 1, wait: bool = True) -> None:
    def work(world):
        save(folder, *state(world, value, num_steps), keep=keep, wait=wait)

    launch(work, ranks, ranks="threads")


def value_in(folder: Path) -> tuple[float, int]:
    """What the newest checkpoint holds: one value everywhere, or it is a mix."""

    def work(world):
        run, optimizer = state(world, 0.5, 0)
        load(folder, run, optimizer)
        found = {float(x) for p in run.parameters.values() for x in p.detach().flatten()}
        found |= {float(x) for p in run.parameters.values() for x in optimizer.state[p]["exp_avg"].flatten()}
        (value,) = found
        return value, run.num_steps

    return launch(work, 1, ranks="threads")[0]


def in_a_child(work) -> int:
    """The exit code of a fork that does it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as failure:
            print(repr(failure), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(moment: int) -> None:
    """From now on the process ends at so many calls to the system; a file may then be half written."""
    count = 0

    def passes() -> None:
        nonlocal count
        count += 1
        if count > moment:
            os._exit(KILLED)

    def heard(event: str, _: Any) -> None:
        if event in CALLS:
            passes()

    def half(tensors, path):
        plain(tensors, path)
        with open(path, "r+b") as file:
            file.truncate(Path(path).stat().st_size // 2)
        passes()
        plain(tensors, path)
        passes()

    def flushed(handle):
        passes()
        sync(handle)
        passes()

    plain, sync = saving.save_file, os.fsync
    saving.save_file, os.fsync = half, flushed
    sys.addaudithook(heard)


SCENES = {
    # what is there before, what is saved, how many are kept, whether the save is waited for
    "a new step": ([(1.0, 1)], (2.0, 2), 0, True),
    "the same step again": ([(0.0, 1), (1.0, 2)], (2.0, 2), 0, True),
    "the one that is kept": ([(0.0, 1), (1.0, 2)], (2.0, 3), 1, True),
    "the one that is kept, beside training": ([(0.0, 1), (1.0, 2)], (2.0, 3), 1, False),
}


def moments(name: str, folder: Path) -> list[tuple[int, float, int]]:
    """Kills a save at every moment; the exit code, the value found after it, what the next save left over."""
    before, (value, step), keep, wait = SCENES[name]
    template = folder / "template"
    for old_value, old_step in before:
        write(template, old_value, old_step)
    found = []
    for moment in range(400):
        here = folder / str(moment)
        shutil.copytree(template, here)

        def attempt(here: Path = here, moment: int = moment) -> None:
            die_at(moment)
            write(here, value, step, keep=keep, wait=wait)

        code = in_a_child(attempt)
        left = value_in(here)[0]
        write(here, 3.0, step, keep=1)
        found.append((code, left, len(list(here.iterdir()))))
        shutil.rmtree(here)
        if code != KILLED:
            break
    return found


def limited(folder: Path, num_ranks: int) -> dict[str, Any]:
    """A save where no file may grow beyond 2000 bytes, as on a full disk."""
    write(folder, 1.0, 1)
    before = {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

        def work(world):
            try:
                save(folder, *state(world, 2.0, 2))
            except CheckpointError as refusal:
                return str(refusal)
            return ""

        told = set(launch(work, num_ranks, ranks="threads"))
        if len(told) == 1 and "could not be written" in told.pop():
            os._exit(REFUSED)

    code = in_a_child(attempt)
    after = {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    names = sorted(path.name for path in folder.iterdir())
    return {"code": code, "same": before == after, "names": names, "newest": find(folder).name}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {name: moments(name, Path(folder) / f"scene {n}") for n, name in enumerate(SCENES)}
        full = [limited(Path(folder) / f"limited {n}", n) for n in (1, 2)]
    print(json.dumps({"moments": found, "limited": full}))


if __name__ == "__main__":
    main()
