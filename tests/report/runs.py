"""Training runs for tests of the report's pages: rows and parts that are made up, with the layouts of a small model."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from shardwright.layout import Layout
from shardwright.plan.plan import Job
from shardwright.report.description import describe
from shardwright.report.training_runs import record_run

OPTIONS = {"model": "mlp", "settings": {"widths": [8, 16]}, "data": "stdlib", "batch": 8, "seq": 16, "steps": 4,
           "clip": 1.0}  # fmt: skip


@cache
def described(line):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    return describe(Job(model, nn.Identity()), Layout.parse(line), inputs=torch.zeros(4, 8))


def row(step, loss, num_ranks=4, **more):
    held = [(10 + rank) * 2**20 for rank in range(num_ranks)]
    return {
        "step": step, "loss": loss, "lr": 1e-3 * step, "grad_norm": 0.5 * step, "step_ms": 10.0, "time_s": 1.0,
        "tokens_per_s": 1000.0, "memory_bytes": [each + 2**20 for each in held], "held_bytes": held, **more,
    }  # fmt: skip


def part(line, first_step=0, **more):
    return {
        "first_step": first_step, "options": {**OPTIONS, "layout": line}, "world_size": Layout.parse(line).num_ranks,
        "command": f"shardwright train --layout '{line}'", "started": "2025-01-01", "versions": {"torch": "2.13"},
        **more,
    }  # fmt: skip


def run(parts=(), rows=(), name="a run", **more):
    return record_run(name, parts, rows, lambda facts: described(facts["options"]["layout"]), **more)


def two_parts():
    """Four steps: two under four ranks, and two under a pipeline of two."""
    rows = [row(1, 4.0), row(2, 3.0, eval_loss=3.5), row(3, 2.0, 2), row(4, 2.5, 2, eval_loss=3.0)]
    return run([part("dp2 tp2"), part("pp2 mb2", 2)], rows)
