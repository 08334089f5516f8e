"""The pool itself: without it the other tests here would say nothing."""

from __future__ import annotations

import os
import time

import pytest
import torch
from tests_dist.pool import Pool, TaskFailedError


def who(world):
    return world.rank, world.size, os.getpid()


def summed(world, value):
    return world.everyone().all_reduce(torch.tensor([value + world.rank])).item()


def fails(world, rank):
    if world.rank == rank:
        raise ValueError("this rank alone")
    return world.everyone().all_reduce(torch.ones(1)).item()


def dies(world):
    if world.rank == 1:
        os._exit(3)
    time.sleep(60)


@pytest.fixture
def pool():
    found = Pool(2)
    yield found
    found.close()


def test_a_pool_starts_its_ranks_once_and_again_after_a_failure(pool):
    first = pool.run(who)
    assert [(rank, size) for rank, size, _ in first] == [(0, 2), (1, 2)]
    assert os.getpid() not in {pid for _, _, pid in first}
    assert pool.run(who) == first
    assert pool.run(summed, 10) == [21, 21]
    assert pool.num_starts == 1
    with pytest.raises(TaskFailedError, match=r"ValueError: this rank alone"):
        pool.run(fails, 1)
    assert pool.run(summed, 1) == [3, 3]
    assert pool.num_starts == 2
    with pytest.raises(TaskFailedError, match="rank 1: it has gone without a word"):
        pool.run(dies)
    assert pool.run(summed, 1) == [3, 3]
    assert pool.num_starts == 3
