"""The library's transport and channels under the rules of NCCL (``tests/pretend_nccl.py``), and that the rules bite."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from comm.scenarios import SCENARIOS
from nccl_rules import Variant
from pretend_nccl import over_nccl
from shardwright.comm.backends import nccl
from shardwright.comm.backends.nccl import NcclChannel
from shardwright.comm.backends.watchdog import Watchdog
from shardwright.comm.launch import run_threads
from shardwright.errors import RankFailedError

STRICTEST = Variant()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.removeprefix("scenario_"))
def test_channels_over_nccl_do_what_every_backend_must(scenario, num_ranks):
    with over_nccl(STRICTEST):
        run_threads(scenario, num_ranks)


# ---- types that NCCL does not have


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16, torch.complex64, torch.bool])
def test_tensors_of_any_type_are_moved(dtype):
    def work(world):
        axis = world.everyone()
        mine = torch.arange(4).add(world.rank).to(torch.int16).to(dtype)
        whole, (back, _) = axis.all_gather(mine), axis.all_to_all([mine, mine], [(4,), (4,)])
        return whole, axis.broadcast(mine.clone(), 1), back

    with over_nccl(STRICTEST):
        for whole, second, first in run_threads(work, 2):
            assert whole.dtype == second.dtype == first.dtype == dtype
            assert whole.tolist() == [*first.tolist(), *second.tolist()]


@pytest.mark.parametrize("dtype", [torch.int16, torch.complex64])
def test_tensors_of_types_without_sums_are_summed(dtype):
    def work(world):
        axis = world.everyone()
        total = axis.all_reduce(torch.full((4,), 3 + world.rank).to(dtype))
        return (
            total,
            axis.reduce_scatter(torch.ones(2, dtype=dtype)),
            axis.reduce_scatter(torch.ones(3, dtype=dtype), 0, [1, 2]),
        )

    with over_nccl(STRICTEST):
        for rank, (total, even, uneven) in enumerate(run_threads(work, 2)):
            assert total.tolist() == [7] * 4
            assert total.dtype == even.dtype == dtype
            assert (even.tolist(), uneven.tolist()) == ([2], [2] * (1 + rank))


# ---- messages


def messages_both_ways(world):
    """Each asks for the other's message, sends its own and only then waits: as stages of a pipeline do."""
    axis = world.everyone()
    axis.connect([(0, 1)])
    other = 1 - axis.index
    coming = axis.receive_async((2,), torch.float32, other)
    axis.send(torch.full((2,), float(world.rank)), other)
    return coming.wait().tolist()


def test_receives_that_are_posted_before_sends_do_not_wait_for_each_other():
    with over_nccl(STRICTEST):
        assert run_threads(messages_both_ways, 2) == [[1, 1], [0, 0]]


def test_with_one_communicator_for_both_directions_they_would(monkeypatch):
    between = NcclChannel._group_between
    monkeypatch.setattr(
        NcclChannel, "_group_between", lambda self, call, member, upwards: between(self, call, member, True)
    )
    with pytest.raises(Exception, match="every rank waits and none can go on") as failure, over_nccl(STRICTEST):
        run_threads(messages_both_ways, 2)
    assert "receive from 1 of (2,), then send to 1 of (2,)" in str(failure.value)


def test_a_pair_that_was_not_connected_is_refused_by_name():
    def work(world):
        axis = world.everyone()
        axis.connect([(0, 1)])
        if axis.index == 2:
            axis.send(torch.ones(1), 1)

    with pytest.raises(Exception, match="nothing connects members 2 and 1"), over_nccl(STRICTEST):
        run_threads(work, 3)


# ---- the watchdog


def passes_both_ways(axis):
    other = 1 - axis.index
    return axis.send_and_receive_async({other: torch.ones(2)}, {other: (2,)}, torch.float32)


LATE = {
    "all_reduce": lambda axis: axis.all_reduce_async(torch.ones(2)),
    "all_gather": lambda axis: axis.all_gather_async(torch.ones(2)),
    "reduce_scatter": lambda axis: axis.reduce_scatter_async(torch.ones(2)),
    "all_to_all": lambda axis: axis.all_to_all_async([torch.ones(1), torch.ones(1)], [(1,), (1,)]),
    "broadcast": lambda axis: axis.broadcast_async(torch.ones(2), 1),
    "receive": lambda axis: axis.receive_async((2,), torch.float32, 1),
    "send": lambda axis: axis.send_async(torch.ones(2), 1),
    "send_and_receive": passes_both_ways,
}
"""Calls of rank 0, for which rank 1 is late."""

