"""What the launcher of ranks says while it waits ends no wait."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from shardwright.comm.backends.processes import run_processes
from shardwright.comm.backends.run_folder import SAVES
from shardwright.comm.backends.started_ranks import StartedRanks
from shardwright.errors import PlanError


def test_a_closed_standard_error_does_not_end_the_wait_for_ranks_that_save(tmp_path, monkeypatch):
    said = []

    def write(text):
        said.append(text)
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write))
    (tmp_path / f"0{SAVES}").touch()
    late = SimpleNamespace(
        ranks=[SimpleNamespace(number=0, ended=False, killed=False)], folder=tmp_path, _last_s=-1.0, _grace_end_s=-1.0
    )
    assert not StartedRanks._waits_for_saves(late)
    assert "the last step is not saved" in said[0]


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "2.5", "99999"])
def test_a_number_of_threads_that_cannot_be_is_refused_before_ranks_are_started(text, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.raises(PlanError, match="OMP_NUM_THREADS is no number of threads"):
        run_processes(print, 2, ())
