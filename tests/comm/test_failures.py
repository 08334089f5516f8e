"""Failures of a start say what was given, what is allowed and how to fix it."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from shardwright.comm import failures
from shardwright.comm.backends import processes
from shardwright.errors import PlanError
from shardwright.train.out_folder import in_use

PARTS = "\n  given:   .*\n  allowed: .*\n  fix:     "


def test_ranks_that_end_without_a_word_are_explained():
    failure = failures.first_failure([], {}, [])
    with pytest.raises(failures.RankFailedError, match=f"the ranks ended before their work did{PARTS}"):
        raise failure


def test_an_error_for_users_is_raised_as_it_is_and_any_other_with_its_rank():
    for failure in (PlanError("no"), in_use(Path("x")), failures.StopRequested()):
        assert failures.first_failure([failures.note_of(0, failure)], {}, []) is failure
    with pytest.raises(failures.RankFailedError, match="rank 1 failed"):
        raise failures.first_failure([failures.note_of(1, KeyError("x"))], {}, [])


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_waits_for_others_in_vain_says_which_are_missing_and_where_those_that_came_are(monkeypatch, rank):
    store = HashStore()
    store.set("shardwright/1", "key@elsewhere")
    monkeypatch.setattr(processes, "_connected", lambda *_: store)
    monkeypatch.setattr(processes, "_START_S", 0.05)
    with pytest.raises(failures.LostPartnerError, match=f"not all ranks came.*{PARTS}") as found:
        processes._new_store(rank, 4, timedelta())
    missing = "ranks 2 to 3" if rank == 0 else "ranks 0, 3"
    there = "ranks 0 to 1" if rank == 0 else "ranks 1 to 2"
    hosts = ", ".join(sorted({"elsewhere", socket.gethostname()}))
    assert f"after 0.05 s {missing} of 4 had not come; {there} had, on {hosts}" in str(found.value)


def test_a_rank_that_cannot_connect_has_lost_another_one_which_is_named_in_its_place(monkeypatch, tmp_path):
    def init(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed: Connection closed by peer")

    monkeypatch.setattr(processes.dist, "init_process_group", init)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(failures.LostPartnerError, match=f"could not connect to the others{PARTS}") as found:
        processes.run_here(print, (), folder=str(tmp_path))
    assert "rank 0 of 1; torch reports: Gloo connectFullMesh failed" in str(found.value)
    lost = failures.note_of(0, found.value)
    assert "rank 1 was killed by SIGKILL" in str(failures.first_failure([lost], {1: -9}, []))


def test_a_rank_that_does_not_find_the_others_says_where_it_looked(monkeypatch):
    monkeypatch.setattr(processes, "_START_S", 0.3)
    with socket.socket() as taken:  # it does not listen: nobody is there, and no other program can be
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(
            failures.LostPartnerError, match=f"the rank at which all others meet has not come{PARTS}"
        ) as found:
            processes._new_store(1, 2, timedelta())
    assert f"rank 1, which tried 127.0.0.1 port {port} for up to 0.3 s" in str(found.value)


def test_the_first_rank_opens_the_store_and_names_those_that_never_come(monkeypatch):
    connected = processes._connected
    monkeypatch.setattr(processes, "_connected", lambda rank, _: connected(rank, 60.0))  # to open it is not waiting
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")  # one that is free
    monkeypatch.setattr(processes, "_START_S", 0.3)
    with pytest.raises(failures.LostPartnerError, match=r"after 0.3 s rank 1 of 2 had not come; rank 0 had, on"):
        processes._new_store(0, 2, timedelta())
