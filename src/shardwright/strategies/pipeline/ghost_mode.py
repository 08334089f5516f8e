"""Runs the whole forward of a model for one pipeline chunk: only the chunk's own events (calls) compute something.

Calls that belong to other chunks return ghosts without running. A ghost is a tensor on the meta device that stands for
a value of another chunk (``analysis/chunks/forward_events.py``). Where an event of this chunk takes a ghost, it gets
the value that was received. Every event is compared with a record of the forward, so that a forward which takes another
path raises before anything wrong is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from shardwright.analysis.chunks.events_chunked import EventsChunked
from shardwright.analysis.chunks.forward_events import ParameterIndex, below_functions, calls_replaced, function_name
from shardwright.analysis.chunks.forward_record import (
    ForwardEvent,
    GhostSpec,
    LengthResult,
    SharedOperand,
    ValueName,
    plain_of,
    raised_again,
    shapes_from_inputs,
    tag_value,
    value_name,
)
from shardwright.analysis.on_meta.device_moves import DEVICE
from shardwright.analysis.on_meta.guards import answer_of_guard
from shardwright.analysis.on_meta.hidden_outputs import hidden_tensors, refused_output
from shardwright.analysis.on_meta.meta_values import PACK
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.analysis.on_meta.operator_results import cloned, map_tensors, tensors_of
from shardwright.errors import PlanError

# torch's type stubs declare these properties, which are written in C, as plain attributes without a getter
_FACTS = frozenset(
    descriptor.__get__  # type: ignore[union-attr]
    for descriptor in (Tensor.shape, Tensor.dtype, Tensor.ndim, Tensor.requires_grad, Tensor.is_meta)
)
"""The getters whose answers for a ghost (a meta tensor for a tensor of another stage) are those for its tensor.

