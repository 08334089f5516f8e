"""A rank that fails ends the others in seconds, and what a person reads first is its own words."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from benchmarks import shared_memory
from tests_dist.command import left_in, temporary_folder, within

from shardwright import CrossEntropy, Layout, launch, parallelize, save_weights, without_values
from shardwright.errors import CommunicationError, LayoutError, RankFailedError

WAIT_S = 6  # of ranks for one that never comes: they also start within it, on a machine that does other work
SOON_S = 10  # without an end of their own ranks would wait ten minutes


def raises_on_one(world, when):
    if world.rank == 1:
        when.write_text(repr(time.monotonic()))
        raise KeyError("the milk is gone")
    world.everyone().barrier()


def is_killed(world, when, number, after_s=0.0):
    axis = world.everyone()
    if world.rank == 1:
        time.sleep(after_s)
        when.write_text(repr(time.monotonic()))
        os.kill(os.getpid(), number)
    for _ in range(10_000):
        axis.all_reduce(torch.ones(100_000))


def exits(world, when):
    if world.rank == 1:
        when.write_text(repr(time.monotonic()))
        os._exit(3)
    world.everyone().barrier()


def disagrees(world, kind):
    axis = world.everyone()
    size = 2 + world.rank if kind == "shape" else 2
    x = torch.ones(size, dtype=torch.float64 if kind == "dtype" and world.rank else torch.float32)
    if kind == "kind" and world.rank:
        axis.all_gather(x)
    elif kind == "axis" and world.rank:
        world.axis("other", [(0, 1)]).all_reduce(x)
    else:
        axis.all_reduce(x)


def never_comes(world):
    if world.rank == 1:
        time.sleep(30)
    world.everyone().all_reduce(torch.ones(3))


def asks_alone(world):
    everyone = world.everyone()
    everyone.barrier()
    if world.rank == 0:
        everyone.all_reduce(torch.ones(2))


def saves_alone(world):
    with without_values():
        model = torch.nn.Linear(3, 3)
    run = parallelize(model, "dp2", world, loss=CrossEntropy())
    if world.rank == 0:
        save_weights(run, "never.pt")


def cannot_be_laid_out(world):
    parallelize(torch.nn.Linear(3, 3), "tp2", world, loss=CrossEntropy())


@pytest.fixture
def failed(tmp_path, monkeypatch):
    """``failed(work, *args)``: what is said, soon, of ranks of which one fails, and nothing is left."""
    when = tmp_path / "when"

    def told(work, *args, **options):
        before = shared_memory.names()
        with temporary_folder() as folder, monkeypatch.context() as patched:
            patched.setattr(tempfile, "tempdir", str(folder))
            with pytest.raises(RankFailedError) as failure:
                launch(work, 3, when, *args, **options)
            assert time.monotonic() - float(when.read_text()) < SOON_S
            assert left_in(folder) == []
        gc.collect()
        assert not shared_memory.left_since(before)
        return str(failure.value)

    return told


@pytest.mark.parametrize("links", ["auto", "sockets"])
def test_a_rank_that_raises_is_heard_and_ends_the_others(failed, links):
    text = failed(raises_on_one, links=links)
    assert text.startswith("rank 1 failed")
    assert "the milk is gone" in text
    assert "LostPartnerError" not in text


@pytest.mark.parametrize("links", ["auto", "sockets"])
@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_a_rank_that_is_killed_is_named(failed, links, after_s):
    text = failed(is_killed, signal.SIGKILL, after_s, links=links)
    assert text.startswith("rank 1 was killed by SIGKILL; the other ranks were ended")
    assert "ran out of memory" in text


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGTERM, "what sent it"), (signal.SIGSEGV, "native code")])
def test_a_rank_that_any_other_signal_ends_is_named_with_it(failed, number, cause):
    text = failed(is_killed, number)
    assert text.startswith(f"rank 1 was killed by {number.name}; the other ranks were ended")
    assert cause in text


def test_a_rank_that_exits_is_named_with_its_exit_code(failed):
    assert failed(exits).startswith("rank 1 ended with exit code 3; the other ranks were ended")


def raises_while_another_computes(world, when):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if world.rank == 1:
        when.write_text(repr(time.monotonic()))
        raise KeyError("the milk is gone")
    while world.rank == 2:
        pass
    world.everyone().barrier()


def is_stopped(world, when):
    axis = world.everyone()
    for step in range(10_000):
        if world.rank == 1 and step == 3:
            when.write_text(repr(time.monotonic() + WAIT_S))  # the others wait for it so long
            os.kill(os.getpid(), signal.SIGSTOP)
        axis.all_reduce(torch.ones(10))


def test_a_rank_that_computes_and_takes_no_signal_holds_no_other_rank_up(failed):
    text = failed(raises_while_another_computes)
    assert text.startswith("rank 1 failed")
    assert "the milk is gone" in text


def test_a_rank_that_is_stopped_is_named_and_ended_with_the_others(failed):
    text = failed(is_stopped, timeout_s=WAIT_S)
    assert text.startswith("rank 1 was stopped, and the other ranks waited for it in vain; all ranks were ended")
    assert "all_reduce of [10] float32" in text


def takes_no_signal(world, begun):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    world.everyone().barrier()
    begun.write_text("")
    time.sleep(60)


def test_ranks_that_do_not_end_when_told_to_are_killed_after_their_grace_and_named(tmp_path):
    begun = tmp_path / "begun"

    def tell():
        within(60, begun.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    telling = threading.Thread(target=tell)
    telling.start()
    with pytest.raises(KeyboardInterrupt, match=r"rank 0, 1 had not ended 0\.5 s after SIGTERM"):
        launch(takes_no_signal, 2, begun, grace_s=0.5)
    telling.join()


def test_a_program_that_sigterm_ends_says_so_in_one_line_and_has_the_exit_code_of_the_signal(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(
            """
            import sys, time
            from pathlib import Path
            import shardwright as sw
            def work(world):
                world.everyone().barrier()
                Path(sys.argv[1], str(world.rank)).write_text("")
                time.sleep(60)
            if __name__ == "__main__":
                sw.launch(work, 2)
            """
        )
    )
    with subprocess.Popen([sys.executable, program, tmp_path], stderr=subprocess.PIPE, text=True) as started:
        within(60, lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
        started.terminate()
        assert started.stderr.read() == "stopped by SIGTERM\n"
    assert started.returncode == 143


@pytest.mark.parametrize("kind", ["kind", "shape", "dtype", "axis"])
def test_ranks_that_disagree_are_both_named(kind):
    with pytest.raises(CommunicationError) as failure:
        launch(disagrees, 2, kind, debug=True)
    assert "rank 0: " in str(failure.value)
    assert "rank 1: " in str(failure.value)


def gets_another_size(world):
    if world.rank == 0:
        world.everyone().send(torch.ones(3), 1)
        world.everyone().all_reduce(torch.ones(5000))
    else:
        with pytest.raises(CommunicationError, match=r"rank 0 sent 12 bytes where 8 are expected"):
            world.everyone().receive((2,), torch.float32, 0)
        world.everyone().all_reduce(torch.ones(10000))


def test_a_message_of_another_size_is_no_number_that_nobody_sent():
    with pytest.raises(CommunicationError, match=r"rank \d sent \d+ bytes where \d+ are expected"):
        launch(gets_another_size, 2)


@pytest.mark.parametrize("links", ["auto", "sockets"])
def test_a_call_that_nobody_joins_times_out_naming_axis_and_call(links):
    with pytest.raises(
        (CommunicationError, RankFailedError),
        match=r"(?s)all_reduce of \[3\] float32 sum over axis 'world'.*call it on every rank",
    ):
        launch(never_comes, 2, links=links, timeout_s=WAIT_S)


@pytest.mark.parametrize(
    ("work", "call", "links"), [(asks_alone, "Axis.all_reduce", "sockets"), (saves_alone, "sw.save_weights", "auto")]
)
def test_a_call_that_one_rank_makes_while_the_others_have_ended_is_named_before_the_time_limit(work, call, links):
    words = rf"(?s)none can go on.*rank 0: in {call}, line \d+ of {{}}\s+rank 1: has returned.*{call}: call it on every"
    with pytest.raises(CommunicationError, match=words.format(Path(__file__).name)):
        launch(work, 2, links=links, timeout_s=4 * WAIT_S)


def test_a_layout_that_cannot_be_is_a_layout_error():
    with pytest.raises(LayoutError, match="no layer of the model can be cut"):
        launch(cannot_be_laid_out, 2)


def test_a_world_that_torchrun_started_is_joined(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, torch, shardwright as sw
            def work(world):
                return world.everyone().all_reduce(torch.ones(1)).item(), world.size
            print(*sw.launch(work, int(sys.argv[1])))
            """
        )
    )
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    joined = subprocess.run([*start, "2"], capture_output=True, text=True, timeout=100)
    assert joined.stdout.count("(2.0, 2)") == 2, joined.stderr
    refused = subprocess.run([*start, "4"], capture_output=True, text=True, timeout=100)
    assert refused.returncode
    assert "the layout does not fit the ranks that were started" in refused.stderr


