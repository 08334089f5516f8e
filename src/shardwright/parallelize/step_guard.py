"""Refuses optimizers and clipping by torch's own means that would train nothing, or each rank differently.

torch calls the hooks of this file before and after each step of every optimizer, so that one made by hand is seen too.
``clip_grad_norm_`` has no such hook; the function that it scales gradients with is replaced by one that looks first.
A guard is asked in the thread that made its run, since ranks may be threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import Any
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwright.errors import PlanError
from shardwright.plan.plan import Plan

_OF_THREAD = threading.local()


class StepGuard:
    """Looks at each optimizer's step beside one run, and at each ``clip_grad_norm_``.

    ``parameters`` are what the run's optimizer steps. ``others`` look like them and are read by no step: the plain
    model's parameters, and the model's own where a strategy stores another form of them. ``num_waiting`` counts the
    steps whose gradients no optimizer has used yet, ``num_updates`` the optimizers' steps.
    """

    def __init__(self, plan: Plan, parameters: Mapping[str, nn.Parameter], others: Iterable[Tensor]) -> None:
        self.plan, self.parameters = plan, parameters
        self.num_waiting = self.num_updates = 0
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._own = {id(parameter) for parameter in parameters.values()}
        self._others: dict[int, ReferenceType[Tensor]] = {id(p): ref(p) for p in others if id(p) not in self._own}
        cut = (name for name, state in plan.state.items() if state.gradient.axes)
        self._cut = next(cut, "")
        if not hasattr(_OF_THREAD, "guards"):
            _OF_THREAD.guards = WeakSet()
        _OF_THREAD.guards.add(self)

    def before_step(self) -> None:
        """Notes that a step begins: gradients that were cleared since the last one wait for no optimizer."""
        if all(parameter.grad is None for parameter in self.parameters.values()):
            self.num_waiting = 0

    def after_step(self) -> None:
        """Notes that a step has left gradients for an optimizer."""
        self.num_waiting += any(parameter.grad is not None for parameter in self.parameters.values())

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises PlanError if the optimizer's step would change nothing, or if gradients of earlier steps are lost."""
        kind, tensors = type(optimizer).__name__, _tensors_of(optimizer)
        line = f"optimizer = run.optimizer(torch.optim.{kind}, lr=...)"
        if self.num_waiting and self._holds_others(tensors):
            raise PlanError(
                f"{kind}.step() would train nothing: it has tensors that no step of the run reads",
                given=f"parameters of the plain model, or of run.model, under {self.plan.layout}",
                allowed="the tensors of run.parameters, which hold what this rank stores",
                fix=f"write {line}, or torch.optim.{kind}(run.parameters.values(), lr=...)",
            )
        if self.num_waiting > 1 and any(id(tensor) in self._own for tensor in tensors):
            raise PlanError(
                f"{kind}.step() would lose the gradients of {self.num_waiting - 1} of {self.num_waiting} steps",
                given=f"{self.num_waiting} calls of run.step since the last {kind}.step(); each starts from zero",
                allowed="one step for each update; accumulate adds up the gradients of several batches",
                fix="write run.accumulate([first, second]) in place of run.step(first), run.step(second), or mb2 in "
                "the layout; optimizer.zero_grad() before a step drops gradients on purpose",
            )

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that an optimizer has used the gradients."""
        if any(id(tensor) in self._own for tensor in _tensors_of(optimizer)):
            self.num_waiting = 0
            self.num_updates += 1
            self._optimizers.add(optimizer)

    def updates(self) -> dict[str, str]:
        """Returns how many updates there were, and the learning rates of the optimizers, as text to compare."""
        rates = sorted(str([float(group.get("lr", 0)) for group in each.param_groups]) for each in self._optimizers)
        return {"number of updates": str(self.num_updates), "learning rates": " ".join(rates)}

    def before_clipping(self, tensors: Iterable[Tensor]) -> None:
        """Raises PlanError if torch's clipping sees a rank's part of the gradients only, or none of them."""
        tensors = list(tensors)
        partly = bool(self._cut) and any(id(tensor) in self._own for tensor in tensors)
        if partly or (self.num_waiting and self._holds_others(tensors)):
            raise PlanError(
                "clip_grad_norm_ of torch would scale each rank's gradients by another number",
                given=f"a rank's part of the gradients under {self.plan.layout}, as of '{self._cut}'"
                if partly
                else f"tensors without gradients under {self.plan.layout}, which are not run.parameters",
                allowed="the norm over the whole model, which the run takes over all ranks",
                fix="write run.clip_grad_norm_(max_norm)",
            )

    def _holds_others(self, tensors: Iterable[Tensor]) -> bool:
        """Whether some of these tensors are of no use to the run, and none but its own has a gradient."""
        found = False
        for tensor in tensors:
            if id(tensor) in self._own:
                continue
            if tensor.grad is not None:
                return False  # trained by other code
            other = self._others.get(id(tensor))
            found = found or (other is not None and other() is tensor)
        return found


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _guards() -> list[StepGuard]:
    return list(getattr(_OF_THREAD, "guards", ()))


def _before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for guard in _guards():
        guard.before_update(optimizer)


def _after_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for guard in _guards():
        guard.after_update(optimizer)


def _look_before_clipping() -> None:
    scale = clip_grad._clip_grads_with_norm_

    @wraps(scale)
    def scale_with_look(parameters: Any, *args: Any, **named: Any) -> None:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for guard in _guards():
            guard.before_clipping(tensors)
        scale(tensors, *args, **named)

    clip_grad._clip_grads_with_norm_ = scale_with_look


register_optimizer_step_pre_hook(_before_update)
register_optimizer_step_post_hook(_after_update)
_look_before_clipping()
