"""Shared by the tests of ranks that fail, leave or disagree."""

from __future__ import annotations

import threading
import time

import pytest

collect_ignore = ["calls_of_torch.py"]  # a program: imported, it would make a process group in the tests' own process


@pytest.fixture
def ends_soon():
    """Ranks that should end do so, and leave no thread behind; those that wait in vain would take a minute."""
    before = set(threading.enumerate())
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 20
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before
