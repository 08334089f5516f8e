"""What dropout costs that does not depend on the layout: a mask beside torch's own dropout, and a GPT's step with it.

Each round measures in a process of its own, and with ``--before CHECKOUT`` in one more of that source tree.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch.nn import functional

import shardwright as sw
from shardwright.keyed_dropout import dropout_mask
from shardwright.models.gpt import GPT, GPTConfig
from shardwright.rng import RngTracker

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write
from benchmarks.gpt_step.run import BATCH, CONFIG, SEQ, batch_of, plain_step

P = 0.1
SHAPES = sized(
    {"attention map": (8, 16, 512, 512), "activation": (8, 512, 4096), "map of the GPT": (BATCH, 4, SEQ, SEQ)},
    {"map": (2, 2, 16, 16)},
)
STEPS = sized(4, 1)


def mask(shape):
    dropout_mask(RngTracker(samples=range(shape[0])), "drop", shape, (), P)


def ours(world, dropout):
    run = sw.parallelize(GPT(GPTConfig(**CONFIG, dropout=dropout)), "single", world)
    optimizer, part = run.optimizer(torch.optim.AdamW, lr=1e-4), next(run.shard([batch_of(0)]))

    def step():
        run.step(part)
        optimizer.step()

    return step


def torchs(dropout):
    model = GPT(GPTConfig(**CONFIG, dropout=dropout))
    return partial(plain_step, model, torch.optim.AdamW(model.parameters(), lr=1e-4), batch_of(0))


def seconds(work, times):
    """The CPU seconds of one run, the mean of some after one to warm up; all of it runs on one thread."""
    work()
    start = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - start) / times


def one_round(world):
    found = {}
    for name, shape in SHAPES.items():
        x, times = torch.ones(shape), sized(max(1, 2**24 // prod(shape)), 1)
        found[f"{name}, mask"] = seconds(partial(mask, shape), times)
        found[f"{name}, torch"] = seconds(partial(functional.dropout, x, P), times)
    for dropout in (0.0, P):
        found[f"step, dropout {dropout}, ours"] = seconds(ours(world, dropout), STEPS)
        found[f"step, dropout {dropout}, torch"] = seconds(torchs(dropout), STEPS)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an older source tree to measure beside this")
    parser.add_argument("--one", action="store_true", help="one round in this process, printed as JSON")
    options = options_of(parser, smallest={"rounds": 1})
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(sw.launch(one_round, 1, ranks="threads")[0]))
        return
    trees = {"after": Path(__file__).resolve().parents[2]}
    if options.before is not None:
        trees["before"] = options.before
    facts, rounds = machine(), []
    command = [sys.executable, __file__, "--one", *(["--smallest"] if options.smallest else [])]
    for number in range(options.rounds):
        row = {}
        for name in list(trees)[:: -1 if number % 2 else 1]:
            given = {**os.environ, "PYTHONPATH": str(trees[name] / "src")}
            done = subprocess.run(command, env=given, stdout=subprocess.PIPE, text=True, check=True)
            row[name] = json.loads(done.stdout)
        rounds.append(row)
    table = []
    for what in rounds[0]["after"]:
        for name in trees:
            each = [row[name][what] for row in rounds]
            found = {"s_median": statistics.median(each), "s_min": min(each), "s_max": max(each)}
            table.append({"what": what, "tree": name, **found})
            print(name, what, *(f"{key} {value * 1e3:.3f} ms" for key, value in found.items()))
    elements = {name: prod(shape) for name, shape in SHAPES.items()}
    write(options, __file__, {"machine": facts, "p": P, "shapes": SHAPES, "elements": elements,
          "config": {**CONFIG, "batch": BATCH, "seq": SEQ}, "table": table, "rounds": rounds})  # fmt: skip


if __name__ == "__main__":
    main()
