"""``Run``: one rank's part of a model under a layout, with the methods that train, evaluate and save the model.

``parallelize`` makes it; scripts, ``verify``, the trainer, checkpoints and the ledger use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from shardwright.comm.axis import Axis
from shardwright.comm.world import World
from shardwright.errors import PlanError
from shardwright.parallelize.averages import Averages, RunAverages
from shardwright.parallelize.batch_copies import BatchCopy
from shardwright.parallelize.batch_parts import BatchParts
from shardwright.parallelize.batches import Targets, as_tensors, check_part, check_takes_inputs
from shardwright.parallelize.explain import explain_text, explained
from shardwright.parallelize.filling import LoadedWeights, fill_parts, fill_whole
from shardwright.parallelize.first_batch import FirstBatchChecker
from shardwright.parallelize.generating import generate
from shardwright.parallelize.gradients import add_up, clip_norm, mean_of_batches
from shardwright.parallelize.loss_counters import LossBuffers
from shardwright.parallelize.loss_reads import check_reads
from shardwright.parallelize.measured_timeline import busy_seconds, measured_timeline
from shardwright.parallelize.no_samples import NoSampleChecker
from shardwright.parallelize.optimizer_check import check_elementwise
from shardwright.parallelize.optimizer_groups import check_groups, groups_of
from shardwright.parallelize.planning import on_device
from shardwright.parallelize.rank_state import RankState
from shardwright.parallelize.run_misuse import is_fixed, refuse_call, refuse_missing, refuse_new
from shardwright.parallelize.step import TrainStep, inputs_in, pieces_of
from shardwright.parallelize.step_checker import StepChecker
from shardwright.parallelize.step_checks import check_own
from shardwright.parallelize.step_guard import StepGuard
from shardwright.parallelize.whole_state import (
    clear_both,
    keep_parts_apart,
    part_of_state,
    refuse_loads,
    refuse_parts,
    warn_of_extra_state,
    whole_state,
)
from shardwright.plan.plan import Job, Plan
from shardwright.rng import RngTracker
from shardwright.runtime.applied import AppliedStrategy
from shardwright.runtime.compiled_blocks import step_uncompiled
from shardwright.runtime.executor import Executor, Microbatch
from shardwright.runtime.gradient_sync import GradientSync
from shardwright.runtime.mixed_precision import LossScale
from shardwright.runtime.timeline import Timeline
from shardwright.strategies.pipeline.pipeline_stage import PipelineStage

if TYPE_CHECKING:
    from shardwright.global_tensor.placement import Placement
    from shardwright.global_tensor.sbp import Sbp
    from shardwright.global_tensor.tensor import GlobalTensor


def check_run(run: Any, line: str) -> None:
    """Raises PlanError if ``run``, an argument of a user's, is not a run; ``line`` is the line to write."""
    if not isinstance(run, Run):
        kind = f"{type(run).__module__}.{type(run).__name__}".removeprefix("builtins.")
        raise PlanError("the run is missing", given=kind, allowed="what sw.parallelize returned", fix=f"write {line}")


