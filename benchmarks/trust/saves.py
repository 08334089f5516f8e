"""What does a checkpoint each 20 steps cost a step of the demo's model, waited for and beside training?

Blocks of steps without a save, with one that is waited for and with one beside training, in turn. A block begins with
its save and ends when its checkpoint is complete, so that all that the save takes counts.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, orders, ratio_rows, sized, write_beside

import shardwright as sw
from shardwright.models import GPT, GPTConfig

LAYOUT = sized("dp2 tp2", "dp2")
CONFIG = sized(GPTConfig(), GPTConfig(num_layers=1, width=16, num_heads=2))
BATCH, SEQ = sized((16, 128), (4, 16))
NONE, BESIDE, WAITS = "no save", "beside training", "waited for"


def measured(world, steps, rounds, folder):
    """For each round and variant the seconds of a step, CPU seconds of all ranks, and seconds of the call of ``save``.

    CPU seconds tell the cost where other processes take the machine's time too.
    """
    with sw.without_values():
        model = GPT(CONFIG)
    run = sw.parallelize(model, LAYOUT, world, loss=sw.CrossEntropy(), check_every=0)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
    tokens = torch.randint(CONFIG.vocabulary, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    (part,) = run.shard([(tokens[:, :-1], tokens[:, 1:])])
    everyone, found = world.everyone(), []
    for number, order in orders((NONE, BESIDE, WAITS), rounds):
        row, cpu, call = {}, {}, {}
        for name in order:
            everyone.barrier()
            start, start_cpu = time.perf_counter(), time.process_time()
            if name != NONE:
                sw.save(folder, run, optimizer, keep=3, wait=name == WAITS)
                call[name] = time.perf_counter() - start
            for _ in range(steps):
                run.step(part)
                run.clip_grad_norm_(1.0)
                optimizer.step()
            run.wait_saves()
            used = torch.tensor([time.process_time() - start_cpu], dtype=torch.float64)
            cpu[name] = everyone.all_reduce(used).item() / steps
            row[name] = (time.perf_counter() - start) / steps
        if number:
            found.append({"step_s": row, "cpu_s": cpu, "call_s": call})
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="between two saves")
    options = options_of(parser, smallest={"rounds": 1, "steps": 2})
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="saves-", dir=options.rows and options.rows.parent) as folder:
        ranks = sw.Layout.parse(LAYOUT)
        rounds = sw.launch(measured, ranks, options.steps, options.rounds, folder)[0]
    table, cpu_table = ([*ratio_rows([each[key] for each in rounds], {BESIDE: NONE, WAITS: NONE})]
                        for key in ("step_s", "cpu_s"))  # fmt: skip
    for row, cpu in zip(table, cpu_table, strict=True):
        row["cpu_ratio_median"], row["cpu_ratio_min"], row["cpu_ratio_max"] = (
            cpu[f"ratio_{each}"] for each in ("median", "min", "max")
        )
        row["call_ms_median"] = 1000 * statistics.median(each["call_s"][row["name"]] for each in rounds)
        row["call_share_median"] = statistics.median(
            each["call_s"][row["name"]] / options.steps / each["step_s"][NONE] for each in rounds
        )
        print(
            f"{row['name']:16} {row['ms_median']:7.1f} ms a step, {row['limit_ms_median']:7.1f} without: "
            f"{row['ratio_median'] - 1:+.1%} ({row['ratio_min'] - 1:+.1%} to {row['ratio_max'] - 1:+.1%}), "
            f"CPU {row['cpu_ratio_median'] - 1:+.1%}, "
            f"a call takes {row['call_ms_median']:.1f} ms, {row['call_share_median']:.1%} of the steps"
        )
    write_beside(options, __file__, {"machine": facts, "table": table, "rounds": rounds})


if __name__ == "__main__":
    main()