def test_a_layout_says_how_many_ranks_it_wants():
    assert launch(rank_of, Layout.parse("dp2")) == [0, 1]


def rank_of(world):
    return world.rank


class Fails(torch.nn.Linear):
    """A layer that does something else in its second microbatch, forward or backward."""

    def __init__(self, act, backward):
        super().__init__(4, 4)
        self.act, self.backward, self.calls = act, backward, 0

    def forward(self, x):
        self.calls += 1
        y = super().forward(x)
        if self.calls == 2 and self.backward:
            y.register_hook(lambda _: self.act())
        elif self.calls == 2:
            self.act()
        return y


def fails_in_a_stage(world, when, how, backward, schedule):
    def act():
        when.write_text(repr(time.monotonic()))
        if how == "raises":
            raise KeyError("the milk is gone")
        os.kill(os.getpid(), signal.SIGKILL)

    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    layers[1] = Fails(act, backward)
    run = parallelize(torch.nn.Sequential(*layers), f"pp3/{schedule} mb4", world)
    for batch in run.shard([(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))] * 100):
        run.step(batch)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_stage_that_raises_in_the_middle_of_a_step_is_heard(failed, backward, schedule):
    text = failed(fails_in_a_stage, "raises", backward, schedule)
    assert text.startswith("rank 1 failed")
    assert "the milk is gone" in text
    assert "LostPartnerError" not in text


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_stage_that_is_killed_in_the_middle_of_a_step_is_named(failed, backward):
    text = failed(fails_in_a_stage, "kills", backward, "1f1b")
    assert text.startswith("rank 1 was killed by SIGKILL; the other ranks were ended")
