"""Runs that meet a full disk, data that cannot be read, an early warning or a new attempt lose no steps."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import signal
import sys
import tempfile
import threading
from contextlib import contextmanager
from functools import cache
from itertools import count as counter

import pytest
import torch
from typer.testing import CliRunner

from shardwright.checkpoint import saving
from shardwright.checkpoint.manifest import read, steps_in
from shardwright.checkpoint.saving import LOSS_SCALE
from shardwright.cli.main import app
from shardwright.comm.backends.message_blocks import MessageBlock
from shardwright.comm.backends.run_folder import STORE, run_folder
from shardwright.comm.launch import launch
from shardwright.errors import (
    CheckpointError,
    CommunicationError,
    LayoutError,
    PlanError,
    RankDifferenceError,
    RankFailedError,
)
from shardwright.layout import Layout
from shardwright.parallelize.run import Run
from shardwright.parallelize.step import TrainStep
from shardwright.parallelize.step_checker import StepChecker
from shardwright.runtime.executor import Executor
from shardwright.train import emergency, loop, progress
from shardwright.train.config import TrainConfig
from shardwright.train.data import fingerprint
from shardwright.train.loop import train
from shardwright.train.progress import Log, cut_metrics, read_metrics

pytestmark = pytest.mark.usefixtures("no_predictions")

SMALL = {"num_layers": 1, "width": 8, "num_heads": 2}
count = counter()
NAN = {3: {"loss": float("nan")}}
ROW = {"step": 1, "loss": 1.0, "tokens_per_s": 1.0, "memory_bytes": [1], "step_ms": 1.0}


def config(**options):
    return TrainConfig(**{"settings": SMALL, "seq": 8, "batch": 3, "steps": 5, "warmup": 1, **options})


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A function that returns the folder of a run with some options that nothing interrupts; no test writes into it."""

    @cache
    def trained(**options):
        out = tmp_path_factory.mktemp("whole") / "run"
        train(config(**options), out, ranks="threads")
        return out

    return trained


def saved_in(out):
    return [int(step.name.removeprefix("step-")) for step in steps_in(out / "checkpoints")]


@contextmanager
def small_files(num_bytes):
    """No file may grow beyond that, as on a full disk; not even the one that pytest may write its own lines to."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---- a full disk


def test_a_disk_that_is_full_for_some_steps_costs_their_rows_and_one_warning(tmp_path, monkeypatch, capsys):
    plain = progress._append

    def append(path, line):
        if '"step": 2,' in line or '"step": 3,' in line:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(path, line)

    monkeypatch.setattr(progress, "_append", append)
    summary = train(config(layout="dp2"), tmp_path / "run", ranks="threads")
    assert (summary["steps"], summary["diverged"]) == (5, None)
    assert saved_in(tmp_path / "run") == [5]
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 4, 5]
    assert capsys.readouterr().err.count("cannot write metrics: [Errno 28]") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_log_on_a_full_device_only_warns(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with Log(tmp_path, 2, 0, writes=True) as log:
        log.add(ROW)
        log.add(ROW)
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_a_removed_file_of_metrics_is_kept_open_until_a_new_one_has_its_rows(tmp_path, monkeypatch, capsys):
    path = tmp_path / "metrics.jsonl"
    with Log(tmp_path, 5, 0, writes=True) as log:
        log.add(ROW)
        path.unlink()
        path.write_text("of another run")
        log.add({**ROW, "step": 2})
        assert path.read_text() == "of another run"
        path.unlink()
        with small_files(10):
            log.add({**ROW, "step": 3})
        assert not path.exists()
        log.add({**ROW, "step": 4})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 4]
    assert capsys.readouterr().err.count("warning") == 1


class ClosedPipe(io.StringIO):
    """A standard error that the program which read it has closed, as ``| head`` does."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def test_a_standard_error_that_is_closed_ends_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", ClosedPipe())
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(progress, "_append", full)  # which is warned of
    assert train(config(), tmp_path / "run", ranks="threads")["steps"] == 5
    assert saved_in(tmp_path / "run") == [5]


def test_half_a_row_is_taken_back(tmp_path):
    with Log(tmp_path, 3, 0, writes=True) as log:
        log.add(ROW)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        with small_files(size + 10):
            log.add({**ROW, "step": 2})
        log.add({**ROW, "step": 3})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]


