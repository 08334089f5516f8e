"""The loop at its edges: what it reads, what it refuses, what it leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import signal
import statistics
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.checkpoint import saving
from shardwright.checkpoint.manifest import steps_in
from shardwright.comm.launch import launch
from shardwright.errors import CheckpointError, PlanError
from shardwright.layout import Layout
from shardwright.parallelize.run import Run
from shardwright.parallelize.step_checker import StepChecker
from shardwright.train import loop
from shardwright.train.config import TrainConfig
from shardwright.train.data import SampleOrder, open_data
from shardwright.train.loop import Stop, train
from shardwright.train.out_folder import locked_folder
from shardwright.train.progress import read_metrics
from shardwright.train.run_file import parts_of

SMALL = {"num_layers": 1, "width": 8, "num_heads": 2, "dropout": 0.1}


def config(**options):
    return TrainConfig(**{"settings": SMALL, "seq": 8, "batch": 3, "steps": 2, "warmup": 1, **options})


def losses(out):
    return [row["loss"] for row in read_metrics(out)]


def refused(kind, *args, **named):
    with pytest.raises(kind) as caught:
        train(*args, ranks="threads", **named)
    text = str(caught.value)
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:4]] == ["given", "allowed", "fix"], text
    return text


# ---- samples


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", ["single", "dp3", "dp2 tp2", "dp8", "dp2 mb3"])
def test_every_sample_is_trained_on_once_in_an_epoch(tmp_path, monkeypatch, line):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 2)
    seen, plain, layout = [], loop.global_batch, Layout.parse(line)
    mesh = layout.mesh

    def noted(dataset, indices):
        rank = int(threading.current_thread().name.removeprefix("rank "))
        if mesh.coord(rank).get("tp", 0) == 0:  # the other tp ranks have the same samples
            seen.extend(int(index) for index in indices)
        return plain(dataset, indices)

    monkeypatch.setattr(loop, "global_batch", noted)
    size = len(open_data(str(tmp_path / "text"), seq=8, model=config().build()[2]))
    assert size % 5, "the last batch is a short one"
    steps = SampleOrder(size, 5, seed=0).num_steps_per_epoch
    train(config(layout=line, data=str(tmp_path / "text"), batch=5, steps=steps), tmp_path / "run", ranks="threads")
    assert sorted(seen) == list(range(size))


@pytest.mark.sampled(0)
def test_a_convnet_learns_from_a_cifar_folder_the_same_under_any_layout(tmp_path):
    lines = ("dp3", "tp2", "pp3/cut:conv1,fc,out mb3", "pp2/zb-h1 mb2 tp2")
    draw = np.random.default_rng(0)
    for name, num in (("data_batch_1.bin", 12), ("test_batch.bin", 4)):
        labels = np.arange(num, dtype=np.uint8) % 2
        pixels = draw.integers(0, 100, (num, 3072), dtype=np.uint8) + labels[:, None] * np.uint8(120)
        np.concatenate([labels[:, None], pixels], axis=1).tofile(tmp_path / name)
    for line in ("single", *lines):
        run = config(
            model="convnet", settings={"channels": (4,), "hidden": (6,)}, data=str(tmp_path), layout=line, batch=6,
            steps=12, lr=3e-3, eval_every=6, eval_batches=2,
        )  # fmt: skip
        train(run, tmp_path / line, ranks="threads")
    expected = losses(tmp_path / "single")
    assert expected[-1] < 0.9 * expected[0]
    for line in lines:
        assert losses(tmp_path / line) == pytest.approx(expected, rel=1e-5)
    rows = read_metrics(tmp_path / "tp2")
    assert [row["step"] for row in rows if "eval_loss" in row] == [6, 12]


def test_the_loss_goes_down(tmp_path):
    train(config(steps=60, lr=1e-2, batch=8, data="stdlib"), tmp_path / "run", ranks="threads")
    found = losses(tmp_path / "run")
    assert sum(found[-10:]) < 0.9 * sum(found[:10])


def test_a_batch_smaller_than_dp_leaves_ranks_without_samples_and_changes_nothing(tmp_path):
    for line in ("single", "dp5"):
        train(config(layout=line, batch=2, steps=3), tmp_path / line, ranks="threads")
    assert losses(tmp_path / "dp5") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)


@pytest.mark.parametrize(("every", "compared"), [(0, []), (2, [0, 2, 4]), (100, [0])])
def test_ranks_are_compared_as_often_as_the_run_is_told_to(tmp_path, monkeypatch, every, compared):
    found = []
    monkeypatch.setattr(sys.modules[StepChecker.__module__], "check_ranks", lambda *given: found.append(given[5]))
    train(config(layout="dp2", steps=5, check_every=every), tmp_path / "run", ranks="threads")
    assert sorted(found) == sorted(2 * compared)


# ---- folders


@pytest.mark.parametrize("path", ["file", "file/inside"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, path):
    (tmp_path / "file").write_text("")
    assert "give another --out" in refused(PlanError, config(), tmp_path / path)


def test_a_resume_of_a_run_that_ended_before_its_first_checkpoint_is_refused(tmp_path):
    out = tmp_path / "run"
    train(config(), out, ranks="threads")
    shutil.rmtree(out / "checkpoints")
    assert "ended before its first checkpoint" in refused(CheckpointError, config(), out, resume=True)
    with (out / ".lock").open() as file:  # as a running run holds it before its first checkpoint
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "is in use" in refused(PlanError, config(), out, resume=True)
    assert "fix:     give another --out, or remove it" in refused(PlanError, config(), out)


def test_a_folder_that_another_run_writes_to_is_refused_on_every_rank(tmp_path):
    out = tmp_path / "run"
    train(config(), out, ranks="threads")
    before = read_metrics(out)
    with (out / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def enter(world):
            try:
                with locked_folder(world, out):
                    return "entered"
            except PlanError as refusal:
                return str(refusal)

        (text,) = set(launch(enter, 3, ranks="threads"))
    assert "is in use" in text
    assert read_metrics(out) == before
    assert train(config(steps=3), out, resume=True, ranks="threads")["steps"] == 3


def test_a_new_run_is_refused_where_another_began_and_ended_since_the_folder_was_found_free(tmp_path, monkeypatch):
    out, plain = tmp_path / "run", loop.launch

    def late(*args, **options):
        monkeypatch.setattr(loop, "launch", plain)
        train(config(), out, ranks="threads")
        return plain(*args, **options)

    monkeypatch.setattr(loop, "launch", late)
    assert "another run has begun in it meanwhile" in refused(PlanError, config(steps=3), out)
    assert len(read_metrics(out)) == 2


def test_a_resumed_run_with_no_steps_left_does_not_rewrite_its_checkpoint(tmp_path):
    out = tmp_path / "run"
    train(config(), out, ranks="threads")
    (step,) = steps_in(out / "checkpoints")
    before = step.stat().st_ino
    summary = train(config(), out, resume=True, ranks="threads")
    assert (summary["steps"], summary["first_loss"], summary["checkpoint"]) == (2, None, str(step))
    assert step.stat().st_ino == before


def test_rows_after_the_checkpoint_are_written_again_and_a_torn_last_row_is_left_out(tmp_path):
    out = tmp_path / "run"
    train(config(steps=4, save_every=2), out, ranks="threads")
    expected = losses(out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    train(config(steps=4, save_every=2), out, resume=True, ranks="threads")
    assert losses(out) == expected
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4]


@pytest.mark.parametrize("line", ["single", "dp2"])
def test_a_folder_that_is_removed_while_a_run_goes_on_is_written_anew_at_the_next_save(
    tmp_path, monkeypatch, line, capsys
):
    out, plain = tmp_path / "run", loop._Training._step

    def step(self):
        row = plain(self)
        if self.world.rank == 0 and row["step"] == 3:
            shutil.rmtree(out)
        return row

    monkeypatch.setattr(loop._Training, "_step", step)
    train(config(layout=line, steps=6, save_every=2), out, ranks="threads")
    monkeypatch.undo()
    said = "".join(capsys.readouterr().err.split())
    assert f"warning: '{out}' was removed; it is written anew, with its metrics".replace(" ", "") in said
    assert [step.name for step in steps_in(out / "checkpoints")] == ["step-00000004", "step-00000006"]
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert train(config(steps=7), out, resume=True, ranks="threads")["steps"] == 7


@pytest.mark.parametrize("line", ["single", "dp2"])
@pytest.mark.parametrize("what", ["run", "run/checkpoints"])
def test_a_folder_that_is_removed_while_a_checkpoint_is_written_is_written_anew_with_it(
    tmp_path, monkeypatch, line, what
):
    out, plain, moved = tmp_path / "run", saving.save_file, tmp_path / "moved"

    def save_file(tensors, path):
        if not moved.exists() and "step-00000004" in path and "part-00000" in path:
            (tmp_path / what).rename(moved)  # at once, whatever other ranks write there
        return plain(tensors, path)

    monkeypatch.setattr(saving, "save_file", save_file)
    train(config(layout=line, steps=6, save_every=2), out, ranks="threads")
    assert moved.exists()
    assert [step.name for step in steps_in(out / "checkpoints")] == ["step-00000004", "step-00000006"]
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4, 5, 6]


def test_a_file_of_metrics_that_is_removed_is_written_anew_with_all_its_rows(tmp_path, monkeypatch):
    out, plain = tmp_path / "run", loop._Training._step
    train(config(), out, ranks="threads")

    def step(self):
        row = plain(self)
        if row["step"] == 4:
            (out / "metrics.jsonl").unlink()
        return row

    monkeypatch.setattr(loop._Training, "_step", step)
    train(config(steps=6), out, resume=True, ranks="threads")
    assert [row["step"] for row in read_metrics(out)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("line", ["single", "dp2"])
def test_a_run_whose_folder_was_removed_leaves_the_run_that_was_started_there_alone(tmp_path, monkeypatch, line):
    out, plain = tmp_path / "run", loop._Training._step

    def step(self):
        row = plain(self)
        if self.world.rank == 0 and row["step"] == 3 and self.config.seed == 0:
            shutil.rmtree(out)
            out.mkdir()
            others.append((out / ".lock").open("a"))
            fcntl.flock(others[0], fcntl.LOCK_EX)
            for name in ("run.json", "metrics.jsonl"):
                (out / name).write_text("{}")
        return row

    others = []
    monkeypatch.setattr(loop._Training, "_step", step)
    with pytest.raises(PlanError, match="another run has begun in it"):
        train(config(layout=line, steps=6, save_every=1), out, ranks="threads")
    others[0].close()
    assert sorted(path.name for path in out.iterdir()) == [".lock", "metrics.jsonl", "run.json"]
    assert (out / "metrics.jsonl").read_text() == (out / "run.json").read_text() == "{}"


class Row(dict):
    """A row of metrics that can be watched."""


def test_a_run_holds_its_first_and_last_row_of_metrics_and_no_others(tmp_path, monkeypatch):
    rows, num_held, plain = [], [], loop._Training._step

    def step(self):
        num_held.append(sum(row() is not None for row in rows))
        row = Row(plain(self))
        rows.append(weakref.ref(row))
        return row

    monkeypatch.setattr(loop._Training, "_step", step)
    summary = train(config(steps=9), tmp_path / "run", ranks="threads")
    written = read_metrics(tmp_path / "run")
    assert num_held == [0, 1, *[2] * 7]
    assert (summary["first_loss"], summary["last_loss"]) == (written[0]["loss"], written[-1]["loss"])
    assert summary["step_ms_median"] == statistics.median(row["step_ms"] for row in written[2:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "2,048 bytes, 4,096 bytes at the run's start"),
        (lambda text: b"x" + text[1:], "another beginning or end"),
        (lambda text: text[:-1] + b"x", "another beginning or end"),
    ],
)
def test_data_that_changed_between_stop_and_resume_are_refused_unless_they_are_accepted(tmp_path, change, words):
    text, out = tmp_path / "text", tmp_path / "run"
    text.write_bytes(bytes(range(256)) * 16)
    train(config(data=str(text)), out, ranks="threads")
    before = text.read_bytes()
    text.write_bytes(change(before))
    told = refused(PlanError, config(data=str(text), steps=3), out, resume=True)
    assert words in told
    assert "--changed-data" in told
    assert train(config(data=str(text), steps=3), out, resume=True, changed_data=True, ranks="threads")["steps"] == 3
    assert train(config(data=str(text), steps=4), out, resume=True, ranks="threads")["steps"] == 4  # it is noted anew
    text.write_bytes(before)
    refused(PlanError, config(data=str(text), steps=5), out, resume=True)


def test_a_run_of_a_version_that_did_not_note_its_data_is_resumed(tmp_path):
    out = tmp_path / "run"
    train(config(), out, ranks="threads")
    found = json.loads((out / "run.json").read_text())
    assert found.pop("data")["stdlib"][0] > 1_000_000
    (out / "run.json").write_text(json.dumps(found))
    assert train(config(steps=3), out, resume=True, ranks="threads")["steps"] == 3


# ---- signals


def test_many_signals_request_one_stop_and_the_old_handlers_are_restored():
    stop, before = Stop(), signal.getsignal(signal.SIGINT)
    with stop.on_signals():
        for _ in range(200):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_that_interrupts_itself_does_not_deadlock():
    """Two signals may come so close that the second interrupts the handler of the first."""
    stop = Stop()
    depth = 0

    def nested(*_):
        nonlocal depth
        depth += 1
        if depth < 50:
            os.kill(os.getpid(), signal.SIGINT)
        stop.request()

    with stop.on_signals():
        signal.signal(signal.SIGINT, nested)
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.requested
    assert not hasattr(stop.requested, "acquire")
    assert not any(hasattr(value, "acquire") or hasattr(value, "wait") for value in vars(stop).values())


def test_a_run_in_threads_saves_on_ctrl_c_and_can_be_resumed(tmp_path, monkeypatch):
    plain = loop._Training._step

    def step(self):
        row = plain(self)
        if self.world.rank == 0 and row["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return row

    monkeypatch.setattr(loop._Training, "_step", step)
    out = tmp_path / "run"
    with contextlib.suppress(KeyboardInterrupt):
        summary = train(config(layout="dp2", steps=50), out, ranks="threads")
        assert summary["stopped"]
    done = len(read_metrics(out))
    assert 2 <= done < 50
    assert [Path(step).name for step in steps_in(out / "checkpoints")] == [f"step-{done:08d}"]
    monkeypatch.undo()
    assert train(config(layout="tp2", steps=done + 1), out, resume=True, ranks="threads")["steps"] == done + 1


# ---- a loss that is not finite


def strict(line):
    """One JSON value as the standard has it: no NaN, no Infinity."""
    return json.loads(line, parse_constant=pytest.fail)


@pytest.mark.parametrize("line", ["single", "dp2 tp2"])
def test_a_loss_that_is_not_finite_ends_the_run_naming_the_step_and_is_not_saved(tmp_path, capsys, line):
    out = tmp_path / "run"
    options = {"layout": line, "lr": 1e30, "steps": 20, "save_every": 1, "warmup": 0, "keep": 1}
    summary = train(config(**options), out, ranks="threads")
    rows = [strict(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = summary["diverged"]
    assert 1 < last < 20
    assert [row["step"] for row in rows] == [*range(1, last + 1)]
    assert rows[-1]["loss"] is None or rows[-1]["grad_norm"] is None
    assert all(row["loss"] is not None and row["grad_norm"] is not None for row in rows[:-1])
    assert f"warning: step {last} went wrong, its " in capsys.readouterr().err
    assert [step.name for step in steps_in(out / "checkpoints")] == [f"step-{last - 1:08d}"]
    assert summary["checkpoint"].endswith(f"step-{last - 1:08d}")
    assert not summary["stopped"]
    with pytest.raises(PlanError, match="'lr'"):
        config(lr=float("nan"))


def test_a_first_step_that_goes_wrong_leaves_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "clip_grad_norm_", lambda *_: torch.tensor(math.inf))
    summary = train(config(layout="dp2"), tmp_path / "run", ranks="threads")
    assert (summary["diverged"], summary["checkpoint"]) == (1, None)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert "ended before its first checkpoint" in refused(CheckpointError, config(), tmp_path / "run", resume=True)


# ---- the parts of a run


def parts_in(out):
    return [(each["first_step"], each["options"]["layout"]) for each in parts_of(out)]


def test_a_run_notes_each_of_its_parts_with_its_layout_and_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/shardwright", "train", "--layout", "dp2 tp2"])
    train(config(steps=3, stop_at=1, layout="dp2"), tmp_path, ranks="threads")
    train(config(steps=3, stop_at=2, layout="tp2"), tmp_path, resume=True, ranks="threads")
    train(config(steps=3, layout="single"), tmp_path, resume=True, ranks="threads")
    assert parts_in(tmp_path) == [(0, "dp2"), (1, "tp2"), (2, "single")]
    assert [each["world_size"] for each in parts_of(tmp_path)] == [2, 2, 1]
    assert {each["command"] for each in parts_of(tmp_path)} == {"shardwright train --layout 'dp2 tp2'"}


def test_parts_whose_steps_are_taken_again_are_no_parts_any_more(tmp_path):
    train(config(steps=3, stop_at=1, layout="dp2"), tmp_path, ranks="threads")
    train(config(steps=3, stop_at=2, layout="tp2"), tmp_path, resume=True, ranks="threads")
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
    train(config(steps=3, layout="dp3"), tmp_path, resume=True, ranks="threads")
    assert parts_in(tmp_path) == [(0, "dp2"), (1, "dp3")]


def test_a_run_whose_folder_was_removed_keeps_its_parts(tmp_path, monkeypatch):
    out, saving = tmp_path / "run", loop._Training._save
    train(config(steps=2, stop_at=1, layout="dp2"), out, ranks="threads")

    def remove_first(self, **named):
        if self.world.rank == 0 and self.run.num_steps == 2:
            shutil.rmtree(out)
        self.everyone.barrier()
        return saving(self, **named)

    monkeypatch.setattr(loop._Training, "_save", remove_first)
    train(config(steps=2, layout="tp2"), out, resume=True, ranks="threads")
    assert parts_in(out) == [(0, "dp2"), (1, "tp2")]


def test_each_row_has_the_memory_that_each_rank_holds_and_its_peak(tmp_path):
    train(config(layout="dp2"), tmp_path, ranks="threads")
    for row in read_metrics(tmp_path):
        assert len(row["held_bytes"]) == len(row["memory_bytes"]) == 2
        assert all(0 < held <= peak for held, peak in zip(row["held_bytes"], row["memory_bytes"], strict=True))
