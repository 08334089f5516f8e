"""Ranks as threads: many at once, ranks that fail, disagree, leave, wait for ever."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from shardwright.comm import launch as launching
from shardwright.comm import limits
from shardwright.comm.launch import launch, run_on_threads
from shardwright.errors import CommunicationError, LayoutError, PlanError, RankFailedError
from shardwright.layout import Layout
from shardwright.mesh import Mesh


def on_threads(num_ranks, work, *args):
    return launch(work, num_ranks, *args, ranks="threads")


# ---- ranks


def test_results_come_in_the_order_of_the_ranks():
    def work(world, base):
        time.sleep(0.01 * (world.size - world.rank))
        return base + world.rank, world.size, world.local

    assert on_threads(4, work, 10) == [(10 + rank, 4, True) for rank in range(4)]


def test_a_layout_or_a_mesh_gives_the_number_of_ranks():
    assert launch(lambda world: world.size, Layout.parse("dp2 tp3"), ranks="threads") == [6] * 6
    assert run_on_threads(Mesh(dp=2, cp=2), lambda axes: sorted(axes)) == [["cp", "dp"]] * 4


def test_a_process_that_is_a_rank_starts_no_more_threads_than_another(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(limits, "most_ranks", lambda ranks: 2)
    with pytest.raises(LayoutError, match="3 ranks that are threads"):
        on_threads(3, lambda world: world.rank)


def test_sixty_four_ranks_work_together():
    def work(axes):
        found = [axis.all_reduce(torch.ones(3)).sum().item() for _ in range(5) for axis in axes.values()]
        return found, axes["tp"].all_gather(torch.tensor([axes["tp"].index])).tolist()

    for found, gathered in run_on_threads(Mesh(pp=4, dp=4, tp=4), work):
        assert found == [12.0] * 15
        assert gathered == [0, 1, 2, 3]
    assert on_threads(64, lambda world: world.everyone().all_reduce(torch.ones(1)).item()) == [64.0] * 64


def test_many_worlds_run_at_once_in_one_process():
    def one(number):
        mesh = Mesh(dp=1 + number % 3, tp=1 + number % 2)

        def work(axes):
            x = torch.tensor([float(number)])
            for _ in range(10):
                x = axes["tp"].all_reduce(x) / axes["tp"].size
                x = axes["dp"].all_reduce(x) / axes["dp"].size
            return x.item()

        return run_on_threads(mesh, work) == [number] * mesh.size

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(24)))


def test_a_world_may_be_started_inside_a_rank():
    def inner(axes):
        return axes["tp"].all_reduce(torch.ones(1)).item()

    def work(world):
        found = run_on_threads(Mesh(tp=3), inner)
        return world.everyone().all_reduce(torch.tensor(sum(found))).item()

    assert on_threads(2, work) == [18.0, 18.0]


# ---- ranks that fail


def fails(world):
    raise ZeroDivisionError("this rank's own words")


@pytest.mark.usefixtures("ends_soon")
def test_a_rank_that_raises_ends_the_others_with_its_own_traceback():
    def work(world):
        axis = world.everyone()
        axis.barrier()
        if world.rank == 2:
            fails(world)
        axis.all_reduce(torch.ones(1))
        time.sleep(60)

    with pytest.raises(RankFailedError) as caught:
        on_threads(4, work)
    text = str(caught.value)
    assert text.startswith("rank 2 failed")
    assert "Traceback (most recent call last)" in text
    assert "in fails" in text
    assert "ZeroDivisionError: this rank's own words" in text
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.usefixtures("ends_soon")
def test_ranks_that_wait_in_different_calls_all_end_when_one_raises():
    def work(world):
        axes = world.axes(Mesh(dp=2, tp=2))
        if world.rank == 0:
            time.sleep(0.05)
            fails(world)
        if world.rank == 1:
            axes["tp"].all_gather(torch.ones(1))
        if world.rank == 2:
            axes["dp"].receive((1,), torch.float32, 0)
        if world.rank == 3:
            axes["dp"].barrier()

    with pytest.raises(RankFailedError, match="rank 0 failed"):
        on_threads(4, work)


def wait_for_the_end_of(rank):
    """Waits until the thread of a rank has ended, and what it raised is known."""
    while any(thread.name == f"rank {rank}" for thread in threading.enumerate()):
        time.sleep(0.001)


@pytest.mark.usefixtures("ends_soon")
def test_a_rank_that_calls_after_another_failed_ends_there():
    reached = []

    def work(world):
        axis = world.everyone()
        if world.rank == 0:
            fails(world)
        wait_for_the_end_of(0)
        axis.send(torch.ones(1), 0)
        reached.append(world.rank)

    with pytest.raises(RankFailedError, match="rank 0 failed"):
        on_threads(2, work)
    assert reached == []


@pytest.mark.usefixtures("ends_soon")
def test_of_several_failures_the_first_is_raised():
    def work(world):
        wait_for_the_end_of(world.rank - 1)
        raise KeyError(f"of rank {world.rank}")

    with pytest.raises(RankFailedError, match="rank 0 failed") as caught:
        on_threads(3, work)
    assert "of rank 0" in str(caught.value)


@pytest.mark.parametrize("error", [LayoutError, PlanError])
def test_a_mistake_that_every_rank_sees_is_raised_as_it_is(error):
    def work(world):
        raise error("the same words")

    with pytest.raises(error, match="the same words"):
        on_threads(3, work)


@pytest.mark.usefixtures("ends_soon")
def test_a_plan_that_one_rank_refuses_first_is_raised_as_it_is_and_names_the_rank():
    def work(world):
        if world.rank == 1:
            raise PlanError("only here")
        world.everyone().barrier()

    with pytest.raises(PlanError, match="only here") as caught:
        on_threads(3, work)
    assert caught.value.__notes__ == ["raised by rank 1"]


@pytest.mark.usefixtures("ends_soon")
def test_work_that_cannot_be_done_ends_every_rank():
    def work(world):
        world.everyone().broadcast(torch.ones(2), source=5)

    with pytest.raises((RankFailedError, CommunicationError)):
        on_threads(2, work)


@pytest.mark.usefixtures("ends_soon")
def test_an_interruption_from_the_keyboard_ends_every_rank():
    def work(world):
        if world.rank == 0:
            time.sleep(0.05)
            _thread.interrupt_main()
            time.sleep(1)
        world.everyone().barrier()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts without one
    try:
        with pytest.raises(KeyboardInterrupt):
            on_threads(3, work)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("saves", [False, True])
def test_a_rank_that_computes_on_after_another_has_failed_holds_up_the_launch_only_while_it_saves(monkeypatch, saves):
    begun, goes_on, ended = threading.Event(), threading.Event(), []
    monkeypatch.setattr(launching, "_END_S", 0.0)

    def work(world):
        if world.rank == 1:
            begun.wait()
            fails(world)
        with world.transport.saving() if saves else nullcontext():
            begun.set()
            goes_on.wait(1 if saves else 20)  # makes no call that would end it
            ended.append(world.rank)

    with pytest.raises(RankFailedError, match="rank 1 failed"):
        on_threads(2, work)
    assert ended == ([0] if saves else [])
    goes_on.set()
    for thread in launching._LEFT:
        thread.join()


@pytest.mark.usefixtures("ends_soon")
def test_ranks_that_compute_on_after_an_interruption_end_with_the_process_and_do_not_abort_it(monkeypatch):
    """Python's end would end their threads inside of native code, which aborts."""
    goes_on, codes = threading.Event(), []
    monkeypatch.setattr(launching, "_END_S", 0.1)
    monkeypatch.setattr(os, "_exit", codes.append)

    def work(world):
        _thread.interrupt_main()
        goes_on.wait()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            on_threads(1, work)
    finally:
        signal.signal(signal.SIGINT, before)
    launching._end_left()
    goes_on.set()
    for thread in launching._LEFT:
        thread.join()
    launching._end_left()
    assert codes == [130]


