"""The one executor: it runs a list of actions on a rank's part of the model, and fires the events strategies act on.

A rank's part of the model is its *work*: chunks that take in a microbatch, or what other stages sent, and that compute
the loss, or send to other stages. Without a pipeline it is one chunk, the whole model. A *group* is a block of
parameters that travel together. One step, with its events in the order they fire, and what listens to each::

    restart                                  ZeRO, fp32 masters, tensor parallelism: drop what a failed step left
    for each action a of the schedule:       F, B, or a backward in two parts, I (inputs) and W (weights)
        before_action(a)                     the memory ledger
        during(a) opens                      ZeRO: unshards the groups of the chunk
          F: forward of one microbatch
          B: backward of one microbatch; W: the weight gradients that its I has put off
             after_backward(m)               tensor parallelism: puts weight gradients still under way in place
             after_weight_gradients(u, m)    ZeRO, gradient sync: start to sum the group; masters: widen its gradients
        during(a) closes                     ZeRO: starts the sums that are left, reshards the groups
        after_action(a)                      tensor parallelism: ends early gathers; offload: mean loss; the ledger
    before_sync                              ZeRO: waits for its sums
    (the core waits for the sums of the gradient sync)
    after_sync                               fp32 masters: take over the gradients
    (the optimizer steps)
    after_optimizer                          ZeRO: what it gathered is stale; masters: round to the compute dtype

``after_weight_gradients(u, m)`` fires during a backward as soon as autograd has given the last gradient of the
group, so that the sums overlap with the rest of the backward. Groups that this backward did not reach follow after
``after_backward``, and so do all groups of an action W.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from shardwright.analysis.module_calls import call_model
from shardwright.errors import PlanError
from shardwright.operators.deferred_gradients import DeferredGradients
from shardwright.plan.batch_shard import BatchShard
from shardwright.plan.param_groups import ParamGroup, held_param_groups
from shardwright.plan.schedule import Action, Schedule
from shardwright.rng import RefusesRandomNumbers, RngTracker
from shardwright.runtime.buffer_writes import BufferWrites
from shardwright.runtime.timeline import Span


class Microbatch(NamedTuple):
    """A share of one step's samples, their places in the global batch, and how many that has.

    ``num_global`` is None where every rank holds all samples; ``num_tokens`` is how many tokens each sample has on all
    ranks together, where these cut sequences.
    """

    inputs: Any
    targets: Any
    samples: range
    num_global: int | None
    num_tokens: int = 0


def _nothing(*_: Any) -> None:
    return None


def _in_nothing(action: Action) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Events:
    """What one listener does at each event of a step, in the order drawn above; an event left out does nothing.

    All ranks fire the same events in the same order, so that listeners may send. ``restart`` fires before a forward
    alone too, and ``after_optimizer`` whenever parameters at rest have changed, as when a checkpoint is loaded.
    """

    restart: Callable[[], None] = _nothing
    before_action: Callable[[Action], None] = _nothing
    during: Callable[[Action], AbstractContextManager[None]] = _in_nothing
    after_backward: Callable[[int], None] = _nothing
    after_weight_gradients: Callable[[ParamGroup, int], None] = _nothing
    after_action: Callable[[Action], None] = _nothing
    before_sync: Callable[[], None] = _nothing
    after_sync: Callable[[], None] = _nothing
    after_optimizer: Callable[[], None] = _nothing


class OutputHandler(Protocol):
    """What becomes of the model's output."""

    def give(self, number: int, microbatch: Microbatch, output: Any) -> Tensor:
        """Takes in an output; returns the tensor that backward starts from."""
        ...


class ModelPart(Protocol):
    """A rank's part of the model, in chunks: what an action does with a microbatch, but for when."""

    def begin(self, schedule: Schedule, microbatches: Sequence[Microbatch], last: OutputHandler) -> None:
        """A list of actions comes; ``last`` takes the model's output."""
        ...

    def wait(self, place: int) -> None:
        """Blocks until what the action at ``place`` in the list needs from elsewhere is there."""
        ...

    def forward(self, chunk: int, number: int) -> Sequence[Tensor]:
        """Runs a microbatch through a chunk and passes the output on; returns the tensors that backward starts from."""
        ...

    def gradients(self, chunk: int, number: int) -> Sequence[Tensor | None]:
        """The gradients of these tensors; None for a loss."""
        ...

    def pass_back(self, chunk: int, number: int) -> None:
        """Called when the gradients of what came in are there."""
        ...

    def chunks_with(self, parameter: str) -> frozenset[int]:
        """This rank's chunks that use a parameter."""
        ...


class WholeModel:
    """A model that begins and ends on this rank: one chunk, which takes in the microbatch itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._microbatches: Sequence[Microbatch] = ()
        self._last: OutputHandler

    def begin(self, schedule: Schedule, microbatches: Sequence[Microbatch], last: OutputHandler) -> None:
        """See :class:`ModelPart`."""
        self._microbatches, self._last = microbatches, last

    def wait(self, place: int) -> None:
        """Does nothing: this rank receives from no other stage."""

    def forward(self, chunk: int, number: int) -> Sequence[Tensor]:
        """See :class:`ModelPart`."""
        microbatch = self._microbatches[number]
        return (self._last.give(number, microbatch, call_model(self.model, microbatch.inputs)),)

    def gradients(self, chunk: int, number: int) -> Sequence[Tensor | None]:
        """See :class:`ModelPart`."""
        return (None,)

    def pass_back(self, chunk: int, number: int) -> None:
        """Does nothing: no other rank waits for the gradient of the model's inputs."""

    def chunks_with(self, parameter: str) -> frozenset[int]:
        """See :class:`ModelPart`."""
        return frozenset((0,))


def _too_late(parameter: str) -> PlanError:
    return PlanError(
        f"the parameter '{parameter}' gets a gradient once more after its group's have been summed over ranks",
        given="backwards inside one backward, as torch.utils.checkpoint(use_reentrant=True) makes them",
        allowed="one gradient of each parameter in one backward",
        fix="use_reentrant=False, or recompute:full or recompute:PATTERN in the layout in its place",
    )


