"""Of a run of which a rank is gone, the ranks that are left save what they hold between them, or say why they cannot.

A rank is gone by an exception that no part of a run catches: as if it was killed, it writes nothing any more.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwright.checkpoint import saving, survivors
from shardwright.checkpoint.manifest import find, steps_in
from shardwright.checkpoint.survivors import SurvivorState
from shardwright.comm.rank_life import this_process
from shardwright.errors import RankDifferenceError, RankFailedError
from shardwright.layout import Layout
from shardwright.parallelize.run import Run
from shardwright.train.config import TrainConfig
from shardwright.train.emergency import EmergencyCheckpoint
from shardwright.train.loop import train
from shardwright.train.progress import METRICS_FILE, add_missing_row, read_metrics

pytestmark = pytest.mark.usefixtures("no_predictions")

OPTIONS = {"settings": {"num_layers": 2, "width": 8, "num_heads": 2}, "seq": 8, "batch": 4, "steps": 5, "warmup": 1}


class GoneError(BaseException):
    """Ends a rank's thread at once."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(survivors, "JOIN_S", 0.5)  # a thread that is gone is not seen to be


def config(line, **options):
    return TrainConfig(layout=line, **{**OPTIONS, **options})


def names_in(out):
    return sorted(path.name for path in (out / "checkpoints").glob("*") if path.name != ".saving")


def goes(monkeypatch, rank, kind, name, number, failure=GoneError):
    """Makes a rank fail at the beginning of a method's call of this number."""
    plain, calls = getattr(kind, name), []

    def broken(self, *given, **named):
        if threading.current_thread().name == f"rank {rank}":
            calls.append(name)
            if len(calls) == number:
                raise failure
        return plain(self, *given, **named)

    monkeypatch.setattr(kind, name, broken)


def run_of(monkeypatch, tmp_path, line, rank, kind=Run, name="step", number=4, **options):
    """Trains a run of which a rank is gone in its fourth step; returns its folder."""
    goes(monkeypatch, rank, kind, name, number)
    with pytest.raises(RankFailedError, match=f"(?s)rank {rank} failed.*GoneError"):
        train(config(line, **options), tmp_path / "run", ranks="threads")
    monkeypatch.undo()
    return tmp_path / "run"


