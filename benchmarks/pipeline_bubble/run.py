"""How much of a step each schedule waits: measured over processes, beside what the simulator says.

The model is a row of layers that sleep. One sleeps in its forward, in its backward for the input's gradient, and for
its weight's gradient either there or, where the schedule splits the backward, when its ``W`` runs: it leaves this to
the run's ``Deferred``, as the library's own layers do. Ranks that sleep need no core, so eight of them fit on two.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

import shardwright as sw
from shardwright.strategies.pipeline.schedules import SCHEDULES, build
from shardwright.strategies.pipeline.simulate import ChunkTimes, simulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write

STAGES = (2, 4, 8)
PER_STAGE = 2  # layers, so that a stage can hold two chunks
AHEAD_S = 0.05  # from agreeing on a moment to that moment
GOAL_POINTS = 2.0


class SleepingLayer(nn.Module):
    """Gives what it gets, after ``forward_s``; its weight, one number, has no influence and a gradient of ones.

    ``deferred`` takes the work of the weight's gradient where a schedule splits the backward; None where none does.
    """

    def __init__(self, forward_s, input_s, weight_s):
        super().__init__()
        self.forward_s, self.input_s, self.weight_s = forward_s, input_s, weight_s
        self.weight = nn.Parameter(torch.zeros(1))
        self.deferred = None

    def reset_parameters(self):
        nn.init.zeros_(self.weight)

    def forward(self, x):
        return x if x.is_meta else _Sleep.apply(x, self.weight, self)


class _Sleep(Function):
    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.layer = layer
        time.sleep(layer.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        layer = ctx.layer
        weight = layer.weight
        time.sleep(layer.input_s)

        def work():
            time.sleep(layer.weight_s)
            weight.grad = torch.ones(1) if weight.grad is None else weight.grad + 1

        if layer.deferred is not None and layer.deferred.accepts(weight):
            layer.deferred.append(work)
        else:
            work()
        return dy, None, None


def measure(world, cases, sleeps_s, repeats):
    """By case and repeat, when this rank's actions began and ended, from a moment that all ranks agreed on."""
    everyone, found = world.everyone(), []
    for line, size in cases:
        if world.rank < size:
            step = stepper(replace(world, size=size), line, sleeps_s)
        runs = []
        for number in range(repeats + 1):
            moment = torch.tensor([time.perf_counter() + AHEAD_S], dtype=torch.float64)
            start = everyone.broadcast(moment).item()  # the clock is the machine's
            time.sleep(max(0.0, start - time.perf_counter()))
            spans = step() if world.rank < size else []
            if number:  # the first warms up: forms go ahead of values
                runs.append([(span.start_s - start, span.end_s - start) for span in spans])
        found.append(runs)
    return found


def stepper(world, line, sleeps_s):
    """A step of the sleeping model; it returns when this rank's actions ran."""
    each_s = [sleep_s / PER_STAGE for sleep_s in sleeps_s]
    model = nn.Sequential(*(SleepingLayer(*each_s) for _ in range(PER_STAGE * world.size)))
    layout = sw.Layout.parse(line)
    run = sw.parallelize(model, layout, world, loss=sw.MeanSquaredError())
    for layer in run.model.modules():
        if isinstance(layer, SleepingLayer):
            layer.deferred = run._executor.deferred  # the library's own layers are given it by the strategy
    x = torch.ones(layout.num_microbatches, 1)
    batch = next(run.shard([(x, torch.zeros_like(x))]))
    used = [p for p in run.model.parameters() if p.numel()]

    def step():
        for parameter in used:
            parameter.grad = None
        loss = run.step(batch).item()
        assert loss == 1.0, loss
        for parameter in used:  # every microbatch gave its gradient once, whichever rank made it
            assert parameter.grad.item() == layout.num_microbatches, parameter.grad
        return run._executor.spans

    return step


def hop_s(runs_of_rank):
    """From an action's end to the beginning of the next on another stage, nothing else going on: in ``naive``.

    On busy cores a sender may be taken off its core before it has read the clock, and the next begin before that: 0.
    """
    gaps = []
    for told in zip(*runs_of_rank, strict=True):
        every = sorted((*span, rank) for rank, spans in enumerate(told) for span in spans)
        gaps += [b[0] - a[1] for a, b in pairwise(every) if a[2] != b[2]]
    return max(0.0, statistics.median(gaps))


