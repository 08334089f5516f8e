"""What every tensor mode costs beside one process with two threads: an MLP alone, and a step of a GPT.

All variants live in the same eight processes; a layout of four ranks runs on the first four. A round runs each variant
in turn, and the one-process limits too. Who takes no part waits in a call, asleep: ranks agree on a moment at which to
begin, far enough ahead for the others to have gone to sleep.
"""

import argparse
import gc
import os
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

import shardwright as sw
from shardwright.comm.recorder import ring_factor
from shardwright.models.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, orders, ratio_rows, sized, write
from benchmarks.gpt_step.run import BATCH, CONFIG, SEQ, adamw, batch_of, plain, plain_step
from benchmarks.tensor_modes.cases import (
    CHOSEN,
    CLASSIC,
    GOALS,
    HIDDEN,
    PEER_MB,
    REGATHER,
    SMALL,
    TOKENS,
    WIDTH,
    InsideMLP,
    accepted,
    dimensions,
    mlp_data,
    plain_mlp,
)

NUM_RANKS = sized(8, 2)
AHEAD_S = 0.02  # from agreeing on a moment to that moment


def alone(step):
    """The step in this process with two threads."""

    def run():
        torch.set_num_threads(2)
        step()
        torch.set_num_threads(1)

    return run


def mlp_limit(plain_mlp, x, dy):
    def step():
        x.grad = None
        plain_mlp.zero_grad()
        plain_mlp(x).backward(dy)

    return step


def gpt(world, line):
    with torch.device("meta"):
        model = GPT(GPTConfig(**CONFIG))
    run = sw.parallelize(model, line, world, num_tokens=BATCH * SEQ)
    optimizer, part = run.optimizer(torch.optim.AdamW, lr=1e-4), next(run.shard([batch_of(0)]))

    def step():
        run.step(part)
        optimizer.step()

    return run, step


def variants(world, lines):
    """By name: how many ranks take part, on those the step, and the run whose traffic is told."""
    found = {}
    for name in ("mlp limit", "gpt limit"):
        found[name] = (1, None, None)
    reference, (x, dy) = plain_mlp(), mlp_data()
    limit = mlp_limit(reference, x.requires_grad_(), dy)
    limit()
    if world.rank == 0:
        model = plain()
        optimizer = adamw(model.parameters())
        found["mlp limit"] = (1, alone(limit), None)
        found["gpt limit"] = (1, alone(lambda: plain_step(model, optimizer, batch_of(0))), None)
    for line in lines:
        size = sw.Layout.parse(line).num_ranks
        if world.rank >= size:
            found[f"mlp {line}"] = found[f"gpt {line}"] = (size, None, None)
            continue
        some = replace(world, size=size)  # the first ranks, as a world of their own
        mlp = InsideMLP(some, line, reference, x, dy)
        mlp.check(reference, x)
        found[f"mlp {line}"] = (size, mlp.step, mlp.run)
        run, step = gpt(some, line)
        found[f"gpt {line}"] = (size, step, run)
    return found


def turn(everyone, num_ranks, step, steps):
    """The wall seconds of one step, from the moment agreed on until the last rank is done, and CPU seconds of all."""
    moment = torch.tensor([time.perf_counter() + AHEAD_S], dtype=torch.float64)
    start = end = everyone.broadcast(moment).item()  # the clock is the machine's
    used = 0.0
    if step is not None:
        gc.disable()
        time.sleep(max(0.0, start - time.perf_counter()))
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(steps):
            step()
        end, after = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        gc.enable()
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    told = everyone.all_gather(torch.tensor([[end - start, used]], dtype=torch.float64))[:num_ranks]
    return told[:, 0].max().item() / steps, told[:, 1].sum().item() / steps


def turns(world, each, rounds, steps):
    """Wall seconds of a step of each variant, all of them once in each round, each round in another order."""
    everyone, rows = world.everyone(), []
    for number, order in orders(each, rounds):
        row = {name: turn(everyone, world.size, each[name], steps)[0] for name in order}
        if number:
            rows.append(row)
    return rows


