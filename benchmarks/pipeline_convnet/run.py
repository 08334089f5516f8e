"""A small ConvNet on CIFAR-10 in four parts: one process, the naive pipeline, the pipelined one; seconds and curves.

All variants live in the same four processes and train an epoch each in turn, from the same start and on the same
batches, which lie ready in memory. Their curves are compared with that of one process: first in float64, over fewer
epochs; then in fp32, where they may differ by what rounding grows to. How much that is, a control shows: one process
whose start is off by one rounding.
"""

import argparse
import gc
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.models.convnet import ConvNetConfig, build_convnet
from shardwright.train.data import Cifar10, SampleOrder, global_batch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, ratio_rows, write

BATCH = 64
SGD = {"lr": 0.02, "momentum": 0.9}
LIMIT, ONE, CONTROL = "one process, 2 threads", "one process, 1 thread", "control"
BY_HAND = "cut:conv1,conv2,fc,out"
LAYOUTS = (
    f"pp4/{BY_HAND}/naive mb4",
    f"pp4/{BY_HAND}/1f1b mb4",
    f"pp4/{BY_HAND}/1f1b mb8",
    f"pp4/{BY_HAND}/zb-h1 mb8",
    "pp4/1f1b mb4",
    "pp2/1f1b mb4",
    "pp2/zb-h1 mb4",
    "tp2",
    "tp2/spatial",
)
EXACT_EPOCHS, EXACT = 2, 1e-9
"""How many epochs are compared in float64, and how far a loss may be off there."""
ALLOWED_GROWTH = 10
"""In fp32 a curve may lie as many times farther from one process's as the control does."""
AHEAD_S = 0.05  # from agreeing on a moment to that moment


def plain(dtype):
    torch.manual_seed(0)
    return build_convnet(ConvNetConfig()).to(dtype)


class OneProcess:
    """Plain torch on rank 0. ``off``: the start is moved by one rounding."""

    def __init__(self, threads, dtype, *, off):
        self.threads, self.model = threads, plain(dtype)
        self.signs = torch.Generator().manual_seed(1) if off else None
        self.optimizer = torch.optim.SGD(self.model.parameters(), **SGD)

    def step(self, batch):
        if self.signs is not None:
            self.round_otherwise()
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def round_otherwise(self):
        """Moves each weight by one rounding, up or down."""
        for p in self.model.parameters():
            up = 2 * torch.randint(2, p.shape, generator=self.signs) - 1
            p.mul_(1 + torch.finfo(p.dtype).eps * up)

    def predict(self, pictures):
        with torch.no_grad():
            return self.model(pictures)


class Pipelined:
    """Ours, under one layout."""

    threads = 1

    def __init__(self, world, line, dtype):
        example = torch.empty(BATCH, 3, 32, 32, dtype=dtype, device="meta")
        self.run = sw.parallelize(plain(dtype), line, world, example=example)
        self.optimizer = self.run.optimizer(torch.optim.SGD, **SGD)

    def step(self, batch):
        loss = self.run.step(next(self.run.shard([batch])))
        self.optimizer.step()
        return loss.item()

    def predict(self, pictures):
        return self.run.predict(pictures)


def made_up(folder):
    """Two batches of random pictures as CIFAR-10's files, for a run that only shows that it runs."""
    draw = torch.Generator().manual_seed(0)
    for name in ("data_batch_1.bin", "test_batch.bin"):
        records = torch.randint(10, (2 * BATCH, Cifar10.record_bytes), dtype=torch.uint8, generator=draw)
        Path(folder, name).write_bytes(records.numpy().tobytes())
    return folder


def variants(world, layouts, dtype):
    """By name, the variant on the ranks that take part, None on the others."""
    found = {}
    for name, threads, off in ((LIMIT, 2, False), (ONE, 1, False), (CONTROL, 1, True)):
        found[name] = OneProcess(threads, dtype, off=off) if world.rank == 0 else None
    for line in layouts:
        size = sw.Layout.parse(line).num_ranks
        found[line] = Pipelined(replace(world, size=size), line, dtype) if world.rank < size else None
    return found


def turn(everyone, variant, batches):
    """One epoch's seconds, from a moment that all agreed on until the last rank is done, and this rank's mean loss."""
    moment = torch.tensor([time.perf_counter() + AHEAD_S], dtype=torch.float64)
    start = end = everyone.broadcast(moment).item()  # the clock is the machine's
    loss_sum = 0.0
    if variant is not None:
        gc.disable()
        torch.set_num_threads(variant.threads)
        time.sleep(max(0.0, start - time.perf_counter()))
        for batch in batches:
            loss_sum += variant.step(batch) * len(batch[1])
        end = time.perf_counter()
        torch.set_num_threads(1)
        gc.enable()
    seconds = everyone.all_reduce(torch.tensor(end - start, dtype=torch.float64), "max").item()
    return seconds, loss_sum / sum(len(targets) for _, targets in batches)


