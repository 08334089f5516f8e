"""Does the planner, which rehearses few blocks, know the memory that the ledger finds by rehearsing all of them?

Layouts of one GPT are drawn; of each, every stage is compared: `memory_by_stage` of the planner's records with the
peak of the stage's first rank by `predict_memory`. Bytes are counted, not timed, and do not depend on the machine.
"""

import argparse
import random
import sys
from pathlib import Path

import torch

import shardwright as sw
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.ledger.account import predict_memory
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.parallelize.auto import num_shares
from shardwright.parallelize.planning import job_for
from shardwright.planner.memory import memory_by_stage
from shardwright.planner.records import record_layout

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write

SEED, SAMPLES, TOKENS, LAYERS = 0, 2, 16, 8
BAR = 0.001
FACTORS = {
    "pp": ("", "", "pp2/1f1b mb5", "pp2/gpipe mb4", "pp4/1f1b mb6", "pp2/zb-h1 mb5", "pp2/interleaved:v2 mb4", "mb2"),
    "dp": ("", "", "dp2", "dp2/zero1", "dp2/zero2", "dp2/zero3", "dp4/zero1"),
    "tp": ("", "tp2", "tp2/sp", "tp2x2/2d"),
    "precision": ("", "bf16"),
    "again": ("", "", "recompute:full"),
}


def drawn(number):
    """So many different lines, drawn with a fixed seed."""
    draw, found = random.Random(SEED), {}
    while len(found) < number:
        line = " ".join(filter(None, (draw.choice(each) for each in FACTORS.values()))) or "single"
        if line != "single" and Layout.parse(line).num_ranks <= 8:
            found[line] = None
    return list(found)


def rows_of(line):
    """A row for each stage: bytes by the planner, by the ledger, and by how much the first is off."""
    layout = Layout.parse(line)
    with sw.without_values():
        model = GPT(GPTConfig(num_layers=LAYERS, width=32, vocabulary=40, max_tokens=TOKENS))
    rows = num_shares(layout) * SAMPLES
    batch = tuple(torch.empty(rows, TOKENS, dtype=torch.long, device="meta") for _ in range(2))
    job = job_for(model, CrossEntropy(), layout, batch[0])
    records = record_layout(job, layout, batch, "cuda")
    for stage, memory in enumerate(memory_by_stage(records)):
        rank = layout.mesh.first_rank(("pp",), stage)
        ledger = predict_memory(job, layout, rank, batch, device="cuda").peak_bytes
        planner = sum(memory.by_kind.values())
        yield {"layout": line, "stage": stage, "planner_bytes": planner, "ledger_bytes": ledger,
               "off": planner / ledger - 1, "rehearsed_whole": records.note}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layouts", type=int, default=30)
    options = options_of(parser, {"layouts": 2})
    table, refused = [], {}
    for line in drawn(options.layouts):
        try:
            found = list(rows_of(line))
        except (LayoutError, PlanError) as problem:
            refused[line] = problem.what
            continue
        table += found
        print(line, ", ".join(f"{row['off']:+.3%}" for row in found), found[0]["rehearsed_whole"], flush=True)
    within = sum(abs(row["off"]) <= BAR for row in table)
    print(f"{within} of {len(table)} stages within {BAR:.1%}")
    write(options, __file__, {"machine": machine(), "bar": BAR, "table": table, "refused": refused})


if __name__ == "__main__":
    main()