def test_rows_are_cut_off_where_there_is_no_room_for_a_copy(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    with small_files(1):
        cut_metrics(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


DAMAGED = [b'{"loss": 1}', b"[1]", b"null", b"\xff\xfe\x00", b'{"step": "a"}', b'{"step": true}', b"[" * 100_000]
DAMAGED += [b'{"step": %s}' % (b"9" * 5000), b'{"step": 1, "loss": "a"}', b'{"step": 1, "lr": NaN}', b'{"st', b"", b"3"]
DAMAGED += [
    b'{"step": 1, "memory_bytes": 7}',
    b'{"step": 1, "memory_bytes": ["a"]}',
    b'{"step": 1, "loss": 1' + b"0" * 400 + b"}",
]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_damaged_rows_of_metrics_are_dropped_with_one_warning_and_the_run_goes_on(tmp_path, capsys, place):
    out = tmp_path / "run"
    train(config(stop_at=2), out, ranks="threads")
    path = out / "metrics.jsonl"
    rows = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line + b"\n" for line in [*rows[:place], *DAMAGED, *rows[place:]]))
    capsys.readouterr()
    found = CliRunner().invoke(app, ["train", "--resume", "--steps", "5", "--ranks", "threads", "--out", str(out)])
    assert found.exit_code == 0, (found.output, found.exception)
    assert found.stderr.count("warning") == 1
    assert f"{len(DAMAGED)} damaged rows of '{path}' were removed; the run goes on" in found.stderr
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2, 3, 4, 5]
    assert path.read_bytes().splitlines()[:2] == rows


def test_a_run_resumed_on_a_full_disk_goes_on(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    train(config(stop_at=2), out, ranks="threads")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(loop, "write_run", full)
    assert train(config(), out, resume=True, ranks="threads")["steps"] == 5
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["single", "dp2"])
def test_a_run_that_begins_on_a_full_disk_is_refused_on_every_rank(tmp_path, line):
    with small_files(200), pytest.raises(PlanError, match=r"cannot write to '.*/run'\n +given: +File too large"):
        train(config(layout=line), tmp_path / "run", ranks="threads")


