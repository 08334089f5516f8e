"""Pools of ranks, one for each number of them and each kind of link, for the whole session."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache

import pytest
import torch
from tests_dist.pool import Pool

torch.set_num_threads(1)


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
