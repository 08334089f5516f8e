"""How much a training step costs beside what it must: tp2 and dp2 against limits and peers, interleaved in one run.

Every variant lives in the same two processes. A round runs each of them in turn; the one-process limit runs while
the other rank waits in a barrier.
"""

import argparse
import os
import statistics
import sys
from importlib import metadata
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import shardwright as sw
from shardwright.models.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import in_turn, machine, options_of, ratio_rows, sized, write

CONFIG = sized(
    {"num_layers": 4, "width": 256, "num_heads": 4, "vocabulary": 1024, "max_tokens": 128},
    {"num_layers": 4, "width": 32, "num_heads": 4, "vocabulary": 64, "max_tokens": 16},
)
BATCH, SEQ = 8, CONFIG["max_tokens"]
LIMITS = {
    "tp2": "tp limit", "tp2 torch": "tp limit", "tp2 megatron": "tp limit",
    "dp2": "dp limit", "dp2 DDP": "dp limit", "dp2 DDP view": "dp limit",
}  # fmt: skip


def batch_of(rank):
    tokens = torch.randint(CONFIG["vocabulary"], (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(rank))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain_step(model, optimizer, batch):
    """The step of one plain device: what both limits and both of torch's own ways run."""
    optimizer.zero_grad()
    logits = model(batch[0])
    functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).backward()
    optimizer.step()


def plain(seed=0):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**CONFIG))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


def ours(world, layout):
    with torch.device("meta"):
        model = GPT(GPTConfig(**CONFIG))
    run = sw.parallelize(model, layout, world)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-4)
    batches = (
        [batch_of(0)] if layout == "tp2" else [tuple(torch.cat(t) for t in zip(batch_of(0), batch_of(1), strict=True))]
    )
    part = next(run.shard(batches))

    def step():
        run.step(part)
        optimizer.step()

    return step


def torch_tp(world):
    """torch's own tensor parallelism: parallelize_module, with sequence-free 1D styles and a cut loss."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )  # fmt: skip

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    config = GPTConfig(**CONFIG, tied=False)
    model = GPT(config)
    for block in model.blocks:
        split_qkv(block.attention)
        columns = ("attention.q", "attention.k", "attention.v", "mlp.up")
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {"attention.o": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
        block.attention.num_heads //= 2
        block.attention.num_kv_heads //= 2
    parallelize_module(
        model, mesh,
        {"token": RowwiseParallel(input_layouts=Replicate()),
         "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)},
    )  # fmt: skip
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False), batch_of(0)

    def step():
        optimizer.zero_grad()
        logits = model(batch[0])
        with loss_parallel():
            functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).backward()
        optimizer.step()

    return step


def split_qkv(attention):
    """The fused projection as three, which torch's styles can cut by heads."""
    from torch import nn

    weight, bias = attention.qkv.weight.detach(), attention.qkv.bias.detach()
    width = weight.shape[1]
    for i, name in enumerate(("q", "k", "v")):
        layer = nn.Linear(width, width)
        layer.weight.data, layer.bias.data = weight[i * width :][:width].clone(), bias[i * width :][:width].clone()
        setattr(attention, name, layer)
    attention.fused = False
    del attention.qkv


def megatron_tp(world):
    """megatron-core's tensor parallelism, of the same weights; see megatron_core.py."""
    from benchmarks.gpt_step import megatron_core

    model, batch = megatron_core.build(plain()), batch_of(0)
    megatron_core.check(model, plain(), batch)
    optimizer = adamw(model.parameters())

    def step():
        optimizer.zero_grad()
        megatron_core.loss_of(model, batch).backward()
        optimizer.step()

    return step


def variants(world, peers):
    """The step of every variant, peers only if wanted; and of those that cannot run here, why."""
    rank = world.rank
    limit, silent = plain(), plain()
    limit_optimizer, silent_optimizer = adamw(limit.parameters()), adamw(silent.parameters())
    own = batch_of(rank)

    def alone():
        if rank == 0:
            torch.set_num_threads(2)
            plain_step(limit, limit_optimizer, own)
            torch.set_num_threads(1)

    found = {
        "tp limit": alone,
        "dp limit": lambda: plain_step(silent, silent_optimizer, own),
        "tp2": ours(world, "tp2"),
        "dp2": ours(world, "dp2"),
    }
    left_out = {}
    if not peers:
        return found, left_out
    ddp = DistributedDataParallel(plain())
    view = DistributedDataParallel(plain(), gradient_as_bucket_view=True)
    ddp_optimizer, view_optimizer = adamw(ddp.parameters()), adamw(view.parameters())
    found["dp2 DDP"] = lambda: plain_step(ddp, ddp_optimizer, own)
    found["dp2 DDP view"] = lambda: plain_step(view, view_optimizer, own)
    for name, build in (("tp2 torch", torch_tp), ("tp2 megatron", megatron_tp)):
        try:
            found[name] = build(world)
            found[name]()
        except ImportError as problem:
            left_out[name] = f"{problem} (pip install -c constraints.txt -e '.[bench]')"
            found.pop(name, None)
        except Exception as problem:  # what a peer cannot do on this machine is said, not hidden
            left_out[name] = f"{type(problem).__name__}: {problem}"
            found.pop(name, None)
    return found, left_out


def measure(world, rounds, steps, peers):
    each, left_out = variants(world, peers)
    return *in_turn(each, rounds, steps), left_out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4)
    options = options_of(parser, smallest={"rounds": 1, "steps": 1}, ours={"rounds": 3})
    os.environ["OMP_NUM_THREADS"] = "1"
    facts = machine()
    rows, cpu_rows, left_out = sw.launch(measure, 2, options.rounds, options.steps, not options.ours)[0]
    if "tp2 megatron" in rows[0]:
        facts["megatron-core"] = metadata.version("megatron-core")
    limits = {name: limit for name, limit in LIMITS.items() if name in rows[0]}
    table, cpu = ratio_rows(rows, limits), ratio_rows(cpu_rows, limits)
    for row, used in zip(table, cpu, strict=True):
        print(
            f"{row['name']:14} {row['ms_median']:7.1f} ms   {row['ratio_median']:.3f} limits "
            f"({row['ratio_min']:.3f} to {row['ratio_max']:.3f})   CPU seconds {used['ratio_median']:.3f}"
        )
    print("limits:", {n: round(statistics.median(r[n] for r in rows) * 1000, 1) for n in ("tp limit", "dp limit")})
    for name, why in left_out.items():
        print(f"{name} is left out: {why}")
    write(options, __file__, {"machine": facts, "config": {**CONFIG, "batch": BATCH, "seq": SEQ}, "table": table,
          "cpu": cpu, "left_out": left_out, "rounds": rows, "cpu_rounds": cpu_rows})  # fmt: skip


if __name__ == "__main__":
    main()
