"""Writes a checkpoint: each rank writes its files into a temporary folder, which rank 0 renames at the end.

The files may be written by threads while training goes on. Collectives belong to the main threads, so these threads
synchronize through the file system: each writes a small JSON file, called its note, once its rank's files are complete,
and rank 0's thread waits for the notes of all::

    rank 0   copy | steps ...    its thread: files, note | notes of all: manifest, rename, remove older ones
    rank 1   copy | steps ...    its thread: files, note

A rank that cannot write removes the folder of notes, which ends the threads of the other ranks too.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from shardwright.checkpoint.locking import MOST_WAIT_S, one_save
from shardwright.checkpoint.manifest import MANIFEST, Manifest, steps_in
from shardwright.checkpoint.survivors import NOTES, Meeting, SavedDecision, wait_until
from shardwright.comm.agreement import gather_json
from shardwright.comm.axis import Axis
from shardwright.comm.pending import Pending
from shardwright.comm.world import World
from shardwright.errors import CheckpointError

_GONE = "its temporary folder was removed"


def write_checkpoint(
    world: World, everyone: Axis, final: Path, token: str, write: Callable[[Path], Any],
    merge: Callable[[list[Any]], Manifest], *, keep: int = 0, snapshot: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Writes the files of all ranks as the checkpoint folder ``final``; every rank calls it with rank 0's ``token``.

    ``write(folder)`` writes this rank's files into a temporary folder, which ``token`` names, and returns a description
    of them as JSON values; on rank 0 ``merge`` makes the manifest from all ranks' descriptions. ``keep``, if not 0, is
    how many checkpoints stay in the folder. With ``snapshot``, a function that copies the state that ``write`` needs,
    this call returns after the copy: a thread writes the files, and ``world.wait_pending`` waits for it.

    Traffic: all-gathers of the descriptions and of error texts.
    Raises: CheckpointError, on every rank, if any could not write; with ``snapshot``, ``world.wait_pending`` raises it
        for what fails after the copy.
    """
    first, partial, locked = everyone.index == 0, _partial(final, token), ExitStack()

    def prepare() -> None:
        if first:
            locked.enter_context(one_save(final.parent))
            clear(final.parent, token)
            (partial if snapshot is None else partial / NOTES).mkdir(parents=True)
        if snapshot is not None:
            snapshot()

    def finish(wrote: list[Any]) -> None:
        _complete(partial, final, merge(wrote), token, keep)

    def write_beside() -> None:
        with locked:
            _leave_note(partial, everyone.index, write)
            if first:
                finish(_notes(partial, range(everyone.size)))

    with ExitStack() as stack:
        stack.push(locked)
        run_on_all(everyone, prepare, final, partial)
        if snapshot is not None:
            stack.pop_all()
            writing, world.writers[:] = _in_thread(write_beside)
            world.pending.append(Pending(lambda: run_on_all(everyone, writing.result, final, partial)))
            return
        wrote = run_on_all(everyone, lambda: write(partial), final, partial)
        run_on_all(everyone, (lambda: finish(wrote)) if first else None, final, partial)


def _leave_note(partial: Path, rank: int, write: Callable[[Path], Any]) -> None:
    """Writes a rank's files into a temporary folder, then a note that it has; on an error removes all ranks' notes."""
    notes = partial / NOTES
    try:
        text = json.dumps(write(partial))
        try:
            (notes / f".{rank}").write_text(text)
            (notes / f".{rank}").rename(notes / f"{rank}.json")
        except FileNotFoundError as failure:
            raise OSError(errno.ENOENT, _GONE) from failure
    except BaseException:  # a stop signal too leaves no note
        aside = partial / f".{NOTES}-{rank}"
        with suppress(OSError):  # renamed first: while notes are removed one by one, another rank's could come
            notes.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _notes(partial: Path, ranks: Sequence[int]) -> list[Any]:
    """Waits for the notes of ``ranks`` while any of them writes; returns the notes' contents, and removes the notes."""
    size = -1
    while not wait_until(lambda: bool(_noted(partial, ranks)) or not (partial / NOTES).is_dir(), MOST_WAIT_S):
        before, size = size, sum(file.stat().st_size for file in partial.iterdir())
        if size == before:
            raise OSError(errno.ETIMEDOUT, f"some rank has written nothing for {MOST_WAIT_S:g} s")
    if not (names := _noted(partial, ranks)):
        raise OSError(errno.ENOENT, _GONE)
    notes = [json.loads((partial / NOTES / name).read_text()) for name in names]
    shutil.rmtree(partial / NOTES)
    return notes


def _noted(partial: Path, ranks: Sequence[int]) -> list[str]:
    """Returns the file names of the notes of ``ranks``; [] as long as one note is missing."""
    names = [f"{rank}.json" for rank in ranks]
    return names if all((partial / NOTES / name).exists() for name in names) else []


def prepare_alone(final: Path, token: str) -> None:
    """Creates the temporary folder of a checkpoint, in which each rank that is left writes its part.

    The checkpoint is to be renamed to ``final``; ``token`` is the random part of the folder's name. Parts are written
    by :func:`write_alone`.
    """
    (_partial(final, token) / NOTES).mkdir(parents=True, exist_ok=True)


def _partial(final: Path, token: str) -> Path:
    """Returns the temporary folder of a checkpoint; ``token`` is the random part of its name."""
    return final.with_name(f".tmp-{final.name}-{token}")


