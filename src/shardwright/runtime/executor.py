"""The one executor: it runs any list of actions, pipeline or not, and fires the events that strategies wait for.

A rank's part of the model is its *work*: chunks that take in a microbatch, or what other stages sent, and that compute
the loss, or send to other stages. Without a pipeline it is one chunk, the whole model.

One backward, and when each event fires (a *unit* is a block of layers whose parameters travel together)::

    before_forward(u)  after_forward(u)  ...  before_backward(u)  after_weight_gradients(u, m)  after_action(a)

``after_backward(m)`` comes when autograd is through, before the units that it did not finish: what a strategy has under
way for weights is put in place there. Every action runs ``during(a)``. Once a step come ``before_sync``, when all
actions are done, ``after_sync``, when the core has summed what it sums, and ``after_optimizer``: parameters at rest
have changed, as they do when a checkpoint is loaded.
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
from shardwright.plan.batch_shard import Samples
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
    """What to do at the edges of units and actions. All are optional; ranks fire them in the same order.

    ``restart`` comes before a step and before a forward alone: what a step that raised has left is let go of.
    """

    restart: Callable[[], None] = _nothing
    before_forward: Callable[[ParamGroup], None] = _nothing
    after_forward: Callable[[ParamGroup], None] = _nothing
    before_backward: Callable[[ParamGroup], None] = _nothing
    after_backward: Callable[[int], None] = _nothing
    after_weight_gradients: Callable[[ParamGroup, int], None] = _nothing
    after_action: Callable[[Action], None] = _nothing
    during: Callable[[Action], AbstractContextManager[None]] = _in_nothing
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
        """Nothing comes from elsewhere."""

    def forward(self, chunk: int, number: int) -> Sequence[Tensor]:
        """See :class:`ModelPart`."""
        microbatch = self._microbatches[number]
        return (self._last.give(number, microbatch, call_model(self.model, microbatch.inputs)),)

    def gradients(self, chunk: int, number: int) -> Sequence[Tensor | None]:
        """See :class:`ModelPart`."""
        return (None,)

    def pass_back(self, chunk: int, number: int) -> None:
        """Nobody waits for it."""

    def chunks_with(self, parameter: str) -> frozenset[int]:
        """See :class:`ModelPart`."""
        return frozenset((0,))


def _too_late(parameter: str) -> PlanError:
    return PlanError(
        f"the parameter '{parameter}' gets a gradient once more after its unit's have been summed over ranks",
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
        units: Sequence[ParamGroup],
        events: Iterable[Events],
        draws: RngTracker,
        samples: Samples | None = None,
        late: Collection[str] = (),
        work: ModelPart | None = None,
        deferred: DeferredGradients | None = None,
        written: BufferWrites | None = None,
    ) -> None:
        self.written = written
        self.model, self.draws, self.samples, self.late = model, draws, samples, frozenset(late)
        self.work = WholeModel(model) if work is None else work
        self.deferred = DeferredGradients() if deferred is None else deferred
        self.events = tuple(events)
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self.units = held_param_groups(units, self.parameters)
        self.spans: list[Span] = []
        self._chunks = {u.name: frozenset[int]().union(*map(self.work.chunks_with, u.parameters)) for u in self.units}
        self._has_run: set[tuple[int, bool]] = set()
        self._action = Action("F", 0)
        self.before_action: Callable[[Action], None] = _nothing
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
            self.before_action(action)
            self.work.wait(place)
            began = perf_counter()
            with self.during(action):
                if kind == "F":
                    starts[chunk, number] = self._forward(chunk, number, microbatches), self._moment()
                elif kind == "W":
                    self.deferred.do(chunk, number)
                    self._end_backward(number, chunk)
                else:
                    self._backward(*starts.pop((chunk, number)))
            self.spans.append(Span(action, began, perf_counter()))
            for events in self.events:
                events.after_action(action)

    def during(self, action: Action) -> AbstractContextManager[Any]:
        """What strategies have open while an action runs."""
        around = [events.during(action) for events in self.events if events.during is not _in_nothing]
        return _all_of(around) if around else nullcontext()

    def in_order(self, actions: Sequence[Action]) -> tuple[ParamGroup, ...]:
        """The units in the order in which a list of actions completes their gradients, the same on every model copy."""
        last = {action.chunk: place for place, action in enumerate(actions) if action.kind in ("B", "W")}
        places = [max((last.get(chunk, -1) for chunk in self._chunks[unit.name]), default=-1) for unit in self.units]
        order = sorted(range(len(places)), key=lambda number: (places[number], -number))
        return tuple(self.units[number] for number in order)

    def _forward(self, chunk: int, number: int, microbatches: Sequence[Microbatch]) -> Sequence[Tensor]:
        microbatch = microbatches[number]
        self.draws.samples = microbatch.samples
        if self.samples is not None and microbatch.num_global is None:
            self.samples.alone(len(microbatch.samples))
        elif self.samples is not None and microbatch.num_global is not None:
            self.samples.begin(microbatch.num_global, number, len(microbatches))
        key = (chunk, self.model.training)
        around: list[AbstractContextManager[Any]] = [] if key in self._has_run else [RefusesRandomNumbers()]
        written = self.written if self.model.training and len(microbatches) > 1 else None
        if written is not None and not written.is_done(chunk):
            around.append(written.watching(chunk, len(microbatches)))
        with _all_of(around) if around else nullcontext():
            starts = self.work.forward(chunk, number)
        self._has_run.add(key)
        return starts

    def _moment(self) -> Sequence[Callable[[], None]]:
        """What goes back to the samples in hand, and what was drawn for them."""
        return [each.moment() for each in (self.draws, self.samples) if each is not None]

    def _backward(self, starts: Sequence[Tensor], forward: Sequence[Callable[[], None]]) -> None:
        kind, number, chunk = self._action
        for back in forward:  # others may have been in hand since, and a model may compute again by itself
            back()
        self._missing = {unit.name: set(unit.parameters) for unit in self.units}
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
        for unit in reversed(self.units):  # what autograd did not reach has no gradient to wait for
            self._fire_gradients(unit)

    def _watch(self) -> None:
        """Hooks where units begin and end, and on every parameter, for whoever listens."""
        for unit in self.units:
            for name in unit.parameters:
                parameter = self.parameters[name]
                if parameter.requires_grad and name not in self.late:  # autograd calls hooks of no gradient too
                    parameter.register_post_accumulate_grad_hook(self._on_gradient(unit, name))
            edges = [self.model.get_submodule(module) for module in unit.modules]
            if any(e.before_forward is not _nothing or e.before_backward is not _nothing for e in self.events):
                for module in edges:
                    module.register_forward_pre_hook(self._on_forward(unit))
                    module.register_forward_hook(self._on_output(unit))

    def _on_gradient(self, unit: ParamGroup, name: str) -> Callable[[Tensor], None]:
        here = ref(self)  # torch keeps such a hook outside of what Python collects: it must not hold the model

        def hook(_: Tensor) -> None:
            if (executor := here()) is not None:
                executor._accumulated(unit, name)

        return hook

    def _accumulated(self, unit: ParamGroup, name: str) -> None:
        missing = self._missing[unit.name]
        done = self._done.get((unit.name, self._action.microbatch), set())
        is_given = bool(done) and done == self._chunks[unit.name]
        if is_given and any(events.after_weight_gradients is not _nothing for events in self.events):
            raise _too_late(name)
        missing.discard(name)
        if not missing and self._action.kind == "B":
            self._fire_gradients(unit)

    def _fire_gradients(self, unit: ParamGroup) -> None:
        """Once for each microbatch, when all chunks that use the unit have given its gradients."""
        chunks, number = self._chunks[unit.name], self._action.microbatch
        done = self._done.setdefault((unit.name, number), set())
        if self._action.chunk in chunks and self._action.chunk not in done:
            done.add(self._action.chunk)
            if done == chunks:
                for events in self.events:
                    events.after_weight_gradients(unit, number)

    def _on_forward(self, unit: ParamGroup) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for events in self.events:
                events.before_forward(unit)

        return hook

    def _on_output(self, unit: ParamGroup) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(lambda _: self._fire_backward(unit))
            for events in self.events:
                events.after_forward(unit)

        return hook

    def _fire_backward(self, unit: ParamGroup) -> None:
        for events in self.events:
            events.before_backward(unit)
