"""Measures this machine for ``shardwright doctor``: its hardware, and its speed in computing and communicating."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import torch

from shardwright import devices
from shardwright.comm.launch import launch
from shardwright.comm.world import World
from shardwright.formatting import format_bytes
from shardwright.report.missing import lacks, lacks_text

_SIZES = (4096, 2**20, 2**24)


def measure_machine(says: Callable[[str], Any] = lambda what: None) -> dict[str, Any]:
    """Returns this machine's hardware and software versions, and measured speeds, as plain data for JSON.

    ``missing`` lists what parts of the library lack here, with what to type. The speeds are the FLOP/s of a matrix
    product on the CPU, in fp32, and the seconds of all-reduces between two ranks, by their size in bytes as text.
    ``says`` is called with text on what is measured next. The ranks are started as processes, and use accelerators if
    there are two or more.
    """
    says("measuring matrix products")
    available, names = torch.distributed.is_available(), devices.names()
    x = torch.ones(512, 512)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - start)
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "free_memory_bytes": psutil.virtual_memory().available,
        "devices": names,
        "backends": [b for b in ("gloo", "nccl", "mpi") if available and torch.distributed.is_backend_available(b)],
        "matmul_flops_per_s": 2 * 512**3 / statistics.median(seconds),
    }
    machine["missing"] = lacks(machine)
    says("measuring all-reduces of 2 processes")
    timed = launch(_links, 2, device="auto" if len(names) > 1 else "cpu")[0]
    machine["all_reduce_s"] = {str(size): s for size, s in zip(_SIZES, timed, strict=True)}
    return machine


def _links(world: World) -> list[float]:
    """Returns the median seconds of an all-reduce of each size in ``_SIZES`` bytes."""
    everyone, medians = world.everyone(), []
    for size in _SIZES:
        x, seconds = torch.ones(size // 4, device=world.device), []
        for _ in range(12):
            everyone.barrier()
            start = devices.moment(world.device)
            everyone.all_reduce(x)
            seconds.append(devices.seconds_between(start, devices.moment(world.device)))
            x.fill_(1)
        medians.append(statistics.median(seconds[2:]))
    return medians


def machine_text(facts: Mapping[str, Any]) -> str:
    """Returns ``facts``, the result of :func:`measure_machine`, as text for the terminal."""
    links = ", ".join(f"{format_bytes(int(n))} in {s * 1000:.2f} ms" for n, s in facts["all_reduce_s"].items())
    return "\n".join(
        [
            f"python {facts['python']}, torch {facts['torch']}, backends {', '.join(facts['backends']) or 'none'}",
            f"{facts['cpus']} cores, {format_bytes(facts['memory_bytes'])} memory, "
            f"{format_bytes(facts['free_memory_bytes'])} free",
            f"devices: {', '.join(facts['devices']) or 'none: ranks run on the CPU'}",
            f"matrix product: {facts['matmul_flops_per_s'] / 1e9:.1f} GFLOP/s, fp32, this process",
            f"all-reduce of 2 processes: {links}",
            *lacks_text(facts["missing"]),
        ]
    )
