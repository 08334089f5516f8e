"""What overlap gains on a slow link: every layout with its messages behind its products, and with none there.

Two ranks, so that each has a core of its own: where ranks share cores, one computes while another waits, and the system
overlaps what we do not. The link is emulated (:class:`shardwright.comm.Link`): a message arrives after its latency and
its bytes, and who waits for it sleeps.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

import shardwright as sw

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, ratio_rows, write
from benchmarks.gpt_step.run import BATCH, CONFIG, SEQ
from benchmarks.tensor_modes.cases import HIDDEN, TOKENS, WIDTH, InsideMLP, mlp_data, plain_mlp
from benchmarks.tensor_modes.run import gpt, turn

LAYOUTS = ("tp2", "tp2/sp", "tp2x1/2d", "tp1x2/2d", "tp2x1/2d:summa", "tp2x1x1/3d", "tp1x1x2/3d")
LINKS = {"none": None, "10 Gbit/s": (50e-6, 1.25e9), "1 Gbit/s": (100e-6, 0.125e9)}
"""Latency in seconds, and bytes per second."""


def measure(world, rounds, steps):
    mlp, data, each = plain_mlp(), mlp_data(), {}
    for layout in LAYOUTS:
        for line in (layout, f"{layout}/no-overlap"):
            each[f"mlp {line}"] = InsideMLP(world, line, mlp, *data).step
            each[f"gpt {line}"] = gpt(world, line)[1]
    everyone, rows = world.everyone(), []
    for number in range(rounds + 1):
        order = list(each)
        order = order[number % len(order) :] + order[: number % len(order)]
        row = {name: turn(everyone, world.size, each[name], steps)[0] for name in order}
        if number:  # the first warms up
            rows.append(row)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="of each variant in its turn")
    parser.add_argument("--write", action="store_true", help="keep the raw rows under results/")
    options = parser.parse_args()
    try:
        from shardwright.comm import Link
    except ImportError:
        print("left out: ranks as processes cannot emulate a slow link yet")
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    facts, table, rounds = machine(), [], {}
    pairs = {f"{model} {line}": f"{model} {line}/no-overlap" for model in ("mlp", "gpt") for line in LAYOUTS}
    for name, speed in LINKS.items():
        link = Link(latency_s=speed[0], bytes_per_s=speed[1]) if speed is not None else None
        rounds[name] = sw.launch(measure, 2, options.rounds, options.steps, link=link)[0]
        for row in ratio_rows(rounds[name], pairs):
            model, _, layout = row["name"].partition(" ")
            free = statistics.median(r[row["name"]] for r in rounds["none"]) * 1000
            table.append({**row, "model": model, "layout": layout, "link": name, "free_ms_median": free})
            print(
                f"{name:10} {row['name']:14} {row['ms_median']:7.1f} ms, without overlap {row['limit_ms_median']:7.1f} "
                f"ms: {row['ratio_median']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f}); "
                f"no link {free:.1f} ms",
                flush=True,
            )
    if options.write:
        sizes = {"width": WIDTH, "hidden": HIDDEN, "tokens": TOKENS}
        write(Path(__file__).parent, {"machine": facts, "mlp": sizes, "gpt": {**CONFIG, "batch": BATCH, "seq": SEQ},
              "links": LINKS, "table": table, "rounds": rounds})  # fmt: skip


if __name__ == "__main__":
    main()
