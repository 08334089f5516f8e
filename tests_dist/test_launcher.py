"""The process that starts the ranks: what is left when it or a rank of it is killed, and what it says of that."""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from benchmarks import shared_memory
from tests_dist.command import (
    end_all,
    family_of,
    fork_server_of,
    left_in,
    ranks_in,
    said_by,
    start,
    temporary_folder,
    wait_for_step,
    within,
)
from torch import nn

import shardwright as sw
from shardwright import command_start, fork_server
from shardwright.checkpoint.manifest import steps_in
from shardwright.comm.backends.run_folder import SAVES, run_folder
from shardwright.comm.backends.started_ranks import SAVES_S, StartedRanks
from shardwright.comm.launch import launch
from shardwright.errors import RankFailedError
from shardwright.train.progress import read_metrics


@pytest.fixture
def folder():
    with temporary_folder() as found:
        yield found


@pytest.fixture
def running(tmp_path, folder):
    """A run under way: its process, its --out, and all its processes; however it ends, it leaves no shared memory."""
    out, before = tmp_path / "run", shared_memory.names()
    process = start(out, "--steps", "100000", folder=folder)
    family = []
    try:
        wait_for_step(process, out, 4)
        family = family_of(process)
        yield process, out, family
    finally:
        process.kill()
        process.wait()
        end_all(family)
    assert not shared_memory.left_since(before)


def can_be_taken(lock):
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def test_ranks_end_when_the_launcher_is_killed_and_leave_nothing(running, folder):
    process, out, family = running
    ranks = ranks_in(folder)
    assert sorted(ranks) == [0, 1, 2, 3]
    assert set(ranks.values()) < set(family)
    assert left_in(folder)
    assert not can_be_taken(out / ".lock")
    process.kill()
    process.wait()
    assert within(20, lambda: not any(rank.is_running() for rank in ranks.values()))
    assert can_be_taken(out / ".lock")
    assert within(20, lambda: not any(each.is_running() for each in family))
    assert left_in(folder) == []
    assert "the process that started the ranks has ended" in said_by(out)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)
def test_a_rank_that_is_killed_is_named_with_its_signal_and_leaves_nothing(running, folder, number):
    process, out, family = running
    ranks_in(folder)[2].send_signal(number)
    assert process.wait(timeout=25) == 1
    assert f"error: rank 2 was killed by {number.name}; the other ranks were ended" in said_by(out)
    assert "Traceback" not in said_by(out)
    assert within(20, lambda: not any(each.is_running() for each in family))
    assert left_in(folder) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_rank_that_is_told_to_stop_is_named_and_all_save_and_stop(running, folder, number):
    process, out, _ = running
    ranks_in(folder)[2].send_signal(number)
    assert process.wait(timeout=25) == 130
    said, done = said_by(out), len(read_metrics(out))
    assert f"rank 2 was told to stop by {number.name}; all ranks have saved and ended" in said
    assert f"step-{done:08d} is complete, continue with --resume" in said
    assert steps_in(out / "checkpoints")[-1].name == f"step-{done:08d}"
    assert left_in(folder) == []


def test_a_launcher_that_is_told_to_stop_lets_the_ranks_save(running, folder):
    process, out, _ = running
    process.terminate()
    assert process.wait(timeout=25) == 130
    assert "told to stop" not in said_by(out)
    assert steps_in(out / "checkpoints")[-1].name == f"step-{len(read_metrics(out)):08d}"
    assert left_in(folder) == []


@pytest.mark.parametrize("times", [1, 3, 10_000], ids=["once", "again", "until it has ended"])
def test_a_signal_to_the_whole_process_group_lets_the_ranks_save_whether_it_comes_once_or_again(running, folder, times):
    process, out, family = running
    for _ in range(times):
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(0.02)
        if process.poll() is not None:
            break
    assert process.wait(timeout=25) == 130, said_by(out)
    done = len(read_metrics(out))
    assert steps_in(out / "checkpoints")[-1].name == f"step-{done:08d}"
    assert f"step-{done:08d} is complete, continue with --resume" in said_by(out)
    assert within(20, lambda: not any(each.is_running() for each in family))
    assert left_in(folder) == []


def test_an_early_warning_to_the_group_saves_and_the_run_goes_on(tmp_path):
    out = tmp_path / "run"
    process = start(out, "--steps", "100000", "--save-every", "0")
    try:
        wait_for_step(process, out, 2)
        os.killpg(process.pid, signal.SIGUSR1)
        assert within(30, lambda: steps_in(out / "checkpoints"))
        wait_for_step(process, out, len(read_metrics(out)) + 2)
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_early_warnings_from_the_first_moment_on_end_no_run(tmp_path):
    out = tmp_path / "run"
    process = start(out, "--steps", "6", "--save-every", "0")
    try:
        bit, status = 1 << signal.SIGUSR1 - 1, Path(f"/proc/{process.pid}/status")
        # a signal before the first line of the library ends any program
        assert within(60, lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & bit)
        while process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGUSR1)
            time.sleep(0.05)
        assert process.returncode == 0, said_by(out)
        assert steps_in(out / "checkpoints")[-1].name == "step-00000006"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_run_without_its_fork_server_goes_on_and_a_rank_that_then_fails_is_named(running, folder, number):
    process, out, family = running
    ranks = ranks_in(folder)
    fork_server_of(process).send_signal(number)
    done = len(read_metrics(out))
    assert within(60, lambda: len(read_metrics(out)) > done + 3)
    ranks[2].kill()
    assert process.wait(timeout=25) == 1
    assert "error: rank 2 was killed" in said_by(out)
    assert within(20, lambda: not any(each.is_running() for each in family))
    assert left_in(folder) == []


def test_what_a_run_leaves_that_was_killed_as_a_whole_the_next_run_removes(running, folder, monkeypatch):
    process, _, family = running
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert within(20, lambda: not any(each.is_running() for each in family))
    assert left_in(folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with run_folder() as mine:
        assert left_in(folder) == sorted(map(str, [mine, *mine.iterdir()]))  # its own alone
    assert left_in(folder) == []


def test_a_folder_of_a_run_that_lives_is_left_alone():
    with run_folder() as first, run_folder() as second:
        assert first.exists()
        assert second.exists()


def collection(world):
    return gc.isenabled(), gc.get_freeze_count() > 100_000


def test_ranks_collect_garbage_but_not_among_what_was_imported_before_they_were_forked():
    assert launch(collection, 2) == [(True, True)] * 2


SCRIPT = """
    import tempfile, torch, shardwright as sw
    def work(world):
        return world.everyone().all_reduce(torch.ones(1)).item()
    if __name__ == "__main__":
        print(sw.launch(work, 2), tempfile.gettempdir())
"""


def test_a_folder_for_temporary_files_with_a_long_path_does_no_harm(tmp_path):
    long = tmp_path / ("a-long-name-" * 10) / ("another-long-name-" * 10)
    long.mkdir(parents=True)
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"TMPDIR": str(long)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["[2.0,", "2.0]", str(long)], done.stderr
    assert left_in(long) == []


def test_a_program_that_starts_ranks_while_a_rank_imports_it_is_told_the_line_to_write(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace('if __name__ == "__main__":', "if True:"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert 'fix:     write if __name__ == "__main__": before the call' in done.stderr
    assert "rank 0 failed" not in done.stderr


def no_work(world):
    return world.rank


def forks(world, end):
    if (child := os.fork()) == 0:
        return end()
    os.waitpid(child, 0)
    return world.rank


def says(file):
    sys.stdout = file.open("w")  # as a pipe or a file: what is printed is not written at once
    print("of a child")


@pytest.mark.parametrize("prints", [False, True])
def test_a_process_that_a_rank_forks_answers_nothing_for_the_rank_and_its_prints_are_kept(tmp_path, prints):
    file = tmp_path / "said"
    assert launch(forks, 1, partial(says, file) if prints else sys.exit) == [0]
    assert not prints or file.read_text() == "of a child\n"


def trains_the_first(world, model, other):
    run = sw.parallelize(model, "dp2", world, loss=sw.MeanSquaredError())
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    for part in run.shard([(torch.ones(2, 2), torch.ones(2, 1))] * 2):
        run.step(part)
        optimizer.step()
    sw.parallelize(other, "dp2", world).predict(torch.ones(2, 2))


def test_the_launcher_is_warned_of_the_model_of_which_ranks_trained_a_copy_and_of_no_other():
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    launch(trains_the_first, 2, model, other)
    other(torch.ones(1, 2))  # warnings are errors here
    with pytest.warns(UserWarning, match="ranks that are processes trained copies"):
        model(torch.ones(1, 2))


def test_signals_are_handled_as_before_once_the_ranks_have_ended():
    handled = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in handled]
    assert launch(no_work, 1) == [0]
    assert [signal.getsignal(number) for number in handled] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_while_the_folder_is_removed_is_handled_once_it_is_removed(folder, monkeypatch, number):
    remove, found_left = shutil.rmtree, []

    def signalled(place, **options):
        os.kill(os.getpid(), number)
        remove(place, **options)

    before = signal.signal(number, lambda *_: found_left.append(left_in(folder)))
    try:
        with monkeypatch.context() as patched:
            patched.setattr(tempfile, "tempdir", str(folder))
            patched.setattr(shutil, "rmtree", signalled)
            assert launch(no_work, 1) == [0]
    finally:
        signal.signal(number, before)
    assert found_left == [[]]


@pytest.mark.parametrize(
    ("came", "passed_on"), [(signal.SIGHUP, signal.SIGTERM), (signal.SIGINT, signal.SIGINT), (0, None)]
)
def test_a_rank_that_starts_after_the_signal_to_stop_is_told_so(came, passed_on):
    told = []
    ranks = StartedRanks(1.0)
    ranks.signalled = came
    ranks._listen = lambda _: None
    ranks.add(SimpleNamespace(signal=told.append))
    assert told == ([] if passed_on is None else [passed_on])


def test_the_launcher_waits_for_a_rank_that_saves_after_a_failure_and_not_for_long(tmp_path, monkeypatch, capsys):
    ranks = StartedRanks(30.0)
    ranks.folder = tmp_path
    ranks.ranks = [SimpleNamespace(number=number, ended=number == 0, killed=False) for number in range(2)]
    ranks._failed_within(1.0)
    assert not ranks._waits_for_saves()
    (tmp_path / f"0{SAVES}").touch()  # of a rank that has ended
    assert not ranks._waits_for_saves()
    (tmp_path / f"1{SAVES}").touch()
    assert ranks._waits_for_saves()
    late = time.monotonic() + SAVES_S + 0.1
    monkeypatch.setattr(time, "monotonic", lambda: late)
    assert not ranks._waits_for_saves()
    assert f"the last step is not saved: {SAVES_S:g} s after the failure" in capsys.readouterr().err


def test_where_no_folder_is_short_enough_the_message_says_so(monkeypatch, tmp_path):
    from shardwright.comm.backends import message_blocks as exchange
    from shardwright.errors import PlanError

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("a-long-name-" * 10)))
    assert len(exchange.folder_for_sockets()) < 20
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PlanError, match="too long a path for local sockets") as refused:
        exchange.folder_for_sockets()
    assert "set TMPDIR" in str(refused.value)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes to cores")
