"""The watchdog: a call that does not complete is named, and the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwright.comm.backends import watchdog as module
from shardwright.comm.backends.watchdog import Watchdog
from shardwright.comm.collective_call import CollectiveCall

CALL = CollectiveCall("all_gather", "dp", "zero", (8, 2), torch.bfloat16)


class Work:
    """What torch gives for a call under way."""

    def __init__(self, done=False):
        self.done, self.num_looks = done, 0

    def is_completed(self):
        self.num_looks += 1
        return self.done

    def wait_for_looks(self):
        """Waits until the watchdog has looked at it, and decided: the second look from now begins after the first."""
        last, end_s = self.num_looks + 2, time.monotonic() + 10
        while self.num_looks < last and time.monotonic() < end_s:
            time.sleep(0.001)
        assert self.num_looks >= last, "the watchdog's thread has not looked in 10 s"


@pytest.fixture
def clock(monkeypatch):
    """The watchdog's clock, which stands still unless a test sets it."""
    found = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: found.now_s))
    return found


def test_a_call_that_does_not_complete_is_named_with_its_axis_and_ranks():
    told, come = [], threading.Event()
    watchdog = Watchdog(3, 0.2, lambda failure: (told.append(str(failure)), come.set()))
    watchdog.add(CALL, (1, 3), [Work(done=True)])
    watchdog.add(CALL, (1, 3, 5), [Work(done=True), Work()])
    assert come.wait(10)
    assert "all_gather of [8, 2] bfloat16 over axis 'dp' for zero did not complete" in told[0]
    assert "rank 3 of ranks 1, 3, 5; torch reports: nothing" in told[0]
    assert "call it on every rank" in told[0]


def test_calls_that_complete_one_after_the_other_are_in_time(clock):
    told = []
    watchdog = Watchdog(0, 0.5, told.append)
    works = [Work() for _ in range(6)]
    for work in works:
        watchdog.add(CALL, (0, 1), [work])
    for work in works:  # all together they take longer than the timeout
        work.wait_for_looks()
        clock.now_s += 0.4
        work.wait_for_looks()
        assert not told
        work.done = True
    watchdog.close()
    watchdog._thread.join(10)
    assert not told


def test_a_call_is_late_as_soon_as_it_was_the_oldest_for_the_timeout(clock):
    told = []
    watchdog = Watchdog(0, 0.5, told.append)
    first, second = Work(), Work()
    watchdog.add(CALL, (0, 1), [first])
    watchdog.add(CALL, (0, 1), [second])
    first.wait_for_looks()
    clock.now_s += 0.4
    first.done = True
    second.wait_for_looks()
    clock.now_s += 0.4
    second.wait_for_looks()
    assert not told
    clock.now_s += 0.2
    watchdog._thread.join(10)
    assert len(told) == 1


def test_after_its_end_nothing_is_reported(clock):
    told, work = [], Work()
    watchdog = Watchdog(0, 0.1, told.append)
    watchdog.add(CALL, (0, 1), [work])
    work.wait_for_looks()
    watchdog.close()
    watchdog._thread.join(10)
    clock.now_s += 10
    assert not watchdog._thread.is_alive()
    assert not told


@pytest.mark.sampled(0)
def test_a_process_whose_main_thread_waits_for_the_card_ends_with_the_text():
    program = (
        "import threading\n"
        "from comm.test_watchdog import CALL, Work\n"
        "from shardwright.comm.backends.watchdog import Watchdog\n"
        "Watchdog(0, 0.1).add(CALL, (0, 1), [Work()])\n"
        "threading.Event().wait()\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], env=_with_tests(), capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 1
    assert "all_gather of [8, 2]" in found.stderr
    assert "see why the other rank stopped" in found.stderr


def _with_tests():
    return {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"}


class Events:
    """A stream's events, which come in the order in which the stream waits for calls."""

    def __init__(self, lost):
        self.lost = lost

    def query(self):
        return not self.lost


def test_of_calls_that_a_stream_waits_for_the_first_is_named():
    told, come = [], threading.Event()
    watchdog = Watchdog(3, 0.2, lambda failure: (told.append(str(failure)), come.set()))
    gather = watchdog.add(CALL, (1, 3), [Work()])
    receive = watchdog.add(CALL._replace(kind="receive"), (1, 3), [Work()])
    for watched in (receive, gather):  # the stream waits for the message first, and comes to no later event
        watched.waited(torch.device("cpu"))
        watched.works = (Events(lost=True),)
    assert come.wait(10)
    assert "receive of" in told[0]
