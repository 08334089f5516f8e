"""Steps an optimizer without calling step hooks, to update a part of its parameters or to try it out."""

from __future__ import annotations

from collections import OrderedDict

from torch.optim import Optimizer


def step_without_hooks(optimizer: Optimizer) -> None:
    """Runs an optimizer's step without the step hooks that are registered on it or on all optimizers.

    If its class's step calls the step of a base class, the hooks of all optimizers may still run in that call.
    """
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    # the hooks on the optimizer are taken away too: a step that calls its base class's step would run them there
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    step = type(optimizer).step
    try:
        # torch wraps ``step`` of each class in a function that runs hooks, and marks this function as ``hooked``
        getattr(step, "__wrapped__", step)(optimizer) if getattr(step, "hooked", False) else step(optimizer)
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks
