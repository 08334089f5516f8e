"""Runs one rank's training steps, evaluations and predictions for ``Run``.

Steps and evaluations return the mean loss over all ranks, predictions the model's output for all samples. Each goes
through the executor, which runs the schedule's forwards and backwards and calls what strategies and gradient sync have
registered for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils._pytree import tree_map_only

from shardwright.analysis.calls.draw_calls import RefusesRandomNumbers
from shardwright.analysis.objects.marked_inputs import in_front, marks_in, own_samples_dims, samples_dims
from shardwright.analysis.on_meta.hidden_outputs import checked_loss
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.analysis.samples.sample_mixing import warn_of_loss
from shardwright.axes import mesh_axes
from shardwright.comm.axis import Axis
from shardwright.errors import EXAMPLE, PlanError
from shardwright.forward_stack import Rung, stack_of
from shardwright.mesh import Coord
from shardwright.models.eval_mode import eval_mode
from shardwright.models.given_loss import SumLoss
from shardwright.models.losses import CrossEntropy, MeanSquaredError, mean_of
from shardwright.parallelize.batch_copies import BatchCopy
from shardwright.parallelize.loss_collectives import RefusesCollective
from shardwright.parallelize.loss_counters import counters_of, warn_of_counters
from shardwright.parallelize.loss_of_halves import warn_of_halves
from shardwright.parallelize.loss_reads import ParametersRead, leaves_read, now_in_graph
from shardwright.parallelize.loss_settings import settings_of
from shardwright.parallelize.loss_watch import RefusesGradients, reads_of, takes_gradients
from shardwright.parallelize.no_samples import NoSampleChecker
from shardwright.parallelize.outputs import OutputShare, can_join, described, join_parts
from shardwright.parallelize.overlapped_update import Mean, overlap_updates, overlapped_offload
from shardwright.parallelize.planning import num_rows, numbers_per_sample, on_device, rows
from shardwright.parallelize.rank_check import batch_number, check_one_batch
from shardwright.parallelize.step_checks import (
    check_code,
    check_dtypes,
    check_frozen,
    check_full,
    check_structure,
    check_trains,
    code_of,
    explained_on_part_of_batch,
    structure_of,
    torch_errors_explained,
)
from shardwright.plan.batch_shard import microbatch_samples, num_tokens_of
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
        check_reads: Callable[[Collection[Tensor], Collection[Tensor]], None],
        copies: BatchCopy,
    ) -> None:
        self.loss, self.plan, self.coord, self.axes = loss, plan, coord, axes
        self.parameters, self.offload = parameters, offload
        self.loss_scale = LossScale() if plan.layout.precision == "fp16" else None
        self._stops_at_nan, self._empty, self._copies = stop_at_nan, empty, copies
        self._widens = plan.layout.precision != "fp32"
        self._executor, self._sync, self._shard = executor, sync, executor.batch_shard
        self._everyone = axes["world"]
        self._joins = True  # False after the first output that cannot be joined from the ranks' shares
        self._told: set[str] = set()  # structures of outputs whose tensors are known to hold samples
        # under ZeRO the optimizer steps shards, and the model computes with whole tensors made of them
        self._stored = {n: p for n, p in parameters.items() if p is not executor.parameters.get(n)}
        self._structure = structure_of(executor.model)
        # stages run code that was read when the model was laid out, and would not see another forward
        self._code = code_of(executor.model) if plan.schedule else ()
        several = plan.layout.num_microbatches > 1 and not plan.layout.own_statistics
        is_replaced = any(wrapper.rung is not Rung.ON_SHARDS for wrapper in stack_of(loss).wrappers)
        known = type(loss) in (CrossEntropy, MeanSquaredError, SumLoss) or is_replaced
        self._dims: set[int] = set()  # the dims other than 0 that hold the samples of targets
        self._has_marks = False  # whether all samples share some targets of the first batch
        self._reads_loss = self._is_of_parts = not known and (several or bool(plan.row_axes))
        self._meets = False  # whether samples are known to meet in the loss
        self._is_checked = self._everyone.device.type == "meta"  # a rehearsal has no values to check
        self._takes_gradients = plan.schedule is not None and not known and takes_gradients(loss)
        self._settings, self._check_reads, self._knows_reads = settings_of(loss), check_reads, known or self._is_checked

    def take(self, batch: Microbatch, update: torch.optim.Optimizer | None, number: int) -> tuple[Tensor, Tensor]:
        """Runs forward and backward of step ``number``; returns the mean loss and number of targets over all ranks.

        Both are float64 scalars. Gradients of the mean loss end in ``parameters[name].grad``; in fp16 they are None if
        one overflowed. With ``update``, an optimizer, offloaded param groups are updated during the backward where that
        is possible; their gradients are None afterwards. The optimizer's own step is left to the caller.

        Raises: PlanError: no parameter requires a gradient; since the model was laid out, a parameter was frozen or
            unfrozen, or a parameter or submodule was replaced or removed; a microbatch without samples needs statistics
            of its own, or the model fails on it; or, with ``stop_at_nan`` or at the least fp16 loss scale, gradients
            are not finite.
        """
        check_trains(self.plan)
        with torch._C.DisableTorchFunctionSubclass():  # parameters that ZeRO marks between steps answer slowly
            check_frozen(self._executor.parameters, self.plan.frozen)
            check_frozen(self._stored, self.plan.frozen)
            check_structure(self._structure)
            check_code(self._code)
        assert batch.num_global is not None, "checked before"
        check_full(self._executor.model, self.plan, batch.num_global)
        self._empty.check(batch.inputs, batch.num_global, self.plan.layout.num_microbatches)
        pieces = pieces_of(self._copies.copied(batch), self.plan.layout.num_microbatches)
        # Gradients are divided by the number of targets that the loss is expected to count, since the real count of all
        # ranks is known after the forward only; finish_gradients corrects them by the ratio.
        expected = max(batch.num_global * numbers_per_sample(batch.targets, batch.num_tokens), 1)
        self._begin(batch.num_tokens)
        self._has_marks = self._reads_loss and bool(marks_in(batch.targets))
        self._dims = samples_dims(batch.targets) if self._reads_loss else set()
        self._executor.rng.step = number
        schedule, stage = self._schedule(len(pieces)), self.coord.get("pp", 0)
        for parameter in self.parameters.values():
            parameter.grad = None
        # gradient sync must know which backward of each param group is the last one, to start its sums right after it
        self._sync.begin(self._executor.in_order(schedule.actions[stage]), len(pieces))
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        overlapped = None if self._stops_at_nan or update is None else overlapped_offload(self.plan, self.offload)
        # a single rank knows the real count, so its gradients are those of a plain loop to the last bit
        alone = self._everyone.size == len(pieces) == 1 and self.loss_scale is None and overlapped is None
        widest = max((p.dtype.itemsize for p in self.parameters.values()), default=0) if alone else 0
        scale_of_sum = None if alone else scale / expected
        last = LossOutput(self._loss_of, scale=scale_of_sum, widen=self._widens, widest_bytes=widest)
        global_mean = partial(self._mean, last.sums)
        overlap = overlap_updates(overlapped, update, self._executor, len(pieces), expected, global_mean)
        with torch.enable_grad(), overlap as early_mean:
            with torch_errors_explained(self.plan):
                self._executor.run(schedule, stage, pieces, last)
            self._copies.note_writes(pieces)
            for events in self._executor.events:
                events.before_sync()
        mean, divisor, num_targets = early_mean[0] if early_mean else global_mean()
        if self.offload is not None and not divisor.is_meta:
            divisor = divisor.to("cpu", non_blocking=True)  # after_sync waits for it, as for the gradients
        self._sync.finish()
        for events in self._executor.events:
            events.after_sync()
        finish_gradients(
            self.parameters, self._everyone.for_strategy("core"), self.loss_scale,
            # gradients of the loss sum, times scale / expected unless alone, become those of the mean
            torch.ones(()) if last.is_mean else (1 if alone else expected) / divisor / scale,
            number, stops_at_nan=self._stops_at_nan,
        )  # fmt: skip
        return mean, num_targets

    def _loss_of(self, output: Any, targets: Any) -> Any:
        if self._reads_loss:  # only in the first call of a user's loss, and if the layout cuts samples
            loss, shown = in_front(self.loss, (output, targets), self._dims)
            self._reads_loss, self._meets = False, warn_of_loss(loss, *shown)
            if not self._meets and not self._has_marks:
                warn_of_halves(loss, *shown, stacklevel=2)
        if self._is_of_parts:
            with explained_on_part_of_batch(self.plan.layout, targets, meets=self._meets):
                return self._watched_loss(output, targets)
        return self._watched_loss(output, targets)

    def _watched_loss(self, output: Any, targets: Any) -> Any:
        if self._knows_reads:
            return self._checked_loss(output, targets)
        self._knows_reads, since, several = True, now_in_graph(), self.plan.layout.num_microbatches > 1
        counters = counters_of(self.loss) if several else {}
        reads = reads_of(self.loss)
        if reads is not None:
            reads.check(self._executor.model, is_cut=self.plan.stages is not None)
        with ParametersRead(output) as used:
            result = self._checked_loss(output, targets)
        if several:
            warn_of_counters(self.loss, counters, self.plan.layout, stacklevel=3)
        if isinstance(result, tuple) and isinstance(result[0], Tensor):
            self._check_reads(leaves_read(result[0], output, since), used.leaves)
        return result

    def _checked_loss(self, output: Any, targets: Any) -> Any:
        tp, is_first = self.plan.layout.factor("tp"), not self._is_checked
        self._is_checked = True
        has_parts = is_first and (tp is not None or self.plan.schedule is not None)  # ranks have parts of the model
        is_last = has_parts and self.plan.schedule is not None and dist.is_available() and dist.is_initialized()
        with (
            RefusesCollective() if is_last else nullcontext(),
            RefusesRandomNumbers(in_loss=True) if is_first else nullcontext(),
            self._refuses_gradients(output),
        ):
            if has_parts:
                return checked_loss(self.loss, output, targets, str(tp or "pp"), all_of=tp is not None)
            return self.loss(output, targets)

    def _refuses_gradients(self, output: Any) -> AbstractContextManager[Any]:
        return RefusesGradients(output) if self._takes_gradients else nullcontext()

    @torch.no_grad()
    def evaluate(self, batch: Microbatch) -> tuple[Tensor, Tensor]:
        """Returns the mean loss and number of targets over all ranks on one batch, in eval mode, without gradients."""
        split = self.plan.schedule is not None or self.plan.layout.own_statistics
        number = self.plan.layout.num_microbatches if split else 1
        assert batch.num_global is not None, "checked before"
        self._empty.check(batch.inputs, batch.num_global, number)
        last = LossOutput(self._checked_loss, widen=self._widens)
        pieces = pieces_of(self._copies.copied(batch), number)
        self._begin(batch.num_tokens)
        with eval_mode(self._executor.model):
            self._forward(pieces, last)
        total = self._total(last.sums, batch_number(batch))
        return mean_of(total[0], total[1])[0], total[1]

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """Returns the model's output for all samples of ``inputs``, on every rank, in eval mode without gradients.

        ``inputs`` are all samples, equal on every rank. Each rank computes its share of them, and ranks join their
        outputs. Every rank computes all samples if there are fewer samples than shares, under ``own-statistics``, if
        an input has its samples in another dim than 0 (``sw.samples_in``), and if an output cannot be joined.

        Raises: PlanError, on every rank: ranks were given different inputs.
        """
        num_samples, moves = num_rows(inputs), self.plan.row_moves.get(OUTPUT, ())
        if not self.plan.row_axes or self._everyone.device.type == "meta":
            return self._output(inputs, range(num_samples), None)
        core = self._everyone.for_strategy("core")
        num_shares = prod(self.plan.mesh[axis] for axis in self.plan.row_axes)
        is_apart = own_samples_dims(inputs)  # then so may the output's samples be in other dims than 0
        if is_apart or not self._joins or num_samples < num_shares or self.plan.layout.own_statistics:
            can_join(OutputShare(num_samples), self.plan, core, ())
            return self._output(inputs, range(num_samples), None)
        output = self._output(inputs, self._shard.local_samples(num_samples), num_samples)
        num_held = [len(self._shard.samples(moves, at)) for at in self.plan.mesh.coords(self.plan.row_axes)]
        share = described(output, len(self._shard.samples(moves)), inputs, num_samples)
        verdict = can_join(share, self.plan, core, () if share.tree in self._told else num_held)
        if verdict:
            self._told.add(share.tree)
            return tree_map_only(Tensor, lambda tensor: self._shard.join_samples(tensor, self.axes, moves), output)
        output = self._output(inputs, range(num_samples), None)
        self._joins = verdict is None and None not in described(output, num_samples).leaves
        if self._joins:
            self._told.add(share.tree)
        return output

    def _output(self, inputs: Any, samples: range, num_global: int | None) -> Any:
        """Returns the output for some samples of ``inputs``; ``num_global`` is None if every rank computes the same."""
        num_tokens = num_tokens_of(inputs) if self.plan.token_axes else 0
        self._begin(num_tokens)
        part = self._shard.cut_tokens(rows(inputs, samples.start, samples.stop), num_tokens)
        local = on_device(inputs_in(self._copies.copies_of(part), self.plan), self._everyone.device)
        with eval_mode(self._executor.model):
            if self.plan.schedule is None:
                self._executor.set_microbatch(Microbatch(local, None, samples, num_global, num_tokens))
                with self._executor.during(Action("F", 0)):
                    output = call_model(self._executor.model, local)
            else:
                end = CollectedOutput()
                self._forward([Microbatch(local, None, samples, num_global, num_tokens)], end)
                output = share_output(self.axes["pp"], end.outputs.get(0), self.plan.schedule.stage_of[-1])
        output = join_parts(output, self.plan, self.axes, self._shard)
        if num_global is None and self.plan.row_moves.get(OUTPUT) and not self.plan.token_axes:
            # every rank began with all samples, so layers that gather samples over an axis have repeated them
            output = tree_map_only(Tensor, lambda tensor: tensor[: len(samples)], output)
        return output

    def _begin(self, num_tokens: int) -> None:
        """Resets the strategies, in case a step has failed, takes over settings of the loss, and sets ``num_tokens``.

        Raises: PlanError: a parameter's dtype was changed since the model was laid out.
        """
        check_dtypes(self._executor.parameters, self.plan.compute_dtypes)
        if self._settings is not None:
            self._settings.renew()
        torch.clear_autocast_cache()  # it may hold casts of the parameters' old values, from a step in the same block
        for events in self._executor.events:
            events.restart()
        self._shard.set_num_tokens(num_tokens)

    def _forward(self, pieces: Sequence[Microbatch], last: OutputHandler) -> None:
        """Runs the forwards of all microbatches, in the schedule's order if the schedule has as many microbatches."""
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

        ``number``, if not 0, is that of the global batch (:func:`batch_number`). The same all-reduce then also sums it
        and its square over the ranks, and an error is raised unless these two sums are those of equal numbers.
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
    """Returns a batch's inputs with floating-point tensors cast to the layout's compute dtype (bf16, fp16).

    Raises: PlanError: an input is marked by ``sw.whole``, ``sw.packed`` or ``sw.samples_in``, and layers would gather
        it over some axis.
    """
    cuts = plan.row_axes - {*mesh_axes("copies")}
    is_known = cuts and Rung.ON_SHARDS not in plan.wrapped.get("", {})
    if is_known and (marks_in(inputs) or own_samples_dims(inputs)):
        raise PlanError(
            "the model was planned without an input that has no samples, or not in dim 0",
            given="a tensor marked by sw.whole, sw.packed or sw.samples_in, and samples cut over "
            f"{', '.join(sorted(cuts))}",
            allowed="inputs that are marked in the example too",
            fix=f"{EXAMPLE}, with the marks",
        )
    return tree_map_only(Tensor, lambda tensor: cast_to_compute(tensor, plan), inputs)


def pieces_of(batch: Microbatch, num_microbatches: int) -> list[Microbatch]:
    """Returns this rank's part of a batch split into ``num_microbatches`` microbatches; some may be empty."""
    microbatches, first = [], batch.samples.start
    for samples in microbatch_samples(batch.samples, num_microbatches):
        start, stop = samples.start - first, samples.stop - first
        inputs, targets = rows((batch.inputs, batch.targets), start, stop)
        microbatches.append(Microbatch(inputs, targets, samples, batch.num_global, batch.num_tokens))
    return microbatches
