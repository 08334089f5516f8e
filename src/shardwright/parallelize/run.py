"""``Run``: a model under a layout, as one rank holds it."""

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
from shardwright.parallelize.overlapped_update import updates_beside, updating
from shardwright.parallelize.planning import num_rows, numbers_per_sample, on_device, rows
from shardwright.plan.batch_shard import microbatch_samples, num_tokens_of
from shardwright.plan.plan import OUTPUT, Job, Plan
from shardwright.plan.schedule import Action, Schedule, accumulate
from shardwright.rng import RngTracker
from shardwright.runtime.applied import Applied
from shardwright.runtime.executor import Events, Executor, Microbatch, OutputHandler
from shardwright.runtime.gradient_sync import GradientSync
from shardwright.runtime.loss_scale import LossScale, finish_gradients
from shardwright.runtime.mixed_precision import cast_to_compute
from shardwright.runtime.outputs import CollectedOutput, LossOutput
from shardwright.runtime.timeline import Span, Timeline
from shardwright.sharding.box import read
from shardwright.strategies.pipeline.p2p import share_output
from shardwright.strategies.pipeline.schedules import forward_only, one_by_one
from shardwright.strategies.pipeline.stage import Stage

if TYPE_CHECKING:
    from shardwright.global_tensor import GlobalTensor, Placement
    from shardwright.global_tensor.sbp import Sbp


