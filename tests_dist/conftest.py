"""Pools of ranks, one for each number of them and each kind of link, for the whole session."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import cache

import pytest
import torch
from tests_dist.pool import Pool

from shardwright import devices

MOST_RANKS = 8

torch.set_num_threads(1)
if 0 < devices.count() < MOST_RANKS:  # ranks share the cards
    os.environ.setdefault(devices.OPTION, f"{devices.accelerator()}/gloo")


@pytest.fixture(scope="session")
def pools():
    """``pools(num_ranks, links)``: ranks that are there already after their first use."""
    with ExitStack() as stack:

        @cache
        def of(num_ranks: int, links: str = "auto") -> Pool:
            pool = Pool(num_ranks, links)
            stack.callback(pool.close)
            return pool

        yield of
