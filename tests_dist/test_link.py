"""A slow link, emulated: messages take their time, and travel while a rank computes."""

import time

import pytest
import torch

from shardwright.comm.backends.message_blocks import Link
from shardwright.comm.launch import launch
from shardwright.errors import PlanError

LINK = Link(latency_s=0.02, bytes_per_s=1e7)


def timed_gather(world, compute_s):
    axis = world.everyone()
    mine = torch.full((250_000,), float(world.rank))  # 1 MB: 100 ms, after a latency of 20
    axis.barrier()
    begin = time.perf_counter()
    pending = axis.all_gather_async(mine)
    until = begin + compute_s
    while time.perf_counter() < until:
        torch.ones(100) @ torch.ones(100)
    whole = pending.wait()
    return begin, time.perf_counter(), whole[::250_000].tolist()


def timed_gathers(world, compute_s, num):
    return [timed_gather(world, compute_s) for _ in range(num)]


def test_a_message_takes_its_latency_and_its_bytes():
    found = launch(timed_gather, 2, 0.0, link=LINK)
    first = min(begin for begin, _, _ in found)  # by the machine's clock: some leave a barrier later
    for _, end, whole in found:
        assert whole == [0.0, 1.0]
        assert end - first >= 0.12


def test_a_message_travels_while_its_ranks_compute():
    for found in launch(timed_gathers, 2, 0.2, 5, link=LINK):
        assert all(whole == [0.0, 1.0] for _, _, whole in found)
        # one after the other they would take 0.32 s and more each time; on a busy machine some do anyway
        assert min(end - begin for begin, end, _ in found) < 0.29


def test_a_link_between_ranks_that_share_no_memory_is_refused():
    with pytest.raises(PlanError, match="share a machine's memory"):
        launch(timed_gather, 2, 0.0, link=LINK, links="sockets")


def test_a_link_without_bandwidth_is_refused():
    with pytest.raises(PlanError, match="a link cannot have this latency or bandwidth"):
        Link(latency_s=0.0, bytes_per_s=0)
