"""Steps an optimizer without torch's hooks, for a part of its update or a trial of it."""

from __future__ import annotations

from collections import OrderedDict

from torch.optim import Optimizer


def step_without_hooks(optimizer: Optimizer) -> None:
    """Runs the step of the optimizer's class without its own hooks and without those of all optimizers.

    Where that step calls a base class's, hooks of all optimizers may still run there.
    """
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    # a step that calls its base class's runs hooks once more, so they are taken away too
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    step = type(optimizer).step
    try:
        # torch wraps the method of a class, once, in one that runs hooks, and marks that one
        getattr(step, "__wrapped__", step)(optimizer) if getattr(step, "hooked", False) else step(optimizer)
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
