"""Mixed precision without ZeRO: parameters that compute in bf16 or fp16, and their fp32 master weights.

Where state is sharded, the shards are the master weights (``flat``); these here are the parameters that are not.
"""

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


class MasterWeights:
    """Master weights of this rank's parameters, except of ``sharded`` ones; casts the model's own parameters.

    The optimizer steps ``masters``, and the model computes with what they are rounded to. Gradients move from the
    model's parameters to the masters at the end of a step; those of ``fp32_sums`` after each microbatch, so that
    microbatches are summed in the masters' dtype.
    """

    def __init__(self, model: nn.Module, plan: Plan, sharded: Collection[str]) -> None:
        self.parameters: Mapping[str, nn.Parameter] = {
            name: p
            for name, p in model.named_parameters()
            if name not in sharded and plan.compute_dtypes[name] != p.dtype
        }
        self.fp32_sums = plan.fp32_sums & self.parameters.keys()
        self.masters = {
            name: nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for name, p in self.parameters.items()
        }
        for name, parameter in self.parameters.items():
            parameter.data = parameter.data.to(plan.compute_dtypes[name])
        self._versions, self._may_be_stale = self._current_versions(), False

    def applied(self) -> Applied:
        """The events and parameters that a run takes over."""
        events = Events(restart=self._restart, after_sync=self._after_sync, after_optimizer=self._after_optimizer)
        if self.fp32_sums:
            events = replace(events, after_weight_gradients=self._after_weight_gradients)
        return Applied(events=events, parameters=self.masters)

    def _restart(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None  # of a step that failed
        # An optimizer that the run has not made fires no after_optimizer; that it has stepped shows in the versions.
        if self._may_be_stale or self._versions != self._current_versions():
            self._round()

    def _after_weight_gradients(self, unit: ParamGroup, microbatch: int) -> None:
        self._move_gradients(self.fp32_sums.intersection(unit.parameters))

    def _after_sync(self) -> None:
        self._move_gradients(self.parameters.keys() - self.fp32_sums)
        self._may_be_stale = True  # an optimizer may write through .data, which raises no version

    def _after_optimizer(self) -> None:
        self._may_be_stale = False
        self._round()

    def _move_gradients(self, names: Collection[str]) -> None:
        for name in names:
            parameter, master = self.parameters[name], self.masters[name]
            if parameter.grad is not None:
                gradient = parameter.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def _round(self) -> None:
        """Copies the master weights into the model's parameters, rounded."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [master._version for master in self.masters.values()]


def cast_buffers(model: nn.Module, plan: Plan) -> None:
    """Casts a model's buffers to the layout's compute dtype, in place.

    Running statistics of batch norms stay wide: they are averages over many steps, whose small changes would be lost.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(module, _NormBase):
                module._buffers[name] = cast_to_compute(buffer, plan)


def cast_to_compute(tensor: Tensor, plan: Plan) -> Tensor:
    """A tensor in the dtype that the layout computes in.

    >>> from shardwright.layout import Layout
    >>> from shardwright.plan.plan import Job
    >>> cast_to_compute(torch.ones(1), Plan.of(Job(nn.ReLU(), nn.Identity()), Layout.parse("bf16"))).dtype
    torch.bfloat16
    """
    return tensor.to(compute_dtype(tensor.dtype, plan.layout))


__all__ = ["MasterWeights", "cast_buffers", "cast_to_compute"]
