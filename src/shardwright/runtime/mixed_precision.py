"""Mixed precision: parameters that compute in a narrow dtype, and wide ones beside them for the optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from shardwright.plan.param_groups import ParamGroup
from shardwright.plan.plan import Plan, compute_dtype
from shardwright.runtime.applied import Applied
from shardwright.runtime.executor import Events


class Masters:
    """This rank's parameters that no strategy keeps masters of; the model's own become narrow.

    ``wide`` are those whose gradients go to the master after each microbatch, and are summed there; the others' go
    there once they are summed.
    """

    def __init__(self, model: nn.Module, plan: Plan, others: Collection[str]) -> None:
        self.parameters: Mapping[str, nn.Parameter] = {
            name: p for name, p in model.named_parameters() if name not in others and plan.dtypes[name] != p.dtype
        }
        self.wide = plan.wide_sums & self.parameters.keys()
        self.resting = {
            name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for name, p in self.parameters.items()
        }
        for name, parameter in self.parameters.items():
            parameter.data = parameter.data.to(plan.dtypes[name])
        self._versions, self._is_in_doubt = self._now(), False

    def applied(self) -> Applied:
        """What a run needs to know."""
        events = Events(restart=self._restart, after_sync=self._after_sync, after_optimizer=self._told)
        if self.wide:
            events = replace(events, after_weight_gradients=self._after_weight_gradients)
        return Applied(events=events, parameters=self.resting)

    def _restart(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        if self._is_in_doubt or self._versions != self._now():  # an optimizer made by hand has told nobody
            self._round()

    def _after_weight_gradients(self, unit: ParamGroup, microbatch: int) -> None:
        self._hand_over(self.wide.intersection(unit.parameters))

    def _after_sync(self) -> None:
        self._hand_over(self.parameters.keys() - self.wide)
        self._is_in_doubt = True  # what is written through .data shows in no version

    def _told(self) -> None:
        self._is_in_doubt = False
        self._round()

    def _hand_over(self, names: Collection[str]) -> None:
        for name in names:
            parameter, master = self.parameters[name], self.resting[name]
            if parameter.grad is not None:
                gradient = parameter.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.resting[name])
        self._versions = self._now()

    def _now(self) -> list[int]:
        return [master._version for master in self.resting.values()]


def narrow_buffers(model: nn.Module, plan: Plan) -> None:
    """Buffers in what the model computes in, but for the statistics of batches, which are averages over many steps."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(module, _NormBase):
                module._buffers[name] = narrow(buffer, plan)


def narrow(tensor: Tensor, plan: Plan) -> Tensor:
    """A tensor in what the layout computes in.

    >>> from shardwright.layout import Layout
    >>> from shardwright.plan.plan import Job
    >>> narrow(torch.ones(1), Plan.of(Job(nn.ReLU(), nn.Identity()), Layout.parse("bf16"))).dtype
    torch.bfloat16
    """
    return tensor.to(compute_dtype(tensor.dtype, plan.layout))


__all__ = ["Masters", "narrow", "narrow_buffers"]
