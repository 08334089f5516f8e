"""What offloading state to disk saves and costs: peak memory and seconds of a step, with and without, stages 1 and 3.

Each variant has processes of its own in every round, since a process's peak tells nothing of which run made it; the
rounds take the variants in turn. Losses are compared to the last bit before anything is measured.
"""

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

import shardwright as sw
from shardwright.ledger.account import measure_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write
from benchmarks.zero_step.run import SIZES, batch_of, plain

BASES = (*sized(("zero1",), ()), "zero3")
OPTIONS = ("", "/offload:disk", "/offload:disk, update", "/offload:disk, update, bound")
CHECKED_STEPS = 2


def status(key):
    """A line of the process's own status, in bytes; the peak counts from the last reset."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{key}:"))


def reset_peak():
    """Lets the peak of the process begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(world, line, size, steps, folder):
    """One rank's losses, seconds of each step, and bytes: of the process before, at its peak, and of tensors."""
    config, num_samples = SIZES[size]
    line, *words = line.split(", ")
    before = status("VmRSS")
    run = sw.parallelize(plain(config), line, world, offload_folder=folder)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-4)
    each = [batch_of(rank, num_samples, config) for rank in range(world.size)]
    part = next(run.shard([tuple(torch.cat(t) for t in zip(*each, strict=True))]))
    everyone = world.everyone()

    def step():
        if "update" in words:
            return run.step(part, update=optimizer).item()
        loss = run.step(part).item()
        optimizer.step()
        return loss

    losses = [step() for _ in range(CHECKED_STEPS)]
    gc.collect()
    reset_peak()
    seconds = []
    for _ in range(steps):
        everyone.barrier()
        start = time.perf_counter()
        step()
        everyone.barrier()
        seconds.append(time.perf_counter() - start)
    peak = status("VmHWM")
    account = measure_memory(run, part, optimizer)
    return {
        "losses": losses,
        "seconds": seconds,
        "before_bytes": before,
        "peak_bytes": peak,
        "tensor_peak_bytes": account.peak_bytes,
        "elsewhere_bytes": sum(account.elsewhere.values()),
    }


def table_of(raw):
    """A row for each variant: medians over rounds, of the rank that holds most."""
    rows = []
    for name, rounds in raw.items():
        seconds = [s for each in rounds for s in each[0]["seconds"]]
        peaks = [max(rank["peak_bytes"] - rank["before_bytes"] for rank in each) for each in rounds]
        rows.append(
            {
                "variant": name,
                "s_median": statistics.median(seconds),
                "s_min": min(seconds),
                "s_max": max(seconds),
                "resident_bytes": int(statistics.median(peaks)),
                "resident_min_bytes": min(peaks),
                "resident_max_bytes": max(peaks),
                "tensor_bytes": max(rank["tensor_peak_bytes"] for rank in rounds[0]),
                "disk_bytes": max(rank["elsewhere_bytes"] for rank in rounds[0]),
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", default="large", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of each variant in a round")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where files of state go; a folder on a disk")
    options = options_of(parser, smallest={"size": "small", "rounds": 1, "steps": 1})
    os.environ |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}  # what is freed goes back at once
    facts = {**machine(), "file_system": file_system(options.folder)}
    raw = {}
    for number in range(options.rounds):
        for base in BASES:
            found = {}
            for option in OPTIONS:
                line = f"dp{options.ranks}/{base}{option}"
                work = (line, options.size, options.steps, options.folder)
                found[line] = list(sw.launch(measure, options.ranks, *work, bind_cores=line.endswith("bound")))
            first, *others = ([rank["losses"] for rank in each] for each in found.values())
            assert all(losses == first for losses in others), f"the losses of {list(found)} differ: {first}, {others}"
            for line, each in found.items():
                raw.setdefault(line, []).append(each)
        print(f"round {number + 1} of {options.rounds} is done", flush=True)
    table = table_of(raw)
    for row in table:
        print(
            f"  {row['variant']:32} {row['s_median']:6.3f} s ({row['s_min']:.3f} to {row['s_max']:.3f})   "
            f"resident {row['resident_bytes'] / 2**20:7.1f} MiB   tensors {row['tensor_bytes'] / 2**20:7.1f} MiB   "
            f"on disk {row['disk_bytes'] / 2**20:7.1f} MiB"
        )
    write(options, __file__, {"machine": facts, "sizes": SIZES, "table": table, "raw": raw})


def file_system(folder):
    """The kind of file system that a folder lies on."""
    path = Path(folder).resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    return next((mounts[each] for each in (path, *path.parents) if each in mounts), "unknown")


if __name__ == "__main__":
    main()
