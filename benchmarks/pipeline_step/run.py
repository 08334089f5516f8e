"""What a pipelined training step costs: every schedule beside one process with two threads and beside peers.

Every variant lives in the same two processes and takes the same steps from the same start. Before anything is timed,
its losses are compared with the limit's. A round runs each variant in turn; the one-process limit runs while the other
rank waits in a barrier.
"""

import argparse
import os
import statistics
import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

import shardwright as sw
from shardwright.strategies.pipeline.schedules import SCHEDULES

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import in_turn, machine, options_of, ratio_rows, write
from benchmarks.gpt_step.run import BATCH, CONFIG, SEQ, adamw, batch_of, plain
from benchmarks.pipeline_step.peers import Part, cross_entropy, deepspeed_pipeline, torch_pipeline

NUM_MICROBATCHES = 4
CHECKED_STEPS, TOLERANCE = 4, 1e-5  # of relative difference: some hundred roundings in fp32
OURS = tuple(f"pp2/{name} mb{NUM_MICROBATCHES}" for name in SCHEDULES)
TORCH = {
    "torch 1F1B": ("Schedule1F1B", ((0,), (1,))),
    "torch interleaved": ("ScheduleInterleaved1F1B", ((0, 2), (1, 3))),
    "torch ZBV": ("ScheduleZBVZeroBubble", ((0, 3), (1, 2))),
}
DEEPSPEED = "DeepSpeed"


def alone(world):
    """The limit: one process, two threads, the whole batch at once."""
    model, batch = plain(), batch_of(0)
    optimizer = adamw(model.parameters())

    def step():
        if world.rank:
            return None
        torch.set_num_threads(2)
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        torch.set_num_threads(1)
        return loss.item()

    return step


def silent(world):
    """Each rank's half of the model over all microbatches, with made-up messages: nothing is sent or waited for."""
    model, batch = plain(), batch_of(0)
    part = Part(model, world.rank, 2)
    optimizer = adamw(part.parameters())
    pieces = list(zip(*(t.chunk(NUM_MICROBATCHES) for t in batch), strict=True))
    width = CONFIG["width"]
    given = torch.randn(BATCH // NUM_MICROBATCHES, SEQ, width, generator=torch.Generator().manual_seed(0))

    def step():
        optimizer.zero_grad()
        for tokens, targets in pieces:
            if part.is_first:
                part(tokens).backward(given)
            else:
                x = given.detach().requires_grad_()
                (cross_entropy(part(x), targets) / NUM_MICROBATCHES).backward()
        optimizer.step()

    return step


def ours(world, line):
    batch = batch_of(0)
    run = sw.parallelize(plain(), line, world, example=batch[0])
    optimizer, part = run.optimizer(torch.optim.AdamW, lr=1e-4), next(run.shard([batch]))

    def step():
        loss = run.step(part)
        optimizer.step()
        return loss.item()

    return step


def variants(world, peers):
    """The step of every variant, peers only if wanted; and of those that cannot run here, why."""
    builders = {"limit": alone, "silent": silent, **{line: partial(ours, line=line) for line in OURS}}
    for name, (kind, chunks_of) in TORCH.items() if peers else ():
        builders[name] = lambda world, kind=kind, chunks_of=chunks_of: torch_pipeline(
            plain(), batch_of(0), NUM_MICROBATCHES, kind, chunks_of, adamw
        )
    if peers:
        builders[DEEPSPEED] = lambda world: deepspeed_pipeline(plain(), batch_of(0), NUM_MICROBATCHES, adamw)
    found, left_out, wanted = {}, {}, None
    for name, build in builders.items():
        try:
            step = build(world)
            if name != "silent":
                losses = losses_of(world, step)
                wanted = wanted or losses
                check(name, losses, wanted)
            found[name] = step
        except Exception as problem:  # what a peer cannot do on this machine is said, not hidden
            if name not in (*TORCH, DEEPSPEED):
                raise
            left_out[name] = f"{type(problem).__name__}: {problem}"
    return found, left_out


def losses_of(world, step):
    """The losses of the first steps; a rank that does not know them hears of them."""
    everyone = world.everyone()
    losses = [step() for _ in range(CHECKED_STEPS)]
    told = torch.tensor([float("-inf") if loss is None else loss for loss in losses], dtype=torch.float64)
    return everyone.all_reduce(told, "max").tolist()


def check(name, losses, wanted):
    """Raises AssertionError unless a variant computes what the limit does: it would be no peer otherwise."""
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
    assert off < TOLERANCE, f"{name}: losses {losses} are off by {off:.1e} from {wanted}"


def measure(world, rounds, steps, peers):
    each, left_out = variants(world, peers)
    return *in_turn(each, rounds, steps), left_out


def table_of(rows, cpu_rows):
    """A row for each variant: wall and CPU ratios."""
    limits = dict.fromkeys((name for name in rows[0] if name != "limit"), "limit")
    keys = ("ratio_median", "ratio_min", "ratio_max")
    return [
        {**row, **{f"cpu_{key}": used[key] for key in keys}}
        for row, used in zip(ratio_rows(rows, limits), ratio_rows(cpu_rows, limits), strict=True)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="of each variant in its turn")
    options = options_of(parser, smallest={"rounds": 1, "steps": 1}, ours={"rounds": 2, "steps": 2})
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    facts = machine()
    rows, cpu_rows, left_out = sw.launch(measure, 2, options.rounds, options.steps, not options.ours)[0]
    if DEEPSPEED in rows[0]:
        facts["deepspeed"] = metadata.version("deepspeed")
    table = table_of(rows, cpu_rows)
    for row in table:
        print(
            f"{row['name']:20} {row['ms_median']:7.1f} ms   {row['ratio_median']:.3f} limits "
            f"({row['ratio_min']:.3f} to {row['ratio_max']:.3f})   CPU seconds {row['cpu_ratio_median']:.3f}"
        )
    print(f"limit: {statistics.median(row['limit'] for row in rows) * 1000:.1f} ms")
    for name, why in left_out.items():
        print(f"{name} is left out: {why}")
    write(options, __file__, {"machine": facts, "config": {**CONFIG, "batch": BATCH, "seq": SEQ,
          "microbatches": NUM_MICROBATCHES}, "table": table, "left_out": left_out, "rounds": rows,
          "cpu_rounds": cpu_rows})  # fmt: skip


if __name__ == "__main__":
    main()
