"""Gradients that are not finite: steps that fp16 leaves out, under a scale that finds its size; or a stop by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.comm.agreement import gather_json
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError

LEAST = 1.0


@dataclass
class LossScale:
    """What the loss is multiplied by before backward, so that small gradients are not zero in fp16.

    Halved when a gradient overflows, and that step is left out; doubled after ``grow_after`` good ones. Source:
    Micikevicius et al. 2018, "Mixed Precision Training", arXiv:1710.03740.

    >>> scale = LossScale(grow_after=2)
    >>> for finite in (False, True, True):
    ...     scale.update(finite)
    ...     print(scale.value, scale.num_skipped)
    32768.0 1
    32768.0 1
    65536.0 1
    """

    value: float = 2.0**16
    grow_after: int = 2000
    num_good: int = 0
    num_skipped: int = 0

    def update(self, finite: bool) -> None:
        """Takes note of a step."""
        if not finite:
            self.num_skipped += 1
            self.num_good, self.value = 0, max(self.value / 2, LEAST)
            return
        self.num_good += 1
        if self.num_good == self.grow_after:
            self.num_good, self.value = 0, self.value * 2


def are_finite(parameters: Mapping[str, nn.Parameter], everyone: Axis) -> bool:
    """Whether all gradients of all ranks are; in a rehearsal, yes. Traffic: one all-reduce of one number."""
    bad = torch.zeros((), device=everyone.device)
    for parameter in parameters.values():
        if parameter.grad is not None:
            bad = torch.maximum(bad, _is_bad(parameter.grad))
    found = everyone.all_reduce(bad, "max")
    return found.device.type == "meta" or not bool(found)


def _is_bad(gradient: Tensor) -> Tensor:
    return (~gradient.isfinite()).any().to(torch.float32)


def stop_at(parameters: Mapping[str, nn.Parameter], everyone: Axis, step: int) -> None:
    """Raises PlanError, on every rank, naming a parameter whose gradient is not finite."""
    bad = [name for name, p in parameters.items() if p.grad is not None and bool(_is_bad(p.grad))]
    found = [name for names in gather_json(everyone, bad[:1]) for name in names]
    if found:
        raise PlanError(
            f"the gradient of '{found[0]}' is not finite in step {step}",
            given="NaN or infinity",
            allowed="finite gradients",
            fix="use a lower rate, or look at the batch; the parameters are as they were before the step",
        )


def finish_gradients(
    parameters: Mapping[str, nn.Parameter], everyone: Axis, scale: LossScale | None, factor: float, step: int,
    *, stops_at_nan: bool,
) -> None:  # fmt: skip
    """What is left of the division by the global count; no gradients where a step is left out."""
    if stops_at_nan and scale is None:
        stop_at(parameters, everyone, step)
    if scale is not None:
        finite = are_finite(parameters, everyone)
        if not finite and scale.value <= LEAST:
            stop_at(parameters, everyone, step)
        scale.update(finite)
        if not finite:
            for parameter in parameters.values():
                parameter.grad = None  # an optimizer leaves these as they are
            return
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    if gradients and factor != 1:
        torch._foreach_mul_(gradients, factor)
