"""Takes this rank's part of a global batch, ready for a step: its samples, its tokens of each, on its device.

``Run.shard`` gives it whole batches, as a data loader yields them, and ``Run.part`` the samples of this rank alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.comm.world import World
from shardwright.devices import HOST
from shardwright.errors import LayoutError
from shardwright.models.model_loss import ModelLoss
from shardwright.parallelize.batches import Targets, as_tensors, checked_number, pairs
from shardwright.parallelize.planning import num_rows, on_device, rows
from shardwright.parallelize.rank_check import some_elements
from shardwright.parallelize.step import inputs_in
from shardwright.plan.batch_shard import BatchShard, num_tokens_of
from shardwright.plan.plan import Plan
from shardwright.runtime.copy_stream import CopyStream, made_ahead
from shardwright.runtime.executor import Microbatch


class BatchParts:
    """Cuts one rank's part out of each global batch: its samples, and of these its tokens if the layout cuts sequences.

    ``batch_shard`` knows which samples and tokens the rank has. With ``compares``, each part keeps some elements of its
    whole batch, so that ranks find out in a step if they were given different global batches.
    """

    def __init__(
        self, model: nn.Module, loss: nn.Module, plan: Plan, world: World, batch_shard: BatchShard, *, compares: bool
    ) -> None:
        self._model, self._loss = model, loss
        self._plan, self._world, self._shard = plan, world, batch_shard
        self._compares = compares
        self._copies: CopyStream | None = None  # made when batches are first read ahead

    def share(self, num_samples: int) -> range:
        """Returns the range of this rank's samples in a global batch of ``num_samples``."""
        return self._shard.local_samples(num_samples)

    def of_batches(self, batches: Iterable[Any], targets: Targets) -> Iterator[Microbatch]:
        """Yields this rank's part of each global batch; ``targets`` says which part of a batch the targets are.

        On an accelerator, each part is copied there while the step before it computes.

        Raises: LayoutError, PlanError: as ``Run.shard``.
        """
        if targets is None and isinstance(self._loss, ModelLoss):
            targets = self._loss.pair
        global_batches = pairs(batches, targets, self._model)
        if self._world.device.type in HOST:
            return map(self._from_global, global_batches)
        if self._copies is None:
            self._copies = CopyStream(self._world.device)
        return made_ahead(global_batches, partial(self._from_global, copies=self._copies), self._copies)

    def of_samples(self, inputs: Any, targets: Any, num_global: int | None) -> Microbatch:
        """Returns the part that has these inputs and targets, all samples of the rank in a batch of ``num_global``.

        Raises: LayoutError, PlanError: as ``Run.part``.
        """
        num_global = checked_number(num_global, inputs, targets)
        inputs, targets, share = as_tensors(inputs), as_tensors(targets), self.share(num_global)
        num_samples = num_rows((inputs, targets))
        if num_samples != len(share):
            raise LayoutError(
                "a part of a batch has another number of samples than this rank's share",
                given=f"{num_samples} samples of {num_global}, on rank {self._world.rank}",
                allowed=f"{len(share)} samples: those of {share} in the batch",
                fix="give only the samples of run.share(num_global), or the whole batches to run.shard",
            )
        return self._from_samples(inputs, targets, num_global, None)

    def _from_global(self, batch: tuple[Any, Any], copies: CopyStream | None = None) -> Microbatch:
        num_global = num_rows(batch)
        samples = self.share(num_global)
        inputs, targets = rows(batch, samples.start, samples.stop)
        part = self._from_samples(inputs, targets, num_global, copies)
        return replace(part, of_global=some_elements(batch)) if self._compares else part

    def _from_samples(self, inputs: Any, targets: Any, num_global: int, copies: CopyStream | None) -> Microbatch:
        num_tokens = 0
        if self._plan.token_axes:
            num_tokens = num_tokens_of(inputs, targets)
            self._shard.check_num_tokens(num_tokens)
        inputs, targets = self._shard.cut_tokens((inputs, targets), num_tokens)
        device = self._world.device
        held = torch.device("cpu") if device.type == "meta" and self._plan.reads_values else device  # a rehearsal
        inputs = on_device(inputs_in(inputs, self._plan), held, copies)
        targets = on_device(targets, device, copies)
        return Microbatch(inputs, targets, self.share(num_global), num_global, num_tokens)