def test_ranks_that_cannot_meet_since_the_temporary_folder_is_full_are_refused(tmp_path, monkeypatch):
    """Where a file takes a part of what a rank writes into it, torch would read it for ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with small_files(200), pytest.raises(PlanError, match=r"(?s)ranks cannot meet: .* no room.*File too large"):
        launch(print, 2)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(PlanError, match="there is no folder for temporary files"):
        launch(print, 2)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot reserve room for an empty file")
def test_the_file_by_which_ranks_meet_keeps_its_room_when_the_disk_fills_later():
    with run_folder() as folder:
        file = (folder / STORE).stat()
    assert file.st_size == 0
    assert file.st_blocks * 512 >= 2**20


def test_a_block_of_shared_memory_that_cannot_be_had_is_explained():
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else None
    with small_files(200), pytest.raises(CommunicationError, match=r"no shared memory for a message\n +given: +4,096"):
        MessageBlock.new(4096)
    assert before is None or len(os.listdir("/proc/self/fd")) == before


# ---- an error


@pytest.mark.parametrize("line", ["single", "dp2 tp2"])
def test_data_that_can_no_longer_be_read_end_the_run_after_a_checkpoint(tmp_path, monkeypatch, line):
    plain, calls = loop.global_batch, []

    def broken(data, indices):
        calls.append(indices)
        if len(calls) > 3 * (4 if line != "single" else 1):
            raise OSError("the disk is gone")
        return plain(data, indices)

    monkeypatch.setattr(loop, "global_batch", broken)
    with pytest.raises(RankFailedError, match="the disk is gone"):
        train(config(layout=line), tmp_path / "run", ranks="threads")
    assert saved_in(tmp_path / "run") == [3]
    monkeypatch.undo()
    assert train(config(), tmp_path / "run", resume=True, ranks="threads")["steps"] == 5


LINES = ["single", "dp2", "dp2/zero3", "pp2/1f1b mb3 dp2/zero1", "tp2"]


class BrokenError(Exception):
    """What the model of one rank raises."""


def breaks(monkeypatch, kind, name, rank, call):
    """Makes one call of a method fail on one rank."""
    plain, calls = getattr(kind, name), []

    def broken(self, *given, **named):
        if threading.current_thread().name == f"rank {rank}":
            calls.append(name)
            if len(calls) == call:
                raise BrokenError(f"in {name}")
        return plain(self, *given, **named)

    monkeypatch.setattr(kind, name, broken)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(("name", "step"), [("step", 3), ("clip_grad_norm_", 3), ("evaluate_all", 4)])
@pytest.mark.sampled(16)
def test_an_error_within_a_step_or_an_evaluation_on_one_rank_ends_the_run_after_a_checkpoint(
    tmp_path, monkeypatch, line, name, step, whole_run
):
    options = {"layout": line, "eval_every": 1, "eval_batches": 1, "keep": 2}
    whole = whole_run(**options)
    breaks(monkeypatch, Run, name, Layout.parse(line).num_ranks - 1, 4)
    with pytest.raises(RankFailedError, match=f"BrokenError: in {name}"):
        train(config(**options), tmp_path / "run", ranks="threads")
    monkeypatch.undo()
    assert saved_in(tmp_path / "run") == [step]
    assert train(config(**options), tmp_path / "run", resume=True, ranks="threads")["steps"] == 5
    found, expected = ({row["step"]: row["loss"] for row in read_metrics(run)} for run in (tmp_path / "run", whole))
    assert found == expected  # and the row of the step whose evaluation failed is there


@pytest.mark.parametrize(("line", "saved"), [("single", [2]), ("dp2/zero1", [2]), ("dp2", [2, 4])])
def test_a_step_that_one_rank_has_not_completed_is_saved_only_by_others_that_hold_all_of_it(
    tmp_path, monkeypatch, line, saved
):
    breaks(monkeypatch, emergency.EmergencyCheckpoint, "note", Layout.parse(line).num_ranks - 1, 4)
    with pytest.raises(RankFailedError, match="BrokenError: in note"):
        train(config(layout=line, save_every=2), tmp_path / "run", ranks="threads")
    assert saved_in(tmp_path / "run") == saved


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
@pytest.mark.parametrize("full", [0, 9])
def test_it_is_said_once_whether_the_last_step_could_be_saved(tmp_path, monkeypatch, capsys, ranks, full):
    full_at(monkeypatch, 3, full)
    for rank in ranks:
        breaks(monkeypatch, Run, "step", rank, 4)
    with pytest.raises(RankFailedError, match="BrokenError: in step"):
        train(config(layout="dp2/zero1"), tmp_path / "run", ranks="threads")
    said = capsys.readouterr().err
    assert saved_in(tmp_path / "run") == ([] if full else [3])
    assert said.count("step 3, the last that was complete, is saved") == (not full)
    assert ("step 3 could not be saved: [Errno 28] No space left on device" in said) == bool(full)


@pytest.mark.parametrize("line", ["single", "dp2", "dp2 fp16", "dp2/zero3 fp16"])
@pytest.mark.parametrize("clip", [0, 1])
@pytest.mark.parametrize("name", ["step", "take"])
@pytest.mark.sampled(0)
def test_an_error_before_the_update_saves_the_last_step_without_clipping_and_in_fp16_too(
    tmp_path, monkeypatch, line, clip, name, whole_run
):
    options = {"layout": line, "clip": clip}
    runs = tmp_path / "run", whole_run(**options)
    plain = TrainStep.take

    def broken(self, *given):
        plain(self, *given)  # which has updated the loss scale
        raise BrokenError("in take")

    if name == "take":
        monkeypatch.setattr(TrainStep, "take", lambda self, *given: (broken if given[2] == 3 else plain)(self, *given))
    else:
        breaks(monkeypatch, Run, name, Layout.parse(line).num_ranks - 1, 4)
    with pytest.raises(RankFailedError, match=f"BrokenError: in {name}"):
        train(config(**options), tmp_path / "run", ranks="threads")
    monkeypatch.undo()
    assert saved_in(tmp_path / "run") == [3]
    assert train(config(**options), tmp_path / "run", resume=True, ranks="threads")["steps"] == 5
    found, expected = ([row["loss"] for row in read_metrics(run)] for run in runs)
    assert found == expected
    scales = [read(run / "checkpoints" / "step-00000005").scalars.get(LOSS_SCALE) for run in runs]
    assert scales[0] == scales[1]


@pytest.mark.parametrize(
    ("options", "name", "why"),
    [
        (
            {"clip": 0, "layout": "dp2/zero3/offload:disk"},
            "run",
            "offloaded state is updated while gradients are computed",
        ),
        ({"layout": "dp2/zero1"}, "note", "had begun to update the parameters"),
    ],
)
def test_a_last_step_that_cannot_be_saved_is_said_with_the_reason(tmp_path, monkeypatch, capsys, options, name, why):
    breaks(monkeypatch, Executor if name == "run" else emergency.EmergencyCheckpoint, name, 1, 4)
    with pytest.raises(RankFailedError, match=f"BrokenError: in {name}"):
        train(config(**{"layout": "dp2", **options}), tmp_path / "run", ranks="threads")
    assert saved_in(tmp_path / "run") == []
    said = capsys.readouterr().err
    assert said.count("step 3, the last that was complete, is not saved: ") == 1
    assert why in said


@pytest.mark.parametrize(
    ("why", "options"),
    [("buffers", {}), ("updates in the backward", {"clip": 0, "layout": "dp2/zero3/offload:disk"})],
)
def test_a_state_that_the_step_may_have_changed_is_not_saved(tmp_path, monkeypatch, why, options):
    if why == "buffers":
        monkeypatch.setattr(emergency, "kept_buffers", lambda model: {"mean": torch.tensor([next(count)])})
    breaks(monkeypatch, Executor, "run", 1, 4)
    with pytest.raises(RankFailedError, match="BrokenError: in run"):
        train(config(**{"layout": "dp2", "save_every": 2, **options}), tmp_path / "run", ranks="threads")
    assert saved_in(tmp_path / "run") == [2]


def test_a_buffer_that_the_step_has_written_without_counting_it_is_not_saved(tmp_path, monkeypatch):
    mean, plain = torch.zeros(8), Run.step

    def step(self, *given, **named):
        if self.num_steps == 3:
            torch.nn.functional.batch_norm(torch.ones(4, 8), mean, torch.ones(8), training=True)
            raise BrokenError("after the forward")
        return plain(self, *given, **named)

    monkeypatch.setattr(emergency, "kept_buffers", lambda model: {"mean": mean})
    monkeypatch.setattr(Run, "step", step)
    with pytest.raises(RankFailedError, match="after the forward"):
        train(config(save_every=2), tmp_path / "run", ranks="threads")
    assert saved_in(tmp_path / "run") == [2]


def test_a_buffer_that_complete_steps_write_without_counting_it_is_saved(tmp_path, monkeypatch):
    mean, plain = torch.zeros(8), Run.step

    def step(self, *given, **named):
        if self.num_steps == 3:
            raise BrokenError("before the forward")
        torch.nn.functional.batch_norm(torch.randn(4, 8), mean, torch.ones(8), training=True)
        return plain(self, *given, **named)

    monkeypatch.setattr(emergency, "kept_buffers", lambda model: {"mean": mean})
    monkeypatch.setattr(Run, "step", step)
    with pytest.raises(RankFailedError, match="before the forward"):
        train(config(save_every=2), tmp_path / "run", ranks="threads")
    assert saved_in(tmp_path / "run") == [2, 3]


def test_an_error_that_says_that_ranks_differ_saves_nothing(tmp_path, monkeypatch):
    def differ(*given):
        if given[5] == 3:
            raise RankDifferenceError("they differ", given="", allowed="", fix="")

    monkeypatch.setattr(sys.modules[StepChecker.__module__], "check_ranks", differ)
    with pytest.raises(RankDifferenceError, match="they differ"):
        train(config(layout="dp2", save_every=2, check_every=1), tmp_path / "run", ranks="threads")
    assert saved_in(tmp_path / "run") == [2]


@pytest.mark.parametrize("kind", [LayoutError, PlanError])
@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_an_error_of_ours_that_all_ranks_raise_in_a_later_step_saves_the_last_complete_one(
    tmp_path, monkeypatch, layout, kind, capsys
):
    plain = Run.step

    def step(self, *given, **named):
        if self.num_steps == 3:
            raise kind("this batch cannot be", given="", allowed="", fix="")
        return plain(self, *given, **named)

    monkeypatch.setattr(Run, "step", step)
    with pytest.raises(kind, match="this batch cannot be"):
        train(config(layout=layout, save_every=0), tmp_path / "run", ranks="threads")
    assert saved_in(tmp_path / "run") == [3]
    assert "step 3, the last that was complete, is saved" in "".join(capsys.readouterr())


# ---- checkpoints beside training


@pytest.mark.sampled(0)
@pytest.mark.parametrize("line", ["single", "dp2/zero1 tp2"])
def test_a_run_that_saves_beside_training_is_the_same_run(tmp_path, line):
    for name, beside in (("waits", False), ("beside", True)):
        summary = train(config(layout=line, save_every=1, save_async=beside, keep=2), tmp_path / name, ranks="threads")
        assert saved_in(tmp_path / name) == [4, 5]
        assert summary["checkpoint"].endswith("step-00000005")
    first, second = (read_metrics(tmp_path / name) for name in ("waits", "beside"))
    assert [row["loss"] for row in first] == [row["loss"] for row in second]
    assert train(config(steps=6), tmp_path / "beside", resume=True, ranks="threads")["steps"] == 6


def full_at(monkeypatch, step, num_times):
    """The disk has no room for rank 1's part of a step, for so many times."""
    plain, left = saving.save_file, [step] * num_times

    def full(tensors, path):
        if f"step-0000000{step}" in path and "part-00001" in path and left:
            left.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(tensors, path)

    monkeypatch.setattr(saving, "save_file", full)