def predicted(name, num_stages, num_microbatches, sleeps_s, transfer_s):
    """The simulator's timeline of the same schedule, with the times that the layers sleep."""
    schedule = build(name, num_stages, num_microbatches)
    share = num_stages / schedule.num_chunks
    times = ChunkTimes.equal(schedule.num_chunks, *(sleep_s * share for sleep_s in sleeps_s), transfer_s=transfer_s)
    return simulate(schedule, times)


def row_of(name, num_stages, num_microbatches, sleeps_s, transfer_s, runs_of_rank):
    """Predicted and measured of one case; ``runs_of_rank`` are the told spans by rank and repeat."""
    ideal, wanted = (predicted(name, num_stages, num_microbatches, sleeps_s, each) for each in (0.0, transfer_s))
    bubbles, walls_s = [], []
    for told in zip(*runs_of_rank, strict=True):
        wall_s = max(end_s for spans in told for _, end_s in spans)
        busy_s = sum(end_s - start_s for spans in told for start_s, end_s in spans)
        bubbles.append(1 - busy_s / (wall_s * num_stages))
        walls_s.append(wall_s)
    return {
        "schedule": name,
        "stages": num_stages,
        "microbatches": num_microbatches,
        "ideal": ideal.bubble,
        "transfer_s": transfer_s,
        "predicted": wanted.bubble,
        "measured_median": statistics.median(bubbles),
        "measured_min": min(bubbles),
        "measured_max": max(bubbles),
        "points_off": 100 * (statistics.median(bubbles) - wanted.bubble),
        "predicted_s": wanted.makespan_s,
        "wall_ratio_median": statistics.median(walls_s) / wanted.makespan_s,
        "wall_s": walls_s,
        "bubbles": bubbles,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="*", default=STAGES)
    parser.add_argument("--per-stage", type=int, nargs="*", default=(2, 4), help="microbatches, in stages")
    parser.add_argument("--schedules", nargs="*", default=tuple(SCHEDULES))
    parser.add_argument("--sleep-ms", type=float, nargs=3, default=(20, 20, 20), help="of a stage: F, I and W")
    parser.add_argument("--repeats", type=int, default=5)
    options = options_of(parser, smallest={"stages": [2], "per_stage": [2], "sleep_ms": [2, 2, 2], "repeats": 1})
    os.environ["OMP_NUM_THREADS"] = "1"
    facts, sleeps_s = machine(), [ms / 1000 for ms in options.sleep_ms]
    names = list(dict.fromkeys(["naive", *options.schedules]))
    cases = [(name, p, each * p) for p in options.stages for each in options.per_stage for name in names]
    lines = [(f"pp{p}/{name} mb{m}", p) for name, p, m in cases]
    found = sw.launch(measure, max(options.stages), lines, sleeps_s, options.repeats)
    told = {case: [runs[place] for runs in found[: case[1]]] for place, case in enumerate(cases)}
    table = []
    for case in cases:
        _, num_stages, num_microbatches = case
        transfer_s = hop_s(told["naive", num_stages, num_microbatches])
        table.append(row := row_of(*case, sleeps_s, transfer_s, told[case]))
        print(
            f"{row['schedule']:12} p={row['stages']} m={row['microbatches']:2}   "
            f"ideal {row['ideal']:.1%}, with {1000 * transfer_s:.2f} ms a transfer {row['predicted']:.1%}   "
            f"measured {row['measured_median']:.1%} ({row['measured_min']:.1%} to {row['measured_max']:.1%})   "
            f"wall {row['wall_ratio_median']:.3f} predicted makespans"
        )
    worst = max(table, key=lambda row: abs(row["points_off"]))
    print(f"farthest off: {worst['points_off']:+.2f} points; within {GOAL_POINTS:g} wanted")
    write(options, __file__, {"machine": facts, "sleep_ms": list(options.sleep_ms), "table": table})


if __name__ == "__main__":
    main()
