"""How much a compiled step takes of one that is not, and how long compiling takes: dp2 and tp2, interleaved in one run.

Every variant lives in the same two processes. A round runs each of them in turn. The first steps are timed one by one:
the first is inspected and runs uncompiled, the second compiles; what torch has compiled in other runs is not used.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

import shardwright as sw
from shardwright.models.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import in_turn, machine, options_of, ratio_rows, sized, write

CONFIG = sized(
    {"num_layers": 4, "width": 256, "num_heads": 4, "vocabulary": 1024, "max_tokens": 128},
    {"num_layers": 2, "width": 16, "num_heads": 2, "vocabulary": 16, "max_tokens": 8},
)
BATCH = sized(16, 4)
COMPILED = sized("compile", "compile:aot_eager")  # for the smallest run no C++ compiler is started
LAYOUTS = {"dp2": "dp2", "compile dp2": f"dp2 {COMPILED}", "tp2": "tp2", "compile tp2": f"tp2 {COMPILED}"}
LIMITS = {"compile dp2": "dp2", "compile tp2": "tp2"}
NUM_FIRST = 3


def step_of(world, layout):
    with torch.device("meta"):
        model = GPT(GPTConfig(**CONFIG))
    run = sw.parallelize(model, layout, world)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-4)
    num = CONFIG["max_tokens"]
    tokens = torch.randint(CONFIG["vocabulary"], (BATCH, num + 1), generator=torch.Generator().manual_seed(0))
    part = next(run.shard([(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]))

    def step():
        run.step(part)
        optimizer.step()

    return step


def measure(world, rounds, steps):
    each, first = {}, {}
    for name, layout in LAYOUTS.items():
        each[name], first[name] = step_of(world, layout), []
        for _ in range(NUM_FIRST):
            start = time.perf_counter()
            each[name]()
            first[name].append(time.perf_counter() - start)
    rows, cpu_rows = in_turn(each, rounds, steps)
    return rows, cpu_rows, first


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    options = options_of(parser, smallest={"rounds": 1, "steps": 1})
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        rows, cpu_rows, first = sw.launch(measure, 2, options.rounds, options.steps)[0]
    table, cpu = ratio_rows(rows, LIMITS), ratio_rows(cpu_rows, LIMITS)
    for row, used in zip(table, cpu, strict=True):
        seconds = ", ".join(f"{s:.2f} s" for s in first[row["name"]])
        print(
            f"{row['name']:12} {row['ms_median']:7.1f} ms, uncompiled {row['limit_ms_median']:7.1f} ms: "
            f"{row['ratio_median']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})   "
            f"CPU seconds {used['ratio_median']:.3f}   first steps {seconds}"
        )
    write(options, __file__, {"machine": facts, "config": {**CONFIG, "batch": BATCH}, "table": table, "cpu": cpu,
          "first": first, "rounds": rows, "cpu_rounds": cpu_rows})  # fmt: skip


if __name__ == "__main__":
    main()
