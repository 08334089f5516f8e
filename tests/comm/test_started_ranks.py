"""What the launcher of ranks says while it waits ends no wait."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from shardwright.comm.backends.run_folder import SAVES
from shardwright.comm.backends.started_ranks import StartedRanks


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