def test_a_disk_that_is_full_for_one_checkpoint_beside_training_costs_that_checkpoint_and_a_warning(
    tmp_path, monkeypatch, capsys
):
    full_at(monkeypatch, 2, 1)
    waits, plain = [], loop.save

    def noted(*given, wait, **more):
        waits.append(wait)
        return plain(*given, wait=wait, **more)

    monkeypatch.setattr(loop, "save", noted)
    options = config(layout="dp2/zero1", save_every=1, save_async=True, keep=0)
    assert train(options, tmp_path / "run", ranks="threads")["steps"] == 5
    assert saved_in(tmp_path / "run") == [1, 3, 4, 5]
    assert waits == [False] * 4 + [True] * 2 + [False] * 2 + [True] * 2
    assert capsys.readouterr().err.count("step-00000002 could not be written") == 1


def test_a_disk_that_stays_full_ends_the_run_with_its_error(tmp_path, monkeypatch):
    full_at(monkeypatch, 4, 9)
    with pytest.raises(CheckpointError, match=r"rank 1: \[Errno 28\] No space left") as told:
        train(config(layout="dp2/zero1", save_every=4), tmp_path / "run", ranks="threads")
    assert "step-00000004 could not be written" in str(told.value)


def test_a_checkpoint_that_cannot_be_written_hides_no_failure_before_it(tmp_path, monkeypatch):
    full_at(monkeypatch, 3, 9)
    plain = loop.global_batch

    def broken(data, indices):
        if reads.append(indices) or len(reads) > 6:
            raise OSError("the data are gone")
        return plain(data, indices)

    reads = []
    monkeypatch.setattr(loop, "global_batch", broken)
    with pytest.raises(RankFailedError, match="the data are gone"):
        train(config(layout="dp2/zero1"), tmp_path / "run", ranks="threads")


