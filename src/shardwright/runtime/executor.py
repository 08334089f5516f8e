"""The executor: runs a schedule's actions on this rank's part of the model, and calls the listeners of each event.

A rank's part of the model is a :class:`ModelPart`: chunks that receive a microbatch or the activations of another
stage, and compute the loss or send to other stages. Without a pipeline it is one chunk, the whole model. One step, with
its events in the order in which they fire, and their listeners::

    restart                                  ZeRO, master weights, tensor parallelism: drop what a failed step left
    for each action a of the schedule:       F, B, or a backward in two parts, I (inputs) and W (weights)
        before_action(a)                     the memory ledger, the planner's rehearsals
        during(a) opens                      ZeRO: unshards the param groups of the chunk; tensor parallelism on shards:
                                             whether this is a training step; profiles
          F: forward of one microbatch
          B: backward of one microbatch; W: the weight gradients that its I has deferred
             after_backward(m)               tensor parallelism: waits for weight gradients still under way
             after_weight_gradients(g, m)    ZeRO, gradient sync: start to sum the group; masters: widen its gradients
        during(a) closes                     ZeRO: starts the remaining sums, reshards the param groups
        after_action(a)                      tensor parallelism: ends prefetches; offload: mean loss; the ledger
    before_sync                              ZeRO: waits for its sums; the planner's rehearsals
    (the run waits for the sums of gradient sync)
    after_sync                               master weights: take over the gradients; ZeRO: reshards all
    (the optimizer steps)
    after_optimizer                          ZeRO: unsharded parameters are stale; masters: round to the compute dtype

``after_weight_gradients(g, m)`` fires during a backward as soon as autograd has accumulated the last gradient of the
param group, so that sums overlap with the rest of the backward. Groups that this backward did not reach follow after
``after_backward``, and so do all groups of an action W.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright.analysis.calls.autograd_graph import leaves_behind
from shardwright.analysis.calls.draw_calls import RefusesRandomNumbers
from shardwright.analysis.calls.reentrant_checkpoints import without_reentry
from shardwright.analysis.objects.marked_inputs import hint_of_samples, unmarked
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.axes import mesh_axes
from shardwright.devices import Moment
from shardwright.errors import ExplainedError, PlanError
from shardwright.models.losses import check_count, mean_of, sum_and_count
from shardwright.operators.split_backward import DeferredGradients
from shardwright.plan.batch_shard import BatchShard
from shardwright.plan.param_groups import ParamGroup, held_param_groups
from shardwright.plan.schedule import Action, Schedule
from shardwright.rng import RngTracker
from shardwright.runtime.buffer_writes import BufferWrites
from shardwright.runtime.timeline import Span
from shardwright.sharding.tensor_shard import tag, tagged


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """A rank's inputs and targets of one microbatch, or of a batch before it is split.

    It is no pair: unpacking or indexing it raises a PlanError that says what to write.

    ``samples`` are the indices of its samples in the global batch. ``num_global`` is the number of samples of the
    global batch, None if every rank holds all samples. ``num_tokens`` is the number of tokens of each sample on all
    ranks together if sequences are sharded, else 0. ``of_global`` are some elements of the global batch, by which ranks
    find out whether their global batches have another order; it may be empty.
    """

    inputs: Any
    targets: Any
    samples: range
    num_global: int | None
    num_tokens: int = 0
    of_global: tuple[Tensor, ...] = ()

    if not TYPE_CHECKING:

        def __iter__(self) -> Any:
            raise self._no_pair("unpacked, as in for inputs, targets in run.shard(loader)")

        def __getitem__(self, key: Any) -> Any:
            raise self._no_pair(f"batch[{key!r}]")

        def _no_pair(self, given: str) -> PlanError:
            named = (
                f"batch.inputs[{next(iter(self.inputs), 'x')!r}]"
                if isinstance(self.inputs, Mapping)
                else "batch.inputs"
            )
            return PlanError(
                "what run.shard yields is this rank's part of a batch, and no pair",
                given=given,
                allowed=f"run.step(batch), run.accumulate, run.evaluate; {named} and batch.targets are this rank's",
                fix="write for batch in run.shard(loader): loss = run.step(batch)",
            )


def _nothing(*_: Any) -> None:
    """Does nothing: the listener of an event that is left out."""


@dataclass(frozen=True, kw_only=True)
class Events:
    """Callbacks of one strategy or other listener for the events of a training step, in the order in which they fire.

    The module's header says when each fires. All ranks of a pipeline stage fire the same events in the same order, so
    that listeners may call collectives. ``restart`` also fires before an evaluation or a prediction, and
    ``after_optimizer`` whenever stored parameters have changed, as after a checkpoint is loaded. ``during`` returns a
    context that is open while an action runs. ``after_backward`` gets the number of the microbatch, and
    ``after_weight_gradients`` the param group whose gradients are complete and the number of the microbatch.
    """

    restart: Callable[[], None] = _nothing
    before_action: Callable[[Action], None] = _nothing
    during: Callable[[Action], AbstractContextManager[None]] | None = None
    after_backward: Callable[[int], None] = _nothing
    after_weight_gradients: Callable[[ParamGroup, int], None] = _nothing
    after_action: Callable[[Action], None] = _nothing
    before_sync: Callable[[], None] = _nothing
    after_sync: Callable[[], None] = _nothing
    after_optimizer: Callable[[], None] = _nothing


class OutputHandler(Protocol):
    """The consumer of the model's output on each microbatch, which computes its loss or collects it."""

    def give(self, number: int, microbatch: Microbatch, output: Any) -> Tensor:
        """Takes the model's output on microbatch ``number``; returns the loss, or without a backward a placeholder."""
        ...


@dataclass
class LossOutput:
    """Computes each microbatch's loss from the model's output, for the backward and for the mean loss of the step.

    The backward runs on the loss sum times ``scale``. A ``scale`` of None is for the only microbatch of one rank: the
    backward then runs on the mean, as in a loop without this library. But if elements of the loss are smaller than
    ``widest_bytes``, the size of an element of the parameters, the factor 1 / count would be rounded; the backward then
    runs on the sum, and ``is_mean`` is False. ``sums`` collects, for each microbatch, a float64 tensor of the loss sum,
    unscaled, and the number of targets. With ``widen`` the output is cast to float32 first, because a sum of many
    numbers in bf16 or fp16 loses digits.
    """

    loss: Callable[[Any, Any], tuple[Tensor, Tensor]]
    scale: float | None = 1.0
    widen: bool = False
    widest_bytes: int = 0
    is_mean: bool = False
    sums: list[Tensor] = field(default_factory=list)

    def give(self, number: int, microbatch: Microbatch, output: Any) -> Tensor:
        """Returns a microbatch's loss sum times ``scale``, or mean, from which backward starts; appends to ``sums``."""
        if self.widen:
            output = tree_map_only(Tensor, _widened, output)
        loss_sum, count = sum_and_count(self.loss(output, unmarked(microbatch.targets)))
        self.sums.append(torch.stack([loss_sum.detach().double(), count.double()]))
        self.is_mean = self.scale is None and loss_sum.dtype.itemsize >= self.widest_bytes
        if self.is_mean:
            return mean_of(loss_sum, count)[0]
        check_count(count)
        return loss_sum if self.scale in (None, 1) else loss_sum * self.scale


def _widened(x: Tensor) -> Tensor:
    """Returns a tensor in fp32, marked as the same shard of a whole tensor; integers as they are."""
    if not x.dtype.is_floating_point:
        return x
    wide = x.float()
    tag(wide, tagged(x))
    return wide


@dataclass
class CollectedOutput:
    """Collects the output of each microbatch by its number, for a forward without a loss."""

    outputs: dict[int, Any] = field(default_factory=dict)

    def give(self, number: int, microbatch: Microbatch, output: Any) -> Tensor:
        """Stores the output of microbatch ``number``; returns a placeholder, as no backward follows."""
        self.outputs[number] = output
        return torch.zeros(())


class ModelPart(Protocol):
    """This rank's chunks of the model, with the methods by which the executor runs a schedule's actions on them."""

    def begin(self, schedule: Schedule, microbatches: Sequence[Microbatch], last: OutputHandler) -> None:
        """Prepares to run a schedule on ``microbatches``; ``last`` takes the model's output on each of them."""
        ...

    def wait(self, place: int) -> None:
        """Waits for the p2p messages that the action at index ``place`` of this stage's list needs."""
        ...

    def forward(self, chunk: int, number: int) -> Sequence[Tensor]:
        """Runs a microbatch through a chunk and sends its outputs; returns the tensors to differentiate."""
        ...

    def gradients(self, chunk: int, number: int) -> Mapping[int, Tensor | None]:
        """Returns the received gradients of the tensors that ``forward`` returned, by index; None for a loss.

        A tensor that the loss does not reach has no entry.
        """
        ...

    def pass_back(self, chunk: int, number: int) -> None:
        """Sends the gradients of a chunk's inputs to the stages that sent them; called after the chunk's backward."""
        ...

    def chunks_with(self, parameter: str) -> frozenset[int]:
        """Returns the numbers of this rank's chunks that use ``parameter``."""
        ...


