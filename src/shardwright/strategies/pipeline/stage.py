"""One pipeline stage at run time: runs this rank's chunks as the executor asks, and exchanges values with other stages.

Every chunk is run from the model's recorded calls (:mod:`~shardwright.analysis.call_graph`), which are read once for
each set of arguments and each train/eval mode. A chunk's inputs come from other stages over :class:`P2P`, or from this
stage's own chunks, without a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_map_only

from shardwright.analysis.arguments import arguments_given, bind
from shardwright.analysis.call_graph import Chunked, Edge, Ready, Repeat, prepare, run
from shardwright.comm.autograd import once
from shardwright.errors import PlanError
from shardwright.plan.plan import ForwardFrame
from shardwright.plan.schedule import Schedule
from shardwright.plan.stages import Stages
from shardwright.runtime.executor import Microbatch, OutputHandler
from shardwright.strategies.pipeline.messages import StageMessage, arrivals, coming, receiver
from shardwright.strategies.pipeline.p2p import P2P, fill, spec_of
from shardwright.strategies.pipeline.same_code import check_same_code, lines_of
from shardwright.strategies.pipeline.shared_buffers import SharedBuffers

POSTED_AHEAD = 2
"""For how many actions, from the one that runs next, receives are posted."""

KEPT_ROUTES = 4
"""How many schedules' message routes are kept, the most recently used first."""

PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of module attributes that may change between steps: the model's code is then read again."""


@dataclass
class Incoming:
    """The tensors of one received message that need gradients, and their gradients once the backward has run."""

    message: StageMessage
    tensors: tuple[Tensor, ...]
    gradients: Sequence[Tensor | None] = ()