@contextmanager
def _all_of(around: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in around:
            stack.enter_context(each)
        yield


class Executor:
    """Runs the actions of one step on this rank's part of the model.

    ``late`` are the parameters whose gradients a strategy puts in place itself, before ``after_backward`` has returned.
    A microbatch without samples runs like any other, on tensors of no rows: another rank's may have some, and the
    two meet in the same calls. ``spans`` are the actions of the last list, with the seconds at which they began and
    ended, and none of the time in which they waited for others.
    """

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
        self._action = Action("F", 0)
        self._done: dict[tuple[str, int], set[int]] = {}
        self._missing: dict[str, set[str]] = {}
        self._watch()

    def run(self, schedule: Schedule, stage: int, microbatches: Sequence[Microbatch], last: OutputHandler) -> None:
        """All actions of a stage, in order; one step is from zero gradients to those of this rank's part."""
        self.work.begin(schedule, microbatches, last)
        self._done, self.spans = {}, []
        starts: dict[tuple[int, int], tuple[Sequence[Tensor], Sequence[Callable[[], None]]]] = {}
        for place, action in enumerate(schedule.actions[stage]):
            kind, number, chunk = self._action = action
            for events in self.events:
                events.before_action(action)
            self.work.wait(place)
            began = perf_counter()
            with self.during(action):
                if kind == "F":
                    starts[chunk, number] = self._forward(chunk, number, microbatches), self._snapshots()
                elif kind == "W":
                    self.deferred.do(chunk, number)
                    self._end_backward(number, chunk)
                else:
                    self._backward(*starts.pop((chunk, number)))
            self.spans.append(Span(action, began, perf_counter()))
            for events in self.events:
                events.after_action(action)

    def during(self, action: Action) -> AbstractContextManager[Any]:
        """Returns a context manager that enters ``Events.during`` of all listeners around an action."""
        around = [events.during(action) for events in self.events if events.during is not _in_nothing]
        return _all_of(around) if around else nullcontext()

    def in_order(self, actions: Sequence[Action]) -> tuple[ParamGroup, ...]:
        """The groups in the order in which the actions complete their gradients, the same on every model copy."""
        last = {action.chunk: place for place, action in enumerate(actions) if action.kind in ("B", "W")}
        chunks = [self._chunks[group.name] for group in self.param_groups]
        places = [max((last.get(chunk, -1) for chunk in each), default=-1) for each in chunks]
        order = sorted(range(len(places)), key=lambda number: (places[number], -number))
        return tuple(self.param_groups[number] for number in order)

    def _forward(self, chunk: int, number: int, microbatches: Sequence[Microbatch]) -> Sequence[Tensor]:
        microbatch = microbatches[number]
        self.rng.samples = microbatch.samples
        if microbatch.num_global is None:
            self.batch_shard.set_uncut(len(microbatch.samples))
        else:
            self.batch_shard.set_microbatch(microbatch.num_global, number, len(microbatches))
        key = (chunk, self.model.training)
        around: list[AbstractContextManager[Any]] = [] if key in self._has_run else [RefusesRandomNumbers()]
        written = self.written if self.model.training and len(microbatches) > 1 else None
        if written is not None and not written.is_done(chunk):
            around.append(written.watching(chunk, len(microbatches)))
        with _all_of(around) if around else nullcontext():
            starts = self.work.forward(chunk, number)
        self._has_run.add(key)
        return starts

    def _snapshots(self) -> Sequence[Callable[[], None]]:
        """Returns functions that restore the batch shard and the random numbers that this forward has used."""
        return [self.rng.snapshot(), self.batch_shard.snapshot()]

    def _backward(self, starts: Sequence[Tensor], forward: Sequence[Callable[[], None]]) -> None:
        kind, number, chunk = self._action
        for restore in forward:  # other microbatches came since, and activation checkpointing may run its forward again
            restore()
        self._missing = {group.name: set(group.parameters) for group in self.param_groups}
        gradients = self.work.gradients(chunk, number)
        with self.deferred.collecting(chunk, number) if kind == "I" else nullcontext():
            if starts:
                torch.autograd.backward(starts, gradients)
        self.work.pass_back(chunk, number)
        if kind == "B":
            self._end_backward(number, chunk)

    def _end_backward(self, number: int, chunk: int) -> None:
        for events in self.events:
            events.after_backward(number)
        for group in reversed(self.param_groups):  # what autograd did not reach has no gradient to wait for
            self._fire_gradients(group)

    def _watch(self) -> None:
        """Puts a hook on every trained parameter, to hear when autograd has given its gradient."""
        for group in self.param_groups:
            for name in group.parameters:
                parameter = self.parameters[name]
                if parameter.requires_grad and name not in self.late:  # autograd calls hooks of no gradient too
                    parameter.register_post_accumulate_grad_hook(self._on_gradient(group, name))

    def _on_gradient(self, group: ParamGroup, name: str) -> Callable[[Tensor], None]:
        here = ref(self)  # torch keeps such a hook outside of what Python collects: it must not hold the model

        def hook(_: Tensor) -> None:
            if (executor := here()) is not None:
                executor._accumulated(group, name)

        return hook

    def _accumulated(self, group: ParamGroup, name: str) -> None:
        missing = self._missing[group.name]
        done = self._done.get((group.name, self._action.microbatch), set())
        is_given = bool(done) and done == self._chunks[group.name]
        if is_given and any(events.after_weight_gradients is not _nothing for events in self.events):
            raise _too_late(name)
        missing.discard(name)
        if not missing and self._action.kind == "B":
            self._fire_gradients(group)

    def _fire_gradients(self, group: ParamGroup) -> None:
        """Fires ``after_weight_gradients`` once for each microbatch, when all chunks that use the group are done."""
        chunks, number = self._chunks[group.name], self._action.microbatch
        done = self._done.setdefault((group.name, number), set())
        if self._action.chunk in chunks and self._action.chunk not in done:
            done.add(self._action.chunk)
            if done == chunks:
                for events in self.events:
                    events.after_weight_gradients(group, number)