class Run(RankState):
    """One rank's part of a model under a layout, made by ``parallelize``: it trains, evaluates, predicts and saves.

    Attributes:
        model: the plain model's modules with this rank's part of each parameter, under the plain names.
        parameters: the tensors that the optimizer updates, by plain name: the model's own parameters, or the stored
            shards or master weights where a strategy keeps such.
        loss: the loss on this rank's device; it returns (sum, count).
        plan: where every tensor lies, and what is done at each layer.
        world, coord: the ranks, and this rank's index on each axis of the mesh.
        axes: the axes of the mesh by name, the axis "world" of all ranks, and joint ones such as "dp+tp".
        offload: the host or disk storage of the optimizer's state; None unless the layout offloads it.
        num_steps: how many steps were taken, skipped ones included.
        rng: the RNG tracker of dropout.
        averages: the averages that :meth:`average` has made.
        weights_read: the files and folders from which ``load_weights`` has filled the model.
        loss_buffers: the buffers of the loss as they were before the first step; a save warns of those that changed.
    """

    def __init__(
        self, job: Job, plan: Plan, world: World, axes: Mapping[str, Axis], executor: Executor, sync: GradientSync,
        applied: Sequence[AppliedStrategy] = (), stop_at_nan: bool = False, plain: nn.Module | None = None,
        check_every: int = 0, first_batch: FirstBatchChecker | None = None,
    ) -> None:  # fmt: skip
        super().__init__(job, plan, world, axes, executor, applied)
        self.rng: RngTracker = executor.rng
        self.averages = RunAverages()
        self.weights_read: list[Path] = []
        self.loss_buffers = LossBuffers(self.loss)
        self._everyone, self._first_batch = axes["world"], first_batch
        compares_batches = bool(check_every and plan.row_axes | plan.token_axes)
        self._parts = BatchParts(job.model, job.loss, plan, world, executor.batch_shard, compares=compares_batches)
        num_shares = prod(plan.mesh[axis] for axis in plan.row_axes)  # beyond these, ranks hold the same samples
        are_threads = world.local and world.size > 1 and world.device.type != "meta"
        copies = BatchCopy(is_shared=are_threads and world.size > num_shares, are_threads=are_threads)
        self._step = TrainStep(
            self.loss, plan, self.coord, axes, self.parameters, executor, sync, self.offload, stop_at_nan,
            NoSampleChecker(plain, plan), self._check_reads, copies,
        )  # fmt: skip
        models = [self.model] if plain is None else [self.model, plain]
        are_compared = bool(check_every) and world.size > 1
        self._guard = StepGuard(plan, self.parameters, models, WeakMethod(self._watch), are_compared=are_compared)
        watches_loss = world.rank == 0 and plan.layout.precision != "fp16" and not stop_at_nan
        self._checker = StepChecker(self._guard, applied, check_every, watches_loss=watches_loss)
        clear_both(self.model, self.parameters)
        refuse_loads(self.model, plan, self.parameters, self.coord)
        refuse_parts(self.model, plan, self.coord)

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if is_fixed(name) and name in vars(self):
                refuse_new(name, value)
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> Any:
            refuse_missing(self, name)

        def __call__(self, *inputs: Any, **named: Any) -> Any:  # noqa: D102  # it only raises
            refuse_call()

    @property
    def draws(self) -> RngTracker:
        """The RNG tracker, under the former name of this attribute; new code reads ``rng``."""
        return self.rng

    # ---- batches

    def share(self, num_samples: int) -> range:
        """Returns the range of this rank's samples in a global batch of ``num_samples``. Only these need be loaded."""
        return self._parts.share(num_samples)

    def shard(self, batches: Iterable[Any], targets: Targets = None) -> Iterator[Microbatch]:
        """Yields this rank's part of each global batch, ready for :meth:`step`.

        ``batches`` is any iterable, such as a ``DataLoader`` that gives the same batches on every rank. By default a
        batch is a pair (inputs, targets); inputs in a tuple are arguments of the model, and those in a dict named ones.
        For other batches, ``targets`` says which part the targets are: the name of a key or field ("labels"), the other
        keys or fields being arguments of the model by their names; the place in a tuple (-1); or a function that
        returns (inputs, targets), such as ``lambda batch: (batch["x"], batch["y"])``. With ``loss=sw.ModelLoss()`` a
        batch is a mapping whose labels the model itself reads, and ``targets`` is left out.

        On an accelerator each part is copied there while the step before it computes. So one batch more is read than
        was yielded: code that notes a position in the data must count that, and no batch may depend on the step before
        it.

        The yielded parts are for :meth:`step`, :meth:`accumulate` and :meth:`evaluate`. Unpacking one as a pair is a
        PlanError: write ``for batch in run.shard(loader): loss = run.step(batch)``.

        Shapes: dim 0 of every tensor is the samples of the global batch, the same number in all.
        Raises: LayoutError: the tensors have different numbers of samples; PlanError: a batch has no such targets, or
            the loader has split the samples between ranks already; and as :meth:`part`.

        >>> import shardwright as sw
        >>> batch = {"input": torch.ones(4, 4), "labels": torch.zeros(4, dtype=torch.int64)}
        >>> def work(world):
        ...     run = sw.parallelize(nn.Linear(4, 3), "single", world)
        ...     return [list(part.inputs) for part in run.shard([batch], targets="labels")]
        >>> sw.launch(work, 1, ranks="threads")
        [[['input']]]
        """
        return self._parts.of_batches(batches, targets)

    def part(self, inputs: Any, targets: Any = None, num_global: int | None = None) -> Microbatch:
        """Returns the batch for :meth:`step` from this rank's samples of a global batch of ``num_global`` samples.

        Use it where each rank loads only its own samples (:meth:`share`), else :meth:`shard`. Inputs and targets are
        moved to the rank's device, and inputs are cast to the compute dtype. If the layout cuts sequences, only this
        rank's tokens of each sample are kept.

        Shapes: dim 0 of every tensor is the samples of :meth:`share`; dim 1, if sequences are cut, all their tokens.
        Raises: LayoutError: a tensor has more or fewer samples than :meth:`share`, or the layout cuts sequences and the
            samples are not sequences; PlanError: an argument is missing, or ``num_global`` is no number, the sequences
            are too short, or a value is an array or an object with tensors instead of a tensor, or contains a tensor
            without dims.
        """
        return self._parts.of_samples(inputs, targets, num_global)

    # ---- steps

    def step(self, batch: Microbatch, update: torch.optim.Optimizer | None = None) -> Tensor:
        """Runs forward and backward over this rank's part of one batch; returns the global mean loss, a scalar.

        All ranks call it. Gradients start at zero and end as those of the global mean, complete on every rank that
        holds the parameter, in ``parameters[name].grad``. Step the optimizer next, or pass it as ``update``: then the
        optimizer is stepped and its gradients are cleared here, and offloaded state is updated during the backward,
        param group by param group. With a loss scale, ``stop_at_nan``, pipeline stages, or gradients of shards that are
        still to be summed, offloaded state is updated after the backward instead.

        In fp16, a step whose gradients overflow is skipped: its gradients are None, so that an optimizer changes
        nothing, and ``num_skipped`` counts it.

        An error that the model raises on every rank may be caught: parameters are unchanged, except for param groups
        that were already updated, and the next step starts afresh.

        Traffic: what the strategies' ``traffic`` states, one all-reduce of (sum, count) over the axes that cut the
            loss, in fp16 or with ``stop_at_nan`` the check that all gradients are finite, and in each step in
            which ranks are compared (``check_every`` of :func:`parallelize`) 8 bytes from each rank.
        Raises: PlanError: ``batch`` is not from :meth:`shard` or :meth:`part`; ranks differ in something that must be
            equal; no parameter requires a gradient; since the model was laid out, a parameter was frozen or unfrozen,
            or a parameter or submodule was replaced or removed; a microbatch without samples needs statistics of its
            own; or, with ``stop_at_nan`` or at the least fp16 loss scale, a gradient is not finite. LayoutError or
            PlanError, in the first step of a run that was given no example: the model's code cannot have the layout.
        """
        check_part("step", batch, update)
        self._guard.before_step()
        mean, _ = self._take_step(batch, update)
        self._guard.after_step()
        if update is not None:
            update.step()
            update.zero_grad()
        return mean

    def accumulate(self, batches: Iterable[Microbatch]) -> Tensor:
        """Takes one step over several batches, accumulating gradients; returns the mean loss over all targets.

        All ranks call it. Gradients are those of that mean: call ``accumulate`` in place of :meth:`step`, then the
        optimizer's step. Each batch counts in ``num_steps``. ``mb4`` in a layout cuts one batch instead, and sums
        gradients over ranks once. If fp16 skips the step for one batch, it is skipped for all.

        Traffic: that of a step for each batch. Raises: PlanError: no batches; and as :meth:`step`.

        >>> import shardwright as sw
        >>> model, batch = nn.Linear(4, 3), (torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))
        >>> def work(world):
        ...     run = sw.parallelize(model, "dp2", world)
        ...     return run.accumulate(run.shard([batch, batch])).shape, run.num_steps
        >>> sw.launch(work, 2, ranks="threads")
        [(torch.Size([]), 2), (torch.Size([]), 2)]
        """

        def take_step(batch: Microbatch) -> tuple[Tensor, Tensor]:
            check_part("accumulate", batch)
            return self._take_step(batch)

        self._guard.before_step()
        num_skipped = self.num_skipped
        mean = add_up(self.parameters, batches, take_step)
        if self.num_skipped > num_skipped:
            for parameter in self.parameters.values():
                parameter.grad = None
        self._guard.after_step()
        return mean

    def _take_step(self, batch: Microbatch, update: torch.optim.Optimizer | None = None) -> tuple[Tensor, Tensor]:
        if self._first_batch is not None:
            self._first_batch.check(batch.inputs, self.model)
        self._checker.before_step(self, batch)
        mean_and_count = self._step.take(batch, update, self.num_steps)
        self._guard.last_loss = mean_and_count[0], self._guard.num_updates
        self.num_steps += 1
        return mean_and_count

    @property
    def loss_scale(self) -> LossScale | None:
        """The fp16 loss scale; None in other precisions."""
        return self._step.loss_scale

    @property
    def num_skipped(self) -> int:
        """The number of fp16 steps skipped so far because a gradient was not finite; 0 in other precisions."""
        return 0 if self.loss_scale is None else self.loss_scale.num_skipped

    def evaluate(self, batch: Microbatch) -> Tensor:
        """Returns the global mean loss on one batch, a scalar, in eval mode and without gradients.

        All ranks call it. The batch runs through the model at once or, with a pipeline or the option
        ``own-statistics``, in microbatches.

        Traffic: that of the forwards, and one all-reduce over the axes that cut the loss, of (sum, count) and, if the
            batch is from :meth:`shard` and ranks are compared, two numbers that tell global batches apart.
        Raises: PlanError: ``batch`` is not from :meth:`shard` or :meth:`part`, or ranks have different global batches.
        """
        check_part("evaluate", batch)
        return self._step.evaluate(batch)[0]

    def evaluate_all(self, batches: Iterable[Microbatch]) -> Tensor:
        """Returns the global mean loss over all targets of several batches, a scalar, as :meth:`evaluate` for one.

        Each target counts the same, whichever batch it is in; targets that the loss ignores do not count. All ranks
        call it. Traffic: that of :meth:`evaluate` for each batch.
        Raises: PlanError: there are no batches, or one is not from :meth:`shard` or :meth:`part`.

        >>> import shardwright as sw
        >>> model, x = nn.Linear(4, 3), torch.ones(6, 4)
        >>> targets = torch.tensor([0, 1, 2, 0, 1, -100])
        >>> def work(world):
        ...     run = sw.parallelize(model, "dp2", world, loss=sw.CrossEntropy())
        ...     return run.evaluate_all(run.shard([(x[:4], targets[:4]), (x[4:], targets[4:])])).item()
        >>> found = sw.launch(work, 2, ranks="threads")
        >>> abs(found[0] - nn.functional.cross_entropy(model(x), targets).item()) < 1e-5
        True
        """
        means = []
        for batch in batches:
            check_part("evaluate_all", batch)
            means.append(self._step.evaluate(batch))
        return mean_of_batches(means)

    def predict(self, inputs: Any) -> Any:
        """Returns the model's output for all samples, on every rank, in eval mode and without gradients.

        All ranks call it. Each computes its share of the samples, and they gather their outputs. Every rank computes
        all samples if there are fewer samples than shares, under ``own-statistics``, and from the first output on that
        has anything but tensors of samples, flags and texts: a number, a cache, or a tensor whose dim 0 is not the
        samples.

        Leave labels out of ``inputs``, unless the model's forward takes them. Tensors without dims in its output, such
        as the loss that a model of transformers computes from labels, become None: :meth:`evaluate` returns the loss.

        Shapes: ``inputs`` are all samples, equal on every rank; the output has the plain model's shapes. Under ``bf16``
            and ``fp16`` it has that dtype, as the model computed it: write ``.float()`` before sums or metrics of it.
        Traffic: that of a forward; one all-gather over each axis that cuts the output, samples included, and if any
            axis cuts samples a gather of text; with pipeline stages, the output is sent from the last stage to the
            others.
        Raises: LayoutError: the layout cuts sequences and the inputs are not sequences, or the inputs' tensors have
            different numbers of samples; PlanError: ranks were given different inputs, the model's forward does not
            take the inputs, or one is an array or an object with tensors instead of a tensor, or contains a tensor
            without dims.

        >>> import shardwright as sw
        >>> model = nn.Linear(2, 1)
        >>> def work(world):
        ...     run, calls = sw.parallelize(model, "dp2", world, loss=sw.MeanSquaredError()), []
        ...     run.model.register_forward_hook(lambda *call: calls.append(len(call[1][0])))
        ...     return run.predict(torch.ones(5, 2)).shape, calls
        >>> sw.launch(work, 2, ranks="threads")
        [(torch.Size([5, 1]), [3]), (torch.Size([5, 1]), [2])]
        """
        check_takes_inputs(self.model, inputs)
        return self._step.predict(as_tensors(inputs))

    def generate(self, inputs: Any, *, seed: int = 0, **options: Any) -> Any:
        """Calls the plain model's own method ``generate``, and returns its result on every rank.

        All ranks call it with the same arguments. ``options`` are passed on, such as ``max_new_tokens=20`` to a model
        of transformers. The random numbers that ``generate`` draws itself are those that follow
        ``torch.manual_seed(seed)``, on every rank the same; those of the forward are the library's, as in training.

        With pipeline stages, and where the ranks of one model copy hold rows of the batch (grids, ``/sp``), each call
        that ``generate`` makes of the model is a :meth:`predict`, and models of transformers keep no keys and values
        (``use_cache=False``). A call of a module inside is a :meth:`predict` too if the model's forward passes the same
        arguments to it and returns its output, as in models of peft; to find that out, the code of that forward runs
        once more for each call, on copies and without modules. An encoder that ``get_encoder`` returns runs once, in a
        prediction of one token. Under other layouts each rank runs ``generate`` on its own part of the model, with
        caches.

        Shapes: those of the model's ``generate``; ``inputs`` are all samples.
        Traffic: that of a forward for each new token, and two all-reduces of two numbers.
        Raises: PlanError: the model has no ``generate``, its ``generate`` calls other modules inside where a rank does
            not hold them, or ranks differ in inputs or results.

        >>> import torch, shardwright as sw
        >>> class Adds(nn.Linear):
        ...     def generate(self, x):
        ...         return torch.cat((x, self(x)), 1)
        >>> def work(world):
        ...     with torch.device("meta"):
        ...         plain = Adds(2, 2)
        ...     return sw.parallelize(plain, "dp2", world).generate(torch.ones(3, 2)).shape
        >>> sw.launch(work, 2, ranks="threads")
        [torch.Size([3, 4]), torch.Size([3, 4])]
        """
        predict = self.predict if self._executor.refuses_calls else None
        local_inputs, others = (
            on_device(inputs_in(as_tensors(tree), self.plan), self.world.device) for tree in (inputs, options)
        )
        by_threads = self.world.local and self.world.size > 1
        guarded = bool(self.plan.allowed_callers)
        return generate(
            self.model, predict, self._everyone, local_inputs, seed, others, guarded=guarded, by_threads=by_threads
        )

    # ---- observing a step

    def rehearse_with(
        self, batch: Microbatch, values: Sequence[Mapping[str, Any]], *, first_step: bool = True
    ) -> None:  # fmt: skip
        """Prepares a pipeline stage for a step on ``batch`` on the meta device, in which no other stage runs.

        ``values`` holds, for each microbatch, the tensors that the stage would receive, by name, on the meta device.
        In a first step, stages also tell each other shapes and dtypes; without ``first_step`` it is a later one.
        Without pipeline stages nothing is done.
        """
        work = self._executor.work
        if isinstance(work, PipelineStage):
            work.expect(self.pieces(batch), values, announced=not first_step)

    def pieces(self, batch: Microbatch, num_microbatches: int | None = None) -> list[Microbatch]:
        """Returns this rank's part of a batch split into microbatches, by default as many as the layout has.

        If there are fewer samples, some microbatches are empty.
        """
        return pieces_of(batch, num_microbatches or self.plan.layout.num_microbatches)

    def timeline(self, batch: Microbatch) -> Timeline:
        """Takes one step like :meth:`step`, without an optimizer, and returns the times of its forwards and backwards.

        All ranks call it. The times are the start and end of every action (forward or backward of a microbatch) on each
        stage of this rank's pipeline, in seconds after a barrier of the stages.

        Traffic: that of the step; with pipeline stages also the barrier, and one gather of the times.

        >>> import shardwright as sw
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> def work(world):
        ...     run = sw.parallelize(model, "pp2 mb2", world)
        ...     (batch,) = run.shard([(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))])
        ...     return [" ".join(str(span.action) for span in stage) for stage in run.timeline(batch).spans]
        >>> sw.launch(work, 2, ranks="threads")[0]
        ['0F0 0F1 0B0 0B1', '1F0 1B0 1F1 1B1']
        """
        timeline = measured_timeline(self, self._executor, partial(self.step, batch))
        self._guard.num_waiting = 0  # no error if no optimizer uses the gradients: the step may be for its times alone
        return timeline

    @contextmanager
    def profile(self, path: str | Path) -> Iterator[None]:
        """Returns a context in which steps are profiled by ``torch.profiler``; rank 0 writes one trace of all ranks.

        All ranks enter it together. The trace at ``path`` is in Chrome's format, which Perfetto (ui.perfetto.dev) and
        chrome://tracing open: a process for each rank, with ranges named "step", "action" (a forward or backward of a
        microbatch), "layer", "call" (a collective or message) and "wait", over torch's own operators and kernels. The
        folder of ``path`` is one that all ranks reach. A run that is not profiled has no hooks for it.

        Traffic: five barriers. Raises: PlanError: the folder does not exist.
        """
        from shardwright.parallelize.profiling import profiled  # only when it is used

        with profiled(self, self._step, Path(path)):
            yield

    def busy_seconds(self) -> tuple[float, float]:
        """Returns the seconds of this rank's forwards and backwards in the last step, and from first start to last end.

        The first number adds up their durations; the second also has the waiting between them. Both are seconds of the
        host's clock, and 0 before the first step. Traffic: none.
        """
        return busy_seconds(self._executor.spans)

    def explain(self, path: str) -> str:
        """Returns text on how one module is parallelized and why, with its parameters, forward stack and traffic.

        ``path`` is a name of ``model.named_modules()``, "" for the model, or "(loss)".

        Traffic: none.
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

    # ---- the optimizer

    def optimizer(
        self, kind: type[torch.optim.Optimizer], parameters: Any = None, **options: Any
    ) -> torch.optim.Optimizer:
        """Returns an optimizer of the torch class ``kind`` over this rank's parameters, made with ``options``.

        ``parameters`` may be tensors or groups of :attr:`parameters`, as torch takes them; by default all parameters
        that require gradients. It may also be a function: ``parameters(name, shape)`` returns the options of a
        parameter by its name and its shape in the plain model, or None to leave the parameter out; a rank's own tensors
        may be slices of other shapes. All ranks must call this method if the layout offloads state, or if there are
        pipeline stages and ``parameters`` are tensors or groups. With offloaded state, the optimizer's ``step`` updates
        one param group after the other.

        Traffic: in each of these two cases one gather of text, else none.
        Raises: PlanError: the optimizer does not update each element alone and the layout shards or offloads a tensor;
            a tensor is not among ``self.parameters``; groups were chosen by the dims of slices; a function leaves out
            every parameter, or returns something else than a mapping or None; or, on every rank, offloaded state does
            not fit. What the constructor of ``kind`` raises is raised too.

        >>> import shardwright as sw
        >>> model = nn.Sequential(nn.Linear(4, 4))
        >>> def work(world):
        ...     run = sw.parallelize(model, "dp2/zero3", world)
        ...     decayed = lambda name, shape: {"weight_decay": 0.1 if len(shape) > 1 else 0.0}
        ...     optimizer = run.optimizer(torch.optim.AdamW, parameters=decayed, lr=0.1)
        ...     return [group["weight_decay"] for group in optimizer.param_groups]
        >>> sw.launch(work, 2, ranks="threads")[0]
        [0.1, 0.0]
        """
        by_shape = callable(parameters)
        if callable(parameters):
            parameters = groups_of(parameters, self.parameters, self.plan)
        parameter_list = None if parameters is None else list(parameters)
        check_elementwise(kind, options, self.plan, parameter_list or ())
        # read before the optimizer is made: torch adds to the groups the options that they lack
        named = all(isinstance(group, dict) and "weight_decay" in group for group in parameter_list or ())
        own = [p for p in self.parameters.values() if p.requires_grad]
        own = own or [nn.Parameter(torch.empty(0))]  # a stage that trains nothing: torch's optimizers need a parameter
        optimizer = kind(own if parameter_list is None else parameter_list, **options)
        check_own(optimizer, (*self.parameters.values(), *own), self.plan)
        if parameter_list is not None and not by_shape and self.world.device.type != "meta":
            everyone = self._everyone.for_strategy("core")
            check_groups(optimizer, self.parameters, self.plan, everyone, states_decay=named)
        self._guard.accept(optimizer, of_all=parameter_list is None or by_shape)
        if self.offload is not None:
            self.offload.attach(optimizer, lambda groups: kind(groups, **options))
        if self.plan.layout.compile is not None:
            step_uncompiled(optimizer)
        return optimizer

    def _check_reads(self, leaves: Collection[Tensor], used: Collection[Tensor]) -> None:
        """Raises PlanError if a loss reads parameters of the plain model, or a rank's part of a parameter.

        ``leaves`` are the parameters that the loss passes gradients to, and ``used`` those whose values it takes.
        """
        leaves = [*leaves, *filter(self._guard.is_plain, used)]
        check_reads(leaves, self.model, self.parameters, self._guard.is_plain, self.plan)

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimizer's steps check and renew the parameters' copies, and its ``state_dict`` name its rank."""
        optimizer.register_step_pre_hook(lambda *_: self._check_written())
        optimizer.register_step_post_hook(lambda *_: self.changed())
        keep_parts_apart(optimizer, self.parameters, self.plan, self.coord)

    def average(
        self, optimizer: torch.optim.Optimizer, decay: float = 0.999, *, from_initial: bool = False
    ) -> Averages:
        """Returns exponential moving averages of the parameters, updated after each step of ``optimizer``.

        Each rank averages the parameters that it stores, under every layout. An average starts with the parameter's
        value after the first update, as in torch's ``AveragedModel``; with ``from_initial``, with the value before that
        update (initialized or loaded), as in timm's ``ModelEma``. The averages are part of the optimizer's state, so
        :func:`~shardwright.save` and :func:`~shardwright.load` keep them, under another layout too. Inside of ``with
        averages.applied():`` the parameters are the averages, to evaluate, predict or take a ``state_dict``. A second
        call for the same optimizer, such as that of a notebook's cell that runs again, returns the same averages.

        Traffic: none. Raises: PlanError: ``decay`` is not from 0 to below 1, the optimizer has averages with another
        decay or start, it is not over the run's parameters, or the layout offloads their state.

        >>> import shardwright as sw
        >>> model = nn.Linear(1, 1, bias=False)
        >>> def work(world):
        ...     run = sw.parallelize(model, "dp2/zero3", world, loss=sw.MeanSquaredError())
        ...     optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        ...     averages = run.average(optimizer, decay=0.5)
        ...     for batch in run.shard([(torch.ones(2, 1), torch.ones(2, 1))] * 3):
        ...         run.step(batch, update=optimizer)
        ...     with averages.applied():
        ...         averaged = run.state_dict()["weight"]
        ...     return (run.state_dict()["weight"] - averaged).abs().item() > 0
        >>> sw.launch(work, 2, ranks="threads")
        [True, True]
        """
        return self.averages.get(self, optimizer, decay, from_initial=from_initial)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales gradients so that their 2-norm over the whole model is at most ``max_norm``; returns the norm before.

        Each element counts once, however many ranks hold a copy. All ranks call it. A norm that is NaN scales nothing.
        Traffic: one all-reduce of one float64.
        """
        everyone = self._everyone.for_strategy("clip")
        return clip_norm(self.parameters, self.plan, self.coord, everyone, max_norm)

    # ---- the state

    def state_dict(self, *, full: bool = True) -> dict[str, Tensor]:
        """Returns the model's parameters and persistent buffers by their plain names, as a module's ``state_dict``.

        With ``full``, all ranks call it, and each gets copies of the whole tensors in host memory, which the plain
        model can load. Without, a rank gets the parts that it stores, which are not copied. Master weights of ``bf16``
        and ``fp16`` stay fp32.

        Traffic: with ``full`` a gather of names and shapes as text, and each element once, in one all-gather of each
            tensor; else none.

        >>> import shardwright as sw
        >>> model = nn.Linear(4, 2, bias=False)
        >>> def work(world):
        ...     run = sw.parallelize(model, "dp2/zero3", world)
        ...     return [run.state_dict(full=full)["weight"].shape for full in (True, False)]
        >>> sw.launch(work, 2, ranks="threads")[1]
        [torch.Size([2, 4]), torch.Size([4])]
        """
        if self.world.rank == 0:
            warn_of_extra_state(self.model)
        return whole_state(self) if full else part_of_state(self)

    def load_state_dict(
        self, state: Mapping[str, Any], *, full: bool = True, strict: bool = True, from_rank: int | None = None
    ) -> LoadedWeights:
        """Writes a state dict into the parameters and persistent buffers, master weights and ZeRO's shards included.

        All ranks call it. With ``full``, ``state`` has whole tensors by their plain names, as the plain model's
        ``state_dict`` or :meth:`state_dict` returns them: on every rank, or on ``from_rank`` alone, which sends one
        tensor after the other; the ``state`` of other ranks is not read. Without ``full`` it has this rank's own parts,
        as ``state_dict(full=False)`` of the same layout returns them. With ``strict``, names must be those of the
        model; without, the tensors whose names fit are loaded. State of optimizers stays as it is.

        Returns the names that were loaded, those that were missing and those that the model does not have.

        Traffic: gathers of names and shapes as text, if ``full``, and of error texts, and one all-reduce of two
            numbers; with ``from_rank`` one broadcast of each tensor.
        Raises: CheckpointError, on every rank: names, shapes or kinds of dtypes are not the model's, or differ between
            ranks. Nothing is changed then. PlanError: ``from_rank`` without ``full``.

        >>> import shardwright as sw
        >>> model = nn.Linear(4, 2)
        >>> def work(world):
        ...     run = sw.parallelize(model, "dp2/zero3", world)
        ...     run.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.arange(2)}, strict=False)
        >>> sw.launch(work, 2, ranks="threads")
        Traceback (most recent call last):
        shardwright.errors.CheckpointError: the weights of the state dict do not fit the model
          given:   'bias' is torch.int64, and the model's torch.float32
          ...
        """
        if not full and from_rank is not None:
            raise PlanError(
                "the parts of a rank are loaded on that rank",
                given=f"full=False, from_rank={from_rank}",
                allowed="from_rank with full=True, whose whole tensors one rank can send",
                fix="leave out from_rank, or give the whole state dict on that rank and leave out full=False",
            )
        return (
            fill_whole(self, state, strict=strict, from_rank=from_rank)
            if full
            else fill_parts(self, state, strict=strict)
        )

    def stop_requested(self) -> bool:
        """Returns True on every rank once any of them was told to stop: then save, and leave the loop.

        All ranks call it, after the same steps. From its first call until the ranks' work ends, SIGINT (Ctrl-C),
        SIGTERM and SIGHUP no longer end the run, and SIGUSR1 has no effect; ``launch`` returns as usual. Ranks that are
        processes are killed if they have not ended ``grace_s`` seconds after the signal.

        Traffic: an all-reduce of a byte.

        >>> from shardwright import launch, parallelize
        >>> def work(world, model):
        ...     run = parallelize(model, "dp2", world)
        ...     before = run.stop_requested()
        ...     if world.rank == 1:
        ...         world.stop.request()                # what the signal does
        ...     return before, run.stop_requested()
        >>> launch(work, 2, torch.nn.Linear(2, 2), ranks="threads")
        [(False, True), (False, True)]
        """
        self.world.stop.follow_signals()
        here = torch.tensor([self.world.stop.requested], dtype=torch.uint8, device=self.world.device)
        return bool(self.axes["world"].for_strategy("progress").all_reduce(here, "max"))

    def wait_saves(self) -> None:
        """Waits until all saves begun by ``save(..., wait=False)`` are complete. All ranks call it.

        Traffic: that of ``save``.
        Raises: CheckpointError, on every rank: a checkpoint could not be written.
        """
        self.world.wait_pending()

    # ---- the parameters as global tensors

    def global_parameters(
        self, placement: Placement | None = None, sbp: Sbp | Sequence[Sbp] | None = None
    ) -> dict[str, GlobalTensor]:
        """Returns copies of all parameters as global tensors, by name; all ranks call it and get every name.

        The tensors have the placement and sbp given. By default they are on all ranks and cut along dim 0.

        Traffic: a gather of dtypes as text, and each element that a rank needs and does not hold.
        Raises: PlanError: ranks are threads; LayoutError: the sbp does not fit the placement or a parameter.
        """
        from shardwright.parallelize import global_parameters  # loads DTensor: only when it is used

        return global_parameters.to_global_parameters(self, placement, sbp)

    def load_global_parameters(self, tensors: Mapping[str, GlobalTensor]) -> None:
        """Writes the values of global tensors, of any placement and sbp, into the parameters of the same names.

        All ranks call it. Other parameters keep their values. It is the inverse of :meth:`global_parameters`.

        Traffic: a gather of dtypes as text, and each element that a rank stores and whose value it does not hold.
        Raises: PlanError: ranks are threads, a value is not a global tensor or is the gathered copy of a view whose
            base was written to since, or the run has no parameter of that name and shape.
        """
        from shardwright.parallelize import global_parameters

        global_parameters.from_global_parameters(self, tensors)
