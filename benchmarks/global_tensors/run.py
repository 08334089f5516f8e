"""20,000 transfers between layouts drawn by seed, over 4 gloo processes: none wrong, in under five minutes."""

import argparse
import os
import sys
import time
from pathlib import Path

import shardwright as sw

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write
from cases.transfers import draw, pairs, placements, sweep


def swept(world, num, chunk):
    start, cpu, wrong = time.perf_counter(), time.process_time(), []
    for first in range(0, num, chunk):
        wrong += sweep(world, first, min(first + chunk, num))
    return wrong, time.perf_counter() - start, time.process_time() - cpu


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=20_000)
    options = options_of(parser, smallest={"num": 40})
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    facts = machine()
    found = sw.launch(swept, 4, options.num, 200)
    drawn = [draw(number) for number in range(options.num)]
    row = {
        "transfers": options.num,
        "wrong": sorted({each for wrong, *_ in found for each in wrong}),
        "seconds": max(seconds for _, seconds, _ in found),
        "cpu_seconds_per_rank": [round(cpu, 1) for *_, cpu in found],
        "sbp_pairs": len({(each.before, each.after) for each in drawn}),
        "of_sbp_pairs": len(pairs()),
        "sources": len({each.source for each in drawn}),
        "destinations": len({each.destination for each in drawn}),
        "of_placements": len(placements(1)) + len(placements(2)),
    }
    print(row)
    write(options, __file__, {"machine": facts, "sweep": row})


if __name__ == "__main__":
    main()
