"""The base of a pipeline stage: it waits for activations and gradients of other stages, and sends its own to them.

Its two subclasses differ in how a chunk is run: :mod:`~shardwright.strategies.pipeline.stage` runs calls that were
traced, :mod:`~shardwright.strategies.pipeline.ghost_stage` the user's own whole forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_flatten

from shardwright.analysis.chunks.call_graph import Edge, Repeat
from shardwright.comm.autograd import once
from shardwright.plan.event_stages import EventStages
from shardwright.plan.plan import ForwardFrame
from shardwright.plan.schedule import Schedule
from shardwright.plan.stages import Stages
from shardwright.runtime.executor import Microbatch, OutputHandler
from shardwright.strategies.pipeline.messages import StageMessage, arrivals, coming, receiver
from shardwright.strategies.pipeline.p2p import P2P, ValueSpec, fill, spec_of

POSTED_AHEAD = 2
"""The number of actions, counting the next one to run, whose receives are already posted."""

KEPT_ROUTES = 4
"""The number of schedules whose message routes are cached, the most recently used first."""


@dataclass
class ReceivedTensors:
    """The received tensors of one message that need gradients; after the backward also their gradients.

    A gradient is None if the backward did not reach the tensor. Both are emptied once the gradients are sent back.
    """

    message: StageMessage
    tensors: tuple[Tensor, ...]
    gradients: Sequence[Tensor | None] = ()


class _Entry(Function):
    """Makes received tensors the inputs of a chunk's autograd graph, and stores their gradients in ``incoming``.

    They are no leaves, so that the chunk's code may overwrite them in place, as on one device.
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, incoming: ReceivedTensors) -> tuple[Tensor, ...]:
        ctx.incoming = incoming
        ctx.set_materialize_grads(False)
        return incoming.tensors

    @staticmethod
    @once
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.incoming.gradients = gradients
        return None, None


def is_received(tensor: Tensor) -> bool:
    """Returns whether a tensor is an input of a chunk's autograd graph, as another chunk has sent it."""
    return isinstance(tensor.grad_fn, _Entry._backward_cls)


class SavedMicrobatch(NamedTuple):
    """The autograd state that a chunk keeps of one microbatch between its forward and its backward.

    ``starts`` are the output tensors from which the backward starts. ``outgoing`` lists, for each outgoing edge, the
    message that brings the gradients back and the indices of the ``starts`` that they belong to, in order.
    """

    incoming: tuple[ReceivedTensors, ...]
    starts: tuple[Tensor, ...]
    outgoing: tuple[tuple[StageMessage, tuple[int, ...]], ...]


class ChunkRoute(NamedTuple):
    """The messages that one stage receives under a schedule: by the action that needs them, and by sending stage.

    ``coming[i]`` are those that the stage's action i needs; ``arrivals`` lists them in order of sending.
    """

    schedule: Schedule
    coming: tuple[tuple[StageMessage, ...], ...]
    arrivals: Mapping[int, Sequence[StageMessage]]


StagesT = TypeVar("StagesT", bound=Stages | EventStages)


