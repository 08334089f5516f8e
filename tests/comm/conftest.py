"""Shared by the tests of ranks that fail, leave or disagree."""

from __future__ import annotations

import threading
import time

import pytest

collect_ignore = ["calls_of_torch.py"]  # a program: imported, it would make a process group in the tests' own process


@pytest.fixture
def within_2_s():
    """Ranks that should end do so at once, and leave no thread behind."""
    before = set(threading.enumerate())
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 2
    deadline = time.monotonic() + 1
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before
