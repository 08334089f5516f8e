"""Raises errors for uses of torch's optimizers and clipping that would train nothing, or train ranks differently.

torch calls the hooks of this file before and after each step of every optimizer, including those not made by
``Run.optimizer``. ``clip_grad_norm_`` has no such hook; the function with which it scales gradients, which is also
``clip_grads_with_norm_``, is replaced by one that checks first. A guard is called only in the thread that made its
run, since ranks may be threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwright.errors import PlanError
from shardwright.parallelize.optimizer_groups import check_groups
from shardwright.plan.plan import Plan

_OF_THREAD = threading.local()


class StepGuard:
    """Checks each optimizer's step and each ``clip_grad_norm_`` of torch against the state of one run.

    ``parameters`` are the tensors that the run's optimizer steps. ``others`` are tensors that a user may confuse with
    them and that no step reads: the plain model's parameters, and the model's own if a strategy stores another form of
    them. Where ranks ``are_compared``, learning rates are noted at every update. ``num_waiting`` counts the steps whose
    gradients no optimizer has used yet, and ``num_updates`` the optimizers' steps.
    """

    def __init__(
        self, plan: Plan, parameters: Mapping[str, nn.Parameter], others: Iterable[Tensor], *, are_compared: bool
    ) -> None:
        self.plan, self.parameters, self.are_compared = plan, parameters, are_compared
        self.num_waiting = self.num_updates = 0
        self._past_rates = self._past_samples = 0  # digests: what differed between two comparisons of the ranks counts
        self._accepted: WeakSet[torch.optim.Optimizer] = WeakSet()  # their groups are checked
        self._numbers: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()  # in order of first steps
        self._count = itertools.count()
        self._recent_rates: dict[int, str] = {}  # of each optimizer that has made a step since ranks were compared
        self._own = {id(parameter) for parameter in parameters.values()}
        self._others: dict[int, ReferenceType[Tensor]] = {id(p): ref(p) for p in others if id(p) not in self._own}
        # gradients of a backward before the run, as of a first try of the model
        every = ((key, other()) for key, other in self._others.items())
        self._gradients_before = {
            key: (ref(p.grad), p.grad._version) for key, p in every if p is not None and p.grad is not None
        }
        cut = (name for name, state in plan.state.items() if state.gradient.axes)
        self._cut = next(cut, "")
        if not hasattr(_OF_THREAD, "guards"):
            _OF_THREAD.guards = WeakSet()
        _OF_THREAD.guards.add(self)

    def accept(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes an optimizer whose parameter groups have been checked: they are not checked again."""
        self._accepted.add(optimizer)

    def before_step(self) -> None:
        """Called before each step: resets ``num_waiting`` if the gradients were cleared since the last step."""
        if all(parameter.grad is None for parameter in self.parameters.values()):
            self.num_waiting = 0

    def after_step(self) -> None:
        """Called after each step: counts it as one whose gradients wait for an optimizer."""
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
        if optimizer not in self._accepted and any(id(tensor) in self._own for tensor in tensors):
            check_groups(optimizer, self.parameters, self.plan)
            self.accept(optimizer)
        if self.num_waiting > 1 and any(id(tensor) in self._own for tensor in tensors):
            raise PlanError(
                f"{kind}.step() would lose the gradients of {self.num_waiting - 1} of {self.num_waiting} steps",
                given=f"{self.num_waiting} calls of run.step since the last {kind}.step(); each starts from zero",
                allowed="one step for each update; accumulate adds up the gradients of several batches",
                fix="write run.accumulate([first, second]) in place of run.step(first), run.step(second), or mb2 in "
                "the layout; optimizer.zero_grad() before a step drops gradients on purpose",
            )

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after an optimizer's step: counts the update, if the optimizer steps the run's parameters."""
        if any(id(tensor) in self._own for tensor in _tensors_of(optimizer)):
            self.num_waiting = 0
            self.num_updates += 1
            if self.are_compared:
                if optimizer not in self._numbers:
                    self._numbers[optimizer] = next(self._count)
                self._recent_rates[self._numbers[optimizer]] = rates = _rates_of(optimizer)
                self._past_rates = crc32(rates.encode(), self._past_rates)

    def count_samples(self, num_samples: int | None) -> str:
        """Counts a step of so many samples of the global batch; returns a digest of all numbers until then, as text."""
        self._past_samples = crc32(f"{num_samples} ".encode(), self._past_samples)
        return f"numbers of digest {self._past_samples:08x}"

    def updates(self) -> dict[str, str]:
        """Returns the number of updates and the learning rates since the last call as text; ranks must agree on it."""
        rates, self._recent_rates = " ".join(sorted(self._recent_rates.values())), {}
        past = f"rates of digest {self._past_rates:08x}"
        return {"number of updates": str(self.num_updates), "learning rates": rates, "rates of all updates": past}

    def before_clipping(self, tensors: Iterable[Tensor]) -> None:
        """Raises PlanError if torch's clipping is given only this rank's shard of the gradients, or none of them."""
        tensors = list(tensors)
        partly = bool(self._cut) and any(id(tensor) in self._own for tensor in tensors)
        if partly or (self.num_waiting and self._holds_others(tensors)):
            raise PlanError(
                "clipping by torch would scale each rank's gradients by another number",
                given=f"a rank's part of the gradients under {self.plan.layout}, as of '{self._cut}'"
                if partly
                else f"tensors without gradients under {self.plan.layout}, which are not run.parameters",
                allowed="the norm over the whole model, which the run takes over all ranks",
                fix="write run.clip_grad_norm_(max_norm)",
            )

    def _is_from_before(self, tensor: Tensor) -> bool:
        """Returns whether a tensor's gradient is what it had before the run: neither replaced nor written to."""
        before, version = self._gradients_before.get(id(tensor), (lambda: None, 0))
        return tensor.grad is before() and tensor.grad is not None and tensor.grad._version == version

    def _holds_others(self, tensors: Iterable[Tensor]) -> bool:
        """Returns whether some of these tensors are of no use to the run, and none but the run's has a gradient."""
        found = False
        for tensor in tensors:
            if id(tensor) in self._own:
                continue
            if tensor.grad is not None and not self._is_from_before(tensor):
                return False  # trained by other code
            other = self._others.get(id(tensor))
            found = found or (other is not None and other() is tensor)
        return found


def _rates_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns the learning rates as text; one that is a tensor is not read, which would wait for its device."""
    rates = (group.get("lr", 0) for group in optimizer.param_groups)
    return str(["a tensor" if isinstance(rate, Tensor) else float(rate) for rate in rates])


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
    # the public name of the same function, for clipping in two parts: get_total_norm, then clip_grads_with_norm_
    clip_grad.clip_grads_with_norm_ = scale_with_look  # type: ignore[attr-defined]
    nn.utils.clip_grads_with_norm_ = scale_with_look


register_optimizer_step_pre_hook(_before_update)
register_optimizer_step_post_hook(_after_update)
_look_before_clipping()
