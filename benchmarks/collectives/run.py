"""Ours against gloo's own: all-reduce, all-gather, reduce-scatter at 4 KB, 1 MB, 64 MB on 2, 4, 8 ranks.

The three ways of each call run in turn in the same processes: gloo's own collective, torch's process groups as our
channel uses them, and shared memory.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import shardwright as sw

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write

SIZES = {"4 KB": 2**12, **sized({"1 MB": 2**20, "64 MB": 2**26}, {})}


def ways_of(call, size, axes):
    """The same call three ways, on a whole of so many bytes."""
    n, rank = dist.get_world_size(), dist.get_rank()
    x = torch.ones(size // 4)
    part, out = x[: x.numel() // n].clone(), torch.empty(x.numel() // n)
    whole = torch.empty(x.numel())
    own = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x),
    }[call]

    def through(axis):
        return {
            "all_reduce": lambda: axis.all_reduce(x),
            "all_gather": lambda: axis.all_gather(part),
            "reduce_scatter": lambda: axis.reduce_scatter(x),
        }[call]

    del rank
    return {"gloo": own, "sockets": through(axes["sockets"]), "shared": through(axes["shared"])}, x


def measure(world, rounds):
    from shardwright.comm.axis import Axis
    from shardwright.comm.backends.gloo import GlooChannel

    shared = world.everyone()
    begin = world.transport.call_starter(shared.ranks, "sockets")
    channel = GlooChannel(world.transport, shared.ranks, begin)
    axes = {"shared": shared, "sockets": Axis("world", shared.ranks, world.rank, channel)}
    rows = []
    for label, size in SIZES.items():
        repeats = rounds if size > 2**22 else 5 * rounds
        for call in ("all_reduce", "all_gather", "reduce_scatter"):
            ways, x = ways_of(call, size, axes)
            seconds = {name: [] for name in ways}
            for number in range(repeats + 2):
                for name, way in ways.items():
                    dist.barrier()
                    start = time.perf_counter()
                    way()
                    dist.barrier()
                    if number > 1:
                        seconds[name].append(time.perf_counter() - start)
                    x.fill_(1)
            medians = {name: statistics.median(found) * 1000 for name, found in seconds.items()}
            rows.append({"ranks": world.size, "size": label, "call": call, **medians,
                         "raw_s": {k: [round(s, 6) for s in v] for k, v in seconds.items()}})  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    options = options_of(parser, smallest={"rounds": 1, "ranks": [2]})
    os.environ["OMP_NUM_THREADS"] = "1"
    facts, table = machine(), []
    for ranks in options.ranks:
        for row in sw.launch(measure, ranks, options.rounds)[0]:
            table.append(row)
            times = "  ".join(f"{way} {row[way]:8.2f} ms" for way in ("gloo", "sockets", "shared"))
            print(f"{ranks} ranks  {row['size']:>5}  {row['call']:15} {times}", flush=True)
    write(options, __file__, {"machine": facts, "table": table})


if __name__ == "__main__":
    main()