@pytest.fixture(scope="module")
def rows_of_one_device(tmp_path_factory):
    """The metrics of a run of one device that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(config("single"), out, ranks="threads")
    return read_metrics(out)


HELD_TWICE = ["dp2", "dp2 tp2", "dp3 tp2", "pp2/1f1b mb2 dp2", "dp2 tp2x2/2d"]


@pytest.mark.parametrize("line", HELD_TWICE)
@pytest.mark.parametrize("which", ["first", "last"])
@pytest.mark.sampled(0)
def test_what_other_ranks_hold_copies_of_is_saved_without_a_rank_that_is_gone(
    tmp_path, monkeypatch, capsys, line, which, rows_of_one_device
):
    rank = 0 if which == "first" else Layout.parse(line).num_ranks - 1
    out = run_of(monkeypatch, tmp_path, line, rank)
    said = capsys.readouterr().err
    assert said.count("step 3, the last that was complete, is saved by rank") == 1
    assert "which held all of it" in said
    assert [step.name for step in steps_in(out / "checkpoints")] == ["step-00000003"]
    assert not any(file.name.startswith(f"part-{rank:05}") for file in find(out / "checkpoints").iterdir())
    assert train(config("tp2"), out, resume=True, ranks="threads")["steps"] == 5
    found, expected = ([(row["step"], row["loss"]) for row in rows] for rows in (read_metrics(out), rows_of_one_device))
    assert found == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in expected]


@pytest.mark.parametrize("line", ["tp2", "dp2/zero1", "dp2/zero3", "pp2/1f1b mb2"])
@pytest.mark.sampled(0)
def test_what_a_rank_that_is_gone_held_alone_is_named_and_nothing_is_saved(tmp_path, monkeypatch, capsys, line):
    out = run_of(monkeypatch, tmp_path, line, 1, save_every=2)
    said = capsys.readouterr().err
    assert said.count("step 3, the last that was complete, is not saved: ") == 1
    assert "rank 1 alone held '" in said
    assert "or parts of them" in said
    assert [step.name for step in steps_in(out / "checkpoints")] == ["step-00000002"]
    assert train(config(line, save_every=2), out, resume=True, ranks="threads")["steps"] == 5
    assert names_in(out) == ["step-00000002", "step-00000004", "step-00000005"]  # and nothing of the failure


@pytest.mark.sampled(0)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_step_that_the_rank_which_is_gone_had_not_completed_is_saved_by_those_that_had(
    tmp_path, monkeypatch, rank, rows_of_one_device
):
    out = run_of(monkeypatch, tmp_path, "dp2 tp2", rank, EmergencyCheckpoint, "note")
    assert [step.name for step in steps_in(out / "checkpoints")] == ["step-00000004"]
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4]  # as the first rank could not write the last
    assert train(config("dp2"), out, resume=True, ranks="threads")["steps"] == 5
    assert read_metrics(out)[-1]["loss"] == pytest.approx(rows_of_one_device[-1]["loss"], rel=1e-5)
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4, 5]


def test_a_row_that_is_missing_takes_the_place_of_half_a_row(tmp_path):
    file = tmp_path / METRICS_FILE
    for before in ("", '{"step": 1}\n', '{"step": 1}\n{"st'):
        file.write_text(before)
        for _ in range(2):  # a row that is there is not written again
            add_missing_row(tmp_path, {"step": 2})
            assert [row["step"] for row in read_metrics(tmp_path)] == ([1, 2] if before else [2])
    file.unlink()
    with pytest.raises(FileNotFoundError):
        add_missing_row(tmp_path, {"step": 2})


def test_ranks_that_have_found_the_state_wrong_forbid_the_others_to_save(tmp_path, monkeypatch, capsys):
    """One rank knows that ranks differ, and another has lost it before it could know."""
    error = RankDifferenceError("they differ", given="", allowed="", fix="")
    goes(monkeypatch, 1, Run, "step", 4, error)
    with pytest.raises(RankDifferenceError, match="they differ"):
        train(config("dp2"), tmp_path / "run", ranks="threads")
    assert names_in(tmp_path / "run") == []
    assert "is saved" not in capsys.readouterr().err


def test_nothing_is_written_into_a_folder_that_another_run_has_made(tmp_path, monkeypatch):
    plain = Run.step

    def step(self, *given, **named):
        if self.num_steps == 3 and self.world.rank == 1:
            (tmp_path / "run" / ".lock").rename(tmp_path / "old")
            (tmp_path / "run" / ".lock").touch()
            raise ArithmeticError("of the work")
        return plain(self, *given, **named)

    monkeypatch.setattr(Run, "step", step)
    with pytest.raises(RankFailedError, match="of the work"):
        train(config("dp2"), tmp_path / "run", ranks="threads")
    assert names_in(tmp_path / "run") == []


@pytest.mark.sampled(0)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_folder_that_was_removed_before_a_rank_is_gone_is_written_anew_with_its_options(
    tmp_path, monkeypatch, capsys, rank
):
    plain, out = Run.step, tmp_path / "run"

    def step(self, *given, **named):
        if self.num_steps == 3 and self.world.rank == rank:
            shutil.rmtree(out)
            raise GoneError
        return plain(self, *given, **named)

    monkeypatch.setattr(Run, "step", step)
    with pytest.raises(RankFailedError, match="GoneError"):
        train(config("dp2"), out, ranks="threads")
    monkeypatch.undo()
    assert f"is saved by rank {1 - rank}" in (said := capsys.readouterr().err)
    assert f"'{out}' was removed, and is written anew without its metrics" in said
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "run.json"]
    assert train(config("tp2"), out, resume=True, ranks="threads")["steps"] == 5


@pytest.mark.parametrize("where", ["a part", "the meeting"])
def test_an_error_of_all_ranks_that_cannot_be_saved_is_told_once(tmp_path, monkeypatch, capsys, where):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if where == "a part":
        monkeypatch.setattr(saving, "save_file", full)
    else:
        write = Path.write_text
        met = ".tmp-failed"
        monkeypatch.setattr(Path, "write_text", lambda at, text: full() if met in str(at) else write(at, text))
        monkeypatch.setattr(survivors.Meeting, "is_first", full)
        monkeypatch.setattr(survivors, "life_of", lambda process, here: "runs")
    plain = Run.step

    def step(self, *given, **named):
        if self.num_steps == 3:
            raise ArithmeticError("of the work")
        return plain(self, *given, **named)

    monkeypatch.setattr(Run, "step", step)
    with pytest.raises(RankFailedError, match="of the work"):
        train(config("dp4"), tmp_path / "run", ranks="threads")
    assert capsys.readouterr().err.count("step 3 could not be saved: [Errno 28] No space left on device") == 1
    assert names_in(tmp_path / "run") == []


def test_a_rank_comes_although_others_that_cannot_write_remove_the_folder(tmp_path, monkeypatch):
    known = SimpleNamespace(run=SimpleNamespace(world=SimpleNamespace(rank=2, size=3)))
    meeting, make, removed = survivors.Meeting(tmp_path / "met", known), Path.mkdir, []

    def mkdir(at, **options):
        make(at, **options)
        if len(removed) < 2:  # each of the two others once
            removed.append(at.rmdir())

    monkeypatch.setattr(Path, "mkdir", mkdir)
    meeting.come(SurvivorState(step=3))
    assert SurvivorState(**json.loads((tmp_path / "met" / "2.json").read_text())).step == 3


def test_a_buffer_that_only_the_rank_which_is_gone_held_is_named(tmp_path, monkeypatch, capsys):
    names = {"rank 0": {}, "rank 1": {"mean": torch.zeros(3)}}
    monkeypatch.setattr(saving, "kept_buffers", lambda _: names[threading.current_thread().name])
    out = run_of(monkeypatch, tmp_path, "dp2", 1)
    assert "step 3, the last that was complete, is not saved: rank 1 alone held 'mean'" in capsys.readouterr().err
    assert steps_in(out / "checkpoints") == []


def left_behind(folder, *noted):
    """The temporary folder of a save beside training, with the notes of some ranks."""
    (folder / "notes").mkdir(parents=True)
    for rank in noted:
        (folder / "notes" / f"{rank}.json").touch()
    return folder / "notes"


def test_a_save_beside_training_ends_if_a_rank_is_dead_that_has_not_written_its_part(tmp_path):
    """Else its thread would hold the lock of the folder, and wait for that part."""
    here = this_process()
    known = SimpleNamespace(here=here, processes=[here, [here[0], here[1], 0.0]], token="mine")
    doomed, whole = left_behind(tmp_path / ".tmp-step-2-a", 0), left_behind(tmp_path / ".tmp-step-3-b", 1)
    mine = left_behind(tmp_path / ".tmp-step-4-mine")
    survivors.Meeting(tmp_path / ".tmp-failed-mine", known)._end_doomed_saves()
    assert [notes.is_dir() for notes in (doomed, whole, mine)] == [False, True, True]


@pytest.mark.sampled(0)
def test_survivors_remove_what_saves_that_were_killed_have_left(tmp_path, monkeypatch):
    goes(monkeypatch, 1, Run, "step", 4)
    left_behind(tmp_path / "run" / "checkpoints" / ".tmp-step-00000002-dead", 0)
    with pytest.raises(RankFailedError, match="GoneError"):
        train(config("dp2"), tmp_path / "run", ranks="threads")
    (tmp_path / "run" / "checkpoints" / ".tmp-failed-x").mkdir()  # of an earlier failure: the next save removes it
    monkeypatch.undo()
    assert [name for name in names_in(tmp_path / "run") if "step" in name] == ["step-00000003"]
    train(config("dp2"), tmp_path / "run", resume=True, ranks="threads")
    assert names_in(tmp_path / "run") == ["step-00000003", "step-00000005"]


DONE = {rank: SurvivorState(step=3) for rank in range(4)}


def decided(monkeypatch, held, states):
    """The step and ranks of the decision where only these ``held`` sets of ranks hold all."""
    found = object.__new__(survivors.Survivors)
    monkeypatch.setattr(found.__class__, "lost", lambda _, ranks: {} if {*ranks} in held else {"w": (1,)})
    found.needs_all, found.run = False, type("run", (), {"world": type("world", (), {"size": 4})})
    decision = found.decide(states)
    return decision.step, decision.ranks, decision.why_not


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (DONE, (3, (0, 1, 2, 3), "")),
        ({0: DONE[0], 1: DONE[1]}, (3, (0, 1), "")),
        ({0: DONE[0], 2: DONE[2]}, (3, (), "rank 1")),
        ({**DONE, 0: SurvivorState(step=4), 1: SurvivorState(step=4)}, (4, (0, 1), "")),
        ({**DONE, 3: SurvivorState(step=3, why_not="it has begun")}, (3, (), "it has begun")),
        ({**DONE, 3: SurvivorState(step=3, forbids=True)}, (None, (), "")),
        ({rank: SurvivorState(step=None) for rank in range(4)}, (None, (), "")),
        ({}, (None, (), "")),
    ],
)
def test_ranks_decide_for_the_latest_step_that_they_hold_whole(monkeypatch, states, expected):
    step, ranks, why_not = decided(monkeypatch, [{0, 1}, {0, 1, 2, 3}], states)
    assert (step, ranks) == expected[:2]
    assert expected[2] in why_not
    assert bool(expected[2]) == bool(why_not)
