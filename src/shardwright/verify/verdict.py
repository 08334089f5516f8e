"""The ``Verdict``, the result of ``verify``, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of ``verify``: whether a layout equals one device within ``tolerance``, and the largest errors.

    Errors are relative. ``max_relative_error`` is the largest error of any gradient, parameter or buffer, and
    ``worst_parameter`` is the tensor that has it. ``first_difference`` is the first parameter whose gradient has a
    larger error than is allowed, or else the first parameter or buffer whose values have one, and ``first_error`` is
    its error. Without such a tensor, they are "" and the error of the loss. ``allowed`` is the error allowed for the
    tensor ``first_difference`` or, if that is "", for ``worst_parameter``: ``tolerance``, or several times the
    difference between runs on one device if that is more for this tensor. ``own_error`` is the largest such difference,
    0 if none is beyond ``tolerance``.

    ``loss_error`` and the errors of gradients, parameters and buffers are the largest of each kind; parameters and
    buffers are compared only if the layout computes in float64, and their errors are 0 otherwise. ``parameters`` and
    ``steps`` count the gradients and steps that were compared, and ``world_size`` the ranks. ``presence`` is text on a
    gradient that only one side has, or on differences that may be rounding. ``shares`` is the share of the parameters
    that each factor of the layout cuts, and ``flops`` that of the forward's FLOPs, where they are known; ``left_whole``
    names the largest layers left whole by a factor that cuts little, and pipeline stages that have nearly all.
    ``only_float32`` is the error of plain torch in float64, if it has a result in float32 alone, else "".
    """

    equal: bool
    max_relative_error: float
    worst_parameter: str
    first_difference: str
    first_error: float
    loss_error: float
    gradients_error: float
    parameters_error: float
    buffers_error: float
    tolerance: float
    parameters: int
    world_size: int
    steps: int
    allowed: float = 0.0
    own_error: float = 0.0
    presence: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)
    flops: Mapping[str, float] = field(default_factory=dict)
    left_whole: str = ""
    only_float32: str = ""

    def __bool__(self) -> bool:
        """Whether the layout equals one device, so that ``assert verify(...)`` fails if it does not."""
        return self.equal

    def to_dict(self) -> dict[str, Any]:
        """Returns the verdict as a dict of plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        allowed = self.allowed or self.tolerance
        own = f"; one device itself differs by {self.own_error:.0e}" if self.own_error else ""
        if self.only_float32:
            own += (
                f"; compared in float32, since plain torch has no result of the model in float64 ({self.only_float32})"
            )
        if self.equal:
            low = self.left_whole  # names its factors itself
            cuts = "".join(f"; {self._cut(factor)}" for factor in self.shares if factor not in low)
            return (
                f"equal to one device: loss, {self.parameters} gradients and {self.steps} steps on "
                f"{self.world_size} ranks, largest error {self.max_relative_error:.1e} "
                f"({self.worst_parameter}), allowed {allowed:.0e}{own}"
                f"{cuts}{low and f'; warning: {low}'}"
            )
        return (
            f"NOT equal to one device: first at {self.first_difference or 'the loss'} by {self.first_error:.1e}, worst "
            f"at {self.worst_parameter} by {self.max_relative_error:.1e}, allowed {allowed:.0e}; "
            f"loss off by {self.loss_error:.1e}, gradients by {self.gradients_error:.1e}, "
            f"parameters after {self.steps} steps by {self.parameters_error:.1e}, buffers by {self.buffers_error:.1e}"
            f"{f'; {self.presence}' if self.presence else ''}{own}"
        )

    def _cut(self, factor: str) -> str:
        work = f" and {100 * self.flops[factor]:.3g} % of the FLOPs" if factor in self.flops else ""
        return f"{factor} cuts {100 * self.shares[factor]:.3g} % of the parameters{work}"