def sent_bytes(world, run, step):
    """What this rank sends in one step, ranks forming rings."""
    if run is None:
        return 0.0
    with world.recorder.recording() as records:
        step()
    # gradients that only some members of a joined axis share are summed among these: two of them in all grids here
    members = {axis: 2 if "+" in axis else run.axes[axis].size for axis in {r.axis for r in records}}
    return float(sum(ring_factor(r.kind, members[r.axis]) * r.num_bytes for r in records))


def measure(world, rounds, steps, lines):
    each, everyone = variants(world, lines), world.everyone()
    rows, cpu_rows, sent = [], [], {}
    for name, (_, step, run) in each.items():
        told = torch.tensor([sent_bytes(world, run, step)], dtype=torch.float64)
        sent[name] = everyone.all_reduce(told, "max").item()
    for number, order in orders(each, rounds):
        row, cpu = {}, {}
        for name in order:
            row[name], cpu[name] = turn(everyone, each[name][0], each[name][1], steps)
        if number:
            rows.append(row)
            cpu_rows.append(cpu)
    paths = ("linear1", "linear2", "blocks.0.attention.qkv", "blocks.0.attention.o", "blocks.0.mlp.up",
             "blocks.0.mlp.down", "head")  # fmt: skip
    roles = {
        name: {path: run.plan.roles[path].name for path in paths if path in run.plan.roles}
        for name, (_, _, run) in each.items()
        if run is not None
    }
    return rows, cpu_rows, sent, roles


def table_of(rows, cpu_rows, sent, roles):
    """A row for each variant: wall and CPU ratios, bytes, goal and peer."""
    limits = {name: f"{name.partition(' ')[0]} limit" for name in roles}
    table = []
    for row, used in zip(ratio_rows(rows, limits), ratio_rows(cpu_rows, limits), strict=True):
        what, _, line = row["name"].partition(" ")
        is_mlp = what == "mlp"
        table.append(
            {
                **row,
                "model": what,
                "layout": line,
                "cpu_ratio_median": used["ratio_median"],
                "cpu_ratio_min": used["ratio_min"],
                "cpu_ratio_max": used["ratio_max"],
                "goal": GOALS.get(line) if is_mlp else None,
                "sent_mb": sent[row["name"]] / 1e6,
                "peer_sent_mb": PEER_MB[dimensions(line)] if is_mlp else None,
                "roles": roles[row["name"]],
            }
        )
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="of each variant in its turn")
    parser.add_argument("--layouts", nargs="*", default=[*CHOSEN, *REGATHER, *CLASSIC])
    options = options_of(
        parser, smallest={"rounds": 1, "steps": 1, "layouts": SMALL}, ours={"rounds": 1, "steps": 1, "layouts": CHOSEN}
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = machine()
    lines, refused = accepted(options.layouts, CONFIG)
    for line, why in refused.items():
        print(f"{line} is left out: {why}")
    rows, cpu_rows, sent, roles = sw.launch(measure, NUM_RANKS, options.rounds, options.steps, lines)[0]
    table = table_of(rows, cpu_rows, sent, roles)
    for row in table:
        goal = f"goal {row['goal']:.2f}" if row["goal"] else ""
        peer = f"peer {row['peer_sent_mb']:.1f}" if row["peer_sent_mb"] else ""
        print(
            f"{row['name']:28} {row['ms_median']:7.1f} ms   {row['ratio_median']:.3f} limits "
            f"({row['ratio_min']:.3f} to {row['ratio_max']:.3f}) {goal:9}   CPU {row['cpu_ratio_median']:.3f}   "
            f"sends {row['sent_mb']:5.1f} MB {peer}"
        )
    limits = {n: round(statistics.median(r[n] for r in rows) * 1000, 1) for n in ("mlp limit", "gpt limit")}
    print("limits:", limits)
    sizes = {"width": WIDTH, "hidden": HIDDEN, "tokens": TOKENS}
    write(options, __file__, {"machine": facts, "mlp": sizes, "gpt": {**CONFIG, "batch": BATCH, "seq": SEQ},
          "steps": options.steps, "refused": refused, "table": table, "rounds": rows,
          "cpu_rounds": cpu_rows})  # fmt: skip


if __name__ == "__main__":
    main()
