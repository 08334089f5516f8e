"""Locks the folder of a training run so that only one run writes to it, and checks that it can be written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shardwright.checkpoint.locking import one_save
from shardwright.checkpoint.writing import clear
from shardwright.comm.agreement import first_problem
from shardwright.comm.world import World
from shardwright.errors import PlanError
from shardwright.file_locks import is_same, lock
from shardwright.train.progress import METRICS_FILE

CHECKPOINTS = "checkpoints"
LOCK = ".lock"


@contextlib.contextmanager
def writing(out: Path) -> Iterator[None]:
    """Returns a context that turns an OSError of its block into a PlanError about the folder ``out``."""
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
    """Returns a context that locks a run's folder on rank 0, and yields the open lock file there, None on other ranks.

    All ranks call it, and it sends two short all-gathers. A missing folder is created. The operating system releases
    the lock of a process that has died. ``new`` says that this run has found the folder free of runs and is to begin
    there.

    Raises: PlanError, on every rank: the lock file cannot be opened; another run has the lock; or, with ``new``, there
        are metrics of a run that has begun in the folder meanwhile.
    """
    everyone = world.everyone()
    with contextlib.ExitStack() as stack:
        problem, file = "", None
        if world.rank == 0:
            try:
                file = stack.enter_context(_locked_file(out, new=new))
            except PlanError as failure:  # the other ranks would wait for this one
                problem = str(failure)
        if first_failure := first_problem(everyone, problem):
            raise PlanError(first_failure[1])
        yield file


def _locked_file(out: Path, *, new: bool) -> IO[str]:
    """Returns the lock file of a run's folder, opened and locked; raises PlanError if that is not possible."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        try:
            file = (out / LOCK).open("a")
        except IsADirectoryError as failure:
            raise PlanError(
                f"'{out / LOCK}' is no regular file",
                given="a folder",
                allowed="the file that a run locks, or none",
                fix="remove it if you know what it is, or give another --out",
            ) from failure
    problem = ""
    if not lock(file):
        problem = "another run writes to it"
    elif new and (out / METRICS_FILE).exists():
        problem = "another run has begun in it meanwhile"
    if problem:
        file.close()
        raise in_use(out, problem)
    return file


def remove_remains(out: Path) -> None:
    """Removes what ranks that were killed while they saved have left in a run's folder, unless a run is in it."""
    root = out / CHECKPOINTS
    with contextlib.suppress(OSError), (out / LOCK).open("r+") as file:
        if lock(file) and any(root.glob(".tmp-*")):
            with one_save(root, 0.0):
                clear(root)


def locked_again(out: Path, held: IO[str], files: contextlib.ExitStack, mode: str = "r+") -> IO[str] | None:
    """Returns the lock file that this run holds in ``out``, after the folder may have been removed and made again.

    It is ``held``, the lock file so far, if that is still the file in ``out`` or if no file there can be opened.
    Otherwise the new file, opened in ``mode``, is locked and returned, and is closed when ``files`` is. The result is
    None if another run has locked the new file.
    """
    try:
        if is_same(held, out / LOCK):
            return held
        file = files.enter_context((out / LOCK).open(mode))
    except OSError:
        return held
    return file if lock(file) else None


class OtherRunError(PlanError):
    """Raised if another run writes to the folder of this run, so that nothing more may be written to it."""


def in_use(out: Path, why: str = "another run writes to it") -> OtherRunError:
    """Returns the error to raise for the folder ``out`` of a run if another run writes to it; ``why`` is the reason."""
    return OtherRunError(
        f"'{out}' is in use",
        given=why,
        allowed="one run for each folder",
        fix="give another --out, or wait until the other run has ended",
    )
