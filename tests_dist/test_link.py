"""A slow link, emulated: messages take their time, and travel while a rank computes."""

import time

import pytest
import torch

from shardwright.comm import Link, launch
from shardwright.errors import PlanError

LINK = Link(latency_s=0.02, bytes_per_s=1e8)


def timed_gather(world, compute_s):
    axis = world.everyone()
    mine = torch.full((250_000,), float(world.rank))  # 1 MB: 10 ms, after a latency of 20
    axis.barrier()
    begin = time.perf_counter()
    pending = axis.all_gather_async(mine)
    until = begin + compute_s
    while time.perf_counter() < until:
        torch.ones(100) @ torch.ones(100)
    whole = pending.wait()
    return time.perf_counter() - begin, whole[::250_000].tolist()


def test_a_message_takes_its_latency_and_its_bytes():
    for seconds, found in launch(timed_gather, 2, 0.0, link=LINK):
        assert found == [0.0, 1.0]
        assert seconds >= 0.03


def test_a_message_travels_while_its_ranks_compute():
    for seconds, found in launch(timed_gather, 2, 0.1, link=LINK):
        assert found == [0.0, 1.0]
        assert seconds < 0.13  # one after the other they would take it and more


def test_a_link_between_ranks_that_share_no_memory_is_refused():
    with pytest.raises(PlanError, match="share a machine's memory"):
        launch(timed_gather, 2, 0.0, link=LINK, links="sockets")


def test_a_link_without_bandwidth_is_refused():
    with pytest.raises(PlanError, match="no link is like this"):
        Link(latency_s=0.0, bytes_per_s=0)