class Run:
    """One rank's part of a model and what it does with it: steps, losses, an optimizer.

    ``model`` holds this rank's part, under the names of the plain model; ``plan`` says where everything lies.
    ``parameters`` are what the optimizer steps, as they rest: the model's own, unless a strategy cuts the state.
    ``offload`` is where their state rests, if that is not the rank's device.
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
        resting = {name: p for each in applied for name, p in each.parameters.items()}
        self.parameters: Mapping[str, nn.Parameter] = {
            name: resting.get(name, p) for name, p in self.model.named_parameters()
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

    # ---- batches

    def share(self, num_samples: int) -> range:
        """Which samples of a global batch this rank computes: load no others."""
        return self._shard.local_samples(num_samples)

    def shard(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[Microbatch]:
        """This rank's part of each global batch (inputs, targets); samples lie in dim 0 of every tensor."""
        for inputs, targets in batches:
            samples = self.share(num_rows((inputs, targets)))
            mine, theirs = rows((inputs, targets), samples.start, samples.stop)
            yield self.part(mine, theirs, num_rows((inputs, targets)))

    def part(self, inputs: Any, targets: Any, num_global: int) -> Microbatch:
        """This rank's own samples, those of :meth:`share`, of a global batch of ``num_global``.

        Samples are whole; where the layout cuts sequences, this rank's tokens of them are taken. Raises: LayoutError,
        PlanError: samples that are no sequences, or too short.
        """
        num_tokens = 0
        if self.plan.token_axes:
            num_tokens = num_tokens_of(inputs, targets)
            self._shard.check_num_tokens(num_tokens)
        inputs, targets = self._shard.cut_tokens((inputs, targets), num_tokens)
        inputs, targets = on_device((self._narrow(inputs), targets), self.world.device)
        return Microbatch(inputs, targets, self.share(num_global), num_global, num_tokens)

    def _narrow(self, inputs: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: cast_to_compute(tensor, self.plan), inputs)

    # ---- steps

    def step(self, batch: Microbatch, update: torch.optim.Optimizer | None = None) -> Tensor:
        """Forward and backward over this rank's part of one batch; returns the global mean loss.

        Starts from zero gradients and ends with the gradients of the global mean, whole on every rank that holds
        the parameter. Call the optimizer next; or give it as ``update``: then it has stepped, and gradients are gone.
        State that is offloaded is then updated beside the backward, unless something needs all gradients first: a loss
        scale, ``stop_at_nan``, stages, ranks that share slices' gradients. Raises: PlanError: no parameter wants one.

        What a model raises on every rank may be caught: parameters are as they were, but for units that were updated
        beside the backward, and the next step knows nothing of it.
        """
        check_trains(self.plan)
        check_frozen(self._executor.parameters, self.plan.frozen)
        assert batch.num_global is not None, "a share of a global batch"
        check_full(self.model, self.plan, batch.num_global)
        pieces = self.pieces(batch)
        expected = max(batch.num_global * numbers_per_sample(batch.targets, batch.num_tokens), 1)
        self._begin(batch.num_tokens)
        self.rng.step = self.num_steps
        schedule, stage = self._schedule(len(pieces)), self.coord.get("pp", 0)
        for parameter in self.parameters.values():
            parameter.grad = None
        self._sync.begin(self._executor.in_order(schedule.actions[stage]), len(pieces))
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        last = LossOutput(self.loss, scale=scale / expected, widen=self._widens)
        beside = None if self._stops_at_nan or update is None else updates_beside(self.plan, self.offload)
        global_mean = partial(self._mean, last.sums)
        with torch.enable_grad(), updating(beside, update, self._executor, len(pieces), expected, global_mean) as known:
            self._executor.run(schedule, stage, pieces, last)
            for events in self._executor.events:
                events.before_sync()
        mean, count = known[0] if known else global_mean()
        self._sync.finish()
        for events in self._executor.events:
            events.after_sync()
        finish_gradients(
            self.parameters, self._everyone.for_strategy("core"), self.loss_scale,
            expected / count / scale,  # by one, unless some targets do not count
            self.num_steps, stops_at_nan=self._stops_at_nan,
        )  # fmt: skip
        self.num_steps += 1
        if update is not None:
            update.step()
            update.zero_grad()
        return mean

    @property
    def num_skipped(self) -> int:
        """How many steps were left out so far, their gradients not finite: in fp16 alone."""
        return 0 if self.loss_scale is None else self.loss_scale.num_skipped

    def _cut(self, batch: Microbatch, samples: range) -> Microbatch:
        start, stop = samples.start - batch.samples.start, samples.stop - batch.samples.start
        inputs, targets = rows(batch.inputs, start, stop), rows(batch.targets, start, stop)
        return Microbatch(inputs, targets, samples, batch.num_global, batch.num_tokens)

    def _schedule(self, num_microbatches: int) -> Schedule:
        return accumulate(num_microbatches) if self.plan.schedule is None else self.plan.schedule

    @torch.no_grad()
    def evaluate(self, batch: Microbatch) -> Tensor:
        """The global mean loss on one batch, dropping nothing and keeping no gradients.

        In microbatches through a pipeline, in its own order, or where each has its statistics; or else at once.
        """
        apart = self.plan.schedule is not None or self.plan.layout.own_statistics
        shares = microbatch_samples(batch.samples, self.plan.layout.num_microbatches if apart else 1)
        last = LossOutput(self.loss, widen=self._widens)
        self._begin(batch.num_tokens)
        with eval_mode(self.model):
            self._forward([self._cut(batch, samples) for samples in shares], last)
        return self._mean(last.sums)[0]

    @torch.no_grad()
    def predict(self, inputs: Any) -> Any:
        """The model's whole output on inputs that every rank holds, on every rank."""
        num_tokens = num_tokens_of(inputs) if self.plan.token_axes else 0
        self._begin(num_tokens)
        mine = on_device(self._narrow(self._shard.cut_tokens(inputs, num_tokens)), self.world.device)
        with eval_mode(self.model):
            in_stages = self.plan.schedule is not None
            output = self._predict_in_stages(mine, num_tokens) if in_stages else self._predict(mine)
        joined: list[str] = []
        for cut in reversed(self.plan.activations.get(OUTPUT, ())):  # the fastest axis first: its parts are neighbours
            output = self.axes[cut.axis].all_gather(output, cut.dim, self._output_sizes(cut.axis, joined))
            joined.append(cut.axis)
        if self.plan.token_axes:
            return self._shard.join(output, self.axes, self.plan.row_moves.get(OUTPUT, ()))
        # what gathered rows found the same samples on every rank
        return tree_map_only(Tensor, lambda each: each[: num_rows(inputs)], output)

    def _predict(self, inputs: Any) -> Any:
        self._shard.set_uncut(num_rows(inputs))
        with self._executor.during(Action("F", 0)):
            return call_model(self.model, inputs)

    def _begin(self, num_tokens: int) -> None:
        """What comes now has samples of so many tokens, and nothing to do with what came before."""
        for events in self._executor.events:
            events.restart()
        self._shard.set_num_tokens(num_tokens)

    def _predict_in_stages(self, inputs: Any, num_tokens: int) -> Any:
        """The output of the last chunk, on every stage."""
        assert self.plan.schedule is not None, "there are stages"
        whole = Microbatch(inputs, None, range(num_rows(inputs)), None, num_tokens)
        end = CollectedOutput()
        self._forward([whole], end)
        last = self.plan.schedule.stage_of[-1]
        return share_output(self.axes["pp"], end.outputs.get(0), last)

    def _forward(self, pieces: Sequence[Microbatch], last: OutputHandler) -> None:
        """All microbatches forward, and no more."""
        schedule = self._schedule(len(pieces))
        same = schedule.num_microbatches == len(pieces)
        forwards = forward_only(schedule) if same else one_by_one(schedule, len(pieces))
        self._executor.run(forwards, self.coord.get("pp", 0), pieces, last)

    def _output_sizes(self, axis: str, joined: Sequence[str]) -> list[int]:
        """How much of the output's cut dim each member of ``axis`` holds, once ``joined`` are gathered."""

        def held(index: int) -> int:
            coords = ({**self.coord, axis: index, **there} for there in self.plan.mesh.coords(joined))
            return sum(b - a for at in coords for cut in self.plan.slices(at)[OUTPUT] for a, b in cut.ranges)

        return [held(index) for index in range(self.plan.mesh[axis])]

    def _mean(self, sums: Sequence[Tensor]) -> tuple[Tensor, float]:
        device = self.world.device
        total = torch.stack(list(sums)).sum(0) if sums else torch.zeros(2, dtype=torch.float64, device=device)
        if self.plan.loss_axes:
            total = self.axes[joint(self.plan, self.plan.loss_axes)].for_strategy("loss").all_reduce(total)
        if total.is_meta:  # a rehearsal has no values
            return total[0], 1.0
        return mean_of(total[0], float(total[1]))

    # ---- what happens when

    @contextmanager
    def observed(self, events: Events) -> Iterator[None]:
        """Adds a listener to the events of the steps that run inside the block."""
        before = self._executor.events
        self._executor.events = (*before, events)
        try:
            yield
        finally:
            self._executor.events = before

    def rehearse_with(self, batch: Microbatch, values: Sequence[Mapping[str, Any]]) -> None:
        """Readies a stage for steps beside stages that are not there: ``values`` cross between them, by microbatch."""
        work = self._executor.work
        if isinstance(work, Stage):
            work.expect(self.pieces(batch), values)

    def pieces(self, batch: Microbatch) -> list[Microbatch]:
        """The microbatches of this rank's part of a batch."""
        shares = microbatch_samples(batch.samples, self.plan.layout.num_microbatches)
        return [self._cut(batch, samples) for samples in shares]

    def timeline(self, batch: Microbatch) -> Timeline:
        """Takes one step as ``step`` does, and says what every stage of this rank's pipeline did when.

        Time begins when all stages are there. Traffic: beside the step's, one barrier and one gathering of times.

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
        mine = [(*span.action, span.start_s - start_s, span.end_s - start_s) for span in self._executor.spans]
        found = [mine] if stages is None else gather_json(stages, mine)
        spans = (tuple(Span(Action(*each[:3]), *each[3:]) for each in stage) for stage in found)
        return Timeline(f"{self.plan.layout}, measured", tuple(spans))

    def explain(self, path: str) -> str:
        """What one module is under this layout, as text: role and why, parameters, forward stack, what it sends.

        ``path`` is a name of ``model.named_modules()``, "" for the model, or "(loss)". Nothing is sent.

        Raises: PlanError: the model has no such module.

        >>> import shardwright as sw
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> said = sw.launch(lambda world: sw.parallelize(model, "dp2", world).explain("0"), 2, ranks="threads")
        >>> print(said[1])
        '0', Linear, on rank 1 of dp2
        role        copied: no strategy cuts it: every rank computes it whole
        ...
          0.weight: 64 B of gradient summed over dp once, with its unit
          0.bias: 16 B of gradient summed over dp once, with its unit
        """
        return explain_text(explained(self, path))

    def kept(self) -> Iterator[Tensor]:
        """What stays on the rank between steps beside parameters and buffers: wholes that parameters are views of."""
        return (tensor for each in self._applied for tensor in each.kept())

    # ---- the optimizer

    def optimizer(
        self, kind: type[torch.optim.Optimizer], parameters: Any = None, **options: Any
    ) -> torch.optim.Optimizer:
        """A real torch optimizer over this rank's part; groups may be given as ``parameters``, as torch takes them.

        Where the layout offloads state, all ranks call it, and its step goes unit by unit.

        Raises: PlanError: an optimizer that needs whole tensors, or all, where some are cut; tensors that are not among
            ``self.parameters``; on every rank, no room for its state where that is offloaded.
        """
        given = None if parameters is None else list(parameters)
        check_elementwise(kind, options, self.plan, given or ())
        own = [p for p in self.parameters.values() if p.requires_grad]
        own = own or [nn.Parameter(torch.empty(0))]  # a stage that trains nothing: torch wants one
        optimizer = kind(own if given is None else given, **options)
        check_own(optimizer, (*self.parameters.values(), *own), self.plan)
        if self.offload is not None:
            self.offload.attach(optimizer, lambda groups: kind(groups, **options))
        optimizer.register_step_post_hook(lambda *_: self.changed())
        return optimizer

    def changed(self) -> None:
        """Says that parameters at rest have new values: :meth:`optimizer`'s do, and loading; ``step`` asks nobody."""
        for events in self._executor.events:
            events.after_optimizer()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm over the *whole* model is at most ``max_norm``; returns it.

        Each element counts once, however many ranks hold a copy. Traffic: one all-reduce of one number.
        """
        square = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            lies = self.plan.state[name].gradient
            for piece in lies.owned(self.coord, self.plan.mesh):
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
        """Every parameter by name, as a global tensor: copies, on all ranks cut along dim 0 unless told otherwise.

        All ranks call it, and get every name. Traffic: each element that lies elsewhere, once for each copy wanted.
        Raises: PlanError: ranks that are threads. LayoutError: an sbp that does not fit.
        """
        from shardwright.parallelize.global_parameters import (
            to_global_parameters,  # loads DTensor: only when it is used
        )

        return to_global_parameters(self, placement, sbp)

    def load_global_parameters(self, tensors: Mapping[str, GlobalTensor]) -> None:
        """Fills parameters from global tensors, wherever those lie: the way back from :meth:`global_parameters`.

        Raises: PlanError: a name or shape that the run does not have.
        """
        from shardwright.parallelize.global_parameters import from_global_parameters

        from_global_parameters(self, tensors)


def joint(plan: Plan, axes: Iterable[str]) -> str:
    """The name of the axis that joins these."""
    return "+".join(sorted(axes, key=plan.mesh.axes.index))