def write_alone(
    final: Path, meeting: Meeting, decision: SavedDecision, write: Callable[[Path], Any],
    merge: Callable[[list[Any]], Manifest], *, keep: int, most_s: float,
) -> bool:  # fmt: skip
    """Writes a checkpoint without collectives, after a failure; returns True on the rank that completes it.

    The ranks of ``decision``, which they have agreed on in ``meeting``, call it after :func:`prepare_alone`. The last
    rank to write its part completes the checkpoint, for which the others wait, at most ``most_s`` seconds. The other
    arguments are those of :func:`write_checkpoint`.

    Raises: OSError: this rank could not write its part, or another one did not in time.
    """
    world, token = meeting.survivors.run.world, meeting.survivors.token
    partial = _partial(final, token)
    try:
        _leave_note(partial, world.rank, write)
        if chosen := bool(_noted(partial, decision.ranks)) and meeting.is_first("completed"):
            with one_save(final.parent, most_s):
                clear(final.parent, token)
                manifest = merge(_notes(partial, decision.ranks))
                Manifest.from_json(manifest.to_json(), final)  # raises unless all elements of each tensor are there
                _complete(partial, final, manifest, token, keep)
    except BaseException:  # a stop signal too
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if not (wait_until(lambda: final.exists() or not partial.exists(), most_s) and final.exists()):
        raise OSError(errno.ENOENT, "another rank could not write its part")
    return chosen


def _in_thread(work: Callable[[], None]) -> tuple[Future[None], list[threading.Thread]]:
    """Runs ``work`` in a daemon thread; returns its result as a future, and the thread.

    The thread does not keep the process alive: without the other ranks it might never end.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as failure:  # raised in the thread that waits
            future.set_exception(failure)

    thread = threading.Thread(target=run, name="checkpoint", daemon=True)
    thread.start()
    return future, [thread]


def clear(root: Path, token: str = "") -> None:
    """Removes the remains of killed saves from the folder ``root``: temporary folders, and replaced checkpoints.

    The caller holds the lock of ``root``. ``token``, if any, is the random text in the names of the caller's temporary
    folders, which stay.
    """
    for stale in root.glob(".tmp-*"):
        if not (token and stale.name.endswith(token)):
            shutil.rmtree(stale, ignore_errors=True)
    for old in root.glob("step-*.old"):
        if (old.with_suffix("") / MANIFEST).is_file():
            _discard(old, token)


def publish(partial: Path, final: Path, manifest: Manifest, token: str) -> None:
    """Completes a checkpoint: writes the manifest into ``partial`` and renames this folder to ``final``.

    All other files in ``partial`` are complete. A checkpoint that had the name before is replaced. ``token`` is the
    random text in the names of the save's temporary folders.
    """
    (partial / MANIFEST).write_text(manifest.to_json())
    flush(partial / MANIFEST)
    flush(partial)
    old = final.with_name(f"{final.name}.old")
    if final.exists():  # the step is saved again: the old checkpoint stays readable until the new one has its name
        _discard(old, token)
        final.rename(old)
    partial.rename(final)
    flush(final.parent)
    _discard(old, token)


def _complete(partial: Path, final: Path, manifest: Manifest, token: str, keep: int) -> None:
    """Makes a checkpoint of a temporary folder with the files of all ranks, and removes older ones beyond ``keep``."""
    publish(partial, final, manifest, token)
    others = [step for step in steps_in(final.parent) if step.name != final.name]
    for step in others[: max(len(others) - keep + 1, 0)] if keep else ():
        _discard(step, token)


def _discard(step: Path, token: str) -> None:
    """Removes a checkpoint if it exists; it is renamed first, so that a half removed one is never read."""
    if step.exists():
        aside = step.with_name(f".tmp-{step.name}-{token}-old")
        step.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def run_on_all(everyone: Axis, do: Callable[[], Any] | None, final: Path, partial: Path) -> list[Any]:
    """Runs ``do``, this rank's part of a save, and returns the results of all ranks; every rank calls it.

    A rank that has nothing to do passes None. Errors name the checkpoint ``final``. Results are JSON values.

    Traffic: two all-gathers, of the lengths of texts and of the texts, which have the results.
    Raises: CheckpointError, on every rank, if ``do`` failed on any; the folder ``partial`` is then removed.
    """
    result: Any = None
    problem, on_disk = "", True
    try:
        result = do() if do is not None else None
    except (OSError, SafetensorError) as failure:
        problem = str(failure) or repr(failure)
    except Exception as failure:  # a failed allocation is a RuntimeError; the other ranks wait for any
        problem, on_disk = f"{type(failure).__name__}: {failure}", False
    results = gather_json(everyone, [problem, on_disk, result])
    failed = [(rank, *told) for rank, (*told, _) in enumerate(results) if told[0]]
    if failed:
        if everyone.index == 0:
            shutil.rmtree(partial, ignore_errors=True)
        # prefers a rank's own error: after one, that rank removes the folder, which fails the others with _GONE
        rank, text, on_disk = min(failed, key=lambda report: _GONE in report[1])
        allowed, fix = (
            "host memory for a copy of a rank's part of the state",
            "save with wait=True: it copies less at once",
        )
        if on_disk:
            allowed = "a folder that can be written, with room for the whole state"
            fix = f"free space at '{final.parent}', or save to another folder"
        raise CheckpointError(
            f"the checkpoint {final.name} could not be written; the last complete one is untouched",
            given=f"rank {rank}: {text}",
            allowed=allowed,
            fix=fix,
        )
    return [value for *_, value in results]


def flush(path: Path) -> None:
    """Waits until the content of a file, or the list of files of a folder, is on the disk (fsync).

    For a folder it does nothing on systems that cannot open folders.
    """
    if path.is_dir() and os.name != "posix":
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
