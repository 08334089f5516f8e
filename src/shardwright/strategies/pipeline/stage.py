"""One stage's part of a model: its chunks, run by the executor, joined to other stages' by mail."""

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
from shardwright.analysis.call_graph import Chunked, Ready, Repeat, prepare, run
from shardwright.comm.autograd import once
from shardwright.errors import PlanError
from shardwright.plan.plan import ForwardFrame
from shardwright.plan.schedule import Schedule
from shardwright.plan.stages import Stages
from shardwright.runtime.executor import Microbatch, OutputHandler
from shardwright.strategies.pipeline.agreement import check_same_code, lines_of
from shardwright.strategies.pipeline.messages import StageMessage, arrivals, coming, receiver
from shardwright.strategies.pipeline.p2p import P2P, fill, spec_of
from shardwright.strategies.pipeline.shared_buffers import SharedBuffers

POSTED_AHEAD = 2
"""Receives of so many actions are posted before the first of them runs."""

KEPT_ROUTES = 4
"""So many lists of actions are remembered, with what they send: those met last."""


PLAIN = (bool, int, float, str, tuple, type(None))
"""Values that a person may change between steps: the code is read again with them."""


@dataclass
class Incoming:
    """What came in over one edge: the tensors that need gradients, and these gradients once they are there."""

    message: StageMessage
    tensors: tuple[Tensor, ...]
    gradients: Sequence[Tensor | None] = ()


class _Entry(Function):
    """Where a chunk's backward ends. What came in is no leaf: the chunk's code may overwrite it, as on one device."""

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
    """What a chunk keeps of one microbatch between forward and backward."""

    incoming: tuple[Incoming, ...]
    starts: tuple[Tensor, ...]
    outgoing: tuple[tuple[StageMessage, tuple[int, ...]], ...]
    """For each edge that leaves, which of the starts its gradients belong to, in order."""


class ChunkRoute(NamedTuple):
    """What other stages send this one in a list of actions: for each of its own, and by stage as it leaves there."""

    schedule: Schedule
    coming: tuple[tuple[StageMessage, ...], ...]
    arrivals: Mapping[int, Sequence[StageMessage]]


@dataclass
class StageCode:
    """A model's code for one set of arguments: how it is cut, and this stage's nodes, ready to run.

    ``attributes`` are the modules' own values that the code was read with.
    """

    chunked: Chunked
    ready: Mapping[int, tuple[Ready, ...]]
    attributes: Mapping[tuple[str, str], Any]
    shared: SharedBuffers
    routes: list[ChunkRoute] = field(default_factory=list)
    has_run: bool = False


