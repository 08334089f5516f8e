"""``to_global`` on one placement beside DTensor's ``redistribute``: the same transfers, in turn, over processes."""

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

SHAPES = {**sized({"even": (1024, 1024), "uneven": (1021, 1019)}, {}), "small": (13, 17)}
PAIRS = ("S(0)->B", "S(1)->B", "P->B", "P->S(0)", "S(0)->S(1)", "B->S(0)")


def measure(world, rounds, times):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    from shardwright.global_tensor import placement
    from shardwright.global_tensor.geometry import GlobalLayout, local_shape
    from shardwright.global_tensor.tensor import wrap

    letters = {"B": Replicate(), "P": Partial(), "S(0)": Shard(0), "S(1)": Shard(1)}
    mesh, where = init_device_mesh("cpu", (world.size,)), placement("cpu", range(world.size))
    rows = []
    for label, shape in SHAPES.items():
        for pair in PAIRS:
            before, after = (letters[each] for each in pair.split("->"))
            local = torch.ones(local_shape(shape, GlobalLayout(where, (before,)), world.rank))
            stride = (shape[1], 1)
            theirs = DTensor.from_local(local, mesh, [before], run_check=False, shape=torch.Size(shape), stride=stride)
            ours = wrap(local, shape, GlobalLayout(where, (before,)))
            ways = {
                "dtensor": lambda x=theirs, to=after: x.redistribute(mesh, [to]),
                "ours": lambda x=ours, to=after: x.to_global(where, (to,)),
            }
            seconds = {name: [] for name in ways}
            for number in range(rounds + 3):
                for name in sorted(ways, reverse=bool(number % 2)):
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(times):
                        ways[name]()
                    dist.barrier()
                    if number > 2:
                        seconds[name].append((time.perf_counter() - start) / times)
            ratios = sorted(a / b for a, b in zip(seconds["ours"], seconds["dtensor"], strict=True))
            median = {name: statistics.median(found) * 1000 for name, found in seconds.items()}
            rows.append({"shape": label, "size": list(shape), "pair": pair, "ours_ms": median["ours"],
                         "dtensor_ms": median["dtensor"], "ratio_median": statistics.median(ratios),
                         "ratio_min": ratios[0], "ratio_max": ratios[-1], "rounds": rounds,
                         "times": times})  # fmt: skip
    return rows


def transfers():
    """Bytes of transfers between placements, beside gathering everything first (planned; tests count the same)."""
    from shardwright.global_tensor import placement, plan_to_global, sbp

    everyone, grid, shape, rows = [0, 1, 2, 3], [[0, 1], [2, 3]], (1024, 1024), []
    cases = [
        ([0, 1], sbp.split(0), [2, 3], sbp.split(0)),
        ([0, 1], sbp.split(0), [2, 3], sbp.split(1)),
        ([0, 1, 3], sbp.split(1), [2, 3], sbp.split(0)),
        ([0, 1], sbp.partial_sum, [2, 3], sbp.broadcast),
        ([1, 2, 3], sbp.partial_sum, everyone, sbp.split(1)),
        (everyone, sbp.split(0), grid, (sbp.split(1), sbp.split(0))),
        (grid, (sbp.partial_sum, sbp.split(0)), everyone, sbp.split(0)),
        ([3, 1], sbp.broadcast, everyone, sbp.split(0)),
        (everyone, sbp.partial_sum, everyone, sbp.broadcast),
        (everyone, sbp.split(0), [2, 3], sbp.partial_sum),
    ]
    for source, before, destination, after in cases:
        a, b = placement("cpu", source), placement("cpu", destination)
        route = plan_to_global(shape, a, before, b, after)
        union = placement("cpu", sorted({*a.ranks, *b.ranks}))
        gather = plan_to_global(shape, a, before, union, sbp.broadcast)
        row = {
            "source": f"{source} {sbp.sbp_text(_tuple(before))}",
            "destination": f"{destination} {sbp.sbp_text(_tuple(after))}",
            "kinds": [step.kind for step in route.steps],
            "bytes": route.moved_bytes(4),
            "gather_bytes": gather.moved_bytes(4),
        }
        rows.append(row)
    return rows


def _tuple(given):
    return given if isinstance(given, tuple) else (given,)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--times", type=int, default=10, help="transfers between barriers")
    parser.add_argument("--ranks", type=int, default=4)
    options = options_of(parser, smallest={"rounds": 1, "times": 1, "ranks": 2})
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    facts = machine()
    rows = sw.launch(measure, options.ranks, options.rounds, options.times)[0]
    for row in rows:
        times = f"{row['ours_ms']:8.2f} {row['dtensor_ms']:8.2f} {row['ratio_median']:.3f}"
        print(f"{row['shape']:7} {row['pair']:12} {times}")
    write(options, __file__, {"machine": facts, "redistribute": rows, "transfers": transfers()})


if __name__ == "__main__":
    main()
