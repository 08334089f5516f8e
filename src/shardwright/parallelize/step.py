"""Runs one rank's training steps, evaluations and predictions for ``Run``.

Steps and evaluations return the mean loss over all ranks, predictions the model's output for all samples. Each goes
through the executor, which runs the schedule's forwards and backwards and calls what strategies and gradient sync have
registered for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.analysis.module_calls import call_model
from shardwright.comm.axis import Axis
from shardwright.mesh import Coord
from shardwright.models.eval_mode import eval_mode
from shardwright.models.losses import mean_of
from shardwright.parallelize.checks import check_frozen, check_full, check_trains
from shardwright.parallelize.no_samples import NoSampleChecker
from shardwright.parallelize.overlapped_update import Mean, overlap_updates, overlapped_offload
from shardwright.parallelize.planning import num_rows, numbers_per_sample, on_device, rows
from shardwright.parallelize.rank_check import batch_number, check_one_batch
from shardwright.plan.batch_shard import BatchShard, microbatch_samples, num_tokens_of
from shardwright.plan.plan import OUTPUT, Plan
from shardwright.plan.schedule import Action, Schedule, accumulate
from shardwright.runtime.applied import Offload
from shardwright.runtime.executor import CollectedOutput, Executor, LossOutput, Microbatch, OutputHandler
from shardwright.runtime.gradient_sync import GradientSync
from shardwright.runtime.mixed_precision import LossScale, cast_to_compute, finish_gradients
from shardwright.strategies.pipeline.p2p import share_output
from shardwright.strategies.pipeline.schedules import forward_only, one_by_one


class TrainStep:
    """Runs training steps, evaluations and predictions on this rank's samples; all ranks call its methods together.

    ``loss_scale`` is the fp16 loss scale; None in other precisions.
    """

    def __init__(
        self,
        loss: nn.Module,
        plan: Plan,
        coord: Coord,
        axes: Mapping[str, Axis],
        parameters: Mapping[str, nn.Parameter],
        executor: Executor,
        sync: GradientSync,
        offload: Offload | None,
        stop_at_nan: bool,
        empty: NoSampleChecker,
    ) -> None:
        self.loss, self.plan, self.coord, self.axes = loss, plan, coord, axes
        self.parameters, self.offload = parameters, offload
        self.loss_scale = LossScale() if plan.layout.precision == "fp16" else None
        self._stops_at_nan, self._empty = stop_at_nan, empty
        self._widens = plan.layout.precision != "fp32"
        self._executor, self._sync, self._shard = executor, sync, executor.batch_shard
        self._everyone = axes["world"]

    def take(self, batch: Microbatch, update: torch.optim.Optimizer | None, number: int) -> tuple[Tensor, Tensor]:
        """Runs forward and backward of step ``number``; returns the mean loss and number of targets over all ranks.

        Both are float64 scalars. Gradients of the mean loss end in ``parameters[name].grad``; in fp16 they are None if
        one overflowed. With ``update``, an optimizer, offloaded param groups are updated during the backward where that
        is possible; their gradients are None afterwards. The optimizer's own step is left to the caller.

        Raises: PlanError: no parameter requires a gradient, one was frozen or unfrozen since the model was laid out, a
            microbatch without samples needs statistics of its own, or is one that the model does not take, or gradients
            are not finite, with ``stop_at_nan`` or at the least fp16 loss scale.
        """
        check_trains(self.plan)
        check_frozen(self._executor.parameters, self.plan.frozen)
        assert batch.num_global is not None, "checked before"
        check_full(self._executor.model, self.plan, batch.num_global)
        self._empty.check(batch.inputs, batch.num_global, self.plan.layout.num_microbatches)
        pieces = pieces_of(batch, self.plan.layout.num_microbatches)
        # Gradients are divided by the number of targets that the loss is expected to count, since the real count of all
        # ranks is known after the forward only; finish_gradients corrects them by the ratio.
        expected = max(batch.num_global * numbers_per_sample(batch.targets, batch.num_tokens), 1)
        self._begin(batch.num_tokens)
        self._executor.rng.step = number
        schedule, stage = self._schedule(len(pieces)), self.coord.get("pp", 0)
        for parameter in self.parameters.values():
            parameter.grad = None
        # gradient sync must know which backward of each param group is the last one, to start its sums right after it
        self._sync.begin(self._executor.in_order(schedule.actions[stage]), len(pieces))
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        last = LossOutput(self.loss, scale=scale / expected, widen=self._widens)
        overlapped = None if self._stops_at_nan or update is None else overlapped_offload(self.plan, self.offload)
        global_mean = partial(self._mean, last.sums)
        overlap = overlap_updates(overlapped, update, self._executor, len(pieces), expected, global_mean)
        with torch.enable_grad(), overlap as early_mean:
            self._executor.run(schedule, stage, pieces, last)
            for events in self._executor.events:
                events.before_sync()
        mean, divisor, num_targets = early_mean[0] if early_mean else global_mean()
        if self.offload is not None and not divisor.is_meta:
            divisor = divisor.to("cpu", non_blocking=True)  # it comes with the gradients, for which after_sync waits
        self._sync.finish()
        for events in self._executor.events:
            events.after_sync()
        finish_gradients(
            self.parameters, self._everyone.for_strategy("core"), self.loss_scale,
            expected / divisor / scale,  # 1 / scale, unless the loss ignores some targets
            number, stops_at_nan=self._stops_at_nan,
        )  # fmt: skip
        return mean, num_targets

    @torch.no_grad()
    def evaluate(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        """Returns the mean loss and number of targets over all ranks on one batch, in eval mode, without gradients."""
        split = self.plan.schedule is not None or self.plan.layout.own_statistics
        number = self.plan.layout.num_microbatches if split else 1
        assert batch.num_global is not None, "checked before"
        self._empty.check(batch.inputs, batch.num_global, number)
        last = LossOutput(self.loss, widen=self._widens)
        self._begin(batch.num_tokens)
        with eval_mode(self._executor.model):
            self._forward(pieces_of(batch, number), last)
        total = self._total(last.sums, batch_number(batch))
        return mean_of(total[0], total[1])[0], total[1]

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """Returns the model's output for all samples of ``inputs``, on every rank, in eval mode without gradients.

        ``inputs`` are all samples, equal on every rank.
        """
        num_tokens = num_tokens_of(inputs) if self.plan.token_axes else 0
        self._begin(num_tokens)
        local = on_device(inputs_in(self._shard.cut_tokens(inputs, num_tokens), self.plan), self._everyone.device)
        with eval_mode(self._executor.model):
            if self.plan.schedule is None:
                self._shard.set_uncut(num_rows(local))
                with self._executor.during(Action("F", 0)):
                    output = call_model(self._executor.model, local)
            else:
                end = CollectedOutput()
                self._forward([Microbatch(local, None, range(num_rows(local)), None, num_tokens)], end)
                output = share_output(self.axes["pp"], end.outputs.get(0), self.plan.schedule.stage_of[-1])
        return join_output(output, num_rows(inputs), self.plan, self.axes, self._shard)

    def _begin(self, num_tokens: int) -> None:
        """Resets the strategies, in case a step has failed, and sets the number of tokens of each sample."""
        for events in self._executor.events:
            events.restart()
        self._shard.set_num_tokens(num_tokens)

    def _forward(self, pieces: Sequence[Microbatch], last: OutputHandler) -> None:
        """Runs the forwards of all microbatches, in the schedule's order if their number is the schedule's."""
        schedule = self._schedule(len(pieces))
        same = schedule.num_microbatches == len(pieces)
        forwards = forward_only(schedule) if same else one_by_one(schedule, len(pieces))
        self._executor.run(forwards, self.coord.get("pp", 0), pieces, last)

    def _mean(self, sums: Sequence[Tensor]) -> Mean:
        """Returns the mean loss over all ranks, its divisor and the number of targets, from this rank's sums."""
        total = self._total(sums)
        return *mean_of(total[0], total[1]), total[1]

    def _total(self, sums: Sequence[Tensor], number: int = 0) -> Tensor:
        """Returns the sum of the loss and the number of targets over all ranks.

        ``number``, if not 0, is that of the global batch, and is compared in the same all-reduce, which then also has
        its sum and the sum of its squares: of equal numbers alone, these fit together.
        """
        device = self._everyone.device
        total = torch.stack(list(sums)).sum(0) if sums else torch.zeros(2, dtype=torch.float64, device=device)
        if not self.plan.loss_axes:
            return total
        own = torch.tensor([number, number**2] if number else [], dtype=total.dtype, device=device)
        axis = self.axes["+".join(sorted(self.plan.loss_axes, key=self.plan.mesh.axes.index))]
        total = axis.for_strategy("loss").all_reduce(torch.cat([total, own]))
        if number:
            check_one_batch(total[2:].tolist(), axis.size, self.plan)
        return total[:2]

    def _schedule(self, num_microbatches: int) -> Schedule:
        return accumulate(num_microbatches) if self.plan.schedule is None else self.plan.schedule


