"""Garbage is collected when a process has grown by a gigabyte, not whenever Python has counted so many new objects.

Runs and recorded models refer to themselves. Python would look for such garbage every few tests, each time among all
objects of torch and all that is kept between tests: a fifth to a quarter of the processor time of these tests. At its
end pytest makes five passes, so that what objects raise while they go is told: the first of them is made here.
"""

import gc

import psutil

MOST_GROWTH = 1 << 30

_PROCESS = psutil.Process()
_after_last_pass = 0


def collect():
    """Collects garbage; what is left is looked at no more, and the size of the process is that growth counts from."""
    global _after_last_pass
    gc.collect()
    gc.freeze()
    _after_last_pass = _PROCESS.memory_info().rss


def pytest_collection_finish():
    """Before the first test: what has been imported is no garbage."""
    collect()


def pytest_runtest_setup():
    """Each time, since a test may turn collection on again; also for ranks that are threads of this process."""
    gc.disable()


def pytest_runtest_teardown():
    """After each test."""
    if _PROCESS.memory_info().rss - _after_last_pass > MOST_GROWTH:
        collect()


def pytest_sessionfinish():
    """After the last test: pytest's own passes look only at what has come since."""
    collect()
