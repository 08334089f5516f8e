"""Ranks that wait for each other in different calls get an error that names the calls, long before the time limit."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

import shardwright as sw
from shardwright.comm.axis import Pending
from shardwright.comm.wait_watchdog import WaitWatchdog, _error_of
from shardwright.errors import CommunicationError

SOON_S = 60


class Ranks:
    """Threads that wait in a call until the watchdog raises there, or ends them; what they were told, by rank."""

    def __init__(self, calls, *, moves=True):
        self.told, self.ended = {}, {}
        store = dist.HashStore()
        threads = [threading.Thread(target=self._rank, args=(n, call, store, len(calls), moves))
                   for n, call in enumerate(calls)]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)

    def _rank(self, rank, call, store, size, moves):
        on = threading.Event()

        def fail(failure):
            self.told[rank] = failure
            if moves:
                on.set()

        def report(failure):
            self.ended[rank] = failure
            on.set()

        watchdog = WaitWatchdog(rank, size, store, 1.0, fail, report)
        if call is None:
            watchdog.leave()
            return
        call(Pending(lambda: on.wait(SOON_S)).wait)
        watchdog.close()


def call_named(name):
    """A function of the library, as its file says, that waits."""
    file = Path(sw.__file__).parent / "weights" / "made_up.py"
    exec(compile(f"def {name}(wait):\n    wait()", file, "exec"), space := {})
    return space[name]


saves, steps = call_named("save"), call_named("step")


def test_ranks_in_different_calls_are_all_told_what_each_waits_in():
    ranks = Ranks([saves, steps, steps])
    assert {*ranks.told} == {0, 1, 2}
    assert not ranks.ended
    assert {str(failure) for failure in ranks.told.values()} == {str(ranks.told[0])}
    first, second = (line.strip() for line in ranks.told[0].given.splitlines())
    assert re.fullmatch(r"rank 0: in sw\.save, line \d+ of test_wait_watchdog\.py", first)
    assert re.fullmatch(r"ranks 1 to 2: in sw\.step, line \d+ of test_wait_watchdog\.py", second)


def test_a_rank_that_waits_for_one_whose_work_is_done_is_told():
    (failure,) = Ranks([saves, None]).told.values()
    assert failure.given.splitlines()[1].strip() == "rank 1: has returned from its work"


def test_a_rank_that_cannot_raise_where_it_waits_is_ended():
    ranks = Ranks([saves, None], moves=False)
    assert ranks.ended == ranks.told
    assert {*ranks.ended} == {0}


def notes(*calls):
    return [json.dumps([1, call, ""]).encode() for call in calls]


def test_the_call_to_make_on_every_rank_is_that_of_the_fewest():
    failure = _error_of(notes("run.step", "sw.save", "run.step"))
    assert isinstance(failure, CommunicationError)
    assert failure.given.split("\n") == ["ranks 0, 2: in run.step", "           rank 1: in sw.save"]
    assert failure.fix.startswith("sw.save: call it on every rank")


@pytest.mark.parametrize("given", [notes("run.step", "run.step"), [*notes("run.step"), b""], [b"", *notes("sw.save")]])
def test_a_long_call_of_all_ranks_and_a_rank_that_goes_on_are_no_error(given):
    assert _error_of(given) is None
