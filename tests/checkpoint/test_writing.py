"""Checkpoints that are written beside training: what they hold, when they are complete, how errors are told."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from contextlib import nullcontext, suppress

import pytest
import torch

from checkpoint.runs import go, held, loaded, start, whole
from checkpoint.test_trust import bare
from shardwright.checkpoint import manifest, saving, writing
from shardwright.checkpoint.loading import load
from shardwright.checkpoint.manifest import find, steps_in
from shardwright.checkpoint.saving import save
from shardwright.comm.launch import launch
from shardwright.errors import CheckpointError, RankFailedError
from shardwright.layout import Layout


@pytest.fixture
def held_up(monkeypatch):
    """The event that all writing waits for, from its beginning."""
    event, plain = threading.Event(), shutil.disk_usage

    def late(path):
        assert ".tmp-step" not in str(path) or event.wait(20)
        return plain(path)

    monkeypatch.setattr(shutil, "disk_usage", late)
    return event


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("line", ["single", "dp2/zero3 tp2", "pp2/1f1b mb2 dp2/zero1", "dp2/zero3/offload:disk"])
def test_training_goes_on_while_the_state_as_it_was_is_written(tmp_path, held_up, line):
    def work(world):
        run, optimizer = start(world, line)
        before = go(run, optimizer, 2)
        path = save(tmp_path, run, optimizer, extra={"note": [1, "two"]}, wait=False)
        now = held(run, optimizer, before)
        go(run, optimizer, 4)
        assert not path.exists(), "it is complete before its files are written"
        world.everyone().barrier()
        held_up.set()
        run.wait_saves()
        assert find(tmp_path) == path
        return now

    before = launch(work, Layout.parse(line), ranks="threads")
    assert names_in(tmp_path) == ["step-00000002"]
    found = loaded("tp2", tmp_path)
    expected, found = whole(line, before), whole("tp2", found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_next_save_waits_and_the_newest_are_kept(tmp_path):
    def work(world):
        run, optimizer = start(world, "dp2")
        for step in range(1, 6):
            go(run, optimizer, step)
            save(tmp_path, run, optimizer, keep=2, wait=False)
            assert len(steps_in(tmp_path)) in (min(step - 1, 2), min(step, 2))
        return len(world.pending)

    assert launch(work, 2, ranks="threads") == [1, 1]
    assert names_in(tmp_path) == ["step-00000004", "step-00000005"]


def test_a_load_beside_a_save_waits_for_it_and_all_ranks_read_the_step_that_the_first_one_finds(
    tmp_path, held_up, monkeypatch
):
    plain = manifest.steps_in

    def late_elsewhere(folder):
        return plain(folder)[: None if threading.current_thread().name == "rank 0" else 1]

    def work(world):
        run, optimizer = start(world, "dp2")
        save(tmp_path, run, optimizer, extra={"step": 0})
        go(run, optimizer, 1)
        world.everyone().barrier()
        held_up.clear()
        save(tmp_path, run, optimizer, extra={"step": 1}, wait=False)
        threading.Timer(0.2, held_up.set).start()
        go(run, optimizer, 2)
        return load(tmp_path, run, optimizer)["step"], run.num_steps

    monkeypatch.setattr(manifest, "steps_in", late_elsewhere)
    held_up.set()
    assert launch(work, 2, ranks="threads") == [(1, 1)] * 2


@pytest.mark.sampled(0)
def test_what_is_pending_holds_nothing_of_the_run(tmp_path, held_up):
    def work(world):
        run, optimizer = start(world, "single")
        go(run, optimizer, 1)
        save(tmp_path, run, optimizer, wait=False)
        gone = weakref.ref(run), weakref.ref(next(iter(run.parameters.values())))
        del run, optimizer
        gc.collect()
        held_up.set()
        return [each() for each in gone]

    assert launch(work, 1, ranks="threads") == [[None, None]]
    assert names_in(tmp_path) == ["step-00000001"]


@pytest.mark.sampled(100)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("told_by", ["the next save", "a wait", "the end"])
def test_an_error_while_writing_is_raised_on_every_rank_and_nothing_is_lost(tmp_path, monkeypatch, rank, told_by):
    told = []

    def work(world):
        run, optimizer = start(world, "pp3/1f1b mb3", lr=0.1)
        save(tmp_path, run, optimizer)
        world.everyone().barrier()
        go(run, optimizer, 1)
        save(tmp_path, run, optimizer, wait=False)
        if told_by == "the end":
            return
        try:
            save(tmp_path, run, optimizer, wait=False) if told_by == "the next save" else run.wait_saves()
        except CheckpointError as refusal:
            told.append(str(refusal))
        if world.rank == 0:
            assert names_in(tmp_path) == ["step-00000000"]
            monkeypatch.undo()
        world.everyone().barrier()
        save(tmp_path, run, optimizer, wait=False)

    plain = saving.save_file

    def fails(tensors, path):
        if f"part-0000{rank}" in path and "step-00000001" in path:
            raise OSError(28, "No space left on device")
        plain(tensors, path)

    monkeypatch.setattr(saving, "save_file", fails)
    if told_by == "the end":
        with pytest.raises(CheckpointError) as refused:
            launch(work, 3, ranks="threads")
        told[:] = [str(refused.value)] * 3
    else:
        launch(work, 3, ranks="threads")
    assert len(told) == 3
    assert len(set(told)) == 1
    assert "the checkpoint step-00000001 could not be written" in told[0]
    assert f"given:   rank {rank}: [Errno 28] No space left on device" in told[0]
    assert names_in(tmp_path) == ["step-00000000", *([] if told_by == "the end" else ["step-00000001"])]


def test_memory_that_is_short_for_the_copy_on_one_rank_is_told_on_every_rank(tmp_path, monkeypatch):
    told, plain = [], saving._PartFile.copied

    def short(part, offload):
        if threading.current_thread().name == "rank 1":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return plain(part, offload)

    monkeypatch.setattr(saving._PartFile, "copied", short)

    def work(world):
        run, optimizer = start(world, "tp2")
        with pytest.raises(CheckpointError) as refused:
            save(tmp_path, run, optimizer, wait=False)
        told.append(str(refused.value))

    launch(work, 2, ranks="threads")
    assert told[0] == told[1]
    assert "rank 1: RuntimeError: DefaultCPUAllocator" in told[0]
    assert "free space" not in told[0]
    assert names_in(tmp_path) == []


def test_a_run_that_fails_beside_a_save_waits_some_seconds_for_it(tmp_path, held_up):
    def work(world):
        run, optimizer = start(world, "tp2")
        save(tmp_path, run, optimizer, wait=False)
        if world.rank == 1:
            threading.Timer(0.3, held_up.set).start()
            raise RuntimeError("of the work")
        world.everyone().barrier()

    with pytest.raises(RankFailedError, match="of the work"):
        launch(work, 2, ranks="threads")
    assert names_in(tmp_path) == ["step-00000000"]


def test_a_temporary_folder_that_is_removed_ends_the_save_with_an_error(tmp_path, held_up):
    def work(world):
        run, optimizer = start(world, "dp2")
        save(tmp_path / "run", run, optimizer, wait=False)
        if world.rank == 0:
            shutil.rmtree(tmp_path / "run")
            held_up.set()
        run.wait_saves()

    with pytest.raises(CheckpointError, match="could not be written"):
        launch(work, 2, ranks="threads")


def test_a_note_that_comes_while_all_are_removed_leaves_none_to_wait_for(tmp_path, monkeypatch):
    """As where a rank writes its note into a folder whose entries another has removed: that folder then stays."""
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(writing, "MOST_WAIT_S", 0.05)
    plain = shutil.rmtree

    def races(folder, **options):
        with suppress(FileNotFoundError):
            (tmp_path / "notes" / "0.json").write_text("[]")
        if folder != tmp_path / "notes":
            plain(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", races)
    with pytest.raises(ZeroDivisionError):
        writing._leave_note(tmp_path, 1, lambda _: 1 / 0)
    with pytest.raises(FileNotFoundError, match="temporary folder was removed"):
        writing._notes(tmp_path, [0, 1])


def test_the_first_rank_waits_for_notes_as_long_as_files_grow(tmp_path, monkeypatch):
    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(writing, "MOST_WAIT_S", 0.05)
    sizes = []

    def wait_until(condition, timeout_s):
        sizes.append(len(sizes))
        (tmp_path / "part").write_bytes(b"." * min(len(sizes), 4))
        return condition()

    monkeypatch.setattr(writing, "wait_until", wait_until)
    with pytest.raises(TimeoutError, match="has written nothing for"):
        writing._notes(tmp_path, [0, 1])
    assert len(sizes) == 5


def test_the_threads_that_write_make_no_call_that_training_makes(tmp_path, monkeypatch):
    callers, plain = set(), writing.gather_json

    def noted(axis, value, room=0):
        callers.add(threading.current_thread().name)
        return plain(axis, value, room)

    monkeypatch.setattr(writing, "gather_json", noted)

    def work(world):
        run, optimizer = start(world, "dp2")
        save(tmp_path, run, optimizer, wait=False)
        go(run, optimizer, 1)

    launch(work, 2, ranks="threads")
    assert callers == {"rank 0", "rank 1"}


@pytest.mark.parametrize("locked", [True, False])
def test_of_two_saves_into_one_folder_one_fails_unless_one_waits_for_the_other(tmp_path, monkeypatch, locked):
    """The first stops in the midst of its files until the second has ended, or waits for the lock."""
    plain, others = saving.save_file, []

    def stops(tensors, path):
        if not others:
            others.append(threading.Thread(target=bare, args=(tmp_path, 2)))
            others[0].start()
            others[0].join(None if not locked else 0.5)
        plain(tensors, path)

    monkeypatch.setattr(saving, "save_file", stops)
    if not locked:
        monkeypatch.setattr(writing, "one_save", lambda folder: nullcontext(folder.mkdir(exist_ok=True)))
    with nullcontext() if locked else pytest.raises(CheckpointError, match="could not be written"):
        bare(tmp_path, 1)
    others[0].join()
    assert names_in(tmp_path) == [*(["step-00000001"] if locked else []), "step-00000002"]