@dataclass
class PipelineStage(Generic[StagesT]):
    """This rank's pipeline chunks, which the executor runs; subclasses define how a chunk runs (``begin``, ``_run``).

    ``stage_of`` gives the stage of each chunk. ``repeat`` is called before a module that earlier chunks call too, with
    the number of their calls: dropout masks are numbered over all calls. ``frame`` is the code that strategies run
    around the model's forward, if there is any.
    """

    model: nn.Module
    stages: StagesT
    stage_of: tuple[int, ...]
    p2p: P2P
    repeat: Repeat
    frame: ForwardFrame | None = None
    _compared: set[object] = field(default_factory=set)
    _route: ChunkRoute | None = None
    _microbatches: Sequence[Microbatch] = ()
    _last: OutputHandler | None = None
    _saved: dict[tuple[int, int], SavedMicrobatch] = field(default_factory=dict)
    _arrived: dict[StageMessage, list[Tensor]] = field(default_factory=dict)  # received, or from a chunk of this stage
    _reached: dict[StageMessage, tuple[bool, ...]] = field(default_factory=dict)  # of gradients that have arrived

    @property
    def stage(self) -> int:
        """This rank's index on the axis ``pp``."""
        return self.p2p.axis.index

    def expect(
        self, microbatches: Sequence[Microbatch], values: Sequence[Mapping[str, Any]], *, announced: bool = False
    ) -> None:  # fmt: skip
        """Sets the shapes and dtypes of all p2p messages, which a stage otherwise learns from the messages themselves.

        It is for steps on the meta device, where no message arrives. ``values[m]`` are the values of microbatch m that
        cross between chunks, by their names in the model's code. ``announced`` says that the others know the shapes and
        dtypes of what this stage sends, as after a first step. Subclasses implement it.
        """
        raise NotImplementedError

    def begin(self, schedule: Schedule, microbatches: Sequence[Microbatch], last: OutputHandler) -> None:
        """Prepares for one run of a schedule over ``microbatches``; ``last`` gets the model's output on each of them.

        Subclasses implement it.
        """
        raise NotImplementedError

    def wait(self, place: int) -> None:
        """Waits for the messages that this stage's action at index ``place`` needs, and posts further receives."""
        assert self._route is not None
        for messages in self._route.coming[place : place + POSTED_AHEAD]:
            self.p2p.post(messages)
        for message in self._route.coming[place]:
            self._arrived[message] = self.p2p.take(message)
            if message.kind == "B":
                self._reached[message] = self.p2p.reached(message)

    def forward(self, chunk: int, number: int) -> Sequence[Tensor]:
        """Runs microbatch ``number`` through a chunk, and sends the chunk's outputs to the stages that take them.

        Returns the tensors from which the chunk's backward starts: the loss, and the outputs that need gradients.
        """
        with framed(self.frame, self._microbatches[number].inputs) as inputs:
            return self._run(chunk, number, inputs)

    def _run(self, chunk: int, number: int, inputs: Any) -> Sequence[Tensor]:
        raise NotImplementedError

    def gradients(self, chunk: int, number: int) -> Mapping[int, Tensor | None]:
        """Returns the gradients of the tensors that :meth:`forward` returned, as the chunks that took them sent them.

        They are listed by the index of the tensor. Gradients from several chunks are added up. None stands for the
        loss, from which the backward starts. A tensor that the loss does not reach has no entry.
        """
        saved = self._saved[chunk, number]
        crossed = {position for _, positions in saved.outgoing for position in positions}
        gradients: dict[int, Tensor | None] = dict.fromkeys(
            place for place in range(len(saved.starts)) if place not in crossed
        )
        for message, positions in saved.outgoing:
            reached = self._reached.pop(message, ())
            for position, gradient, is_reached in zip(positions, self._arrived.pop(message, []), reached, strict=True):
                if is_reached:
                    before = gradients.get(position)
                    gradients[position] = gradient if before is None else before + gradient
        return gradients

    def pass_back(self, chunk: int, number: int) -> None:
        """Sends the gradients of a chunk's inputs to the stages that sent those inputs.

        Zeros are sent for an input that the backward did not reach. A gradient for a chunk of this stage is only kept.
        """
        for incoming in self._saved.pop((chunk, number)).incoming:
            raw_gradients = incoming.gradients or [None] * len(incoming.tensors)
            reached = tuple(gradient is not None for gradient in raw_gradients)
            pairs = zip(raw_gradients, incoming.tensors, strict=True)
            gradients = [torch.zeros_like(tensor) if gradient is None else gradient for gradient, tensor in pairs]
            # The autograd node refers to `incoming`: emptying it breaks a cycle that only the collector would free.
            incoming.tensors = incoming.gradients = ()
            back = incoming.message._replace(kind="B")
            if receiver(back, self.stage_of) == self.stage:
                self._arrived[back], self._reached[back] = gradients, reached
            else:
                self.p2p.send_gradients(incoming.message, gradients, reached, receiver(back, self.stage_of))

    def chunks_with(self, parameter: str) -> frozenset[int]:
        """Returns this rank's chunks that use ``parameter``; only its first chunk if none does."""
        mine = [chunk for chunk, at in enumerate(self.stage_of) if at == self.stage]
        chunked = self.stages.chunked
        return frozenset(chunk for chunk in mine if parameter in chunked.weights_of(chunk)) or frozenset(mine[:1])

    def _key(self, number: int, microbatch: Microbatch, count: int) -> object:
        """Returns a key of all that determines the shapes of a microbatch's messages, equal on every stage."""
        leaves, spec = tree_flatten(microbatch.inputs)
        shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
        place = (number, count, microbatch.num_global, microbatch.num_tokens)
        kind = self.p2p.axis.device.type
        cast = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
        return (str(spec), shapes, place, self.model.training, torch.is_grad_enabled(), cast)

    def _new_route(self, schedule: Schedule, routes: list[ChunkRoute], edges: Sequence[Edge]) -> ChunkRoute:
        """Returns the schedule's message route, cached in ``routes``; each evaluation brings a new schedule."""
        for place, route in enumerate(routes):
            if route.schedule is schedule:
                routes.insert(0, routes.pop(place))
                return route
        by_action = (coming(action, edges) for action in schedule.actions[self.stage])
        remote = (
            tuple(m for m in messages if self.stage_of[m.source] != self.stage_of[m.target]) for messages in by_action
        )
        route = ChunkRoute(schedule, tuple(remote), arrivals(schedule, edges, self.stage))
        routes[KEPT_ROUTES - 1 :] = []
        routes.insert(0, route)
        return route

    # ---- values on edges

    def _finish(
        self, chunk: int, number: int, incoming: Sequence[ReceivedTensors], sent: Mapping[int, list[Any]], output: Any,
        is_last: bool,
    ) -> Sequence[Tensor]:  # fmt: skip
        """Sends a chunk's values to later chunks, hands on the model's output; returns the tensors to differentiate."""
        assert self._last is not None
        starts: list[Tensor] = []
        outgoing = []
        for target, values in sent.items():
            message = StageMessage("F", number, chunk, target)
            outgoing.append((message._replace(kind="B"), tuple(_positions(self._send(message, values), starts))))
        if is_last:
            output = output if self.frame is None else self.frame.give(output)
            start = self._last.give(number, self._microbatches[number], output)
            starts += [start] if start.requires_grad else []  # a microbatch may skip every layer
        if torch.is_grad_enabled():
            self._saved[chunk, number] = SavedMicrobatch(tuple(incoming), tuple(starts), tuple(outgoing))
        return starts

    def _scattered(self, spec: ValueSpec, message: StageMessage) -> ValueSpec:
        """Returns the spec of a message's values with a mark on each tensor that is sent in parts.

        Subclasses know which tensors are the same on all ranks of the axis over which parts are sent.
        """
        raise NotImplementedError

    def _received_values(self, message: StageMessage, incoming: list[ReceivedTensors]) -> Any:
        """Returns the values of a message, in order; appends those that need gradients to ``incoming``."""
        tensors = self._arrived.pop(message)
        spec = self.p2p.spec(message)
        differentiable = [i for i, leaf in enumerate(spec.tensors) if leaf.needs_gradient]
        if differentiable:
            came = ReceivedTensors(message, tuple(tensors[i] for i in differentiable))
            incoming.append(came)
            start = torch.empty(0, requires_grad=True)
            for i, tensor in zip(differentiable, _Entry.apply(start, came), strict=True):
                tensors[i] = tensor
        return fill(spec, tensors)

    def _send(self, message: StageMessage, values: list[Any]) -> list[Tensor]:
        """Sends values to the stage that uses them; returns the tensors whose gradients will come back."""
        spec, tensors = spec_of(values, f"chunk {message.source}")
        to = receiver(message, self.stage_of)
        if to == self.stage:
            self.p2p.set_local_spec(message, spec)
            self._arrived[message] = [tensor.detach() for tensor in tensors]
        else:
            self.p2p.send(message, self._scattered(spec, message), tensors, to)
        return [tensor for tensor in tensors if tensor.requires_grad]


def framed(frame: ForwardFrame | None, inputs: Any) -> AbstractContextManager[Any]:
    """Returns a context for one forward that yields the model's inputs as ``frame`` shards them for this rank.

    Without a frame it yields them unchanged.
    """
    return nullcontext(inputs) if frame is None else frame.within(inputs)


def _positions(tensors: Sequence[Tensor], starts: list[Tensor]) -> list[int]:
    """Returns each tensor's index in ``starts``, where the backward starts; tensors that are not in it are appended."""
    positions = []
    for tensor in tensors:
        position = next((i for i, start in enumerate(starts) if start is tensor), len(starts))
        if position == len(starts):
            starts.append(tensor)
        positions.append(position)
    return positions