def test_processes_are_bound_to_cores_of_their_own_when_told_to():
    cores = sorted(os.sched_getaffinity(0))
    bound = launch(_cores, 2, bind_cores=True)
    assert sorted({core for each in bound for core in each}) == cores
    assert len(cores) < 2 or not set(bound[0]) & set(bound[1])
    assert sorted(os.sched_getaffinity(0)) == cores


def _cores(world):
    return sorted(os.sched_getaffinity(0))


def test_a_fork_server_that_ends_before_the_ranks_start_is_explained(monkeypatch):
    monkeypatch.setattr(fork_server, "_COMMAND", "raise SystemExit")
    with pytest.raises(RankFailedError, match=r"ended before they were started\n  given: .*\n  allowed: .*\n  fix: "):
        fork_server.ForkServer().fork()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_is_stopped_while_it_imports_leaves_no_fork_server(tmp_path, sent):
    process = start(tmp_path / "run")
    try:
        assert within(30, lambda: psutil.Process(process.pid).children())
        server = fork_server_of(process)
        process.send_signal(sent)
        process.wait(timeout=30)
        assert not read_metrics(tmp_path / "run"), "it has not begun"
        assert within(30, lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    finally:
        end_all([psutil.Process(process.pid)] if process.poll() is None else [])


@pytest.mark.parametrize("words", [["--ranks", "threads"], ["--ranks=threads"], ["--help"]])
def test_a_command_that_starts_no_ranks_starts_no_fork_server(monkeypatch, words):
    for name in command_start._OF_RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", "shardwright.cli", "train", "--layout", "dp2"])
    assert command_start._trains_here()
    monkeypatch.setattr(sys, "orig_argv", [*sys.orig_argv, *words])
    assert not command_start._trains_here()
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "/bin/shardwright", "sample", "--from", "train"])
    assert not command_start._trains_here()


def test_a_fork_server_that_cannot_import_what_ranks_need_is_explained(monkeypatch):
    failing = fork_server._COMMAND.replace("import shardwright, torch._dynamo", "import no_such_module, torch._dynamo")
    monkeypatch.setattr(fork_server, "_COMMAND", failing)
    with pytest.raises(RankFailedError, match="could not import what ranks need"):
        fork_server.ForkServer().fork()
