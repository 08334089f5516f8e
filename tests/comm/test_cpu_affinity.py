"""Ranks of one machine and its cores."""

from __future__ import annotations

import pytest

from shardwright.comm.cpu_affinity import bind, cores_of
from shardwright.errors import PlanError


@pytest.mark.parametrize(("num_ranks", "cores"), [(1, [3]), (3, [0, 1, 2, 5, 6, 7, 9]), (8, list(range(8)))])
def test_every_core_has_one_rank_where_there_are_enough(num_ranks, cores):
    each = [cores_of(index, num_ranks, cores) for index in range(num_ranks)]
    assert [core for part in each for core in part] == cores
    assert max(map(len, each)) - min(map(len, each)) <= 1


def test_ranks_take_turns_where_there_are_fewer_cores():
    assert [cores_of(index, 5, [2, 4]) for index in range(5)] == [(2,), (4,), (2,), (4,), (2,)]


def test_a_system_that_cannot_bind_raises(monkeypatch):
    monkeypatch.delattr("os.sched_setaffinity")
    with pytest.raises(PlanError, match="leave out bind_cores"):
        bind(0, 2)