def inputs_in(inputs: Any, plan: Plan) -> Any:
    """Returns a batch's inputs with floating-point tensors cast to the layout's compute dtype (bf16, fp16)."""
    return tree_map_only(Tensor, lambda tensor: cast_to_compute(tensor, plan), inputs)


def pieces_of(batch: Microbatch, num_microbatches: int) -> list[Microbatch]:
    """Returns this rank's part of a batch split into ``num_microbatches`` microbatches; some may be empty."""
    found, first = [], batch.samples.start
    for samples in microbatch_samples(batch.samples, num_microbatches):
        start, stop = samples.start - first, samples.stop - first
        inputs, targets = rows(batch.inputs, start, stop), rows(batch.targets, start, stop)
        found.append(Microbatch(inputs, targets, samples, batch.num_global, batch.num_tokens))
    return found


def join_output(output: Any, num_samples: int, plan: Plan, axes: Mapping[str, Axis], shard: BatchShard) -> Any:
    """Returns the model's whole output for ``num_samples`` samples on every rank, all-gathered from the ranks' shards.

    ``output`` is this rank's shard. A tensor in it without dims is of this rank's samples alone, and becomes None.
    Traffic: one all-gather over each axis that cuts the output.
    """
    output = tree_map_only(Tensor, lambda each: each if each.dim() else None, output)
    joined: list[str] = []
    for cut in reversed(plan.activations.get(OUTPUT, ())):  # the fastest axis first: its parts are neighbors
        output = axes[cut.axis].all_gather(output, cut.dim, _output_sizes(plan, shard, cut.axis, joined))
        joined.append(cut.axis)
    if plan.token_axes:
        return shard.join(output, axes, plan.row_moves.get(OUTPUT, ()))
    # layers that gather samples over an axis gathered as many copies here: every rank began with all samples
    return tree_map_only(Tensor, lambda each: each[:num_samples], output)


def _output_sizes(plan: Plan, shard: BatchShard, axis: str, joined: Sequence[str]) -> list[int]:
    """Returns the size of the output's sharded dim on each rank along ``axis``, after all-gathers over ``joined``."""

    def held(index: int) -> int:
        coords = ({**shard.coord, axis: index, **other} for other in plan.mesh.coords(joined))
        return sum(b - a for at in coords for cut in plan.slices(at)[OUTPUT] for a, b in cut.ranges)

    return [held(index) for index in range(plan.mesh[axis])]
