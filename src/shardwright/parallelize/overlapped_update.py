"""Updates of offloaded state beside the backward: of a unit as soon as its gradients are summed and divided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shardwright.plan.plan import Plan
from shardwright.plan.schedule import Action
from shardwright.plan.traffic import summed_axes
from shardwright.runtime.applied import Offload
from shardwright.runtime.executor import Events, Executor

Mean = tuple[Tensor, float]
"""A mean loss, and over how many targets."""


def updates_beside(plan: Plan, offload: Offload | None) -> Offload | None:
    """What may update units before the backward is over, if it may: the answer is equal on every rank.

    Not where gradients have a scale that may turn out too large, where the loss is known on another stage alone, or
    where ranks still sum what they hold in slices.
    """
    if offload is None or plan.schedule is not None or plan.layout.precision == "fp16":
        return None
    later = (axis for name in plan.offloaded for axis in summed_axes(plan, name) if name not in plan.frozen)
    return None if any(plan.mesh[axis] > 1 for axis in later) else offload


@contextmanager
def updating(
    offload: Offload | None, optimizer: torch.optim.Optimizer | None, executor: Executor, num_microbatches: int,
    expected: int, mean: Callable[[], Mean],
) -> Iterator[Sequence[Mean]]:  # fmt: skip
    """While it lasts, the optimizer updates units as their gradients come; nothing happens without ``offload``.

    Gradients were divided by what the loss was ``expected`` to count. What it has counted is known when the last
    forward is done: then the mean loss is in what this gives.
    """
    known: list[Mean] = []
    if offload is None or optimizer is None:
        yield known
        return

    def after_action(action: Action) -> None:
        if action == Action("F", num_microbatches - 1):
            known.append(mean())
            offload.begin(optimizer, expected / known[0][1])

    before, executor.events = executor.events, (*executor.events, Events(after_action=after_action))
    try:
        yield known
    finally:
        executor.events = before
        offload.end()