# ---- ranks that leave, and ranks that wait for each other


@pytest.mark.usefixtures("ends_soon")
def test_a_rank_that_returns_early_is_named_to_the_ranks_that_wait():
    def work(world):
        axis = world.everyone()
        if world.rank != 1:
            axis.all_reduce(torch.ones(2))

    with pytest.raises(CommunicationError) as caught:
        on_threads(3, work)
    text = str(caught.value)
    assert "rank 0 waits in all_reduce of [2] float32 sum over axis 'world' for core for rank 1" in text
    assert "rank 2 waits in all_reduce" in text
    assert "rank 1 has returned already" in text


@pytest.mark.usefixtures("ends_soon")
def test_a_rank_that_returns_while_others_already_wait_is_named():
    def work(world):
        axis = world.everyone()
        if world.rank == 0:
            time.sleep(0.1)
        else:
            axis.barrier()

    with pytest.raises(CommunicationError, match="rank 0 has returned already"):
        on_threads(3, work)


@pytest.mark.usefixtures("ends_soon")
def test_ranks_that_all_wait_for_a_message_get_an_error():
    def work(world):
        world.everyone().receive((2,), torch.float32, (world.rank + 1) % world.size)

    with pytest.raises(CommunicationError) as caught:
        on_threads(3, work)
    text = str(caught.value)
    assert text.startswith("every rank waits and none can continue")
    for rank in range(3):
        assert f"rank {rank} waits in message of [2] float32" in text
        assert f"for rank {(rank + 1) % 3}" in text


@pytest.mark.usefixtures("ends_soon")
def test_a_call_that_one_rank_makes_once_too_often_is_an_error():
    def work(world):
        axis = world.everyone()
        for _ in range(3 + (world.rank == 1)):
            axis.barrier()

    with pytest.raises(CommunicationError, match="rank 1 waits in barrier"):
        on_threads(2, work)


def test_slow_ranks_are_no_deadlock():
    def work(world):
        axis = world.everyone()
        for turn in range(3):
            if world.rank == turn:
                time.sleep(0.05)
            axis.barrier()
        return axis.all_reduce(torch.ones(1)).item()

    assert on_threads(3, work) == [3.0] * 3


def test_a_rank_may_return_before_the_others_need_nothing_of_it():
    def work(world):
        axis = world.everyone()
        if world.rank == 0:
            axis.send(torch.tensor([7]), 1)
            return 0
        time.sleep(0.05)
        return axis.receive((1,), torch.int64, 0).item()

    assert on_threads(2, work) == [0, 7]


def test_a_world_starts_afresh_after_one_that_failed():
    def failing(world):
        if world.rank == 0:
            fails(world)
        world.everyone().barrier()

    for _ in range(5):
        with pytest.raises(RankFailedError):
            on_threads(2, failing)
        assert on_threads(2, lambda world: world.everyone().all_reduce(torch.ones(1)).item()) == [2.0, 2.0]
