"""``Run``: one rank's part of a model under a layout, with the methods that train, evaluate and save it.

``parallelize`` makes it; scripts, ``verify``, the trainer, checkpoints and the ledger use it. A step goes through the
executor, which runs the schedule's actions and fires the events that strategies and gradient sync listen to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.analysis.module_calls import call_model
from shardwright.comm.agreement import gather_json
from shardwright.comm.axis import Axis
from shardwright.comm.world import World
from shardwright.models.eval_mode import eval_mode
from shardwright.models.losses import mean_of
from shardwright.parallelize.checks import check_frozen, check_full, check_own, check_trains
from shardwright.parallelize.explain import explain_text, explained
from shardwright.parallelize.optimizer_check import check_elementwise
from shardwright.parallelize.overlapped_update import overlap_updates, overlapped_offload
from shardwright.parallelize.planning import num_rows, numbers_per_sample, on_device, rows
from shardwright.plan.batch_shard import microbatch_samples, num_tokens_of
from shardwright.plan.plan import OUTPUT, Job, Plan
from shardwright.plan.schedule import Action, Schedule, accumulate
from shardwright.rng import RngTracker
from shardwright.runtime.applied import Applied
from shardwright.runtime.executor import CollectedOutput, Events, Executor, LossOutput, Microbatch, OutputHandler
from shardwright.runtime.gradient_sync import GradientSync
from shardwright.runtime.mixed_precision import LossScale, cast_to_compute, finish_gradients
from shardwright.runtime.timeline import Span, Timeline
from shardwright.sharding.box import read
from shardwright.strategies.pipeline.p2p import share_output
from shardwright.strategies.pipeline.pipeline_stage import PipelineStage
from shardwright.strategies.pipeline.schedules import forward_only, one_by_one

if TYPE_CHECKING:
    from shardwright.global_tensor import GlobalTensor, Placement
    from shardwright.global_tensor.sbp import Sbp


class Run:
    """One rank's part of a model, made by ``parallelize``: training steps, evaluation, prediction and the optimizer.

    Attributes:
        model: the plain model's modules with this rank's part of each parameter, under the plain names.
        loss: the loss on this rank's device.
        plan: the layout of every tensor.
        world, axes, coord: the ranks, the axes of the mesh, and this rank's index on each.
        parameters: the tensors that the optimizer updates, by plain name: the model's own parameters, or the stored
            shards or master weights where a strategy keeps such.
        offload: the host or disk storage of their state, if the layout offloads it.
        rng: the RNG tracker of dropout.
        num_steps: how many steps were taken, skipped ones included.
        loss_scale: the fp16 loss scale; None in other precisions.
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        world: World,
        axes: Mapping[str, Axis],
        executor: Executor,
        sync: GradientSync,
        applied: Sequence[Applied] = (),
        stop_at_nan: bool = False,
    ) -> None:
        self.model, self.loss = job.model, job.loss
        self.plan, self.world, self.axes = plan, world, axes
        stored = {name: p for each in applied for name, p in each.parameters.items()}
        self.parameters: Mapping[str, nn.Parameter] = {
            name: stored.get(name, p) for name, p in self.model.named_parameters()
        }
        self.offload = next((each.offload for each in applied if each.offload is not None), None)
        self._applied = applied
        self.coord = plan.mesh.coord(world.rank)
        self.rng: RngTracker = executor.rng
        self.num_steps = 0
        self.loss_scale = LossScale() if plan.layout.precision == "fp16" else None
        self._stops_at_nan = stop_at_nan
        self._widens = plan.layout.precision != "fp32"
        self._executor, self._sync, self._shard = executor, sync, executor.batch_shard
        self._everyone = axes["world"]

    @property
    def draws(self) -> RngTracker:
        """The RNG tracker: the former name of ``rng``."""
        return self.rng

    # ---- batches

    def share(self, num_samples: int) -> range:
        """Returns the indices of this rank's samples in a global batch of ``num_samples``: it loads no others."""
        return self._shard.local_samples(num_samples)

    def shard(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[Microbatch]:
        """Yields this rank's part of each global batch (inputs, targets).

        Shapes: dim 0 of every tensor is the samples of the global batch, the same number in all.
        Raises: LayoutError: tensors with different numbers of samples; and as :meth:`part`.
        """
        for inputs, targets in batches:
            num_global = num_rows((inputs, targets))
            samples = self.share(num_global)
            local_inputs, local_targets = rows((inputs, targets), samples.start, samples.stop)
            yield self.part(local_inputs, local_targets, num_global)

    def part(self, inputs: Any, targets: Any, num_global: int) -> Microbatch:
        """Returns the batch for :meth:`step` from this rank's samples of a global batch of ``num_global``.

        Inputs are moved to the rank's device and cast to the compute dtype. Where the layout cuts sequences, this
        rank's tokens of each sample are taken.

        Shapes: dim 0 of every tensor is the samples of :meth:`share`; dim 1, if sequences are cut, all their tokens.
        Raises: LayoutError: the layout cuts sequences and the samples are none; PlanError: they are too short.
        """
        num_tokens = 0
        if self.plan.token_axes:
            num_tokens = num_tokens_of(inputs, targets)
            self._shard.check_num_tokens(num_tokens)
        inputs, targets = self._shard.cut_tokens((inputs, targets), num_tokens)
        inputs, targets = on_device((self._to_compute_dtype(inputs), targets), self.world.device)
        return Microbatch(inputs, targets, self.share(num_global), num_global, num_tokens)

    def _to_compute_dtype(self, inputs: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: cast_to_compute(tensor, self.plan), inputs)

    # ---- steps

    def step(self, batch: Microbatch, update: torch.optim.Optimizer | None = None) -> Tensor:
        """Runs forward and backward over this rank's part of one batch; returns the global mean loss, a scalar.

        Gradients start at zero and end as those of the global mean, complete on every rank that holds the parameter,
        in ``parameters[name].grad``. Step the optimizer next, or pass it as ``update``: then it is stepped and its
        gradients are cleared here, and offloaded state is updated during the backward, param group by param group.
        (Not during it with a loss scale, ``stop_at_nan``, stages, or gradients of shards that are still to be summed.)

        An error that the model raises on every rank may be caught: parameters are unchanged, except for param groups
        that were already updated, and the next step starts afresh.

        Traffic: what the strategies' ``traffic`` states, one all-reduce of (sum, count) over the axes that cut the
            loss, and in fp16 or with ``stop_at_nan`` the check that all gradients are finite.
        Raises: PlanError: no parameter requires a gradient, one was frozen since the model was laid out, a microbatch
            without samples needs statistics of its own, or, with ``stop_at_nan``, a gradient is not finite.
        """
        check_trains(self.plan)
        check_frozen(self._executor.parameters, self.plan.frozen)
        assert batch.num_global is not None, "batches for a step come from shard() or part()"
        check_full(self.model, self.plan, batch.num_global)
        pieces = self.pieces(batch)
        # Gradients are divided by the number of targets that the loss is expected to count, since the real count of all
        # ranks is known after the forward only; finish_gradients corrects them by the ratio.
        expected = max(batch.num_global * numbers_per_sample(batch.targets, batch.num_tokens), 1)
        self._begin(batch.num_tokens)
        self.rng.step = self.num_steps
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
        mean, count = early_mean[0] if early_mean else global_mean()
        self._sync.finish()
        for events in self._executor.events:
            events.after_sync()
        finish_gradients(
            self.parameters, self._everyone.for_strategy("core"), self.loss_scale,
            expected / count / scale,  # 1 / scale, unless the loss ignores some targets
            self.num_steps, stops_at_nan=self._stops_at_nan,
        )  # fmt: skip
        self.num_steps += 1
        if update is not None:
            update.step()
            update.zero_grad()
        return mean

    @property
    def num_skipped(self) -> int:
        """The number of fp16 steps skipped so far because a gradient was not finite; 0 in other precisions."""
        return 0 if self.loss_scale is None else self.loss_scale.num_skipped

    def _schedule(self, num_microbatches: int) -> Schedule:
        return accumulate(num_microbatches) if self.plan.schedule is None else self.plan.schedule

    @torch.no_grad()
    def evaluate(self, batch: Microbatch) -> Tensor:
        """Returns the global mean loss on one batch, a scalar, in eval mode and without gradients.

        The batch goes through the model at once; in microbatches with a pipeline or ``own-statistics``.

        Traffic: that of the forwards, and one all-reduce of (sum, count) over the axes that cut the loss.
        """
        split = self.plan.schedule is not None or self.plan.layout.own_statistics
        last = LossOutput(self.loss, widen=self._widens)
        self._begin(batch.num_tokens)
        with eval_mode(self.model):
            self._forward(self.pieces(batch, None if split else 1), last)
        return self._mean(last.sums)[0]

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """Returns the model's output for all samples, on every rank, in eval mode and without gradients.

        Shapes: ``inputs`` are all samples, equal on every rank; the output has the plain model's shapes.
        Traffic: that of a forward; one all-gather over each axis that cuts the output; with stages, the output is sent
            from the last stage to the others.
        Raises: LayoutError: the layout cuts sequences and the inputs are none.
        """
        num_tokens = num_tokens_of(inputs) if self.plan.token_axes else 0
        self._begin(num_tokens)
        local = on_device(self._to_compute_dtype(self._shard.cut_tokens(inputs, num_tokens)), self.world.device)
        with eval_mode(self.model):
            if self.plan.schedule is None:
                self._shard.set_uncut(num_rows(local))
                with self._executor.during(Action("F", 0)):
                    output = call_model(self.model, local)
            else:
                end = CollectedOutput()
                self._forward([Microbatch(local, None, range(num_rows(local)), None, num_tokens)], end)
                output = share_output(self.axes["pp"], end.outputs.get(0), self.plan.schedule.stage_of[-1])
        joined: list[str] = []
        for cut in reversed(self.plan.activations.get(OUTPUT, ())):  # the fastest axis first: its parts are neighbours
            output = self.axes[cut.axis].all_gather(output, cut.dim, self._output_sizes(cut.axis, joined))
            joined.append(cut.axis)
        if self.plan.token_axes:
            return self._shard.join(output, self.axes, self.plan.row_moves.get(OUTPUT, ()))
        # layers that gather samples over an axis gathered as many copies here: every rank began with all samples
        return tree_map_only(Tensor, lambda each: each[: num_rows(inputs)], output)

    def _begin(self, num_tokens: int) -> None:
        """Resets the strategies, which may hold leftovers of a failed step, and sets the tokens of each sample."""
        for events in self._executor.events:
            events.restart()
        self._shard.set_num_tokens(num_tokens)

    def _forward(self, pieces: Sequence[Microbatch], last: OutputHandler) -> None:
        """Runs the forwards of all microbatches, in the schedule's order if it has as many."""
        schedule = self._schedule(len(pieces))
        same = schedule.num_microbatches == len(pieces)
        forwards = forward_only(schedule) if same else one_by_one(schedule, len(pieces))
        self._executor.run(forwards, self.coord.get("pp", 0), pieces, last)

    def _output_sizes(self, axis: str, joined: Sequence[str]) -> list[int]:
        """Returns the size of the output's sharded dim on each index of ``axis``, once ``joined`` are gathered."""

        def held(index: int) -> int:
            coords = ({**self.coord, axis: index, **other} for other in self.plan.mesh.coords(joined))
            return sum(b - a for at in coords for cut in self.plan.slices(at)[OUTPUT] for a, b in cut.ranges)

        return [held(index) for index in range(self.plan.mesh[axis])]

    def _mean(self, sums: Sequence[Tensor]) -> tuple[Tensor, float]:
        """Returns the global mean loss and its number of targets from this rank's (sum, count) of each microbatch."""
        device = self.world.device
        total = torch.stack(list(sums)).sum(0) if sums else torch.zeros(2, dtype=torch.float64, device=device)
        if self.plan.loss_axes:
            joined = "+".join(sorted(self.plan.loss_axes, key=self.plan.mesh.axes.index))
            total = self.axes[joined].for_strategy("loss").all_reduce(total)
        if total.is_meta:  # a rehearsal has no values
            return total[0], 1.0
        return mean_of(total[0], float(total[1]))

    # ---- observing a step

    @contextmanager
    def observed(self, events: Events) -> Iterator[None]:
        """Returns a context in which the executor also calls the listener ``events``, after those of the strategies."""
        before = self._executor.events
        self._executor.events = (*before, events)
        try:
            yield
        finally:
            self._executor.events = before

    def rehearse_with(self, batch: Microbatch, values: Sequence[Mapping[str, Any]]) -> None:
        """Prepares a stage for rehearsed steps without the other stages: ``values`` are what it would receive.

        ``values`` holds, for each microbatch, the tensors that cross between chunks by name, on the meta device.
        """
        work = self._executor.work
        if isinstance(work, PipelineStage):
            work.expect(self.pieces(batch), values)

    def pieces(self, batch: Microbatch, num_microbatches: int | None = None) -> list[Microbatch]:
        """Splits this rank's part of a batch into microbatches, by default the layout's number; some may be empty."""
        found, first = [], batch.samples.start
        for samples in microbatch_samples(batch.samples, num_microbatches or self.plan.layout.num_microbatches):
            start, stop = samples.start - first, samples.stop - first
            inputs, targets = rows(batch.inputs, start, stop), rows(batch.targets, start, stop)
            found.append(Microbatch(inputs, targets, samples, batch.num_global, batch.num_tokens))
        return found

    def timeline(self, batch: Microbatch) -> Timeline:
        """Takes one step like :meth:`step`; returns when each of this rank's pipeline stages ran which action, in s.

        Time 0 is after a barrier of all stages. Traffic: the step's, that barrier, and one gather of the times.

        >>> import shardwright as sw
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> def work(world):
        ...     run = sw.parallelize(model, "pp2 mb2", world)
        ...     (batch,) = run.shard([(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))])
        ...     return [" ".join(str(span.action) for span in stage) for stage in run.timeline(batch).spans]
        >>> sw.launch(work, 2, ranks="threads")[0]
        ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']
        """
        stages = self.axes["pp"].for_strategy("core") if "pp" in self.axes else None
        if stages is not None:
            stages.barrier()
        start_s = perf_counter()
        self.step(batch)
        own = [(*span.action, span.start_s - start_s, span.end_s - start_s) for span in self._executor.spans]
        found = [own] if stages is None else gather_json(stages, own)
        spans = (tuple(Span(Action(*each[:3]), *each[3:]) for each in stage) for stage in found)
        return Timeline(f"{self.plan.layout}, measured", tuple(spans))

    def explain(self, path: str) -> str:
        """Returns as text what the layout makes of one module: role, reason, parameters, forward stack and traffic.

        ``path`` is a name of ``model.named_modules()``, "" for the model, or "(loss)". Traffic: none.
        Raises: PlanError: the model has no such module.

        >>> import shardwright as sw
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> texts = sw.launch(lambda world: sw.parallelize(model, "dp2", world).explain("0"), 2, ranks="threads")
        >>> print(texts[1])
        '0', Linear, on rank 1 of dp2
        role        copied: no strategy cuts it: every rank computes it whole
        ...
          0.weight: 64 B of gradient summed over dp once, with its param group
          0.bias: 16 B of gradient summed over dp once, with its param group
        """
        return explain_text(explained(self, path))

    def kept(self) -> Iterator[Tensor]:
        """Yields the tensors kept between steps beside parameters and buffers: unsharded flat parameters."""
        return (tensor for each in self._applied for tensor in each.kept())

    # ---- the optimizer

    def optimizer(
        self, kind: type[torch.optim.Optimizer], parameters: Any = None, **options: Any
    ) -> torch.optim.Optimizer:
        """Returns a torch optimizer ``kind`` over this rank's parameters, made with ``options``.

        ``parameters`` may be tensors or groups of :attr:`parameters`, as torch takes them; all that train by default.
        If the layout offloads state, all ranks must call it, and its ``step`` goes param group by param group.

        Raises: PlanError: the optimizer does not update each element alone and the layout shards a tensor; a tensor is
            not among ``self.parameters``; or, on every rank, there is no room for offloaded state.
        """
        given = None if parameters is None else list(parameters)
        check_elementwise(kind, options, self.plan, given or ())
        own = [p for p in self.parameters.values() if p.requires_grad]
        own = own or [nn.Parameter(torch.empty(0))]  # a stage that trains nothing: torch's need one
        optimizer = kind(own if given is None else given, **options)
        check_own(optimizer, (*self.parameters.values(), *own), self.plan)
        if self.offload is not None:
            self.offload.attach(optimizer, lambda groups: kind(groups, **options))
        optimizer.register_step_post_hook(lambda *_: self.changed())
        return optimizer

    def changed(self) -> None:
        """Marks unsharded and low-precision copies of the parameters as out of date, to be renewed before use.

        All ranks call it after writing to :attr:`parameters`; optimizers from :meth:`optimizer` and loading do so.
        """
        for events in self._executor.events:
            events.after_optimizer()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales gradients so that their norm over the whole model is at most ``max_norm``; returns the norm before.

        Each element counts once, however many ranks hold a copy. Traffic: one all-reduce of one float64.
        """
        square = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            for piece in self.plan.state[name].gradient.owned(self.coord, self.plan.mesh):
                part = read(parameter.grad, piece, piece.whole)
                square += (part.abs() if part.is_complex() else part).double().square().sum()
        norm: Tensor = self._everyone.for_strategy("clip").all_reduce(square).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if gradients and scale < 1:
            torch._foreach_mul_(gradients, scale.item())
        return norm

    # ---- the parameters as global tensors

    def global_parameters(
        self, placement: Placement | None = None, sbp: Sbp | Sequence[Sbp] | None = None
    ) -> dict[str, GlobalTensor]:
        """Returns copies of all parameters as global tensors, by name; all ranks call it and get every name.

        By default they are on all ranks, cut along dim 0. Traffic: each element that a rank wants and does not hold.
        Raises: PlanError: ranks are threads; LayoutError: the sbp does not fit the placement or a parameter.
        """
        from shardwright.parallelize import global_parameters  # loads DTensor: only when it is used

        return global_parameters.to_global_parameters(self, placement, sbp)

    def load_global_parameters(self, tensors: Mapping[str, GlobalTensor]) -> None:
        """Fills parameters from global tensors of any placement and sbp: the inverse of :meth:`global_parameters`.

        All ranks call it. Traffic: each element that a rank stores and whose value it does not hold.
        Raises: PlanError: ranks are threads, or the run has no parameter of that name and shape.
        """
        from shardwright.parallelize import global_parameters

        global_parameters.from_global_parameters(self, tensors)
