"""What a rank holds and copies in a step of ZeRO-3: our slices beside fully_shard, seen by the same tracker.

Bytes are counted, not timed, and do not depend on the machine. A forward and a backward are looked at, the third of a
run; the optimizer's own tensors are held, and its step is left out.
"""

import argparse
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

import shardwright as sw
from shardwright.ledger.tracking import Tracker

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write
from benchmarks.gpt_step.run import adamw
from benchmarks.zero_step import peers
from benchmarks.zero_step.run import SIZES, batch_of, plain

COPIES = ("copy_", "cat", "clone", "_foreach_copy_", "split_with_sizes_copy", "_chunk_cat", "chunk_cat",
          "all_gather_copy_in", "_to_copy")  # fmt: skip
AROUND = ("shardwright.strategies.zero.zero.", "torch.distributed.fsdp.")
INSIDE = (
    "shardwright.comm.backends.message_blocks",
    "shardwright.comm.backends.shared_memory",
    "shardwright.comm.backends.shared_sums",
)
"""Whose copies are counted: made around a call to bring its tensors together or apart, and by our transport itself."""


class Watching(Tracker):
    """A tracker that also sees storages that are resized behind its back, and counts what is copied."""

    def __init__(self):
        super().__init__()
        self.copies = Counter()

    def mark(self):
        for known in list(self._entries.values()):
            storage = known.alive()
            if storage is not None and storage.nbytes() != known.num_bytes:
                self._add(storage, known.kind)
        super().mark()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if who_asks() != "inside":  # what was made before the step counts too, and may be given memory in it
            given = [t for t in tree_leaves((args, kwargs)) if type(t) in (torch.Tensor, torch.nn.Parameter)]
            self.hold("messages", [t for t in given if t.untyped_storage()._cdata not in self._entries])
        result = super().__torch_dispatch__(function, types, args, kwargs)
        name = function.overloadpacket.__name__
        if name in COPIES:
            written = (kwargs or {}).get("out", result if result is not None else args[0])
            if name == "all_gather_copy_in":
                written = args[0]
            num_bytes = sum(t.nbytes for t in tree_leaves(written) if isinstance(t, torch.Tensor))
            self.copies[who_asks()] += num_bytes
        self.mark()
        return result


def who_asks():
    """Whether a copy is made around a call, inside our transport, or by the model."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(INSIDE):
            return "inside"
        if name.startswith(AROUND):
            return "around"
        frame = frame.f_back
    return "model"


def local(tensors):
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, torch.Tensor)]


def ours(world, line, config, num_samples):
    run = sw.parallelize(plain(config), line, world)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-4)
    each = [batch_of(rank, num_samples, config) for rank in range(world.size)]
    part = next(run.shard([tuple(torch.cat(t) for t in zip(*each, strict=True))]))
    return (*run.parameters.values(), *run.model.parameters()), optimizer, lambda: run.step(part)


def fsdp(world, reshard, config, num_samples):
    model, batch, kept = plain(config), batch_of(world.rank, num_samples, config), []

    def build(parameters):
        kept.append(adamw(parameters))
        return kept[0]

    peers.fsdp(model, batch, build, reshard=reshard)

    def step():
        kept[0].zero_grad()
        peers.cross_entropy(model(batch[0]), batch[1]).backward()

    return tuple(model.parameters()), kept[0], step


def measured(world, size):
    """By variant: the peak, the parameters and optimizer state at rest, and what was copied."""
    config, num_samples = SIZES[size]
    builders = {f"dp{world.size}/zero3{option}": partial(ours, world, f"dp{world.size}/zero3{option}")
                for option in ("", "/ahead:0")}  # fmt: skip
    builders |= {"FSDP2 reshard": partial(fsdp, world, True), "FSDP2 kept": partial(fsdp, world, False)}
    found = {}
    for name, build in builders.items():
        parameters, optimizer, step = build(config, num_samples)
        for _ in range(2):
            step()
            optimizer.step()
        world.everyone().barrier()
        tracker = Watching()
        tracker.hold("parameters", local(parameters))
        with torch._C.DisableTorchFunctionSubclass():  # a resharded parameter refuses to show that it has none
            tracker.hold("gradients", local([p.grad for p in parameters]))
        tracker.hold("optimizer", local(tree_leaves(list(optimizer.state.values()))))
        with tracker:
            step()
        account = tracker.account()
        found[name] = {"peak_bytes": account.peak_bytes, "at_peak": account.at_peak(), **tracker.copies}
        del parameters, optimizer, step
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    options = options_of(parser, smallest={"sizes": ["small"]})
    os.environ["OMP_NUM_THREADS"] = "1"
    facts, table = machine(), []
    for size in options.sizes:
        num_bytes = sum(p.numel() * 4 for p in plain(SIZES[size][0]).parameters())
        for num_ranks in options.ranks:
            ranks = sw.launch(measured, num_ranks, size)
            for name in ranks[0]:
                most = max((rank[name] for rank in ranks), key=lambda each: each["peak_bytes"])
                row = {"size": size, "ranks": num_ranks, "name": name, "parameter_bytes": num_bytes, **most}
                table.append(row)
                around, inside = most.get("around", 0) / num_bytes, most.get("inside", 0) / num_bytes
                print(f"{size} {num_ranks} {name:16} peak {most['peak_bytes'] / 1e6:8.2f} MB, copied around calls "
                      f"{around:.2f} P, inside {inside:.2f} P   {most['at_peak']}", flush=True)  # fmt: skip
    write(options, __file__, {"machine": facts, "sizes": SIZES, "table": table})


if __name__ == "__main__":
    main()
