"""Whether ``plan`` knows this machine after ``calibrate``: 12 layouts of two models on two ranks, beside their steps.

For ranks as threads and as processes, and for each model: the machine is calibrated, every layout is predicted from the
cluster file, and then all layouts run in the same ranks, in interleaved rounds, so that what disturbs one disturbs all.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path

import torch

import shardwright as sw
from shardwright.models import MODELS
from shardwright.planner.calibrate import calibrate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import SMALLEST, machine, options_of, orders, sized, write

MODELS_MEASURED = {
    "gpt": sized(
        {"num_layers": 4, "width": 256, "num_heads": 4, "vocabulary": 1024, "max_tokens": 128},
        {"num_layers": 4, "width": 16, "num_heads": 2, "vocabulary": 32, "max_tokens": 8},
    ),
    "wide llama": sized(
        {"style": "llama", "num_layers": 4, "width": 512, "num_heads": 8, "vocabulary": 512, "max_tokens": 64},
        {"style": "llama", "num_layers": 4, "width": 16, "num_heads": 2, "vocabulary": 32, "max_tokens": 8},
    ),
}
LAYOUTS = sized(
    (
        *("dp2", "mb4 dp2", "dp2/zero1", "dp2/zero3", "dp2 recompute:full", "tp2", "tp2/sp", "mb4 tp2"),
        *("pp2/1f1b mb4", "pp2/gpipe mb8", "pp2/zb-h1 mb4", "pp2/interleaved:v2 mb4"),
    ),
    ("dp2", "tp2", "pp2/1f1b mb2"),
)
BATCH = 8
KINDS = sized(("threads", "processes"), ("threads",))


class Build:
    """A model and its loss, from a name that processes can be sent."""

    def __init__(self, name):
        self.name = name

    def __call__(self):
        entry = MODELS["gpt"]
        return entry.factory(entry.config(**MODELS_MEASURED[self.name])), entry.loss()


def batch_of(name):
    entry, seq = MODELS["gpt"], MODELS_MEASURED[name]["max_tokens"]
    draw = torch.Generator().manual_seed(0)
    return entry.example_batch(entry.config(**MODELS_MEASURED[name]), BATCH, seq, draw)


def predicted(name, cluster):
    """The price of each layout, by its line."""
    with sw.without_values():
        model, loss = Build(name)()
    batch = batch_of(name)
    return {line: sw.plan_layouts(model, cluster, batch, loss=loss, layout=line).best for line in LAYOUTS}


def step_of(world, name, line):
    with sw.without_values():
        model, loss = Build(name)()
    batch = batch_of(name)
    run = sw.parallelize(model, line, world, loss=loss, example=batch[0])
    optimizer, part = run.optimizer(torch.optim.AdamW, lr=1e-4), next(run.shard([batch]))

    def step():
        run.step(part)
        optimizer.step()

    return step


def measure(world, name, rounds, steps):
    """Wall and CPU seconds of a step of each layout, by round; CPU seconds are the mean of both ranks'."""
    everyone = world.everyone()
    used = time.thread_time if world.local else time.process_time
    each, rows = {line: step_of(world, name, line) for line in LAYOUTS}, []
    for number, order in orders(each, rounds):
        row = {}
        for line in order:
            each[line]()  # what the layout before left in the caches is not its own
            everyone.barrier()
            gc.disable()
            before, start = used(), time.perf_counter()
            for _ in range(steps):
                each[line]()
            everyone.barrier()
            wall, cpu = time.perf_counter() - start, torch.tensor([used() - before])
            gc.enable()
            row[line] = {"wall_s": wall / steps, "cpu_s": everyone.all_reduce(cpu).item() / steps / world.size}
        if number:
            rows.append(row)
    return rows


def rows_of(kind, name, cluster, rounds, steps):
    prices = predicted(name, cluster)
    measured = sw.launch(measure, 2, name, rounds, steps, ranks=kind)[0]
    rows = []
    for line, price in prices.items():
        wall = sorted(row[line]["wall_s"] for row in measured)
        seconds = statistics.median(wall)
        waits = price.waterfall["bubble"] + price.waterfall["pp"]
        rows.append({
            "ranks": kind, "model": name, "layout": line, "predicted_s": price.step_s, "measured_s": seconds,
            "measured_min_s": wall[0], "measured_max_s": wall[-1], "error": price.step_s / seconds - 1,
            "cpu_s": statistics.median(row[line]["cpu_s"] for row in measured), "busy_s": price.step_s - waits,
            "waterfall": dict(price.waterfall),
        })  # fmt: skip
        print(f"{kind:9} {name:10} {line:24} {price.step_s * 1e3:7.1f} ms predicted, {seconds * 1e3:7.1f} measured "
              f"({wall[0] * 1e3:.1f} to {wall[-1] * 1e3:.1f}): {rows[-1]['error']:+.0%}", flush=True)  # fmt: skip
    return rows, measured


def summary_of(rows):
    """Errors of all rows, and the regret of the layout predicted best, for each kind of rank and model."""
    found = []
    for kind, name in dict.fromkeys((row["ranks"], row["model"]) for row in rows):
        own = [row for row in rows if (row["ranks"], row["model"]) == (kind, name)]
        errors = sorted(abs(row["error"]) for row in own)
        best, fastest = min(own, key=lambda row: row["predicted_s"]), min(own, key=lambda row: row["measured_s"])
        found.append({
            "ranks": kind, "model": name, "layouts": len(own), "median_error": statistics.median(errors),
            "worst_error": errors[-1], "regret": best["measured_s"] / fastest["measured_s"] - 1,
            "chosen": best["layout"], "fastest": fastest["layout"],
        })  # fmt: skip
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2)
    options = options_of(parser, smallest={"rounds": 1, "steps": 1}, ours={"rounds": 3, "steps": 1})
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    facts, rows, rounds, calibrations = machine(), [], {}, {}
    for kind in KINDS:
        for name in MODELS_MEASURED:
            began = time.perf_counter()
            limit_s = {"limit_s": 5.0} if SMALLEST else {}
            found = calibrate(Build(name), batch_of(name), "dp2", ranks=kind, **limit_s)
            took_s = time.perf_counter() - began
            print(f"calibrated in {took_s:.0f} s\n{found.summary()}", flush=True)
            own, rounds[f"{kind}, {name}"] = rows_of(kind, name, found.cluster, options.rounds, options.steps)
            rows += own
            calibrations[f"{kind}, {name}"] = {"seconds": took_s, **found.table}
    table = summary_of(rows)
    for each in table:
        print(f"{each['ranks']}, {each['model']}: median error {each['median_error']:.1%}, worst "
              f"{each['worst_error']:.0%}; chose {each['chosen']}, regret {each['regret']:.1%}")  # fmt: skip
    errors = [abs(row["error"]) for row in rows]
    print(f"all {len(rows)}: median error {statistics.median(errors):.1%}")
    write(options, __file__, {"machine": facts, "table": table, "rows": rows, "calibrations": calibrations,
                              "rounds": rounds})  # fmt: skip


if __name__ == "__main__":
    main()