class WholeModel:
    """The model part of a rank without pipeline stages: one chunk, which is the whole model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._microbatches: Sequence[Microbatch] = ()
        self._last: OutputHandler

    def begin(self, schedule: Schedule, microbatches: Sequence[Microbatch], last: OutputHandler) -> None:
        """Stores the microbatches, and the handler of the model's output, for :meth:`forward`."""
        self._microbatches, self._last = microbatches, last

    def wait(self, place: int) -> None:
        """Does nothing: without stages there are no p2p messages to wait for."""

    def forward(self, chunk: int, number: int) -> Sequence[Tensor]:
        """Runs the model on microbatch ``number``; returns the loss, or the output handler's placeholder for it."""
        microbatch = self._microbatches[number]
        try:
            # in one expression: a name for the output would hold it while the loss is computed
            return (self._last.give(number, microbatch, call_model(self.model, microbatch.inputs)),)
        except (RuntimeError, ValueError, IndexError) as failure:
            is_part = microbatch.num_global is None or len(microbatch.samples) < microbatch.num_global
            is_known = isinstance(failure, ExplainedError | torch.OutOfMemoryError)
            if is_part and not is_known and (hint := hint_of_samples(microbatch.inputs)):
                failure.add_note(hint)
            raise

    def gradients(self, chunk: int, number: int) -> Mapping[int, Tensor | None]:
        """Returns ``{0: None}``: without stages no gradient is received, and the backward starts from the loss."""
        return {0: None}

    def pass_back(self, chunk: int, number: int) -> None:
        """Does nothing: without stages no rank needs the gradient of the model's inputs."""

    def chunks_with(self, parameter: str) -> frozenset[int]:
        """Returns chunk 0, the only one, for every parameter."""
        return frozenset((0,))


