"""What a step of ZeRO costs: stages 1, 2, 3 beside ranks that send nothing and beside peers, interleaved in one run.

Every variant lives in the same processes and takes the same steps from the same start. Before anything is timed, its
losses are compared with those of the first of ours: plain data parallel's, if it is there. A round runs each variant in
turn.
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
from shardwright.models.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import in_turn, machine, options_of, ratio_rows, write
from benchmarks.gpt_step.run import CONFIG, adamw
from benchmarks.zero_step import peers

SIZES = {
    "small": (CONFIG, 8),
    "large": ({"num_layers": 19, "width": 512, "num_heads": 8, "vocabulary": 1024, "max_tokens": 128}, 1),
}
"""By name, the model and the samples of a rank; the large one has 60 M parameters, and traffic rules."""

FAMILIES = {
    "DDP": ("DDP", "ZeroRedundancyOptimizer"),
    "FSDP2": ("FSDP2 reshard", "FSDP2 kept"),
    "DeepSpeed 1, 2": ("DeepSpeed 1", "DeepSpeed 2"),
    "DeepSpeed 3": ("DeepSpeed 3",),
}
"""Peers that share a run where memory is short: each family beside the limit and our stages, in its own processes."""

IN_MEMORY = 0.7
"""How much of a machine's memory may be state; activations, buffers of messages and the processes take some too."""

CHECKED_STEPS, TOLERANCE = 3, 1e-5  # of relative difference: some hundred roundings in fp32
OURS = ("", "/zero1", "/zero2", "/zero3", "/zero3/ahead:0")
PEERS = {
    "DDP": peers.ddp,
    "ZeroRedundancyOptimizer": peers.redundancy,
    "FSDP2 reshard": partial(peers.fsdp, reshard=True),
    "FSDP2 kept": partial(peers.fsdp, reshard=False),
    "DeepSpeed 1": partial(peers.deepspeed, stage=1),
    "DeepSpeed 2": partial(peers.deepspeed, stage=2),
    "DeepSpeed 3": partial(peers.deepspeed, stage=3),
}


def plain(config):
    torch.manual_seed(0)
    return GPT(GPTConfig(**config))


def batch_of(rank, num_samples, config):
    draw = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config["vocabulary"], (num_samples, config["max_tokens"] + 1), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def ours(world, line, config, num_samples):
    run = sw.parallelize(plain(config), line, world)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-4)
    each = [batch_of(rank, num_samples, config) for rank in range(world.size)]
    part = next(run.shard([tuple(torch.cat(t) for t in zip(*each, strict=True))]))

    def step():
        loss = run.step(part)
        optimizer.step()
        return loss.item()

    return step


def variants(world, size, wanted):
    """The step of every variant; and of those that cannot run here, why."""
    config, num_samples = SIZES[size]
    own = batch_of(world.rank, num_samples, config)

    def limit(world):
        model = plain(config)
        return peers.plain_step(model, adamw(model.parameters()), own)

    builders = {"limit": limit}
    for option in OURS:
        line = f"dp{world.size}{option}"
        builders[line] = partial(ours, line=line, config=config, num_samples=num_samples)
    for name, build in PEERS.items():
        builders[name] = lambda world, build=build: build(plain(config), own, adamw)
    found, left_out, expected = {}, {}, None
    for name, build in builders.items():
        if name != "limit" and name not in wanted:
            continue
        try:
            step = build(world)
            losses = losses_of(world, step, is_mean=name.startswith("dp"))
            if name != "limit":  # whose ranks go different ways
                expected = expected or losses
                check(name, losses, expected)
            found[name] = step
        except Exception as problem:  # what a peer cannot do on this machine is said, not hidden
            if name not in PEERS:
                raise
            left_out[name] = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
    return found, left_out


def losses_of(world, step, *, is_mean):
    """The mean losses of the first steps over all ranks."""
    losses = torch.tensor([step() for _ in range(CHECKED_STEPS)], dtype=torch.float64)
    return losses.tolist() if is_mean else (world.everyone().all_reduce(losses) / world.size).tolist()


def check(name, losses, wanted):
    """Raises AssertionError unless a variant computes what plain data parallel does: it would be no peer otherwise."""
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
    assert off < TOLERANCE, f"{name}: losses {losses} are off by {off:.1e} from {wanted}"


def measure(world, size, rounds, steps, wanted):
    each, left_out = variants(world, size, wanted)
    return *in_turn(each, rounds, steps), left_out


