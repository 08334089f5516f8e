"""Exponential moving averages of a run's parameters (EMA), under every layout: each rank averages what it stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.models.settings import check_fraction

if TYPE_CHECKING:
    from shardwright.parallelize.run import Run

KEY = "average"
"""The name of an average in the optimizer's state of its parameter, which checkpoints save like Adam's moments."""


class Averages:
    """Exponential moving averages of the parameters that an optimizer updates; ``Run.average`` makes them.

    After the optimizer's first step an average is the parameter, as in torch's ``AveragedModel``; after each later one,
    ``decay`` times itself and ``1 - decay`` times the parameter. A step that fp16 skips does not count. A parameter
    without a gradient so far has no average yet, and stands for it itself. Buffers are not averaged.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, decay: float) -> None:
        check_fraction("decay", decay)
        own = {id(parameter): name for name, parameter in run.parameters.items()}
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]) and own:
            raise PlanError(
                "an optimizer of other tensors has no averages of the run's parameters",
                given=f"{type(optimizer).__name__} over tensors that are not in run.parameters",
                allowed="an optimizer of this run",
                fix=f"write optimizer = run.optimizer(torch.optim.{type(optimizer).__name__}, lr=...)",
            )
        if run.offload is not None:
            raise PlanError(
                "parameters are not averaged where their state is offloaded",
                given=f"an average under {run.plan.layout}",
                allowed="layouts without /offload",
                fix="leave out /offload, or average the checkpoints of a run",
            )
        self._run, self._optimizer, self.decay = run, optimizer, decay
        self._before: dict[nn.Parameter, Tensor] = {}
        self._has_gradients = self._is_applied = False
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._update)

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for group in self._optimizer.param_groups for p in group["params"])

    @torch.no_grad()
    def _begin(self, *_: Any) -> None:
        """Notes which parameters have gradients, and the values of those that take part only from this step on."""
        if self._is_applied:
            raise PlanError(
                "an optimizer steps from the parameters, and not from their averages",
                given=f"{type(self._optimizer).__name__}.step() inside of averages.applied()",
                allowed="evaluate, predict, state_dict and save",
                fix="end the block before the next step",
            )
        trained = [p for p in self._parameters() if p.grad is not None]
        self._has_gradients = bool(trained)
        started = any(KEY in state for state in self._optimizer.state.values())
        self._before = {p: p.clone() for p in trained if started and KEY not in self._optimizer.state.get(p, {})}

    @torch.no_grad()
    def _update(self, *_: Any) -> None:
        if not self._has_gradients:  # a step that fp16 skips
            return
        state = self._optimizer.state
        averages: list[Tensor] = []
        values: list[Tensor] = []
        for parameter in self._parameters():
            if KEY not in state.get(parameter, {}):
                if parameter.grad is None:  # an optimizer begins the state of a parameter when that is empty
                    continue
                first = self._before.get(parameter)
                state[parameter][KEY] = parameter.clone() if first is None else first
            averages.append(state[parameter][KEY])
            values.append(parameter)
        self._before = {}
        if averages:
            torch._foreach_lerp_(averages, values, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Returns a context in which the run's parameters are their averages; all ranks enter it together.

        Inside, ``evaluate``, ``predict``, ``state_dict`` and ``save`` without an optimizer use the averages. No
        optimizer may step. Afterwards, the parameters are again what they were.

        Traffic: none itself; ZeRO unshards the averages, and afterwards the parameters, before they are used.
        """
        assert not self._is_applied, "averages are applied once at a time"
        pairs = [(p, found[KEY]) for p in self._parameters() if KEY in (found := self._optimizer.state.get(p, {}))]
        self._swap(pairs)
        self._is_applied = True
        try:
            yield
        finally:
            self._is_applied = False
            self._swap(pairs)

    @torch.no_grad()
    def _swap(self, pairs: list[tuple[nn.Parameter, Tensor]]) -> None:
        for parameter, average in pairs:
            value = parameter.clone()
            parameter.copy_(average)
            average.copy_(value)
        self._run.changed()
