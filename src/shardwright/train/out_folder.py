"""The folder of a training run: that it can be written, and that one run at a time writes to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shardwright.comm.agreement import first_problem
from shardwright.comm.world import World
from shardwright.errors import PlanError
from shardwright.file_locks import is_same, lock
from shardwright.train.progress import METRICS_FILE

CHECKPOINTS = "checkpoints"
LOCK = ".lock"


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Makes an error of the system, in the block, a PlanError about the folder ``out``."""
    try:
        yield
    except OSError as failure:
        raise PlanError(
            f"cannot write to '{out}'",
            given=failure.strerror or str(failure),
            allowed="a folder that can be written, or can be created",
            fix="give another --out",
        ) from failure


@contextlib.contextmanager
def locked_folder(world: World, out: Path, *, new: bool = False) -> Iterator[IO[str] | None]:
    """Locks a run's folder on rank 0 during the block, and yields its lock file there, None on other ranks.

    The system releases a dead run's lock. Raises: PlanError, on every rank: another run has the lock, or, where this
    one is ``new``, has begun and ended there since the folder was found to be free.
    """
    everyone = world.everyone()
    with contextlib.ExitStack() as stack:
        problem, file = "", None
        if world.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((out / LOCK).open("a"))
            if not lock(file):
                problem = "another run writes to it"
            elif new and (out / METRICS_FILE).exists():
                problem = "another run has begun in it meanwhile"
        if found := first_problem(everyone, problem):
            raise in_use(out, found[1])
        yield file


def locked_again(out: Path, held: IO[str], files: contextlib.ExitStack, mode: str = "r+") -> IO[str] | None:
    """Returns the file that locks ``out`` for this run; None if another run has, after ``out`` was removed.

    It is ``held``, unless another file has its name: then that one is locked, and ``files`` closes it.
    """
    try:
        if is_same(held, out / LOCK):
            return held
        file = files.enter_context((out / LOCK).open(mode))
    except OSError:
        return held
    return file if lock(file) else None


def in_use(out: Path, why: str = "another run writes to it") -> PlanError:
    """Returns the error of a run in whose folder another run writes."""
    return PlanError(
        f"'{out}' is in use",
        given=why,
        allowed="one run for each folder",
        fix="give another --out, or wait until the other run has ended",
    )
