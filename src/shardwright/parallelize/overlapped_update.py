"""Runs the optimizer's updates of offloaded state during the backward, instead of after it.

Each param group is updated as soon as its gradients are complete.
"""

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

Mean = tuple[Tensor, Tensor, Tensor]
"""The mean loss, its divisor (the number of targets, or 1 if that is 0) and the number of targets, as 0-d tensors."""


def overlapped_offload(plan: Plan, offload: Offload | None) -> Offload | None:
    """Returns ``offload`` if offloaded param groups can be updated during the backward, else None; alike on all ranks.

    They cannot be updated so early with an fp16 loss scale, which may turn out too large; with pipeline stages, of
    which only the last has the loss; or if ranks must still sum the gradients of their shards.
    """
    if offload is None or plan.schedule is not None or plan.layout.precision == "fp16":
        return None
    later = (axis for name in plan.offloaded for axis in summed_axes(plan, name) if name not in plan.frozen)
    return None if any(plan.mesh[axis] > 1 for axis in later) else offload


@contextmanager
def overlap_updates(
    offload: Offload | None, optimizer: torch.optim.Optimizer | None, executor: Executor, num_microbatches: int,
    expected: int, mean: Callable[[], Mean],
) -> Iterator[Sequence[Mean]]:  # fmt: skip
    """Returns a context for one step, in which offloaded param groups are updated once their gradients are complete.

    Gradients in the backward are divided by ``expected``, an estimate of the number of targets. The real number is
    known after the last of ``num_microbatches`` forwards: the context then calls ``mean()`` and appends the result to
    the list that it yields. The updates scale the gradients by expected / real. Leaving the context waits for all
    updates. Without an offload or an optimizer the context does nothing, and its list stays empty.
    """
    means: list[Mean] = []
    if offload is None or optimizer is None:
        yield means
        return

    def after_action(action: Action) -> None:
        if action == Action("F", num_microbatches - 1):
            means.append(mean())
            offload.begin(optimizer, expected / means[0][1])

    before, executor.events = executor.events, (*executor.events, Events(after_action=after_action))
    try:
        yield means
    finally:
        executor.events = before
        offload.end()