def measure(world, folder, layouts, epochs, share, dtype):
    """Seconds, mean loss and test accuracy of each epoch, by variant; where each layout is cut."""
    torch.set_num_threads(1)
    everyone, each = world.everyone(), variants(world, layouts, dtype)
    train, test = (global_batch(data, range(len(data))) for data in (Cifar10(folder), Cifar10(folder, split="eval")))
    train, test = ((pictures.to(dtype), labels) for pictures, labels in (train, test))
    order, rows = SampleOrder(len(train[1]), BATCH, seed=0), []
    num_steps = math.ceil(order.num_steps_per_epoch * share)
    for epoch in range(epochs):
        first = epoch * order.num_steps_per_epoch
        indices = [torch.from_numpy(order.batch(first + number)) for number in range(num_steps)]
        batches = [tuple(t[index] for t in train) for index in indices]
        names, row = list(each), {}
        for name in names[epoch % len(names) :] + names[: epoch % len(names)]:
            variant = each[name]
            seconds, loss = turn(everyone, variant, batches)
            right = 0.0 if variant is None else (variant.predict(test[0]).argmax(1) == test[1]).double().mean().item()
            row[name] = {"s": seconds, "loss": loss, "accuracy": right}
        rows.append({name: row[name] for name in names})
    cuts = {}
    for line in layouts:
        stages = None if each[line] is None else each[line].run.plan.stages
        if stages is not None:
            chunked = stages.chunked
            cuts[line] = [chunked.calls_of(chunk) for chunk in range(chunked.num_chunks)]
    return rows, cuts, (len(train[1]), len(test[1]), num_steps)


def off(rows, name, what):
    """The largest difference of a curve from one process's."""
    return max(abs(row[name][what] - row[LIMIT][what]) for row in rows)


def check(rows, exact_rows):
    """Raises AssertionError for a curve that rounding alone does not explain."""
    for name in rows[0]:
        if name != CONTROL:
            seen = off(exact_rows, name, "loss")
            assert seen < EXACT, f"{name}: loss off by {seen:.1e} in float64"
        for epochs in range(1, len(rows) + 1):
            allowed = ALLOWED_GROWTH * max(off(rows[:epochs], CONTROL, "loss"), torch.finfo(torch.float32).eps)
            seen = off(rows[:epochs], name, "loss")
            assert seen <= allowed, f"{name}: loss off by {seen:.1e} after {epochs} epochs, {allowed:.1e} allowed"


def table_of(rows, exact_rows, cuts):
    """A row for each variant: seconds of an epoch, the curve's end and how far it is off."""
    seconds = [{name: told["s"] for name, told in row.items()} for row in rows]
    return [
        {
            **row,
            "exact_off": off(exact_rows, row["name"], "loss"),
            "loss_off": off(rows, row["name"], "loss"),
            "accuracy_off": off(rows, row["name"], "accuracy"),
            "losses": [each[row["name"]]["loss"] for each in rows],
            "accuracies": [each[row["name"]]["accuracy"] for each in rows],
            "cut": cuts.get(row["name"]),
        }
        for row in ratio_rows(seconds, dict.fromkeys(seconds[0], LIMIT))
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", help="cifar-10-batches-bin: CIFAR-10, the binary version")
    parser.add_argument("--epochs", type=int, default=7, help="each is a round: every variant trains it in turn")
    parser.add_argument("--share", type=float, default=1.0, help="of each epoch's batches")
    parser.add_argument("--layouts", nargs="*", default=LAYOUTS)
    options = options_of(parser, smallest={"epochs": 2, "layouts": ["pp2/1f1b mb4", "tp2/spatial"]})
    with tempfile.TemporaryDirectory() as empty:
        compare(options, made_up(empty) if options.smallest and options.folder is None else options.folder)


def compare(options, folder):
    """Trains all variants on the pictures of the folder, checks their curves and writes the rows."""
    if folder is None:
        print(
            "left out: name a folder with CIFAR-10's binary version, python benchmarks/pipeline_convnet/run.py FOLDER"
        )
        return
    try:
        Cifar10(folder)
    except PlanError as problem:
        sys.exit(str(problem))
    os.environ["OMP_NUM_THREADS"] = "1"
    facts, folder = machine(), str(Path(folder).resolve())
    size = max(sw.Layout.parse(line).num_ranks for line in options.layouts)
    work = (measure, size, folder, options.layouts)
    exact_rows, *_ = sw.launch(*work, EXACT_EPOCHS, options.share, torch.float64)[0]
    rows, cuts, (num_train, num_test, num_steps) = sw.launch(*work, options.epochs, options.share, torch.float32)[0]
    check(rows, exact_rows)
    table = table_of(rows, exact_rows, cuts)
    print(f"an epoch: {num_steps} batches of {BATCH} of {num_train} pictures; tested on {num_test}")
    for row in table:
        print(
            f"{row['name']:40} {row['ms_median'] / 1000:7.2f} s   {row['ratio_median']:.3f} of the limit "
            f"({row['ratio_min']:.3f} to {row['ratio_max']:.3f})   loss {row['losses'][-1]:.4f}, off by "
            f"{row['loss_off']:.1e} (float64: {row['exact_off']:.1e})   accuracy {row['accuracies'][-1]:.3f}, "
            f"off by {row['accuracy_off']:.3f}"
        )
    data = {"train": num_train, "test": num_test, "batches": num_steps, "batch": BATCH, **SGD}
    write(options, __file__, {"machine": facts, "data": data, "table": table, "rounds": rows,
          "exact_rounds": exact_rows})  # fmt: skip


if __name__ == "__main__":
    main()
