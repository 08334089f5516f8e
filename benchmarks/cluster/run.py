"""How fast are ranks on two or three nodes, beside the same ranks on one, and beside torch's DistributedDataParallel?

Nodes are network namespaces of this machine, with addresses of their own, and have two ranks each. Two worlds are
there all the time, one on one node and one on several; a round runs every variant of both in turn, while the other
world waits.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
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
BATCH, RANKS_OF_NODE = 12, 2
SUMS = ("4 MB summed in two levels", "4 MB summed by gloo alone")
LINKS = {"as fast as the machine": "", **sized({"1 Gbit/s": "1gbit"}, {})}
PLACES = {2: "two nodes", 3: "three nodes"}


def variants(num_nodes):
    """What is run on so many nodes of two ranks: two layouts, in the first of which tp stays inside a node, and DDP."""
    return f"dp{num_nodes} tp{RANKS_OF_NODE}", f"dp{num_nodes * RANKS_OF_NODE}", "DDP"


def limits(num_nodes):
    """What each variant is beside: itself on one node, and DDP in the same place."""
    several, names = PLACES[num_nodes], variants(num_nodes)
    nodes_cost = {f"{each}, {several}": f"{each}, one node" for each in names}
    sums = {f"{SUMS[0]}, {several}": f"{SUMS[1]}, {several}"}
    return nodes_cost | sums | {f"{each} beside DDP, {place}": f"DDP, {place}" for place in (several, "one node")
                                for each in names[:-1]}  # fmt: skip


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
    inputs, targets = (each.chunk(world.size)[world.rank] for each in batch())

    def step():
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    return step


def serve(world, steps):
    """Runs the variants whose names come in, one after the other, and says how long a step took."""
    names = variants(world.size // RANKS_OF_NODE)
    each = {name: ddp(world) if name == "DDP" else ours(world, name) for name in names}
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


def measure(num_nodes, rounds, steps, link):
    """The seconds of a step of each variant on one node and on several, in rounds."""
    words = (__file__, "--serve", str(steps), "--nodes", str(num_nodes), *["--smallest"] * SMALLEST)
    with ExitStack() as stack:
        several = stack.enter_context(nodes(num_nodes, link))
        each_rank = [node for node in several for _ in range(RANKS_OF_NODE)]
        worlds = {
            "one node": stack.enter_context(world_on([several[0]] * len(each_rank), 29601, *words)),
            PLACES[num_nodes]: stack.enter_context(world_on(each_rank, 29602, *words)),
        }
        names = [(variant, place) for variant in variants(num_nodes) for place in worlds]
        names += [(each, PLACES[num_nodes]) for each in SUMS]
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
    parser.add_argument(
        "--nodes", type=int, choices=PLACES, help="measure on so many alone; by default on two and three"
    )
    options = options_of(parser, smallest={"rounds": 1, "steps": 1, "nodes": 3})
    if options.serve:
        sw.launch(serve, options.nodes * RANKS_OF_NODE, options.serve)
        return
    facts, table, rounds = machine(), [], {}
    if reason := why_not():
        print(f"left out: {reason}")
        write(options, __file__, {"machine": facts, "table": [], "left_out": {"cluster": reason}})
        return
    for num_nodes, (link, speed) in product([options.nodes] if options.nodes else PLACES, LINKS.items()):
        found = measure(num_nodes, options.rounds, options.steps, speed)
        rounds[f"{PLACES[num_nodes]}, {link}"] = found
        beside = limits(num_nodes)
        for name in beside:
            if " beside DDP, " in name:
                for row in found:
                    row[name] = row[name.replace(" beside DDP", "")]
        for row in ratio_rows(found, beside):
            tokens = BATCH * CONFIG["max_tokens"] / row["ms_median"] * 1000
            table.append({**row, "link": link, "num_nodes": num_nodes, "tokens_per_s": tokens})
            print(f"{link:24} {row['name']:32} {tokens:8.0f} tokens/s, {row['ratio_median']:.2f} of {row['limit']} "
                  f"({row['ratio_min']:.2f} to {row['ratio_max']:.2f})", flush=True)  # fmt: skip
    config = {**CONFIG, "batch": BATCH, "ranks_of_node": RANKS_OF_NODE}
    write(options, __file__, {"machine": facts, "config": config, "table": table, "rounds": rounds})


if __name__ == "__main__":
    main()
