"""How fast are four ranks on two nodes, beside the same ranks on one, and beside torch's DistributedDataParallel?

Nodes are network namespaces of this machine, with addresses of their own. Two worlds of four ranks are there all the
time, one on one node and one on two; a round runs every variant of both in turn, while the other world waits.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from shardwright.models.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import SMALLEST, machine, options_of, orders, ratio_rows, sized, write
from benchmarks.nodes import READY, nodes, why_not, world_on

CONFIG = sized(
    {"num_layers": 4, "width": 256, "num_heads": 4, "vocabulary": 1024, "max_tokens": 128},
    {"num_layers": 1, "width": 32, "num_heads": 4, "vocabulary": 64, "max_tokens": 16},
)
BATCH, NUM_RANKS = 8, 4
VARIANTS = ("dp2 tp2", "dp4", "DDP")
SUMS = ("4 MB summed in two levels", "4 MB summed by gloo alone")
LINKS = {"as fast as the machine": "", **sized({"1 Gbit/s": "1gbit"}, {})}
LIMITS = {
    "dp2 tp2, two nodes": "dp2 tp2, one node",
    "dp4, two nodes": "dp4, one node",
    "DDP, two nodes": "DDP, one node",
    f"{SUMS[0]}, two nodes": f"{SUMS[1]}, two nodes",
    "dp2 tp2 beside DDP, two nodes": "DDP, two nodes",
    "dp4 beside DDP, two nodes": "DDP, two nodes",
    "dp2 tp2 beside DDP, one node": "DDP, one node",
    "dp4 beside DDP, one node": "DDP, one node",
}


def batch():
    shape = (BATCH, CONFIG["max_tokens"] + 1)
    tokens = torch.randint(CONFIG["vocabulary"], shape, generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ours(world, layout):
    with torch.device("meta"):
        model = GPT(GPTConfig(**CONFIG))
    run = sw.parallelize(model, layout, world)
    optimizer, part = run.optimizer(torch.optim.AdamW, lr=1e-4), next(run.shard([batch()]))

    def step():
        run.step(part)
        optimizer.step()

    return step


def ddp(world):
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT(GPTConfig(**CONFIG)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = (each.chunk(NUM_RANKS)[world.rank] for each in batch())

    def step():
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    return step


def serve(world, steps):
    """Runs the variants whose names come in, one after the other, and says how long a step took."""
    each = {name: ddp(world) if name == "DDP" else ours(world, name) for name in VARIANTS}
    everyone, message = world.everyone(), torch.ones(2**20)
    sockets = replace(everyone, channel=getattr(everyone.channel, "sockets", everyone.channel))
    each |= {SUMS[0]: lambda: everyone.all_reduce(message), SUMS[1]: lambda: sockets.all_reduce(message)}
    print(READY, flush=True)
    for line in sys.stdin:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            each[line.strip()]()
        dist.barrier()
        print((time.perf_counter() - start) / steps, flush=True)


def measure(rounds, steps, link):
    """The seconds of a step of each variant on one node and on two, in rounds."""
    words = (__file__, "--serve", str(steps), *["--smallest"] * SMALLEST)
    with ExitStack() as stack:
        first, second = stack.enter_context(nodes(2, link))
        worlds = {
            "one node": stack.enter_context(world_on([first] * NUM_RANKS, 29601, *words)),
            "two nodes": stack.enter_context(world_on([first, first, second, second], 29602, *words)),
        }
        names = [(variant, place) for variant in VARIANTS for place in worlds] + [(each, "two nodes") for each in SUMS]
        found = []
        for number, order in orders(names, rounds):
            row = {f"{variant}, {place}": max(map(float, worlds[place](variant))) for variant, place in order}
            if number:
                found.append(row)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--serve", type=int, metavar="STEPS", help=argparse.SUPPRESS)
    options = options_of(parser, smallest={"rounds": 1, "steps": 1})
    if options.serve:
        sw.launch(serve, NUM_RANKS, options.serve)
        return
    facts, table, rounds = machine(), [], {}
    if reason := why_not():
        print(f"left out: {reason}")
        write(options, __file__, {"machine": facts, "table": [], "left_out": {"cluster": reason}})
        return
    for link, speed in LINKS.items():
        rounds[link] = measure(options.rounds, options.steps, speed)
        beside = [row | {f"{each} beside DDP, {place}": row[f"{each}, {place}"] for each in VARIANTS[:2]
                         for place in ("one node", "two nodes")} for row in rounds[link]]  # fmt: skip
        for row in ratio_rows(beside, LIMITS):
            tokens = BATCH * CONFIG["max_tokens"] / row["ms_median"] * 1000
            table.append({**row, "link": link, "tokens_per_s": tokens})
            print(f"{link:24} {row['name']:30} {tokens:8.0f} tokens/s, {row['ratio_median']:.2f} of {row['limit']} "
                  f"({row['ratio_min']:.2f} to {row['ratio_max']:.2f})", flush=True)  # fmt: skip
    config = {**CONFIG, "batch": BATCH, "ranks": NUM_RANKS}
    write(options, __file__, {"machine": facts, "config": config, "table": table, "rounds": rounds})


if __name__ == "__main__":
    main()