class _Entry(Function):
    """Makes received tensors the inputs of a chunk's autograd graph, and stores their gradients in ``incoming``.

    They are no leaves, so that the chunk's code may overwrite them in place, as on one device.
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, incoming: Incoming) -> tuple[Tensor, ...]:
        ctx.incoming = incoming
        ctx.set_materialize_grads(False)
        return incoming.tensors

    @staticmethod
    @once
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.incoming.gradients = gradients
        return None, None


class SavedMicrobatch(NamedTuple):
    """What a chunk keeps of one microbatch between its forward and its backward.

    ``starts`` are the tensors that the backward starts from. ``outgoing`` lists, for each outgoing edge, the message
    that brings the gradients back and which of ``starts`` they belong to, in order.
    """

    incoming: tuple[Incoming, ...]
    starts: tuple[Tensor, ...]
    outgoing: tuple[tuple[StageMessage, tuple[int, ...]], ...]


class ChunkRoute(NamedTuple):
    """The messages that a stage receives under one schedule: by the action that needs them, and by sending stage."""

    schedule: Schedule
    coming: tuple[tuple[StageMessage, ...], ...]
    arrivals: Mapping[int, Sequence[StageMessage]]


@dataclass
class StageCode:
    """The model's traced calls for one set of forward arguments, cut into chunks, this stage's ready to run.

    ``attributes`` are the values of modules' attributes with which the code was read.
    """

    chunked: Chunked
    ready: Mapping[int, tuple[Ready, ...]]
    attributes: Mapping[tuple[str, str], Any]
    shared: SharedBuffers
    routes: list[ChunkRoute] = field(default_factory=list)
    has_run: bool = False


@dataclass
class Stage:
    """This rank's pipeline chunks, as the :class:`~shardwright.runtime.executor.ModelPart` that the executor runs.

    ``repeat`` is called before a module that earlier chunks call too, with the number of their calls: dropout masks
    are numbered over all calls. ``frame`` is what strategies have put around the model's forward.
    """

    model: nn.Module
    stages: Stages
    stage_of: tuple[int, ...]
    p2p: P2P
    repeat: Repeat
    frame: ForwardFrame | None = None
    _codes: dict[object, StageCode] = field(default_factory=dict)
    _compared: set[object] = field(default_factory=set)
    _code: StageCode | None = None
    _route: ChunkRoute | None = None
    _microbatches: Sequence[Microbatch] = ()
    _last: OutputHandler | None = None
    _saved: dict[tuple[int, int], SavedMicrobatch] = field(default_factory=dict)
    _arrived: dict[StageMessage, list[Tensor]] = field(default_factory=dict)  # received, or from a chunk of this stage

    @property
    def stage(self) -> int:
        """This rank's index on the axis ``pp``."""
        return self.p2p.axis.index

    def expect(self, microbatches: Sequence[Microbatch], values: Sequence[Mapping[str, Any]]) -> None:
        """Sets the shapes and dtypes of all messages from other stages; a rehearsal, which receives none, needs them.

        ``values[m]`` are microbatch m's values that cross between chunks, by their names in the model's code.
        """
        chunked = self.stages.with_arguments(arguments_given(self.stages.model, microbatches[0].inputs))
        for number, (microbatch, crossing) in enumerate(zip(microbatches, values, strict=True)):
            for edge in chunked.edges:
                sent = [_crossing_value(chunked, name, crossing[name]) for name in edge.values]
                spec, _ = spec_of(sent, f"chunk {edge.source}")
                self.p2p.set_spec(self._key(number, microbatch, len(microbatches)), (edge.source, edge.target), spec)

    # ---- ModelPart: called by the executor

    def begin(self, schedule: Schedule, microbatches: Sequence[Microbatch], last: OutputHandler) -> None:
        """Prepares for one run of a schedule over ``microbatches``; ``last`` gets the model's output of each."""
        count = len(microbatches)
        keys = [self._key(number, each, count) for number, each in enumerate(microbatches)]
        for key, microbatch in zip(keys, microbatches, strict=True):
            if not self.p2p.has_key(key):
                # Bad inputs raise here, on every stage, before any stage waits for another.
                with framed(self.frame, microbatch.inputs):
                    pass
        self._code = self._code_for(arguments_given(self.stages.model, microbatches[0].inputs))
        self._route, self._microbatches, self._last = self._route_for(schedule, self._code), microbatches, last
        self._saved, self._arrived = {}, {}
        self.p2p.begin(self._route.arrivals, keys)

    def wait(self, place: int) -> None:
        """Posts receives ahead and waits for the messages that the action at index ``place`` of the stage needs."""
        assert self._route is not None
        for messages in self._route.coming[place : place + POSTED_AHEAD]:
            self.p2p.post(messages)
        for message in self._route.coming[place]:
            self._arrived[message] = self.p2p.take(message)

    def forward(self, chunk: int, number: int) -> Sequence[Tensor]:
        """Runs microbatch ``number`` through a chunk and sends its outputs; returns those to run backward from."""
        with framed(self.frame, self._microbatches[number].inputs) as inputs:
            return self._run(chunk, number, inputs)

    def _run(self, chunk: int, number: int, inputs: Any) -> Sequence[Tensor]:
        assert self._code is not None
        assert self._last is not None
        chunked, microbatch = self._code.chunked, self._microbatches[number]
        values = bind(chunked, inputs)
        incoming: list[Incoming] = []
        for edge in chunked.edges:
            if edge.target == chunk:
                message = StageMessage("F", number, edge.source, chunk)
                values.update(zip(edge.values, self._received_values(message, incoming), strict=True))
        with self._code.shared.watching(self.model) if self._code.shared.users else nullcontext():
            output = run(self._code.ready[chunk], values, chunked.before(self.repeat))
        if not self._code.has_run:
            for path, name in self._changed_attributes(self._code):
                raise _attribute_changed(path, name)
        starts: list[Tensor] = []
        outgoing = []
        for edge in chunked.edges:
            if edge.source == chunk:
                message = StageMessage("F", number, chunk, edge.target)
                sent = [_crossing_value(chunked, name, values[name]) for name in edge.values]
                outgoing.append((message._replace(kind="B"), tuple(_positions(self._send(message, sent), starts))))
        if chunk == chunked.num_chunks - 1:
            output = output if self.frame is None else self.frame.give(output)
            start = self._last.give(number, microbatch, output)
            starts += [start] if torch.is_grad_enabled() else []
        if torch.is_grad_enabled():
            self._saved[chunk, number] = SavedMicrobatch(tuple(incoming), tuple(starts), tuple(outgoing))
        return starts

    def gradients(self, chunk: int, number: int) -> Sequence[Tensor | None]:
        """Returns the received gradient of each output of a chunk, summed over senders; None for the loss itself."""
        saved = self._saved[chunk, number]
        found: list[Tensor | None] = [None] * len(saved.starts)
        for message, positions in saved.outgoing:
            for position, gradient in zip(positions, self._arrived.pop(message, []), strict=True):
                before = found[position]
                found[position] = gradient if before is None else before + gradient
        return found

    def pass_back(self, chunk: int, number: int) -> None:
        """Sends the gradients of a chunk's inputs to the stages that sent those inputs."""
        for incoming in self._saved.pop((chunk, number)).incoming:
            found = incoming.gradients or [None] * len(incoming.tensors)
            pairs = zip(found, incoming.tensors, strict=True)
            gradients = [torch.zeros_like(tensor) if gradient is None else gradient for gradient, tensor in pairs]
            # The autograd node refers to `incoming`: emptying it breaks a cycle that only the collector would free.
            incoming.tensors = incoming.gradients = ()
            back = incoming.message._replace(kind="B")
            if receiver(back, self.stage_of) == self.stage:
                self._arrived[back] = gradients
            else:
                self.p2p.send_gradients(gradients, receiver(back, self.stage_of))

    def chunks_with(self, parameter: str) -> frozenset[int]:
        """Returns this rank's chunks that use a parameter; its first chunk if none does."""
        mine = [chunk for chunk, at in enumerate(self.stage_of) if at == self.stage]
        chunked = self.stages.chunked
        return frozenset(chunk for chunk in mine if parameter in chunked.weights_of(chunk)) or frozenset(mine[:1])

    # ---- the model's code

    def _code_for(self, given: tuple[str, ...]) -> StageCode:
        """Returns the code for these arguments, read again if the train/eval modes or modules' settings changed."""
        key = (given, tuple(module.training for module in self.model.modules()))
        code = self._codes.get(key)
        if code is not None and (changed := self._changed_attributes(code)):
            for path, name in changed:
                value = getattr(self.model.get_submodule(path), name)
                if not isinstance(value, PLAIN):
                    raise _attribute_changed(path, name)
                setattr(self.stages.model.get_submodule(path), name, value)
            self._codes.clear()
            code = None
        if code is not None:
            code.has_run = True
            return code
        for path, module in self.model.named_modules():
            self.stages.model.get_submodule(path).training = module.training
        code = self._codes[key] = self._read_code(given)
        kind = (given, self.model.training)
        if kind not in self._compared:  # all stages begin the same kinds of runs, so all of them compare here
            self._compared.add(kind)
            check_same_code(self.p2p.axis.for_strategy("core"), lines_of(code.chunked))
        return code

    def _changed_attributes(self, code: StageCode) -> list[tuple[str, str]]:
        """Returns the module path and name of each attribute whose value differs from when the code was read."""
        found = []
        for (path, name), before in code.attributes.items():
            now = getattr(self.model.get_submodule(path), name, None)
            if now is not before and not (isinstance(now, PLAIN) and type(now) is type(before) and now == before):
                found.append((path, name))
        return found

    def _read_code(self, given: tuple[str, ...]) -> StageCode:
        chunked = self.stages.with_arguments(given)
        attributes = {
            (path, name): getattr(self.model.get_submodule(path), name, None) for path, name in chunked.attributes
        }
        mine = (chunk for chunk, at in enumerate(self.stage_of) if at == self.stage)
        ready = {chunk: prepare(self.model, chunked, chunk) for chunk in mine}
        return StageCode(chunked, ready, attributes, SharedBuffers(chunked, self.stage_of, self.stage))

    def _key(self, number: int, microbatch: Microbatch, count: int) -> object:
        """Returns all that determines the specs of a microbatch's values, equal on every stage."""
        leaves, spec = tree_flatten(microbatch.inputs)
        shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
        place = (number, count, microbatch.num_global, microbatch.num_tokens)
        kind = self.p2p.axis.device.type
        cast = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
        return (str(spec), shapes, place, self.model.training, torch.is_grad_enabled(), cast)

    def _route_for(self, schedule: Schedule, code: StageCode) -> ChunkRoute:
        return self._new_route(schedule, code.routes, code.chunked.edges)

    def _new_route(self, schedule: Schedule, routes: list[ChunkRoute], edges: Sequence[Edge]) -> ChunkRoute:
        """Returns the schedule's message route, from ``routes`` if it is there; evaluations bring new schedules."""
        for place, route in enumerate(routes):
            if route.schedule is schedule:
                routes.insert(0, routes.pop(place))
                return route
        each = (coming(action, edges) for action in schedule.actions[self.stage])
        remote = (tuple(m for m in some if self.stage_of[m.source] != self.stage_of[m.target]) for some in each)
        route = ChunkRoute(schedule, tuple(remote), arrivals(schedule, edges, self.stage))
        routes[KEPT_ROUTES - 1 :] = []
        routes.insert(0, route)
        return route

    # ---- values on edges

    def _received_values(self, message: StageMessage, incoming: list[Incoming]) -> Any:
        """Returns the values of a message, in order; appends those that need gradients to ``incoming``."""
        tensors = self._arrived.pop(message)
        spec = self.p2p.spec(message)
        differentiable = [i for i, leaf in enumerate(spec.tensors) if leaf.needs_gradient]
        if differentiable:
            came = Incoming(message, tuple(tensors[i] for i in differentiable))
            incoming.append(came)
            start = torch.empty(0, requires_grad=True)
            for i, tensor in zip(differentiable, _Entry.apply(start, came), strict=True):  # type: ignore[no-untyped-call]
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
            self.p2p.send(message, spec, tensors, to)
        return [tensor for tensor in tensors if tensor.requires_grad]


def framed(frame: ForwardFrame | None, inputs: Any) -> AbstractContextManager[Any]:
    """Returns a ``with`` context for one forward, which yields the inputs as the frame's strategies change them."""
    return nullcontext(inputs) if frame is None else frame.within(inputs)


def _attribute_changed(path: str, name: str) -> PlanError:
    return PlanError(
        f"'{f'{path}.{name}'.lstrip('.')}' is set while the model runs, and read by code outside of the module",
        given="an attribute that is no longer what it was when the code was read",
        allowed="values that modules take and return: these are sent between stages; settings that do not change "
        "within a step",
        fix="return the value from the module's forward",
    )


def _crossing_value(chunked: Chunked, name: str, value: Any) -> Any:
    """Returns a value to be sent: detached, unless a gradient can come back for it."""
    return value if name in chunked.learning else tree_map_only(Tensor, Tensor.detach, value)


def _positions(tensors: Sequence[Tensor], starts: list[Tensor]) -> list[int]:
    """Returns the position of each tensor among the backward's starts, to which new ones are appended."""
    positions = []
    for tensor in tensors:
        position = next((i for i, start in enumerate(starts) if start is tensor), len(starts))
        if position == len(starts):
            starts.append(tensor)
        positions.append(position)
    return positions