They make no tensor.
"""


class ChunkStoppedError(BaseException):
    """Raised to leave the user's forward once the last recorded call of a chunk has run.

    It is no ``Exception``, so that code which turns all of these into errors of its own lets it pass.
    """


class GhostMode(TorchFunctionMode):
    """A context that runs one chunk's calls of the forward for one microbatch; other chunks' calls return meta tensors.

    ``chunk`` is the number of the chunk; with None no call is run, and the forward is only compared with the record.
    ``plain`` are the recorded modules by path, with the user's hooks alone, and ``names`` finds names of parameters.
    ``received`` are the values that other chunks have sent, by name, and ``device`` is the one on which this chunk
    computes. ``made`` collects this chunk's values that other chunks take. ``before`` is called with the number of each
    of this chunk's recorded calls before the call runs.
    """

    takes_draws = True
    """Tells ``KeyedDraws`` to leave the call of a random function to this mode, so that it is one event as recorded."""

    def __init__(
        self, chunked: EventsChunked, chunk: int | None, plain: Mapping[str, nn.Module], names: ParameterIndex,
        received: Mapping[ValueName, Tensor], device: torch.device, before: Callable[[int], None],
    ) -> None:  # fmt: skip
        super().__init__()
        self._chunked, self._plain, self._names = chunked, plain, names
        self._device, self._before = device, before
        for name, tensor in received.items():
            tag_value(tensor, name)
        self._events = chunked.record.events
        self._chunk, end = chunk, len(self._events)
        self._first, self._stop = (end, end) if chunk is None else chunked.bounds[chunk : chunk + 2]
        self._is_last = chunk in (None, chunked.num_chunks - 1)
        self._sent = {value for edge, values in chunked.values.items() if edge[0] == chunk for value in values}
        self._returned = frozenset(chunked.record.outputs)
        self._real: dict[ValueName, Tensor] = dict(received)
        self._at, self._inside = 0, False
        self.made: dict[ValueName, Tensor] = {}

    def run(self, model: nn.Module, units: Mapping[nn.Module, str], opened: Sequence[nn.Module], inputs: Any) -> Any:
        """Runs the forward up to this chunk's last call; returns the model's output on the last chunk, else None.

        ``units`` are the modules that the record has as single calls, with their paths. Hooks on ``opened`` modules do
        not run.

        Raises: PlanError: the forward makes other calls than the recorded one, or code between modules reads a value
            that another stage computes.
        """
        if self._chunked.record.writes_inputs:  # this stage's other chunks read the inputs too
            inputs = cloned(inputs)
        callers: dict[nn.Module, Callable[..., Any]] = {module: module.forward for module in opened}
        callers.update((module, self._caller(path, module)) for module, path in units.items())
        with calls_replaced(callers):
            try:
                with self:
                    outputs = call_model(model, inputs)
            except ChunkStoppedError:
                return None
        if self._at == self._stop == len(self._events) and not self._is_last:
            return None  # no event is left for the chunks that follow
        if not self._is_last or self._at != len(self._events):
            raise self._differs("the end of the forward")
        if self._chunk is None:
            return None
        for leaf in hidden_tensors(outputs):
            value = self._value(leaf.tensor) if value_name(leaf.tensor) in self._returned else leaf.tensor
            if value is not leaf.tensor and leaf.replace is None:
                raise refused_output(leaf.holder, "pp")
            if value is not leaf.tensor and leaf.replace is not None:
                leaf.replace(value)
        is_own = all(self._value(tensor) is tensor for tensor in tensors_of(outputs))
        return outputs if is_own else tree_map_only(Tensor, self._value, outputs)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._inside or func in _FACTS:
            return func(*args, **kwargs) if kwargs else func(*args)
        tensors = tensors_of((args, kwargs)) if kwargs else tensors_of(args)
        takes = self._takes(tensors)
        if not any(takes):
            return func(*args, **kwargs) if kwargs else func(*args)
        named, name = dict(kwargs or {}), function_name(func)
        event = self._events[self._at] if self._at < len(self._events) else None
        asks = func is Tensor.type and len(args) == 1 and not named  # x.type() gives text
        if event is None or event.number is not None or event.name != name or asks:
            return self._look(func, name, args, named, tensors)
        return self._event(event, takes, tensors, func, args, named)

    def _takes(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        return tuple([value_name(tensor) or self._names.of(tensor) for tensor in tensors])

    def _look(self, func: Any, name: str, args: Any, named: Any, tensors: Sequence[Tensor]) -> Any:
        """Runs a function that makes no tensor, such as one that reads a tensor's size.

        Raises PlanError if it reads a value that another stage computes, or makes or changes a tensor after all.
        """
        if func == DEVICE and tensors[0].is_meta:
            return self._device
        if func is Tensor.type and tensors[0].is_meta:
            return torch.empty(0, dtype=tensors[0].dtype, device=self._device).type()
        versions = [tensor._version for tensor in tensors]
        try:
            result = func(*args, **named)
        except (RuntimeError, NotImplementedError) as failure:
            if not any(tensor.is_meta for tensor in tensors):
                raise
            goes_on = answer_of_guard() if func in (Tensor.__bool__, Tensor.item) else None
            if goes_on is not None:  # a check such as isnan().any(): the stage with the value makes it
                return goes_on
            raise PlanError(
                f"the code between modules reads a value that another stage computes: {name}",
                given=self._where(),
                allowed="code between modules whose calls do not depend on values",
                fix="move what depends on values into a module of its own",
            ) from failure
        if (tensors_of(result) and name != "grad.__get__") or versions != [tensor._version for tensor in tensors]:
            raise self._differs(f"a call of {name}")
        return result

    def _caller(self, path: str, module: nn.Module) -> Callable[..., Any]:
        original: Callable[..., Any] = module._call_impl

        def call(*args: Any, **named: Any) -> Any:
            if self._inside:
                return original(*args, **named)
            event = self._events[self._at] if self._at < len(self._events) else None
            if event is None or event.number is None or event.name != path:
                raise self._differs(f"a call of '{path}'")
            with below_functions():
                tensors = tensors_of((args, named))
                takes = self._takes(tensors)
            number = self._at
            is_ghost = not self._first <= number < self._stop
            if is_ghost:
                self._run_hooks("_forward_pre_hooks", path, module, args, named)
            results = self._event(event, takes, tensors, original, args, named)
            if is_ghost:
                self._run_hooks("_forward_hooks", path, module, args, named, results)
            return results

        return call

    def _run_hooks(self, kind: str, path: str, module: nn.Module, args: Any, named: Any, *results: Any) -> None:
        """Runs the user's own hooks on the ghosts (meta tensors) that a module takes and returns.

        Hooks run on every stage because they may keep values for later code. ``kind`` is torch's name of the module's
        dict of hooks. Of this model's hooks those run that the recorded model had too, so hooks of strategies do not.
        The copies on this model run, not those on the recorded one, since a hook may keep values on its own model.
        """
        recorded_hooks, own_hooks = (getattr(owner, kind) for owner in (self._plain[path], module))
        with_named = getattr(self._plain[path], f"{kind}_with_kwargs")
        for number, hook in list(recorded_hooks.items()):
            with self._natively(), _GhostOperators():
                own_hooks.get(number, hook)(module, args, *([named] if number in with_named else []), *results)

    def _event(
        self, event: ForwardEvent, takes: tuple[Any, ...], tensors: Sequence[Tensor], call: Any, args: Any, named: Any
    ) -> Any:
        if takes != event.takes:
            raise self._differs(f"{event} on values {takes} and not {event.takes}")
        if self._chunk is None:
            plain = plain_of(args, named)
            if event.number is not None:
                with below_functions():
                    plain += shapes_from_inputs(tensors, takes)
            if plain != event.plain:
                raise self._differs(f"{event} with {', '.join(plain)} and not {', '.join(event.plain)}")
        number, self._at = self._at, self._at + 1
        if not self._first <= number < self._stop:
            if number >= self._stop:
                raise ChunkStoppedError  # the user's code has caught the first one
            if event.raised is not None:
                raise raised_again(event.raised)
            with below_functions():
                selects = self._chunk is None and number in self._chunked.record.selections and not event.written
                if selects and any(isinstance(spec, GhostSpec) for spec in event.results):
                    if event.number is not None:  # its code may change buffers and start collectives: recorded anew
                        raise self._differs(f"{event}, which selects by values of inputs")
                    self._check_selected(event, call, args, named)
                computed = self._lengths(event, call, args, named)
                return self._ghosts(event, tensors, computed)
        self._before(number)
        asked = tensors
        if any(takes):
            with below_functions():  # so that reading attributes of tensors here is no call in this mode
                args, named = map_tensors((args, named), self._value)
                tensors = [self._value(tensor) for tensor in tensors]
        with self._popped():
            with self._natively():
                if event.name in self._chunked.record.checkpointed and event.number is not None:
                    results = _checkpointed(call, args, named)
                else:
                    results = call(*args, **named)
            if event.raised is not None:
                raise self._differs(f"{event}, which did not raise a {type(event.raised).__name__}")
            results = self._marked(event, tensors, results)
            for place, spec in event.written:  # the user's code holds the ghost, not the received tensor
                tag_value(asked[place], spec.name)
        if self._at == self._stop and not self._is_last:
            raise ChunkStoppedError
        return results

    @contextmanager
    def _natively(self) -> Iterator[None]:
        """A context in which functions run without this mode, so that a recomputation runs without it too."""
        self._inside = True
        try:
            with self._popped():
                yield
        finally:
            self._inside = False

    def _popped(self) -> AbstractContextManager[Any]:
        return _NativeContext() if _get_current_function_mode() is self else nullcontext()

    def _value(self, tensor: Tensor) -> Tensor:
        """Returns the received tensor in place of a ghost (a meta tensor), and any other tensor unchanged.

        Raises PlanError for a ghost whose value was not received.
        """
        name = value_name(tensor)
        value = tensor if name is None else self._real.get(name, tensor)
        if value.is_meta and self._device.type != "meta":
            raise self._differs("a use of a value that was not received")
        return value

    def _marked(self, event: ForwardEvent, tensors: Sequence[Tensor], results: Any) -> Any:
        """Tags an event's results with their value names, and adds those that other chunks take to ``made``.

        Raises PlanError if the results differ from those in the record.
        """
        leaves, tree = ([results], None) if type(results) is Tensor else tree_flatten(results)
        written, overwritten = dict(enumerate(tensors)), {place for place, _ in event.written}
        if len(leaves) != len(event.results):
            raise self._differs(f"{event} with {len(leaves)} results")
        for place, (leaf, spec) in enumerate(zip(leaves, event.results, strict=True)):
            if isinstance(spec, GhostSpec):
                if any(leaf is tensor for tensor in tensors):  # in the record the result was a new tensor
                    leaves[place] = leaf = leaf.view_as(leaf)
                self._keep(leaf, spec)
            elif isinstance(spec, SharedOperand) and isinstance(leaf, Tensor):
                name, operand = event.takes[spec.operand], tensors[spec.operand]
                if not (spec.operand in overwritten or _is_same(leaf, operand) or self._is_copy(event, name)):
                    raise self._differs(f"{event} with a result of its own, where an operand was returned")
                tag_value(leaf, name if isinstance(name, tuple) else None)  # a received tensor has no tag yet
                written[spec.operand] = leaf  # a layer that writes in place on one device may not do so here
            elif repr(leaf) != repr(spec) and isinstance(leaf, bool | int | float | str | None):
                raise self._differs(f"{event} with {leaf!r} and not {spec!r}")
        for place, spec in event.written:
            self._keep(written[place], spec)
            self._real[spec.name] = written[place]
        return leaves[0] if tree is None else tree_unflatten(leaves, tree)

    def _is_copy(self, event: ForwardEvent, name: Any) -> bool:
        """Whether an event copies a value with other strides than in the record, and no event writes to that value."""
        written = (writer.takes[place] for writer in self._events for place, _ in writer.written)
        return event.name == "contiguous" and all(written_name != name for written_name in written)

    def _keep(self, tensor: Tensor, spec: GhostSpec) -> None:
        if tuple(tensor.shape) != spec.shape:
            raise self._differs(f"a value of shape {tuple(tensor.shape)} and not {spec.shape}")
        tag_value(tensor, spec.name)
        if spec.name in self._sent:
            self.made[spec.name] = tensor

    def _lengths(self, event: ForwardEvent, call: Any, args: Any, named: Any) -> Sequence[Any]:
        """Returns the results of a call, if every stage computes some of them itself (:class:`LengthResult`), else ().

        Raises PlanError if the rest of the results have other shapes than in the record: the sequences then have other
        lengths.
        """
        if not any(isinstance(leaf, LengthResult) for leaf in event.results):
            return ()
        rows, lengths = args[0], args[1]
        if lengths.is_meta and self._device.type != "meta":
            raise PlanError(
                "the lengths of packed sequences are values that another stage computes",
                given=self._where(),
                allowed="lengths of inputs, or computed from inputs alone",
                fix="move the code that packs, and computes the lengths, into a module of its own",
            )
        # one number stands in for the features of each row, since lengths do not depend on them
        rows = torch.zeros((), device=self._device).expand(rows.shape[: 2 if event.name == PACK else 1])
        results = tree_leaves(call(rows, *args[1:], **named))
        spec, shape = event.results[0], tuple(results[0].shape)
        if isinstance(spec, GhostSpec) and shape != spec.shape[: len(shape)]:
            raise self._differs(f"a value of shape {shape} and not {spec.shape[: len(shape)]}")
        return results

    def _ghosts(self, event: ForwardEvent, tensors: Sequence[Tensor], computed: Sequence[Any]) -> Any:
        def result(leaf: Any) -> Any:
            if isinstance(leaf, LengthResult):
                return computed[leaf.place]
            if isinstance(leaf, SharedOperand):
                return tensors[leaf.operand]
            return ghosts[leaf.name] if isinstance(leaf, GhostSpec) else leaf

        ghosts = {leaf.name: leaf.ghost() for leaf in event.results if isinstance(leaf, GhostSpec)}
        for place, spec in event.written:
            tag_value(tensors[place], spec.name)
        leaves = [result(leaf) for leaf in event.results]
        return leaves[0] if event.is_leaf else tree_unflatten(leaves, event.tree)

    def _check_selected(self, event: ForwardEvent, call: Any, args: Any, named: Any) -> None:
        """Raises PlanError if values of inputs, as of a mask, pick other numbers of elements than in the record.

        They are elements of a ghost, the meta tensor that stands for another stage's value.
        """
        # a mask cannot index a ghost, which is on the meta device: a single zero stands for it, expanded to its shape
        args, named = map_tensors(
            (args, named),
            lambda t: torch.zeros((), dtype=t.dtype, device=self._device).expand(t.shape) if t.is_meta else t,
        )
        for leaf, spec in zip(tree_leaves(call(*args, **named)), event.results, strict=True):
            if isinstance(spec, GhostSpec) and tuple(leaf.shape) != spec.shape:
                raise self._differs(f"a value of shape {tuple(leaf.shape)} and not {spec.shape}")

    def _where(self) -> str:
        after = f"after {self._events[self._at - 1]}" if self._at else "at the beginning of the forward"
        return f"{after}, event {self._at} of {len(self._events)}"

    def _differs(self, now: str) -> PlanError:
        expected = str(self._events[self._at]) if self._at < len(self._events) else "the end of the forward"
        return PlanError(
            f"the forward does other calls than those that were recorded when the model was cut: {now}",
            given=f"{now}, {self._where()}; recorded was {expected}",
            allowed="forwards whose calls depend on the shapes of the inputs alone, and not on values or on state that "
            "modules of other stages keep",
            fix="make the forward take one path for all values, give an example that takes all paths, or leave out pp",
        )


class _GhostOperators(TorchDispatchMode):
    """A context in which operators with a ghost among their operands run on the meta device.

    A hook of a module on another stage may combine ghosts with buffers, of which this rank has the values.
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (args, kwargs or {})
        tensors = tensors_of(arguments)
        if any(tensor.is_meta for tensor in tensors) and not all(tensor.is_meta for tensor in tensors):
            arguments = map_tensors(arguments, lambda tensor: tensor.to("meta"))
        return function(*arguments[0], **arguments[1])


class _NativeContext:
    """A context without the innermost function mode; it is several times as fast as torch's own."""

    def __enter__(self) -> None:
        self._mode = _pop_mode()

    def __exit__(self, *error: object) -> None:
        _push_mode(self._mode)


def _checkpointed(call: Callable[..., Any], args: Any, named: Any) -> Any:
    """Calls a module under activation checkpointing, as the user's code asks for, on received tensors.

    The user's own checkpoint, which is around this call, would run the module again on ghosts (meta tensors). The hooks
    set here keep the hooks of that checkpoint from seeing the tensors that are saved.
    """
    from torch.utils.checkpoint import checkpoint  # slow (torch's compiler), and the user's code has it

    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return checkpoint(call, *args, use_reentrant=False, **named)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one storage; tensors without values have none, and count as the same."""
    if tensor is other or tensor.is_meta or other.is_meta:
        return True
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
