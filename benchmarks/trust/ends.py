"""How long a run takes to end once one rank has failed while another is busy, or once a rank is stopped.

A rank raises while another computes and hears no SIGTERM; or a rank is stopped (SIGSTOP), of which the others know when
a call has not completed within the time limit. The seconds count from there to the end of the launcher.
"""

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import shardwright as sw
from shardwright.errors import RankFailedError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write_beside

RANKS, TIMEOUT_S = 3, 6.0


def raises_beside_a_busy_rank(world, when):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if world.rank == 1:
        when.write_text(repr(time.monotonic()))
        raise KeyError("the milk is gone")
    while world.rank == 2:
        pass
    world.everyone().barrier()


def is_stopped(world, when):
    axis = world.everyone()
    for step in range(10_000):
        if world.rank == 1 and step == 3:
            when.write_text(repr(time.monotonic() + TIMEOUT_S))  # the others know after so long
            os.kill(os.getpid(), signal.SIGSTOP)
        axis.all_reduce(torch.ones(1000))


CASES = {
    "raises beside a busy rank": (raises_beside_a_busy_rank, "rank 1 failed"),
    "is stopped": (is_stopped, "rank 1 was stopped"),
}


def seconds_to_end(name):
    """The seconds from the moment at which the cause can be known, and whether the error names the rank."""
    work, said = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        when = Path(folder) / "when"
        try:
            sw.launch(work, RANKS, when, timeout_s=TIMEOUT_S)
        except RankFailedError as failure:
            end_s = time.monotonic() - float(when.read_text())
            return end_s, said in str(failure)
    raise AssertionError(f"no rank failed: {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="of each case, in turn")
    options = options_of(parser, smallest={"times": 1})
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = [
        {"case": name, "end_s": end_s, "named": named}
        for _ in range(options.times)
        for name in CASES
        for end_s, named in [seconds_to_end(name)]
    ]
    table = []
    for name in CASES:
        ends = [row["end_s"] for row in rows if row["case"] == name]
        named = sum(row["named"] for row in rows if row["case"] == name)
        table.append(
            {"case": name, "times": len(ends), "named": named, "end_s_median": statistics.median(ends),
             "end_s_max": max(ends)}
        )  # fmt: skip
        print(
            f"{name}: {len(ends)} times, {named} named, median {statistics.median(ends):.2f} s, worst {max(ends):.2f} s"
        )
    write_beside(options, __file__, {"machine": machine(), "table": table, "rows": rows})


if __name__ == "__main__":
    main()
