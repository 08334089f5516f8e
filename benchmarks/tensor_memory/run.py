"""What a rank holds under every tensor mode, beside its share of one device: parameters, and what backward needs.

Bytes are counted, not timed, so ranks are threads. What is saved for backward is every storage that autograd keeps
during one forward, each once, parameters left out: activations, and gathered operands where a mode keeps them.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import shardwright as sw
from shardwright.models.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write
from benchmarks.gpt_step.run import BATCH, CONFIG, SEQ, batch_of, plain
from benchmarks.tensor_modes.cases import (
    CHOSEN,
    CLASSIC,
    HIDDEN,
    REGATHER,
    SMALL,
    TOKENS,
    WIDTH,
    InsideMLP,
    accepted,
    mlp_data,
    plain_mlp,
)


def held_bytes(parameters, step):
    """(bytes of the parameters, bytes that autograd saves while ``step`` runs)."""
    own = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage  # kept alive: no other takes its address meanwhile
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(own.values()), sum(storage.nbytes() for storage in saved.values())


def one_device():
    mlp, model, (x, dy), (tokens, targets) = plain_mlp(), plain(), mlp_data(), batch_of(0)
    x.requires_grad_()

    def loss():
        return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return {
        "mlp": held_bytes(mlp.parameters(), lambda: mlp(x).backward(dy)),
        "gpt": held_bytes(model.parameters(), lambda: loss().backward()),
    }


def one_rank(world, line, reference):
    mlp = InsideMLP(world, line, reference, *mlp_data())
    inside = [p for name, p in mlp.run.model.named_parameters() if name.startswith("linear")]
    with torch.device("meta"):
        model = GPT(GPTConfig(**CONFIG))
    run = sw.parallelize(model, line, world, num_tokens=BATCH * SEQ)
    tokens, targets = batch_of(0)
    mine = run.share(BATCH)
    part = run.part(*(t[mine.start : mine.stop].clone() for t in (tokens, targets)), BATCH)  # no view of the whole
    return {
        "mlp": held_bytes(inside, mlp.step),
        "gpt": held_bytes(run.model.parameters(), lambda: run.step(part)),
    }


def rows_of(line, whole):
    """For each model the largest rank, and how many shares of one device that is."""
    layout = sw.Layout.parse(line)
    ranks = sw.launch(one_rank, layout, line, plain_mlp(), ranks="threads")  # built once: threads share torch's seed
    for model in whole:
        row = {"model": model, "layout": line, "ranks": layout.num_ranks}
        for what, at in (("parameter", 0), ("saved", 1)):
            most = max(rank[model][at] for rank in ranks)
            row |= {f"{what}_bytes": most, f"{what}_shares": most * layout.num_ranks / whole[model][at]}
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", nargs="*", default=[*CHOSEN, *REGATHER, *CLASSIC])
    options = options_of(parser, smallest={"layouts": SMALL})
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    facts = machine()
    lines, refused = accepted(options.layouts, CONFIG)
    for line, why in refused.items():
        print(f"{line} is left out: {why}")
    whole = one_device()
    table = [row for line in lines for row in rows_of(line, whole)]
    for row in sorted(table, key=lambda row: row["model"], reverse=True):
        print(
            f"{row['model']} {row['layout']:22} parameters {row['parameter_bytes'] / 1e6:6.2f} MB "
            f"{row['parameter_shares']:.2f} shares   saved {row['saved_bytes'] / 1e6:6.2f} MB "
            f"{row['saved_shares']:.2f} shares"
        )
    print("one device:", {model: [f"{each / 1e6:.2f} MB" for each in found] for model, found in whole.items()})
    sizes = {"width": WIDTH, "hidden": HIDDEN, "tokens": TOKENS}
    write(options, __file__, {"machine": facts, "mlp": sizes, "gpt": {**CONFIG, "batch": BATCH, "seq": SEQ},
          "refused": refused, "one_device": whole, "table": table})  # fmt: skip


if __name__ == "__main__":
    main()
