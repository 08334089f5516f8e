"""Whether the ledger knows: the peak of every rank, predicted on the meta device and measured in a run.

Bytes are counted, not timed, and do not depend on the machine; ranks are processes, where each one's memory is its own.
"""

import argparse
import gc
import os
import sys
from itertools import product
from pathlib import Path

import torch

import shardwright as sw
from shardwright.ledger.account import measure_memory, predict_memory
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.plan.plan import Job

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write

CONFIG = {"num_layers": sized(4, 1), "num_heads": 4, "width": 128, "vocabulary": 512, "max_tokens": 64, "dropout": 0.1}
BATCH = 16
STAGES = ("", "/zero1", "/zero2", "/zero3")
WORDS = ("", *sized(("recompute:full",), ()))
PRECISIONS = ("", *sized(("bf16",), ()))
SIZES = (1, 2, 4, 8)
OVER, UNDER = 0.02, 0.01


def plain():
    with sw.without_values():
        return GPT(GPTConfig(**CONFIG))


def data():
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(CONFIG["vocabulary"], (BATCH, CONFIG["max_tokens"] + 1), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def both(world, lines):
    """By layout, the peak of this rank: predicted, and measured."""
    return {line: (said(world.rank, line), peak_of(world, line)) for line in lines}


def said(rank, line):
    return without_shared(predict_memory(Job(plain(), CrossEntropy()), line, rank, data()))


def without_shared(account):
    """The peak but for blocks of shared memory: the layouts run one after the other in processes that keep theirs."""
    return account.peak_bytes - account.at_peak()["shared"]


def peak_of(world, line):
    gc.collect()  # what the layout before left in circles is not this one's
    run = sw.parallelize(plain(), line, world, example=data()[0])
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)
    (batch,) = run.shard([data()])
    for _ in range(2):
        run.step(batch)
        optimizer.step()
    return without_shared(measure_memory(run, batch, optimizer))


def row_of(size, stage, word, precision, line, peaks):
    """How far the prediction is off, over the ranks."""
    off = [predicted / found - 1 for predicted, found in peaks]
    return {
        "layout": line,
        "ranks": size,
        "stage": stage or "/plain",
        "recompute": word,
        "precision": precision or "fp32",
        "predicted_bytes": [predicted for predicted, _ in peaks],
        "measured_bytes": [found for _, found in peaks],
        "off_min": min(off),
        "off_max": max(off),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--stages", nargs="+", default=list(STAGES))
    options = options_of(parser, smallest={"ranks": [2], "stages": ["", "/zero3"]})
    os.environ["OMP_NUM_THREADS"] = "1"
    facts, table = machine(), []
    for size in options.ranks:
        cases = {
            " ".join(f"dp{size}{stage} {precision} {word}".split()): (stage, word, precision)
            for stage, word, precision in product(options.stages, WORDS, PRECISIONS)
        }
        ranks = sw.launch(both, size, list(cases))
        for line, case in cases.items():
            row = row_of(size, *case, line, [rank[line] for rank in ranks])
            table.append(row)
            print(
                f"{line:32} {max(row['measured_bytes']):12,} bytes measured, predicted off by "
                f"{row['off_min']:+.2%} to {row['off_max']:+.2%}",
                flush=True,
            )
        # after each size: the next takes longer
        write(options, __file__, {"machine": facts, "gpt": {**CONFIG, "batch": BATCH}, "table": table})
    worst = [row["layout"] for row in table if row["off_min"] < -UNDER or row["off_max"] > OVER]
    print("out of bounds:", ", ".join(worst) or "none")


if __name__ == "__main__":
    main()
