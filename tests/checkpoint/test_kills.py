"""A save that is killed at any moment, or refused by the system, leaves the last complete checkpoint as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest

from checkpoint.dying import KILLED, REFUSED, SCENES

pytestmark = pytest.mark.sampled(0)


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "dying.py")],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("scene", SCENES)
def test_a_save_that_is_killed_at_any_call_to_the_system_leaves_a_complete_checkpoint(found, scene):
    codes = [code for code, _, _ in found["moments"][scene]]
    values = [value for _, value, _ in found["moments"][scene]]
    assert set(codes[:-1]) == {KILLED}
    assert codes[-1] == 0, "the last attempt runs to its end"
    assert len(codes) > 15, "that many moments there are, at least"
    # the last complete one, then from one moment on the new one: never an older one, never a mix
    assert [value for value, _ in groupby(values)] == [1.0, 2.0]


@pytest.mark.parametrize("scene", SCENES)
def test_what_a_killed_save_left_over_is_gone_after_the_next(found, scene):
    assert {number for _, _, number in found["moments"][scene]} == {1}


def test_a_disk_that_is_full_half_way_is_an_error_on_every_rank_and_the_last_one_is_untouched(found):
    for each in found["limited"]:
        assert each == {"code": REFUSED, "same": True, "names": ["step-00000001"], "newest": "step-00000001"}