class Executor:
    """Runs one step's forwards and backwards, as a schedule lists them, on this rank's part of the model.

    ``work`` is that part, by default the whole model. ``deferred`` keeps the weight gradients of split backwards, and
    ``written``, if given, checks which buffers the microbatches write. ``rng`` and ``batch_shard`` are set to the
    microbatch of each forward, and again before its backward. ``late`` are the parameters whose gradients a strategy
    accumulates itself, before ``after_backward`` has returned. A microbatch without samples runs like any other, on
    tensors with no rows: the microbatch of another rank may have samples, and both ranks must make the same collective
    calls. ``in_action`` says whether an action runs. ``spans`` are the actions of the last run, each with its start and
    end by ``clock``; an action's time includes waits in collectives, but not the wait for p2p messages before the
    action.
    """

    clock: Callable[[], Moment] = staticmethod(perf_counter)  # of spans; Run.timeline sets that of the rank's device

    def __init__(
        self,
        model: nn.Module,
        param_groups: Sequence[ParamGroup],
        events: Iterable[Events],
        rng: RngTracker,
        batch_shard: BatchShard,
        late: Collection[str] = (),
        work: ModelPart | None = None,
        deferred: DeferredGradients | None = None,
        written: BufferWrites | None = None,
    ) -> None:
        self.written = written
        self.model, self.rng, self.batch_shard, self.late = model, rng, batch_shard, frozenset(late)
        self.work = WholeModel(model) if work is None else work
        self.deferred = DeferredGradients() if deferred is None else deferred
        self.events = tuple(events)
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self.param_groups = held_param_groups(param_groups, self.parameters)
        self.spans: list[Span] = []
        self._chunks = {
            u.name: frozenset[int]().union(*map(self.work.chunks_with, u.parameters)) for u in self.param_groups
        }
        self._has_run: set[tuple[int, bool]] = set()
        self._action, self.in_action = Action("F", 0), False
        self._done: dict[tuple[str, int], set[int]] = {}
        self._missing: dict[str, set[str]] = {}
        self._register_hooks()

    def run(self, schedule: Schedule, stage: int, microbatches: Sequence[Microbatch], last: OutputHandler) -> None:
        """Runs the actions of pipeline stage ``stage`` in order on ``microbatches``; ``last`` takes the model's output.

        All-reduces of gradients may still be running afterwards; gradient sync waits for them.

        Raises: PlanError: the model draws random numbers that depend on the layout, changes a buffer in every
            microbatch, or gives a parameter another gradient after the gradients of its param group were sent.
        """
        self.work.begin(schedule, microbatches, last)
        self._done, self.spans = {}, []
        starts: dict[tuple[int, int], tuple[Sequence[Tensor], Sequence[Callable[[], None]]]] = {}
        for place, action in enumerate(schedule.actions[stage]):
            kind, number, chunk = self._action = action
            for events in self.events:
                events.before_action(action)
            self.work.wait(place)
            began = self.clock()
            with self.during(action):
                if kind == "F":
                    tensors = self._forward(chunk, number, microbatches)
                    # for a recomputation in the backward: other microbatches change this state in between
                    starts[chunk, number] = tensors, [self.rng.snapshot(), self.batch_shard.snapshot()]
                elif kind == "W":
                    self.deferred.run(chunk, number)
                    self._end_backward(number, chunk)
                else:
                    self._backward(*starts.pop((chunk, number)))
            self.spans.append(Span(action, began, self.clock()))
            for events in self.events:
                events.after_action(action)

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Returns a context around one action, which enters the ``during`` contexts of all listeners.

        Outside of such a context, a call of the model's forward raises PlanError if the model has pipeline stages or
        the ranks of one model copy have different samples or tokens: the output would be wrong. With several ranks, a
        backward outside of it that reaches a trained parameter raises PlanError too.
        """
        with ExitStack() as stack:
            for events in self.events:
                if events.during is not None:
                    stack.enter_context(events.during(action))
            before, self.in_action = self.in_action, True
            try:
                yield
            finally:
                self.in_action = before

    def in_order(self, actions: Sequence[Action]) -> tuple[ParamGroup, ...]:
        """Returns the param groups in the order in which the actions of a step complete their gradients.

        The order is the same on all ranks of a pipeline stage.
        """
        last = {action.chunk: place for place, action in enumerate(actions) if action.kind in ("B", "W")}
        chunks = [self._chunks[group.name] for group in self.param_groups]
        places = [max((last.get(chunk, -1) for chunk in group_chunks), default=-1) for group_chunks in chunks]
        order = sorted(range(len(places)), key=lambda number: (places[number], -number))
        return tuple(self.param_groups[number] for number in order)

    def set_microbatch(self, microbatch: Microbatch, number: int = 0, num_microbatches: int = 1) -> None:
        """Makes a microbatch the current one of this rank's batch shard and RNG tracker, before its forward."""
        self.rng.samples = microbatch.samples
        if microbatch.num_global is None:
            self.batch_shard.set_uncut(len(microbatch.samples))
        else:
            self.batch_shard.set_microbatch(microbatch.num_global, number, num_microbatches)

    def _forward(self, chunk: int, number: int, microbatches: Sequence[Microbatch]) -> Sequence[Tensor]:
        microbatch = microbatches[number]
        self.set_microbatch(microbatch, number, len(microbatches))
        key = (chunk, self.model.training)
        written = self.written if self.model.training and len(microbatches) > 1 else None
        with ExitStack() as stack:
            if key not in self._has_run:  # only in the first run: later ones draw alike
                stack.enter_context(RefusesRandomNumbers())
            if written is not None:
                stack.enter_context(written.watching(chunk, len(microbatches)))
            starts = self.work.forward(chunk, number)
        if self.rng.forward_ended is not None:
            self.rng.forward_ended()
        self._has_run.add(key)
        return starts

    def _backward(self, starts: Sequence[Tensor], snapshots: Sequence[Callable[[], None]]) -> None:
        kind, number, chunk = self._action
        for restore in snapshots:
            restore()
        self._missing = {group.name: set(group.parameters) for group in self.param_groups}
        gradients = self.work.gradients(chunk, number)
        starts = [starts[place] for place in gradients]
        if kind == "B" and any(group.is_selected for group in self.param_groups):
            self._expect_used(starts)
        with self.deferred.collecting(chunk, number) if kind == "I" else nullcontext():
            if starts:
                with without_reentry():  # for recomputations of the forward
                    torch.autograd.backward(starts, tuple(gradients.values()))
        self.work.pass_back(chunk, number)
        if kind == "B":
            self._end_backward(number, chunk)

    def _expect_used(self, starts: Sequence[Tensor]) -> None:
        """Expects gradients only for parameters that the forward has used, in groups whose use depends on the samples.

        Otherwise a rank that used all of a group's parameters would begin the group's reduction earlier than other
        ranks, and so make its collective calls in another order.
        """
        reached = leaves_behind(starts)
        for group in self.param_groups:
            if group.is_selected:
                used = {name for name in group.parameters if id(self.parameters[name]) in reached}
                self._missing[group.name] &= used | self.late

    def _end_backward(self, number: int, chunk: int) -> None:
        for events in self.events:
            events.after_backward(number)
        for group in reversed(self.param_groups):  # no more gradients come: unreached parameters have none
            self._fire_gradients(group)

    def _register_hooks(self) -> None:
        """Registers a hook on every trained parameter, which autograd calls when it has accumulated the gradient.

        If only an action gives the right output, another hook refuses forwards of the model by other code. That is so
        on pipeline stages, and if the ranks of one model copy have different rows of the batch.
        """
        for group in self.param_groups:
            for name in group.parameters:
                parameter = self.parameters[name]
                if parameter.requires_grad and name not in self.late:  # hooks of late ones would fire too early
                    parameter.register_post_accumulate_grad_hook(self._on_gradient(group, name))

        if self.refuses_calls:
            weak_self = ref(self)

            def refuse(*_: Any) -> None:
                if (executor := weak_self()) is not None and not executor.in_action:
                    raise _outside("forward", "run.model was called by other code than the run")

            self.model.register_forward_pre_hook(refuse, prepend=True)

    @property
    def refuses_calls(self) -> bool:
        """Whether a forward of the model by other code raises, because this rank alone would compute a wrong output."""
        cuts = (self.batch_shard.axes | self.batch_shard.token_axes).intersection(mesh_axes("operators"))
        return bool(cuts) or not isinstance(self.work, WholeModel)

    def _on_gradient(self, group: ParamGroup, name: str) -> Callable[[Tensor], None]:
        weak_self = ref(self)  # Python cannot collect cycles through such a hook: it must not hold the model

        def hook(_: Tensor) -> None:
            if (executor := weak_self()) is not None:
                executor._accumulated(group, name)

        return hook

    def _accumulated(self, group: ParamGroup, name: str) -> None:
        if not self.in_action:
            if self.batch_shard.mesh.size > 1:
                raise _outside("backward", f"'{name}' got a gradient of this rank's samples, which no rank sums")
            return
        missing = self._missing[group.name]
        done = self._done.get((group.name, self._action.microbatch), set())
        is_fired = bool(done) and done == self._chunks[group.name]
        if is_fired and any(events.after_weight_gradients is not _nothing for events in self.events):
            raise PlanError(
                f"the parameter '{name}' gets another gradient after its param group was summed over ranks",
                given="backwards inside one backward, as an autograd function that runs its code again takes them",
                allowed="one gradient of each parameter in one backward",
                fix="use torch.utils.checkpoint, or instead recompute:full or recompute:PATTERN in the layout",
            )
        missing.discard(name)
        if not missing and self._action.kind == "B":
            self._fire_gradients(group)

    def _fire_gradients(self, group: ParamGroup) -> None:
        """Fires ``after_weight_gradients`` once for each microbatch, after all chunks that use the group are done."""
        chunks, number = self._chunks[group.name], self._action.microbatch
        done = self._done.setdefault((group.name, number), set())
        if self._action.chunk in chunks and self._action.chunk not in done:
            done.add(self._action.chunk)
            if done == chunks:
                for events in self.events:
                    events.after_weight_gradients(group, number)


def _outside(what: str, given: str) -> PlanError:
    return PlanError(
        f"a {what} outside of the run's own steps would be wrong on several ranks",
        given=given,
        allowed="run.predict(inputs) for the output, run.evaluate for the loss, run.generate(inputs, ...) for text, "
        "run.step to train",
        fix="write output = run.predict(inputs), or for batch in run.shard([(inputs, targets)]): run.step(batch)",
    )