MEETS = {
    "receive": lambda axis: axis.send_async(torch.ones(2), 0),
    "send": lambda axis: axis.receive_async((2,), torch.float32, 0),
}
"""What rank 1 then calls, where that is another call."""


@pytest.mark.parametrize("name", LATE)
def test_the_watchdog_names_every_call_that_does_not_complete(name):
    def work(world):
        axis = world.everyone()
        axis.connect([(0, 1)])
        if world.rank == 0:
            transport = world.transport
            transport._watchdog = Watchdog(0, 0.1, lambda failure: (told.append(str(failure)), come.set()))
            pending = LATE[name](axis)
        assert come.wait(20), "the watchdog has said nothing"
        if world.rank == 1:
            pending = MEETS.get(name, LATE[name])(axis)
        pending.wait()

    told, come = [], threading.Event()
    with over_nccl(Variant(made_beforehand=True)):
        run_threads(work, 2)
    (text,) = told
    assert text.startswith("send of" if name == "send_and_receive" else f"{name} of"), text
    assert "over axis 'world'" in text
    assert "did not complete" in text
    assert "rank 0 of ranks 0, 1" in text


# ---- torch itself


@pytest.mark.sampled(0)
def test_torch_takes_every_call_as_it_is_made():
    """The backend of torch that sends nothing has NCCL's calls: names and arguments are those of torch."""
    program = Path(__file__).with_name("calls_of_torch.py")
    found = subprocess.run([sys.executable, "-W", "error", program], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


# ---- the rules


def test_members_that_make_different_calls_are_told():
    def work(world):
        group = nccl.dist.group.WORLD
        size = 2 + world.rank
        nccl.dist.all_reduce(torch.ones(size), group=group)

    with pytest.raises(Exception, match=r"different calls.*rank 0 all_reduce"), over_nccl(STRICTEST):
        run_threads(work, 2)


def test_bytes_that_change_under_way_are_told():
    def work(world):
        group, mine = nccl.dist.group.WORLD, torch.ones(2)
        if world.rank == 1:
            has_changed.wait(10)
        call = nccl.dist.broadcast(mine, group, 0, True)
        if world.rank == 0:
            mine.add_(1)
            has_changed.set()
        call.wait()

    has_changed = threading.Event()
    with pytest.raises(Exception, match="changed while it was under way"), over_nccl(Variant(made_beforehand=True)):
        run_threads(work, 2)


def gathers(mine, into):
    return nccl.dist.all_gather_single(into, mine, nccl.dist.group.WORLD, True)


def scatters(mine, into):
    return nccl.dist.reduce_scatter_single(mine, into, nccl.dist.group.WORLD, True)


def sums(mine, into):
    return nccl.dist.all_reduce(mine, async_op=True)


def spreads(mine, into):
    return nccl.dist.broadcast(mine, nccl.dist.group.WORLD, 0, True)


def passes(mine, into):
    is_first = threading.current_thread().name == "rank 0"
    return (nccl.dist.isend if is_first else nccl.dist.irecv)(mine, nccl.dist.group.WORLD, 1 if is_first else 0)


SENT, RESULTS = "that are sent by", "that wait for the results of"
TOUCHED = {
    "what is gathered": (gathers, 0, (0, 1), SENT),
    "where it is gathered": (gathers, 1, (0, 1), RESULTS),
    "what is summed and cut": (scatters, 1, (0, 1), SENT),
    "where a part of the sum comes": (scatters, 0, (0, 1), RESULTS),
    "what is summed in place": (sums, 0, (0, 1), RESULTS),
    "what is broadcast": (spreads, 0, (0,), SENT),
    "where it is broadcast": (spreads, 0, (1,), RESULTS),
    "a message that is sent": (passes, 0, (0,), SENT),
    "a message that is received": (passes, 0, (1,), RESULTS),
}
"""A call, and which of its tensors a rank writes into after the call has run and before it waits; the ranks that do."""


@pytest.mark.parametrize(
    ("start", "place", "rank", "told"),
    [
        pytest.param(start, place, rank, told, id=f"{name}, rank {rank}")
        for name, (start, place, ranks, told) in TOUCHED.items()
        for rank in ranks
    ],
)
def test_a_tensor_that_is_written_before_the_wait_is_told(start, place, rank, told):
    def work(world):
        tensors = torch.ones(2), torch.ones(4)
        call = start(*tensors)
        have_run.wait(10)
        if world.rank == rank:
            tensors[place][1] = 5
        call.wait()

    have_run = threading.Barrier(2)
    with pytest.raises(Exception, match=f"rank {rank}: bytes {told} .* changed"), over_nccl(STRICTEST):
        run_threads(work, 2)


def send_and_change(*, asks):
    """A send that nothing waits for, whose tensor is changed once it has run; ``asks`` whether it has, first."""

    def work(world):
        mine = torch.ones(2)
        call = passes(mine, None)
        have_run.wait(10)
        if world.rank:
            call.wait()
        else:
            assert not asks or call.is_completed()
            mine.add_(1)

    have_run = threading.Barrier(2)
    with over_nccl(STRICTEST):
        run_threads(work, 2)


def test_a_send_that_nothing_waits_for_is_compared_when_the_run_ends():
    with pytest.raises(Exception, match=r"rank 0: bytes that are sent by send to 1 of .* changed"):
        send_and_change(asks=False)


def test_a_message_may_be_changed_once_its_send_is_found_to_be_complete():
    send_and_change(asks=True)


NOT_TAKEN = {
    "of the host, where ranks are on an accelerator": (
        "meta",
        lambda: torch.ones(2),
        "does not take: cpu, torch.float32",
    ),
    "of another stride": ("cpu", lambda: torch.ones(2, 3).T, r"does not take: .* strides \(1, 3\) of \(3, 2\)"),
    "of a type without a sum": ("cpu", lambda: torch.ones(2, dtype=torch.int16), "does not take: cpu, torch.int16"),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
@pytest.mark.parametrize("start", [sums, spreads, passes], ids=lambda start: start.__name__)
def test_a_tensor_that_nccl_does_not_take_is_refused(start, name):
    device, make, told = NOT_TAKEN[name]
    with pytest.raises(Exception, match=told), over_nccl(STRICTEST, device):
        run_threads(lambda world: start(make(), None), 2, device=device)


def test_what_is_received_is_nan_until_the_wait():
    def work(world):
        axis = world.everyone()
        pending = axis.all_reduce_async(mine := torch.ones(2))
        before = mine.isnan().all().item()
        pending.wait()
        return before, mine.tolist()

    with over_nccl(STRICTEST):
        assert run_threads(work, 2) == [(True, [2, 2])] * 2


def test_a_result_that_nothing_waits_for_is_told():
    def work(world):
        world.everyone().all_reduce_async(torch.ones(2))

    with pytest.raises(Exception, match=r"nothing waited for .*all_reduce"), over_nccl(STRICTEST):
        run_threads(work, 2)


def test_a_message_that_completed_alone_comes_before_the_next():
    small, large = torch.ones(2), torch.full((4,), 2.0)

    def work(world):
        group = nccl.dist.group.WORLD
        if world.rank == 0:
            sends = [nccl.dist.isend(each, group, 1) for each in (small, large)]
            has_sent.set()
            return [send.wait() for send in sends]
        has_sent.wait(10)
        into = [torch.zeros(2), torch.zeros(4)]
        for each in into:
            nccl.dist.irecv(each, group, 0).wait()
        return [each.tolist() for each in into]

    has_sent = threading.Event()
    with over_nccl(Variant(eager_bytes=small.nbytes, made_beforehand=True)):
        assert run_threads(work, 2)[1] == [small.tolist(), large.tolist()]


def test_ranks_that_wait_for_one_that_has_ended_are_told():
    def work(world):
        if world.rank == 0:
            world.everyone().barrier()
        time.sleep(0.2)  # so that rank 0 waits already

    with over_nccl(STRICTEST), pytest.raises(RankFailedError, match="every rank waits and none can go on"):
        run_threads(work, 2)


def test_tensors_that_are_neighbors_by_chance_are_no_whole():
    storage = torch.arange(8.0)
    whole = list(storage.split(4))
    apart = [torch.frombuffer(memoryview(storage.numpy())[start : start + 4], dtype=torch.float32) for start in (0, 4)]
    assert apart[1].data_ptr() == apart[0].data_ptr() + apart[0].nbytes
    assert torch.equal(nccl._joined(whole), storage)
    assert nccl._joined(apart) is None
