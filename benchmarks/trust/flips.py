"""Flips random bits of checkpoints, one at a time, over every file: each must be an error, and change nothing."""

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write_beside

import shardwright as sw
from shardwright.checkpoint.manifest import find
from shardwright.errors import CheckpointError

LAYOUTS = sized(("single", "dp2/zero1", "tp2", "pp2 mb2", "dp2/zero3 tp2"), ("dp2/zero1",))
BATCH = (torch.arange(32.0).view(4, 8) / 32, torch.tensor([0, 1, 2, 3]))


def started(world, line):
    """A small model after one step, with its optimizer."""
    with sw.without_values():
        model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Linear(8, 4))
    run = sw.parallelize(model, line, world, seed=3)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    run.step(next(run.shard([BATCH])))
    optimizer.step()
    return run, optimizer


def save(world, line, folder):
    sw.save(folder, *started(world, line), extra={"note": [1.5, "two"]})


def state_of(run, optimizer):
    return str(
        [{n: p.tolist() for n, p in run.parameters.items()}, optimizer.state_dict(), run.num_steps, run.rng.seed]
    )


def flips(world, line, folder, count, draw):
    """Rows of ``count`` flips: layout, file, byte, bit, and what the load did. One rank reads every file."""
    run, optimizer = started(world, "single")
    files, rows, before = sorted(find(Path(folder)).iterdir()), [], state_of(run, optimizer)
    for number in range(count):
        file = files[number % len(files)]
        content = bytearray(file.read_bytes())
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        content[place] ^= 1 << bit
        file.write_bytes(content)
        try:
            sw.load(folder, run, optimizer)
            outcome = "undetected"
        except CheckpointError:
            outcome = "detected" if number % 50 or state_of(run, optimizer) == before else "changed the run"
        except Exception as failure:
            outcome = f"traceback: {type(failure).__name__}"
        content[place] ^= 1 << bit
        file.write_bytes(content)
        rows.append(f"{line}, {file.name}, byte {place}, bit {bit}: {outcome}")
    sw.load(folder, run, optimizer)  # the files are as they were
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=2000)
    options = options_of(parser, smallest={"flips": 20})
    facts, rows, draw = machine(), [], random.Random(14)
    for line in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            sw.launch(save, sw.Layout.parse(line), line, folder, ranks="threads")
            rows += sw.launch(flips, 1, line, folder, options.flips // len(LAYOUTS), draw, ranks="threads")[0]
    table = [
        {"name": line, "flips": len(mine), **Counter(row.partition(": ")[2].partition(":")[0] for row in mine)}
        for line in LAYOUTS
        for mine in [[row for row in rows if row.startswith(f"{line}, ")]]
    ]
    for row in table:
        print(row)
    write_beside(options, __file__, {"machine": facts, "table": table, "rounds": rows})


if __name__ == "__main__":
    main()