def test_a_step_that_diverges_ends_the_run_as_such_where_a_checkpoint_before_it_failed(tmp_path, monkeypatch):
    full_at(monkeypatch, 2, 9)
    plain = loop._Training._step
    monkeypatch.setattr(loop._Training, "_step", lambda self: {**(row := plain(self)), **NAN.get(row["step"], {})})
    summary = train(config(layout="dp2/zero1", save_every=1, save_async=True), tmp_path / "run", ranks="threads")
    assert summary["diverged"] == 3
    assert summary["checkpoint"].endswith("step-00000001")


def test_a_resumed_run_can_be_told_to_wait_for_its_saves_again(tmp_path):
    train(config(save_async=True, stop_at=1), tmp_path, ranks="threads")
    options = ["train", "--resume", "--no-save-async", "--stop-at", "2", "--ranks", "threads", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, options).exit_code == 0
    assert json.loads((tmp_path / "run.json").read_text())["options"]["save_async"] is False


# ---- an early warning


@pytest.mark.sampled(0)
def test_an_early_warning_saves_and_the_run_goes_on(tmp_path, monkeypatch):
    plain = loop._Training._step

    def step(self):
        row = plain(self)
        if self.world.rank == 0 and row["step"] == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return row

    monkeypatch.setattr(loop._Training, "_step", step)
    before = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        summary = train(config(layout="dp2", steps=40, keep=0), tmp_path / "run", ranks="threads")
    finally:
        signal.signal(signal.SIGUSR1, before)
    early, last = saved_in(tmp_path / "run")
    assert 2 <= early < 40
    assert (last, summary["steps"], summary["stopped"]) == (40, 40, False)


