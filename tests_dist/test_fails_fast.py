"""A rank that fails ends the others in seconds, and what a person reads first is its own words."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

from shardwright import CrossEntropy, Layout, launch, parallelize
from shardwright.errors import CommunicationError, LayoutError, RankFailedError


def raises_on_one(world):
    if world.rank == 1:
        raise KeyError("the milk is gone")
    world.everyone().barrier()


def is_killed(world, after_s):
    axis = world.everyone()
    if world.rank == 1:
        time.sleep(after_s)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(10_000):
        axis.all_reduce(torch.ones(100_000))


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


def cannot_be_laid_out(world):
    parallelize(torch.nn.Linear(3, 3), "tp2", world, loss=CrossEntropy())


@pytest.mark.parametrize("links", ["auto", "sockets"])
def test_a_rank_that_raises_is_heard_and_ends_the_others(links):
    start = time.monotonic()
    with pytest.raises(RankFailedError) as failure:
        launch(raises_on_one, 3, links=links)
    assert time.monotonic() - start < 15
    text = str(failure.value)
    assert text.startswith("rank 1 failed")
    assert "the milk is gone" in text
    assert "LostPartnerError" not in text


@pytest.mark.parametrize("links", ["auto", "sockets"])
@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_a_rank_that_is_killed_is_named(links, after_s):
    start = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 was killed"):
        launch(is_killed, 3, after_s, links=links)
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("kind", ["kind", "shape", "dtype", "axis"])
def test_ranks_that_disagree_are_both_named(kind):
    with pytest.raises(CommunicationError) as failure:
        launch(disagrees, 2, kind, debug=True)
    assert "rank 0: " in str(failure.value)
    assert "rank 1: " in str(failure.value)


@pytest.mark.parametrize("links", ["auto", "sockets"])
def test_a_call_that_nobody_joins_times_out_naming_axis_and_call(links):
    with pytest.raises(
        (CommunicationError, RankFailedError), match=r"all_reduce of \[3\] float32 sum over axis 'world'"
    ):
        launch(never_comes, 2, links=links, timeout_s=2)


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
