"""What the executor itself costs: microseconds of an action on layers that do nothing; and how long lists take to make.

A layer gives its input plus one number, so a step is all overhead: autograd's, the executor's, the messages'. Without a
pipeline the same microbatches run through the same layers by hand, and through the executor on one rank.
"""

import argparse
import os
import resource
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import shardwright as sw
from shardwright.strategies.pipeline.schedules import SCHEDULES, build
from shardwright.strategies.pipeline.simulate import ChunkMemory, ChunkTimes, simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write

NUM_MICROBATCHES = 32
STAGES = sized((2, 4), (2,))
LARGE = sized((64, 1024), (4, 16))  # stages and microbatches of the lists
GOAL_S = {"build": 1.0, "simulate": 2.0}
AHEAD_S = 0.02  # from agreeing on a moment to that moment
BY_HAND = "by hand"


class EmptyLayer(nn.Module):
    """Adds one number."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def reset_parameters(self):
        nn.init.zeros_(self.shift)

    def forward(self, x):
        return x + self.shift


def plain(num_layers):
    return nn.Sequential(*(EmptyLayer() for _ in range(num_layers)))


def data():
    x = torch.ones(NUM_MICROBATCHES, 1)
    return x, torch.zeros_like(x)


def by_hand():
    """The microbatches through one layer, forward and backward: two actions each, and nothing around them."""
    model, loss = plain(1), sw.MeanSquaredError()
    pieces = list(zip(*(t.chunk(NUM_MICROBATCHES) for t in data()), strict=True))

    def step():
        model.zero_grad()
        for x, target in pieces:
            loss(model(x), target)[0].backward()

    return step, 2 * NUM_MICROBATCHES


def through(world, line):
    """A step under a layout, one layer a chunk, and how many actions this rank's list has."""
    layout = sw.Layout.parse(line)
    factor = layout.factor("pp")
    schedule = None if factor is None else build(factor.options[0].name, factor.size, NUM_MICROBATCHES)
    model = plain(1 if schedule is None else schedule.num_chunks)
    run = sw.parallelize(model, layout, world, loss=sw.MeanSquaredError())
    batch = next(run.shard([data()]))
    shifts = [p for p in run.model.parameters() if p.numel()]

    def step():
        for shift in shifts:
            shift.grad = None
        run.step(batch)

    step()
    for shift in shifts:  # of the mean of squares of ones: each microbatch counted
        torch.testing.assert_close(shift.grad, torch.full((1,), 2.0))
    return step, 2 * NUM_MICROBATCHES if schedule is None else len(schedule.actions[world.rank])


def variants(world, lines):
    """By name, a step and its actions on this rank."""
    found = {BY_HAND: by_hand()} if world.size == 1 else {}
    return {**found, **{line: through(world, line) for line in lines}}


def turn(everyone, variant, steps, cpu_s):
    """Microseconds of an action: the wall's on the busiest rank, and CPU's, all ranks' over all actions."""
    moment = torch.tensor([time.perf_counter() + AHEAD_S], dtype=torch.float64)
    start = everyone.broadcast(moment).item()  # the clock is the machine's
    step, num_actions = variant
    time.sleep(max(0.0, start - time.perf_counter()))
    before = cpu_s()
    for _ in range(steps):
        step()
    taken = [time.perf_counter() - start, cpu_s() - before, num_actions]
    told = everyone.all_gather(torch.tensor([taken], dtype=torch.float64))
    most, total = told.amax(0).tolist(), told.sum(0).tolist()
    return {"wall_us": most[0] / most[2] / steps * 1e6, "cpu_us": total[1] / total[2] / steps * 1e6}


def measure(world, lines, rounds, steps):
    """By round and variant, microseconds of an action."""
    torch.set_num_threads(1)
    everyone, each, rows = world.everyone(), variants(world, lines), []

    def cpu_s():
        if world.local and world.rank:
            return 0.0  # rank 0 counts for the process
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    for number in range(rounds + 1):
        names = list(each)
        order = names[number % len(names) :] + names[: number % len(names)]
        row = {name: turn(everyone, each[name], steps, cpu_s) for name in order}
        if number:  # the first warms up
            rows.append({name: row[name] for name in names})
    return rows


def actions_table(kind, rows):
    """A row for each variant: medians and ranges."""
    found = []
    for name in rows[0]:
        row = {"ranks": kind, "name": name}
        for what in ("wall_us", "cpu_us"):
            values = [each[name][what] for each in rows]
            row |= {f"{what}_median": statistics.median(values), f"{what}_range": [min(values), max(values)]}
        found.append(row)
    return found


def seconds(work, repeats):
    """What ``work`` gave, and the seconds of each time."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        taken.append(time.perf_counter() - start)
    return result, taken


def lists_table(repeats):
    """Every schedule for 64 stages and 1,024 microbatches: seconds to build it and to simulate it, memory too."""
    found = []
    for name in SCHEDULES:
        schedule, built_s = seconds(partial(build, name, *LARGE), repeats)
        count = schedule.num_chunks
        timeline, simulated_s = seconds(
            partial(simulate, schedule, ChunkTimes.equal(count), ChunkMemory.equal(count)), repeats
        )
        found.append(
            {
                "name": name,
                "actions": sum(map(len, schedule.actions)),
                "build_s_median": statistics.median(built_s),
                "build_s": built_s,
                "simulate_s_median": statistics.median(simulated_s),
                "simulate_s": simulated_s,
                "bubble": timeline.bubble,
            }
        )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="of each variant in its turn")
    parser.add_argument("--schedules", nargs="*", default=tuple(SCHEDULES))
    options = options_of(parser, smallest={"rounds": 1, "steps": 1})
    os.environ["OMP_NUM_THREADS"] = "1"
    facts, rounds, table = machine(), {}, []
    for kind in ("processes", "threads"):
        for size in (1, *STAGES):
            lines = [f"pp{size}/{name} mb{NUM_MICROBATCHES}" for name in options.schedules]
            lines = lines if size > 1 else [f"mb{NUM_MICROBATCHES}"]
            rows = sw.launch(measure, size, lines, options.rounds, options.steps, ranks=kind)[0]
            rounds[f"{size} {kind}"] = rows
            table += actions_table(kind, rows)
    for row in table:
        low, high = row["wall_us_range"]
        print(
            f"{row['ranks']:10} {row['name']:22} {row['wall_us_median']:7.1f} us an action "
            f"({low:.1f} to {high:.1f})   CPU {row['cpu_us_median']:7.1f} us"
        )
    lists = lists_table(sized(5, 1))
    print(f"lists of {LARGE[0]} stages and {LARGE[1]} microbatches: goals {GOAL_S}, in seconds")
    for row in lists:
        print(
            f"{row['name']:12} {row['actions']:7} actions   built in {row['build_s_median']:.2f} s   "
            f"simulated in {row['simulate_s_median']:.2f} s"
        )
    write(options, __file__, {"machine": facts, "microbatches": NUM_MICROBATCHES, "table": table,
          "lists": lists, "rounds": rounds})  # fmt: skip


if __name__ == "__main__":
    main()
