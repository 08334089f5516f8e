"""What the benchmarks share: rows, medians, and the facts of the machine."""

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.comm.backends.message_blocks import Link

SMALLEST = "--smallest" in sys.argv
"""Whether this run only shows that the benchmark runs. Ranks are started with the arguments of the command."""

T = TypeVar("T")


def sized(usual: T, smallest: T) -> T:
    """A size that is measured, or under ``--smallest`` the one that takes the least time."""
    return smallest if SMALLEST else usual


LINKS = {"none": None, "10 Gbit/s": (50e-6, 1.25e9), **sized({"1 Gbit/s": (100e-6, 0.125e9)}, {})}
"""Latency in seconds, and bytes per second."""


def options_of(
    parser: argparse.ArgumentParser, smallest: Mapping[str, object], ours: Mapping[str, object] | None = None
) -> argparse.Namespace:
    """The options of the command line, with those that every benchmark has: where rows go, and ``--smallest``.

    ``smallest`` and ``ours`` are the defaults under ``--smallest`` and ``--ours``; what the command line says comes
    first. A benchmark without ``ours`` has no ``--ours``.
    """
    parser.add_argument("--write", action="store_true", help="keep the raw rows under results/")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write the raw rows into this file")
    parser.add_argument("--smallest", action="store_true", help="tiny sizes, one round: whether all of it runs")
    if ours is not None:
        parser.add_argument("--ours", action="store_true", help="no peers, few rounds: for comparing source trees")
    options = parser.parse_args()
    if options.smallest and options.write:
        parser.error("--smallest measures nothing worth committing; fix: --rows FILE in place of --write")
    if options.smallest:
        parser.set_defaults(**smallest)
    elif ours is not None and options.ours:
        parser.set_defaults(**ours)
    return parser.parse_args()


def machine() -> dict:
    """What the numbers were measured on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "measured": datetime.now(UTC).isoformat(timespec="minutes"),
        "load_before": os.getloadavg()[0],
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def ratio_rows(rounds: list[dict[str, float]], limits: dict[str, str]) -> list[dict]:
    """Each variant's ratio to its limit, round by round: median and range; ``limits`` maps a variant to its limit."""
    rows = []
    for name, limit in limits.items():
        ratios = [r[name] / r[limit] for r in rounds]
        rows.append(
            {
                "name": name,
                "limit": limit,
                "ms_median": statistics.median(r[name] for r in rounds) * 1000,
                "limit_ms_median": statistics.median(r[limit] for r in rounds) * 1000,
                "ratio_median": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "rounds": len(ratios),
            }
        )
    return rows


def orders(each: Iterable[str], rounds: int) -> Iterator[tuple[int, list[str]]]:
    """A round's number and the order of its variants, each round beginning with another; round 0 is to warm up."""
    names = list(each)
    for number in range(rounds + 1):
        first = number % len(names)
        yield number, names[first:] + names[:first]


def in_turn(each: Mapping[str, Callable[[], object]], rounds: int, steps: int) -> tuple[list[dict], list[dict]]:
    """Wall and CPU seconds of a step of each variant, all of them once in each round, each round in another order.

    Every rank calls it, in torch's default group; CPU seconds are those of all ranks.
    """
    rows, cpu_rows = [], []
    for number, order in orders(each, rounds):
        row, cpu = {}, {}
        for name in order:
            dist.barrier()
            gc.disable()
            before = resource.getrusage(resource.RUSAGE_SELF)
            start = time.perf_counter()
            for _ in range(steps):
                each[name]()
            dist.barrier()
            row[name] = (time.perf_counter() - start) / steps
            after = resource.getrusage(resource.RUSAGE_SELF)
            gc.enable()
            used = torch.tensor([after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime])
            dist.all_reduce(used)
            cpu[name] = used.item() / steps
        if number:
            rows.append(row)
            cpu_rows.append(cpu)
    return rows, cpu_rows


def over_links(
    work: Callable[..., list[dict]], pairs: Mapping[str, str], *given: object
) -> tuple[list[dict], dict[str, list[dict]]]:
    """``work(world, *given)`` on two ranks over each link: each variant beside its other; and the raw rounds."""
    table, rounds = [], {}
    for name, speed in LINKS.items():
        link = Link(latency_s=speed[0], bytes_per_s=speed[1]) if speed is not None else None
        rounds[name] = sw.launch(work, 2, *given, link=link)[0]
        for row in ratio_rows(rounds[name], dict(pairs)):
            free = statistics.median(r[row["name"]] for r in rounds["none"]) * 1000
            table.append({**row, "link": name, "free_ms_median": free})
            print(
                f"{name:10} {row['name']:18} {row['ms_median']:7.1f} ms, {row['limit']} {row['limit_ms_median']:7.1f} "
                f"ms: {row['ratio_median']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f}); "
                f"no link {free:.1f} ms",
                flush=True,
            )
    return table, rounds


def write(options: argparse.Namespace, script: str, result: dict) -> None:
    """Writes the result, raw rows and all: to ``--rows``, and under ``--write`` to ``results/`` beside the script."""
    text = json.dumps(result, indent=1) + "\n"
    if options.rows is not None:
        options.rows.write_text(text)
    if options.write:
        folder = Path(script).parent / "results"
        folder.mkdir(exist_ok=True)
        stamp = result["machine"]["measured"].replace(":", "").replace("+0000", "")
        (folder / f"{stamp}.json").write_text(text)


def write_beside(options: argparse.Namespace, script: str, result: dict) -> None:
    """Writes as :func:`write` does, but into a folder named as the script: for folders with several scripts."""
    folder = Path(script).with_suffix("")
    if options.write:
        folder.mkdir(exist_ok=True)
    write(options, str(folder / "results"), result)
