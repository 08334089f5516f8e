"""What becomes of a model's output: a loss in training, or the output itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardwright.models.losses import sum_and_count
from shardwright.runtime.executor import Microbatch


@dataclass
class LossOutput:
    """Where a model ends in training: adds up the loss and what it counts.

    Backward runs on the sum times ``scale``, a number that all ranks know beforehand. With ``widen`` the loss is taken
    of the model's output in float32: a sum of many numbers has no place in less.
    """

    loss: Callable[[Any, Any], tuple[Tensor, Tensor]]
    scale: float = 1.0
    widen: bool = False
    sums: list[Tensor] = field(default_factory=list)

    def give(self, number: int, microbatch: Microbatch, output: Any) -> Tensor:
        """See :class:`~shardwright.strategies.pipeline.Last`."""
        if self.widen:
            output = tree_map_only(Tensor, lambda t: t.float() if t.dtype.is_floating_point else t, output)
        loss_sum, count = sum_and_count(self.loss(output, microbatch.targets))
        self.sums.append(torch.stack([loss_sum.detach().double(), count.double()]))
        return loss_sum * self.scale if self.scale != 1 else loss_sum


@dataclass
class CollectedOutput:
    """Where a model ends that is asked for its output alone."""

    outputs: dict[int, Any] = field(default_factory=dict)

    def give(self, number: int, microbatch: Microbatch, output: Any) -> Tensor:
        """See :class:`~shardwright.strategies.pipeline.Last`."""
        self.outputs[number] = output
        return torch.zeros(())
