"""Lets the modules that a plan computes again keep nothing but what goes in."""

from __future__ import annotations

from shardwright.pipeline.regions import Block, Remembers
from shardwright.strategy import Job, Plan


def compute_again(job: Job, plan: Plan) -> None:
    """Makes each call of the plan's ``again`` modules a region; the last change of a rank's model before it runs.

    Ranks that share operators run all of a block again, so that all make the same calls; others run as far as the
    backward asks.
    """
    states: list[Remembers] = [each for each in (job.draws, job.samples, job.frame) if each is not None]
    selective = plan.layout.recompute == "selective"
    tp = plan.layout.factor("tp")
    shared = tp is not None and tp.size > 1
    for path in plan.again:
        module = job.model.get_submodule(path)
        block = Block(path, module, module.forward, tuple(states), selective, shared)
        module.forward = block