def bytes_a_parameter(name, num_ranks):
    """What a variant holds for each parameter: the weight, its gradient and two moments; peers copies to send, too."""
    stage = int(name.split("zero")[1][0]) if "zero" in name else int(name[-1]) if "DeepSpeed" in name else 0
    whole, cut = {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)}[stage]
    if name.startswith(("FSDP2", "ZeroRedundancyOptimizer")):
        whole, cut = {"FSDP2 reshard": (0, 16), "FSDP2 kept": (4, 16)}.get(name, (8, 8))
    copies = {"DDP": 4, "Zero": 4, "Deep": 8}.get(name[:4].rstrip(), 0)
    return whole + cut / num_ranks + copies


def held_gib(size, num_ranks, names):
    """What these variants and the limit hold at once, about."""
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in GPT(GPTConfig(**SIZES[size][0])).parameters())
    each = (bytes_a_parameter(name, num_ranks) for name in ("limit", *names))
    return sum(each) * num_parameters * num_ranks / 2**30


def runs_of(size, num_ranks, wanted, memory_gib):
    """The runs of one case: each one's name and variants; one run if all fit in memory at once."""
    case = f"{size}, {num_ranks} ranks"
    every = wanted or [*(f"dp{num_ranks}{option}" for option in OURS), *PEERS]
    if held_gib(size, num_ranks, every) <= IN_MEMORY * memory_gib:
        return {case: every}
    stages = [name for name in every if name.endswith(("/zero1", "/zero2", "/zero3"))]
    return {
        f"{case}, beside {family}": [*stages, *(name for name in every if name in peers)]
        for family, peers in FAMILIES.items()
    }


def table_of(case, rows, cpu_rows):
    """A row for each variant: wall and CPU ratios."""
    limits = dict.fromkeys((name for name in rows[0] if name != "limit"), "limit")
    keys = ("ratio_median", "ratio_min", "ratio_max")
    return [
        {"case": case, **row, **{f"cpu_{key}": used[key] for key in keys}}
        for row, used in zip(ratio_rows(rows, limits), ratio_rows(cpu_rows, limits), strict=True)
    ]


def say(case, rows, table):
    """Prints what one run has found."""
    print(f"{case}: limit {statistics.median(row['limit'] for row in rows) * 1000:.1f} ms")
    for row in table:
        print(
            f"  {row['name']:24} {row['ms_median']:7.1f} ms   {row['ratio_median']:.3f} limits "
            f"({row['ratio_min']:.3f} to {row['ratio_max']:.3f})   CPU seconds {row['cpu_ratio_median']:.3f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--only", nargs="*", default=[], help="names of variants, where not all are to run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="of each variant in its turn")
    options = options_of(
        parser,
        smallest={"ranks": [2], "sizes": ["small"], "rounds": 1, "steps": 1},
        ours={"ranks": [2], "sizes": ["small"], "rounds": 2, "steps": 2},
    )
    os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    facts, table, raw, left_out = machine(), [], {}, {}
    for size in options.sizes:
        for num_ranks in options.ranks:
            wanted = [f"dp{num_ranks}{option}" for option in OURS] if options.ours else options.only
            for case, names in runs_of(size, num_ranks, wanted, facts["memory_gib"]).items():
                if (need := held_gib(size, num_ranks, names)) > IN_MEMORY * facts["memory_gib"]:
                    left_out[case] = f"about {need:.0f} GiB of state at once, on {facts['memory_gib']:.0f} GiB"
                    continue
                rows, cpu_rows, missing = sw.launch(measure, num_ranks, size, options.rounds, options.steps, names)[0]
                raw[case] = {"rounds": rows, "cpu_rounds": cpu_rows}
                left_out |= missing
                table += (found := table_of(case, rows, cpu_rows))
                say(case, rows, found)
    for name, why in left_out.items():
        print(f"{name} is left out: {why}")
    if any(name.startswith("DeepSpeed") for rows in raw.values() for name in rows["rounds"][0]):
        facts["deepspeed"] = metadata.version("deepspeed")
    case = {"rounds": next(iter(raw.values()))["rounds"]} if options.ours else {}  # of one size and number of ranks
    write(options, __file__, {"machine": facts, "sizes": SIZES, "table": table, "left_out": left_out,
          "raw": raw, **case})  # fmt: skip


if __name__ == "__main__":
    main()