@dataclass
class Stage:
    """This rank's chunks, run as the executor asks.

    ``repeat`` is told, before a module is called that earlier chunks call too, how often they do: random layers count.
    ``frame`` is what lies around the model's forward, where a strategy has put something there.
    """

    model: nn.Module
    stages: Stages
    stage_of: tuple[int, ...]
    mail: P2P
    repeat: Repeat
    frame: ForwardFrame | None = None
    _codes: dict[object, StageCode] = field(default_factory=dict)
    _compared: set[object] = field(default_factory=set)
    _code: StageCode | None = None
    _route: ChunkRoute | None = None
    _microbatches: Sequence[Microbatch] = ()
    _last: OutputHandler | None = None
    _kept: dict[tuple[int, int], SavedMicrobatch] = field(default_factory=dict)
    _here: dict[StageMessage, list[Tensor]] = field(default_factory=dict)
    _inbox: dict[StageMessage, list[Tensor]] = field(default_factory=dict)

    @property
    def stage(self) -> int:
        """This rank's place among the stages."""
        return self.mail.axis.index

    def expect(self, microbatches: Sequence[Microbatch], values: Sequence[Mapping[str, Any]]) -> None:
        """Learns the forms of all that will come from others, for a rehearsal in which nobody tells.

        ``values``, by microbatch, are those that cross between chunks, by their names in the model's code.
        """
        chunked = self.stages.with_arguments(arguments_given(self.stages.model, microbatches[0].inputs))
        for number, (microbatch, crossing) in enumerate(zip(microbatches, values, strict=True)):
            for edge in chunked.edges:
                sent = [_past(chunked, name, crossing[name]) for name in edge.values]
                form, _ = spec_of(sent, f"chunk {edge.source}")
                self.mail.learn(self._key(number, microbatch, len(microbatches)), (edge.source, edge.target), form)

    # ---- what the executor asks, see Work

    def begin(self, schedule: Schedule, microbatches: Sequence[Microbatch], last: OutputHandler) -> None:
        """A list of actions comes."""
        count = len(microbatches)
        keys = [self._key(number, each, count) for number, each in enumerate(microbatches)]
        for key, microbatch in zip(keys, microbatches, strict=True):
            if not self.mail.knows(key):  # what is refused is refused by every stage, before one waits for another
                with framed(self.frame, microbatch.inputs):
                    pass
        self._code = self._code_for(arguments_given(self.stages.model, microbatches[0].inputs))
        self._route, self._microbatches, self._last = self._route_for(schedule, self._code), microbatches, last
        self._kept, self._here, self._inbox = {}, {}, {}
        self.mail.begin(self._route.arrivals, keys)

    def wait(self, place: int) -> None:
        """Posts the receives of the next actions and waits for what this one needs."""
        assert self._route is not None
        for messages in self._route.coming[place : place + POSTED_AHEAD]:
            self.mail.post(messages)
        for message in self._route.coming[place]:
            self._inbox[message] = self.mail.take(message)

    def forward(self, chunk: int, number: int) -> Sequence[Tensor]:
        """Runs a microbatch through a chunk and sends on what others need."""
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
                values.update(zip(edge.values, self._take_in(message, incoming), strict=True))
        with self._code.shared.watching(self.model) if self._code.shared.users else nullcontext():
            output = run(self._code.ready[chunk], values, chunked.before(self.repeat))
        if not self._code.has_run:
            for path, name in self._changed(self._code):
                raise _set_while_running(path, name)
        starts: list[Tensor] = []
        outgoing = []
        for edge in chunked.edges:
            if edge.source == chunk:
                message = StageMessage("F", number, chunk, edge.target)
                sent = self._give(message, [self._to_send(values, name) for name in edge.values])
                outgoing.append((message._replace(kind="B"), tuple(_places(sent, starts))))
        if chunk == chunked.num_chunks - 1:
            output = output if self.frame is None else self.frame.give(output)
            start = self._last.give(number, microbatch, output)
            starts += [start] if torch.is_grad_enabled() else []
        if torch.is_grad_enabled():
            self._kept[chunk, number] = SavedMicrobatch(tuple(incoming), tuple(starts), tuple(outgoing))
        return starts

    def gradients(self, chunk: int, number: int) -> Sequence[Tensor | None]:
        """The gradients of what the chunk gave: what came back over each edge, added up; None for the loss."""
        kept = self._kept[chunk, number]
        found: list[Tensor | None] = [None] * len(kept.starts)
        for message, places in kept.outgoing:
            came = self._inbox.pop(message) if message in self._inbox else self._here.pop(message, [])
            for place, gradient in zip(places, came, strict=True):
                before = found[place]
                found[place] = gradient if before is None else before + gradient
        return found

    def pass_back(self, chunk: int, number: int) -> None:
        """Sends the gradients of what came in to where it came from."""
        kept = self._kept.pop((chunk, number))
        for incoming in kept.incoming:
            found = incoming.gradients or [None] * len(incoming.tensors)
            pairs = zip(found, incoming.tensors, strict=True)
            gradients = [torch.zeros_like(tensor) if gradient is None else gradient for gradient, tensor in pairs]
            incoming.tensors = incoming.gradients = ()  # autograd knows of them: a circle, that only gc would free
            back = incoming.message._replace(kind="B")
            if receiver(back, self.stage_of) == self.stage:
                self._here[back] = gradients
            else:
                self.mail.send_gradients(gradients, receiver(back, self.stage_of))

    def chunks_with(self, parameter: str) -> frozenset[int]:
        """This rank's chunks that use a parameter; the first where none does."""
        mine = [chunk for chunk, at in enumerate(self.stage_of) if at == self.stage]
        chunked = self.stages.chunked
        return frozenset(chunk for chunk in mine if parameter in chunked.weights_of(chunk)) or frozenset(mine[:1])

    # ---- inside

    def _code_for(self, given: tuple[str, ...]) -> StageCode:
        """The code that runs now: it may depend on the arguments, on training, and on values that modules keep."""
        key = (given, tuple(module.training for module in self.model.modules()))
        code = self._codes.get(key)
        if code is not None and (changed := self._changed(code)):
            for path, name in changed:
                value = getattr(self.model.get_submodule(path), name)
                if not isinstance(value, PLAIN):
                    raise _set_while_running(path, name)
                setattr(self.stages.model.get_submodule(path), name, value)
            self._codes.clear()
            code = None
        if code is not None:
            code.has_run = True
        if code is None:
            for path, module in self.model.named_modules():
                self.stages.model.get_submodule(path).training = module.training
            code = self._codes[key] = self._read(given)
            self._compare(code, given)
        return code

    def _compare(self, code: StageCode, given: tuple[str, ...]) -> None:
        """Asks the other stages whether they read the same, once for each kind of list: all begin the same ones."""
        kind = (given, self.model.training)
        if kind not in self._compared:
            self._compared.add(kind)
            check_same_code(self.mail.axis.for_strategy("core"), lines_of(code.chunked))

    def _changed(self, code: StageCode) -> list[tuple[str, str]]:
        """What the code was read with and is no longer so."""
        found = []
        for (path, name), before in code.attributes.items():
            now = getattr(self.model.get_submodule(path), name, None)
            if now is not before and not (isinstance(now, PLAIN) and type(now) is type(before) and now == before):
                found.append((path, name))
        return found

    def _read(self, given: tuple[str, ...]) -> StageCode:
        chunked = self.stages.with_arguments(given)
        mine = [chunk for chunk, at in enumerate(self.stage_of) if at == self.stage]
        attributes = {
            (path, name): getattr(self.model.get_submodule(path), name, None) for path, name in chunked.attributes
        }
        ready = {chunk: prepare(self.model, chunked, chunk) for chunk in mine}
        return StageCode(chunked, ready, attributes, SharedBuffers(chunked, self.stage_of, self.stage))

    def _key(self, number: int, microbatch: Microbatch, count: int) -> object:
        """All that the forms of a microbatch's values follow from, the same on every stage."""
        leaves, spec = tree_flatten(microbatch.inputs)
        shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
        place = (number, count, microbatch.num_global, microbatch.num_tokens)
        kind = self.mail.axis.device.type
        cast = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None
        return (str(spec), shapes, place, self.model.training, torch.is_grad_enabled(), cast)

    def _route_for(self, schedule: Schedule, code: StageCode) -> ChunkRoute:
        """Found once for a schedule; evaluations make their own, so the last few are kept."""
        for place, route in enumerate(code.routes):
            if route.schedule is schedule:
                code.routes.insert(0, code.routes.pop(place))
                return route
        edges = code.chunked.edges
        each = (coming(action, edges) for action in schedule.actions[self.stage])
        apart = (tuple(m for m in some if self.stage_of[m.source] != self.stage_of[m.target]) for some in each)
        route = ChunkRoute(schedule, tuple(apart), arrivals(schedule, edges, self.stage))
        code.routes[KEPT_ROUTES - 1 :] = []
        code.routes.insert(0, route)
        return route

    def _take_in(self, message: StageMessage, incoming: list[Incoming]) -> Any:
        """The values that came over an edge, in order; what needs gradients is noted in ``incoming``."""
        tensors = self._inbox.pop(message) if message in self._inbox else self._here.pop(message)
        form = self.mail.form(message)
        learns = [i for i, leaf in enumerate(form.tensors) if leaf.needs_gradient]
        if learns:
            came = Incoming(message, tuple(tensors[i] for i in learns))
            incoming.append(came)
            start = torch.empty(0, requires_grad=True)
            for i, tensor in zip(learns, _Entry.apply(start, came), strict=True):  # type: ignore[no-untyped-call]
                tensors[i] = tensor
        return fill(form, tensors)

    def _to_send(self, values: Mapping[str, Any], name: str) -> Any:
        """A value as others get it: without its past, where no gradient can come back."""
        assert self._code is not None
        return _past(self._code.chunked, name, values[name])

    def _give(self, message: StageMessage, values: list[Any]) -> list[Tensor]:
        """Hands values on; returns the tensors among them whose gradients come back."""
        form, tensors = spec_of(values, f"chunk {message.source}")
        to = receiver(message, self.stage_of)
        if to == self.stage:
            self.mail.remember(message, form)
            self._here[message] = [tensor.detach() for tensor in tensors]
        else:
            self.mail.send(message, form, tensors, to)
        return [tensor for tensor in tensors if tensor.requires_grad]


def framed(frame: ForwardFrame | None, inputs: Any) -> AbstractContextManager[Any]:
    """A forward on these inputs, which it gives as the modules inside take them."""
    return nullcontext(inputs) if frame is None else frame.within(inputs)


def _set_while_running(path: str, name: str) -> PlanError:
    return PlanError(
        f"'{f'{path}.{name}'.lstrip('.')}' is set while the model runs, and read by code outside of the module",
        given="an attribute that is no longer what it was when the code was read",
        allowed="values that modules take and return: these are sent between stages; settings that do not change "
        "within a step",
        fix="return the value from the module's forward",
    )


def _past(chunked: Chunked, name: str, value: Any) -> Any:
    """A value with its past where a gradient can come back, and without one where none can."""
    return value if name in chunked.learning else tree_map_only(Tensor, Tensor.detach, value)


def _places(tensors: Sequence[Tensor], starts: list[Tensor]) -> list[int]:
    """Where each tensor is among the starts of the backward; new ones are added."""
    places = []
    for tensor in tensors:
        place = next((i for i, start in enumerate(starts) if start is tensor), len(starts))
        if place == len(starts):
            starts.append(tensor)
        places.append(place)
    return places
