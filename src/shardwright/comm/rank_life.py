"""Finds out whether the process of another rank on the same node still runs, without sending it a message."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, Literal

import psutil

from shardwright.comm.backends.nodes import this_node

Life = Literal["runs", "stopped", "dead"]


def this_process() -> list[Any]:
    """Returns a description of this process as JSON values, which :func:`life_of` takes on any rank of the run.

    It has the node with its namespace of process ids, the process id, and the time at which the process started, since
    the system gives the id of a dead process to a new one later.
    """
    node = this_node()
    with suppress(OSError):  # another system has no namespaces
        node += "/" + os.readlink("/proc/self/ns/pid")
    return [node, os.getpid(), psutil.Process().create_time()]


def life_of(process: list[Any], here: list[Any]) -> Life:
    """Returns whether a process runs, is stopped (SIGSTOP) or dead; "runs" if it is on another node, and so unknown.

    ``process`` is the result of :func:`this_process` in that process, and ``here`` its result in this one.

    >>> here = this_process()
    >>> life_of(here, here), life_of([here[0], here[1], 0.0], here), life_of(["elsewhere", 1, 0.0], here)
    ('runs', 'dead', 'runs')
    """
    node, number, start_s = process
    if node != here[0]:
        return "runs"
    try:
        handle = psutil.Process(number)
        status = handle.status()
        if handle.create_time() != start_s or status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return "dead"
    except psutil.NoSuchProcess:
        return "dead"
    except psutil.Error:  # the system does not tell
        return "runs"
    return "stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "runs"
