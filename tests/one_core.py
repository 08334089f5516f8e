"""A core for each of pytest's parallel processes, because in it ranks are threads, of which one runs Python at a time.

Each call of torch lets go of Python's lock, and on several cores another rank takes it there: 14 to 30 % of the time.
"""

import os


def stay_on_one_core():
    """Binds this process to one core if it is a worker of pytest-xdist; outside of Linux it stays where it is."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