@pytest.mark.parametrize("place", [0, 2**20 - 1, 2 * 2**20, 3 * 2**20 - 1])
def test_a_byte_of_the_first_or_last_megabyte_of_the_data_that_changed_is_seen(tmp_path, place):
    data = tmp_path / "text"
    with data.open("wb") as file:
        file.truncate(3 * 2**20)  # no block of it is on the disk
    before = fingerprint(str(data))
    with data.open("r+b") as file:
        file.seek(place)
        file.write(b"x")
    assert fingerprint(str(data)) != before


def test_a_byte_between_the_ends_of_the_data_is_not_read_and_a_changed_size_is(tmp_path):
    data = tmp_path / "text"
    with data.open("wb") as file:
        file.truncate(3 * 2**20)
    before = fingerprint(str(data))
    with data.open("r+b") as file:
        file.seek(2**20)
        file.write(b"x")
    assert fingerprint(str(data)) == before, "a resume reads two megabytes of any file, however large"
    with data.open("ab") as file:
        file.write(bytes(1))
    assert fingerprint(str(data)) != before


def test_each_file_of_a_folder_of_pictures_has_its_own_fingerprint(tmp_path):
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(3073))
    before = fingerprint(str(tmp_path))
    assert sorted(before) == sorted(names)
    (tmp_path / "data_batch_3.bin").write_bytes(bytes([1]) + bytes(3072))
    after = fingerprint(str(tmp_path))
    assert [name for name in names if after[name] != before[name]] == ["data_batch_3.bin"]


# ---- torchrun's next attempt


def test_the_next_attempt_of_torchrun_goes_on_from_the_newest_checkpoint(tmp_path, monkeypatch):
    out = tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    train(config(stop_at=3, layout="dp2"), out, ranks="threads")
    assert train(config(layout="single"), out, ranks="threads")["steps"] == 5  # a machine that lost no rank counts none
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4, 5]


def test_the_next_attempt_of_a_run_without_a_checkpoint_starts_anew(tmp_path, monkeypatch):
    out = tmp_path / "run"
    train(config(stop_at=3), out, ranks="threads")
    (out / "checkpoints").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(config(), out, ranks="threads")["steps"] == 5
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("flags", [{}, {"resume": True}])
def test_the_next_attempt_checks_what_a_resume_checks(tmp_path, monkeypatch, counted, flags):
    text, out = tmp_path / "text", tmp_path / "run"
    text.write_bytes(bytes(range(256)) * 16)
    if not counted:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    train(config(stop_at=3, data=str(text), layout="dp2"), out, ranks="threads")
    if counted:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    before = (out / "run.json").read_bytes()
    for changed in ({"seed": 9}, {"batch": 4}, {"settings": {**SMALL, "width": 16}}):
        with pytest.raises(PlanError, match=f"a resumed run cannot change '{next(iter(changed))}'"):
            train(config(data=str(text), **changed), out, ranks="threads", **flags)
    text.write_bytes(bytes(range(256)) * 8)
    with pytest.raises(PlanError, match="the data have changed since the run was started"):
        train(config(data=str(text)), out, ranks="threads", **flags)
    assert (out / "run.json").read_bytes() == before
    accepted = train(config(data=str(text)), out, ranks="threads", changed_data=True, **flags)
    assert (accepted["steps"], accepted["layout"]) == (5, "single")


@pytest.mark.sampled(0)
def test_auto_fit_takes_the_ranks_that_are_there_and_says_so(tmp_path, monkeypatch):
    out = tmp_path / "run"
    train(config(stop_at=3, layout="dp2/zero1 tp2"), out, ranks="threads")
    monkeypatch.setenv("WORLD_SIZE", "6")
    options = ["train", "--layout", "auto-fit", "--resume", "--ranks", "threads", "--out", str(out)]
    found = CliRunner().invoke(app, options)
    assert found.exit_code == 0, found.output
    assert "auto-fit: dp2/zero1 tp2 -> dp3/zero1 tp2, for the 6 ranks that there are" in found.stderr
    monkeypatch.setenv("WORLD_SIZE", "5")
    refused = CliRunner().invoke(app, options)
    assert refused.exit_code == 2
    assert "5 ranks, and dp3/zero1 tp2 needs 2 for each replica" in refused.stderr
