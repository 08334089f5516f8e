"""What does it cost, and what does it save, that tensor-parallel ranks send parts of activations to the next stage?

Four ranks, ``pp2 tp2``, run on one node and with a stage on each of two nodes, which are network namespaces here.
Both worlds are there all the time; a round runs every variant of both in turn, while the other world waits.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

import shardwright as sw
from shardwright.models.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import SMALLEST, machine, options_of, orders, ratio_rows, sized, write
from benchmarks.nodes import READY, nodes, why_not, world_on

CONFIG = sized(
    {"num_layers": 4, "width": 256, "num_heads": 4, "vocabulary": 1024, "max_tokens": 128},
    {"num_layers": 2, "width": 32, "num_heads": 4, "vocabulary": 64, "max_tokens": 16},
)
BATCH, NUM_RANKS = 8, 4
WHOLE, PARTS = "pp2/1f1b mb4 tp2", "pp2/1f1b/scatter mb4 tp2"
LINKS = {"as fast as the machine": "", **sized({"1 Gbit/s": "1gbit", "0.1 Gbit/s": "100mbit"}, {})}
PLACES = ("one node", "a node for each stage")
KINDS = ("send", "receive", "all_gather")


def batch():
    shape = (BATCH, CONFIG["max_tokens"] + 1)
    tokens = torch.randint(CONFIG["vocabulary"], shape, generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain():
    with torch.device("meta"):
        return GPT(GPTConfig(**CONFIG))


def stepper(world, layout):
    run = sw.parallelize(plain(), layout, world, example=batch()[0])
    optimizer, part = run.optimizer(torch.optim.AdamW, lr=1e-4), next(run.shard([batch()]))

    def step():
        loss = run.step(part)
        optimizer.step()
        return loss.item()

    return step


def serve(world, steps):
    """Runs the variants whose names come in, one after the other, and says how long a step took."""
    each = {name: stepper(world, name) for name in (WHOLE, PARTS)}
    losses = [[step() for _ in range(3)] for step in each.values()]
    assert losses[0] == losses[1], f"other losses: {losses}"
    print(READY, flush=True)
    for line in sys.stdin:
        dist.barrier()
        start, used, crossed = time.perf_counter(), time.process_time(), bytes_sent()
        for _ in range(steps):
            each[line.strip()]()
        found = time.process_time() - used, bytes_sent() - crossed
        dist.barrier()
        print(*(each / steps for each in (time.perf_counter() - start, *found)), flush=True)


def bytes_sent():
    """The bytes that have left this node so far, as its network interface counts them, headers included."""
    lines = (line.split() for line in Path("/proc/net/dev").read_text().splitlines())
    return next((int(words[9]) for words in lines if words[0] == "eth0:"), 0)


def sent(layout):
    """The payload bytes of what a step's stages send each other, recorded on each rank, by kind."""

    def work(world):
        step = stepper(world, layout)
        step()
        with world.recorder.recording() as records:
            step()
        found = Counter()
        for record in records:
            if record.source == "pipeline" and record.kind in KINDS:
                found[record.kind] += record.num_bytes
        return dict(found)

    return sw.launch(work, NUM_RANKS, ranks="threads")


def measure(rounds, steps, link):
    """The seconds of a step of each variant on one node and on two, in rounds."""
    words = (__file__, "--serve", str(steps), *["--smallest"] * SMALLEST)
    with ExitStack() as stack:
        first, second = stack.enter_context(nodes(2, link))
        ranks = {PLACES[0]: [first] * NUM_RANKS, PLACES[1]: [first, first, second, second]}
        worlds = {
            place: stack.enter_context(world_on(each, port, *words))
            for (place, each), port in zip(ranks.items(), (29611, 29612), strict=True)
        }
        names = [(variant, place) for variant in (WHOLE, PARTS) for place in worlds]
        rows = {"seconds": [], "cpu_seconds": [], "crossed_bytes": []}
        for number, order in orders(names, rounds):
            said = {
                f"{variant}, {place}": [tuple(map(float, line.split())) for line in worlds[place](variant)]
                for variant, place in order
            }
            if number:
                rows["seconds"].append({name: max(seconds for seconds, _, _ in ranks) for name, ranks in said.items()})
                rows["cpu_seconds"].append({name: sum(cpu for _, cpu, _ in ranks) for name, ranks in said.items()})
                # of one rank on each node: others of the node see the same interface
                rows["crossed_bytes"].append(
                    {name: ranks[0][2] + ranks[-1][2] for name, ranks in said.items() if PLACES[1] in name}
                )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--serve", type=int, metavar="STEPS", help=argparse.SUPPRESS)
    options = options_of(parser, smallest={"rounds": 1, "steps": 1})
    if options.serve:
        sw.launch(serve, NUM_RANKS, options.serve)
        return
    facts, table, rounds = machine(), [], {}
    messages = {layout: sent(layout) for layout in (WHOLE, PARTS)}
    result = {"machine": facts, "config": {**CONFIG, "batch": BATCH, "ranks": NUM_RANKS}, "bytes": messages}
    if reason := why_not():
        print(f"left out: {reason}")
        write(options, __file__, {**result, "table": [], "left_out": {"pipeline_scatter": reason}})
        return
    for link, speed in LINKS.items():
        rounds[link] = measure(options.rounds, options.steps, speed)
        limits = {f"{PARTS}, {place}": f"{WHOLE}, {place}" for place in PLACES}
        wall, cpu = (ratio_rows(rounds[link][kind], limits) for kind in ("seconds", "cpu_seconds"))
        crossed = {name: statistics.median(row[name] for row in rounds[link]["crossed_bytes"])
                   for name in rounds[link]["crossed_bytes"][0]}  # fmt: skip
        for row, used in zip(wall, cpu, strict=True):
            bytes_of = {
                "crossed_bytes": crossed.get(row["name"], 0),
                "limit_crossed_bytes": crossed.get(row["limit"], 0),
            }
            table.append({**row, "cpu_ratio_median": used["ratio_median"], "link": link, **bytes_of})
            print(f"{link:24} {row['name']:46} {row['ms_median']:7.1f} ms, {row['ratio_median']:.3f} of {row['limit']} "
                  f"({row['ratio_min']:.3f} to {row['ratio_max']:.3f}), CPU {used['ratio_median']:.3f}, crossed "
                  f"{bytes_of['crossed_bytes']:.0f} of {bytes_of['limit_crossed_bytes']:.0f}", flush=True)  # fmt: skip
    write(options, __file__, {**result, "table": table, "rounds": rounds})


if __name__ == "__main__":
    main()
