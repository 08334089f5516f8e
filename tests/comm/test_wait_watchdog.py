"""Ranks that wait for each other in different calls get an error that names the calls, long before the time limit."""

from __future__ import annotations

import itertools
import json
import re
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

import shardwright as sw
from shardwright.comm.pending import Pending
from shardwright.comm.wait_watchdog import WaitWatchdog, _error_of, _Note
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


class CountingStore(dist.HashStore):
    """A store that sets ``looked`` once all notes have been read five times."""

    def __init__(self):
        super().__init__()
        self.num_reads, self.looked = 0, threading.Event()

    def multi_get(self, keys):
        self.num_reads += 1
        if self.num_reads == 5:
            self.looked.set()
        return super().multi_get(keys)


def test_a_note_that_its_rank_has_not_confirmed_is_no_error_because_it_may_have_gone_on():
    store, told = CountingStore(), []
    on, started = threading.Event(), threading.Event()

    def rank():
        watchdog = WaitWatchdog(0, 2, store, 1.0, lambda failure: (told.append(failure), on.set()), print)
        started.set()
        steps(Pending(lambda: on.wait(SOON_S)).wait)
        watchdog.close()

    store.set("waits/1", json.dumps(_Note(7, "sw.save", "", [])))  # of a process that was suspended, say
    thread = threading.Thread(target=rank)
    thread.start()
    assert store.looked.wait(SOON_S)
    assert told == []
    store.set("waits/1", json.dumps(_Note(7, "sw.save", "", [1, 7])))
    thread.join(SOON_S)
    assert [each.given.splitlines()[1].strip() for each in told] == ["rank 1: in sw.save"]


def test_what_a_rank_has_waited_for_is_not_held_until_the_next_look():
    watchdog = WaitWatchdog(0, 2, dist.HashStore(), 1.0, print, print)
    looks, seen, on = itertools.count(), threading.Event(), threading.Event()

    def between_looks(seconds):
        if next(looks) == 0:
            return False
        seen.set()
        return on.wait(SOON_S)

    def finish():
        watchdog._closed = SimpleNamespace(wait=between_looks, set=on.set)
        return seen.wait(SOON_S)

    pending = Pending(finish)
    assert pending.wait()
    held = weakref.ref(pending)
    del pending
    assert held() is None
    watchdog.close()


def test_a_store_that_has_gone_with_its_rank_ends_the_thread_without_a_word():
    class GoneStore(dist.HashStore):
        def set(self, key, value):
            raise dist.DistNetworkError("gone")

    watchdog = WaitWatchdog(0, 2, GoneStore(), 1.0, print, print)
    steps(Pending(lambda: watchdog._thread.join(SOON_S)).wait)
    assert not watchdog._thread.is_alive()
    watchdog.leave()


def notes(*calls):
    return [_Note(1, call, "", []) for call in calls]


def test_the_call_to_make_on_every_rank_is_that_of_the_fewest():
    failure = _error_of(notes("run.step", "sw.save", "run.step"))
    assert isinstance(failure, CommunicationError)
    assert failure.given.split("\n") == ["ranks 0, 2: in run.step", "           rank 1: in sw.save"]
    assert failure.fix.startswith("sw.save: call it on every rank")


def test_a_long_call_of_all_ranks_is_no_error():
    assert _error_of(notes("run.step", "run.step")) is None
