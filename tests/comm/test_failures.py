"""Failures of a start say what was given, what is allowed and how to fix it."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from shardwright.comm import failures
from shardwright.comm.backends import processes

PARTS = "\n  given:   .*\n  allowed: .*\n  fix:     "


def test_ranks_that_end_without_a_word_are_explained():
    failure = failures.first_failure([], {}, [])
    with pytest.raises(failures.RankFailedError, match=f"the ranks ended before their work did{PARTS}"):
        raise failure


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_others_in_vain_says_which_it_is_and_how_long(monkeypatch, rank):
    monkeypatch.setattr(processes, "rendezvous", lambda *_, **__: iter([(HashStore(), rank, 2)]))
    monkeypatch.setattr(processes, "_START_S", 0.05)
    with pytest.raises(failures.LostPartnerError, match=f"not all ranks that torchrun started.*{PARTS}") as found:
        processes._new_store(rank, 2, timedelta())
    assert f"rank {rank} of 2, which has waited 0.05 s" in str(found.value)
