"""Records one forward of a model as a list of events: calls of modules, and of functions between modules.

The user's own forward runs once on the meta device. A call of a module that is named as a *unit* is one event; the
calls inside of it are not listed. A function that is called outside of units is an event too if it depends on a
parameter or on the result of an event. A function of inputs and constants alone is not an event, because every rank can
compute it. So each value is known by the event that made it, and each event by the values that it takes.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from shardwright.analysis.calls.autograd_graph import node_of, nodes_behind, nodes_from
from shardwright.analysis.calls.draw_calls import DrawCall, draw_of
from shardwright.analysis.chunks.costs import Cost, CostCounting
from shardwright.analysis.chunks.forward_record import (
    PACKING,
    ForwardEvent,
    ForwardRecord,
    GhostSpec,
    LengthResult,
    ModuleSpan,
    SharedOperand,
    ValueName,
    forget_values,
    plain_of,
    raised_again,
    shapes_from_inputs,
    tag_value,
    value_mark,
    value_name,
)
from shardwright.analysis.on_meta.device_moves import TAKES_GRADIENT, call_on_meta
from shardwright.analysis.on_meta.hidden_outputs import unseen_outputs
from shardwright.analysis.on_meta.meta_device import buffers_put_back, on_meta
from shardwright.analysis.on_meta.meta_values import TO_NUMBERS, MetaValues
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.analysis.on_meta.operator_results import check_not_nested, cloned, tensors_of
from shardwright.analysis.traced.batch_norms import ignoring_batch_statistics
from shardwright.analysis.traced.tracer import is_autograd_function

_HOOKS = frozenset([Tensor.register_hook, Tensor.register_post_accumulate_grad_hook])
"""The functions that set hooks on gradients.

On a ghost, the meta tensor that stands for a tensor of another stage, a hook would not run.
"""

_READERS = frozenset(TO_NUMBERS)
"""Tensor methods that read a tensor's values without running an operator."""

Draw = Callable[[str, int, int, DrawCall], Tensor]
"""A function from a module's name, the number of its call, the number of the draw in that call, and the draw.

It returns the result of the draw. Both numbers count from 0.
"""


def below_functions() -> Any:
    """Returns a context in which torch function modes are disabled, so that calls inside it are not recorded."""
    return torch._C.DisableTorchFunction()


def function_name(function: Callable[..., Any]) -> str:
    """Returns a torch function's name; an attribute's getter is named with the attribute, such as ``shape.__get__``."""
    name = str(getattr(function, "__name__", function))
    return f"{function.__self__.__name__}.{name}" if name in ("__get__", "__set__") else name  # type: ignore[attr-defined]


_CONVERSIONS = frozenset(["to", "float", "double", "half", "bfloat16", "type", "type_as"])
"""The functions that return their operand itself if it already has the requested dtype."""


class ParameterIndex:
    """Looks up the name of a model's parameter or buffer by the tensor itself; a tied tensor goes by its first name."""

    def __init__(self, model: nn.Module) -> None:
        # reversed, so that the first of several tied names wins
        parameters = reversed(list(model.named_parameters(remove_duplicate=False)))
        self.parameters: dict[int, tuple[str, Tensor]] = {id(tensor): (name, tensor) for name, tensor in parameters}
        buffers = reversed(list(model.named_buffers(remove_duplicate=False)))
        self.buffers = {id(tensor): (name, tensor) for name, tensor in buffers}

    @contextmanager
    def also(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Returns a context in which the tensors in ``parameters`` count as parameters too, under the names given."""
        known = self.parameters
        if parameters:
            self.parameters = {**known, **{id(tensor): (name, tensor) for name, tensor in parameters.items()}}
        try:
            yield
        finally:
            self.parameters = known

    def of(self, tensor: Tensor) -> str | None:
        """Returns the name of a parameter, or None for any other tensor."""
        entry = self.parameters.get(id(tensor))
        return None if entry is None else entry[0]

    def any_of(self, tensor: Tensor) -> str | None:
        """Returns the name of a parameter or buffer, or None for any other tensor."""
        entry = self.buffers.get(id(tensor))
        return self.of(tensor) if entry is None else entry[0]


@contextmanager
def calls_replaced(around: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Returns a context in which a call of each module in ``around`` runs the function given for it instead.

    The modules' hooks do not run, unless the function runs them.
    """
    for module, call in around.items():
        vars(module)["_call_impl"] = call
    try:
        yield
    finally:
        for module in around:
            vars(module).pop("_call_impl", None)


def _needs_gradient(tensor: Tensor) -> bool:
    """Returns whether a tensor requires a gradient, or the tensor inside if a transform such as ``vmap`` wraps it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.requires_grad


class _ForwardRecorder(TorchFunctionMode):
    """The torch function mode that fills a :class:`ForwardRecord` while a forward runs."""

    takes_draws = True

    def __init__(
        self, model: nn.Module, units: Collection[str], work: CostCounting, device: str, values: MetaValues,
        draw: Draw | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._device, self._values, self._draw = device, values, draw
        self._running: list[tuple[str, int]] = []
        self._has_autocast = self._has_inputs = False
        self._num_draws = Counter[tuple[str, int]]()
        # by id: tensors that code between units computes from inputs; kept alive, so that ids stay taken
        self._varying: dict[int, Tensor] = {}
        # by id: tensors that code between units computes from buffers, each with the names of these buffers
        self._stored: dict[int, tuple[Tensor, frozenset[str]]] = {}
        self._reading: list[tuple[str, frozenset[str]]] = []  # modules whose code reads values of buffers, and which
        self._state = [(f"{path}.{name}".lstrip("."), module, name, buffer, buffer._version, buffer.shape)
                       for path, module in model.named_modules()
                       for name, buffer in module._buffers.items() if buffer is not None]  # fmt: skip
        self.record, self.names = ForwardRecord(), ParameterIndex(model)
        self._units, self._work, self._numbers = frozenset(units), work, Counter[str]()
        self._unit: int | None = None
        self._varies_in_unit = False  # whether the running unit has computed from inputs themselves
        self._given: frozenset[ValueName] = frozenset()
        self._reads: set[str] = set()
        self._scope = -1
        self._made: dict[ValueName, Any] = {}
        self._code_of_call: CodeType | None = None
        # by the frame of a checkpoint: the module that calls it, and the modules or functions that it calls
        self._checkpoints: dict[FrameType, tuple[str, list[str]]] = {}
        # storages of tensors without a name into which events have written, with a tensor that keeps each alive
        self._written_free: dict[int, Tensor] = {}
        self._functions: set[Any] = set()  # autograd's nodes of calls of the user's own autograd functions

    def _name(self, tensor: Tensor) -> ValueName | str | None:
        return value_name(tensor) or self.names.of(tensor)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        operands = tensors_of((args, named))
        if func in TAKES_GRADIENT and any(id(tensor) in self._varying for tensor in operands):
            self.record.own_backward.add("")  # a gradient with respect to inputs, which are no ghosts in a real run
        elif (func in TAKES_GRADIENT or func in _HOOKS) and self._unit is None:
            self.record.own_backward.add(self._running[-1][0])
        self._note_functions(operands)
        for tensor in operands:
            self._look_at(tensor)
        takes = tuple(map(self._name, operands))
        if isinstance(func, torch._ops.OpOverload) and self._unit is None and takes.count(None) < len(takes):
            # a ``torch.jit`` script made this call; in a real run function modes do not see calls inside of a script
            self.record.own_backward.add(self._running[-1][0])
        in_transform = torch._C._functorch.peek_interpreter_stack() is not None
        if in_transform and self._unit is None and any(map(_needs_gradient, operands)):
            # torch.vmap and similar transforms wrap tensors, and no ghost of another stage's tensor can be made inside
            # of one; transforms of inputs alone, such as masks, are computed by every stage
            self.record.own_backward.add(self._running[-1][0])
        draw = draw_of(func, args, named)
        if draw is not None:
            self._num_draws[self._running[-1]] += 1
        if all(name is None for name in takes):
            return self._free(func, args, named, operands, draw)
        versions, before = [tensor._version for tensor in operands], self._work.now()
        num_reads, varies = self._values.num_reads, any(id(tensor) in self._varying for tensor in operands)
        results = self._selecting(func, args, named)
        has_read = varies and self._values.num_reads > num_reads
        if has_read:
            self._decides_by_inputs()
        self._varies_in_unit |= varies
        if has_read or (varies and self._unit is None and not self.record.is_one_path):
            self.record.selections.add(len(self.record.events))  # other inputs may select another number of elements
        if self._has_autocast and function_name(func) in _CONVERSIONS and any(results is value for value in operands):
            with below_functions():
                # under autocast the operand of a real run has another dtype than on meta, so the result is a new tensor
                results = results.view_as(results)
        outputs = tensors_of(results)
        written = [place for place, tensor in enumerate(operands) if tensor._version != versions[place]]
        if self._unit is not None:
            inside = self._unit, -1
            for tensor in [output for output in outputs if all(output is not other for other in operands)]:
                tag_value(tensor, inside)
        elif outputs or written:
            reads = frozenset(name for name in takes if isinstance(name, str))
            if any(self.names.any_of(operands[place]) is not None for place in written):
                self.record.writing.add(self._running[-1][0])
            self._note_callers(sys._getframe(1), self._running[-1][0], "")
            plain, cost = plain_of(args, named), self._work.since(before)
            self._add(function_name(func), None, operands, takes, plain, results, written, reads, cost)
        return results

    def _selecting(self, func: Any, args: Any, named: Any) -> Any:
        """Runs a function on the meta device, and notes the running module if its code selects by values that it reads.

        Every stage runs the code between modules, so that code may not decide by values that only one stage has.
        """
        selected, self._values.selects_all = self._values.num_selected, self._running[-1][0] != ""
        try:
            results = call_on_meta(*self._values.indexing(func, args), named, self._device)
        finally:
            self._values.selects_all = False
        if self._values.num_selected > selected and self._unit is None:
            self.record.selecting.add(self._running[-1][0])
        return results

    def _free(
        self, func: Any, args: Any, named: dict[str, Any], operands: Sequence[Tensor], draw: DrawCall | None
    ) -> Any:
        """Runs a function of inputs and constants alone, and notes reads of values that depend on the inputs."""
        drawn = None if draw is None else draw.drawn(None)
        self.record.draws |= draw is not None and drawn is None
        values = None if drawn is None else self._values.values(drawn)
        if draw is not None and values is not None and values is not drawn:  # draw for the values of a constant
            drawn, draw = values, replace(draw, given={k: values if v is drawn else v for k, v in draw.given.items()})
        has_values = drawn is None or (self._unit is None and not drawn.is_meta)
        if self._draw is not None and draw is not None and has_values:
            results = self._draw(*self._running[-1], self._num_draws[self._running[-1]] - 1, draw)
        else:
            reads, varies = self._values.num_reads, any(id(tensor) in self._varying for tensor in operands)
            stored = frozenset[str]().union(*map(self._buffers_in, operands))
            if stored and not varies:
                results = self._selecting(func, args, named)
                self._stored.update((id(x), (x, stored)) for x in tensors_of(results))
                if self._values.num_reads > reads and self._unit is None:
                    self._reading.append((self._running[-1][0], stored))
                return results
            # if the inputs have values, unknown values come from random numbers, which a run draws before it records
            self._values.selects_all = self._has_inputs and varies
            try:
                results = call_on_meta(*self._values.indexing(func, args), named, self._device)
            finally:
                self._values.selects_all = False
            if draw is None and not varies:
                return results
            self._varies_in_unit |= varies
            if self._values.num_reads > reads or func in _READERS:
                self._decides_by_inputs()
        if self._unit is not None:  # a module may keep the result for its next call
            for tensor in tensors_of(results):
                if all(tensor is not operand for operand in operands):
                    tag_value(tensor, (self._unit, -1))
        self.vary((results, operands))
        return results

    def _decides_by_inputs(self) -> None:
        """Notes that later calls or shapes depend on values of the inputs, or on random numbers."""
        if self._unit is None:
            self.record.is_one_path = False
        else:
            self.record.deciding.add(self._unit)

    def _buffers_in(self, tensor: Tensor) -> frozenset[str]:
        """Returns the name of the buffer that a tensor is, or the names of the buffers that it was computed from."""
        name = self.names.any_of(tensor)
        return self._stored[id(tensor)][1] if id(tensor) in self._stored else frozenset([name] if name else [])

    def note_changed_buffers(self) -> None:
        """Notes the modules whose code read a buffer that the forward has changed, and those whose buffer was replaced.

        A buffer that a forward changes may differ between stages and steps, so that stages would not decide alike.
        """
        changed, scopes = set[str](), {scope.path for scope in self.record.scopes}
        for path, module, name, buffer, version, shape in self._state:
            if module._buffers.get(name) is not buffer or buffer._version != version or buffer.shape != shape:
                changed.add(path)
            if module._buffers.get(name) is not buffer and path.rpartition(".")[0] in scopes:
                self.record.writing.add(path.rpartition(".")[0])
        self.record.selecting.update(path for path, names in self._reading if names & changed)

    def begin(self, inputs: Any) -> None:
        """Notes the inputs of the forward, whose values differ between microbatches."""
        self._has_inputs = not any(tensor.is_meta for tensor in tensors_of(inputs))
        self.vary(inputs)

    def vary(self, tree: Any) -> None:
        """Notes that the values of these tensors differ between microbatches."""
        self._varying.update((id(tensor), tensor) for tensor in tensors_of(tree))

    def _look_at(self, tensor: Tensor) -> None:
        """Notes the use of a weight, and of a value that did not reach the event by its arguments."""
        weight, here = self.names.any_of(tensor), len(self.record.events)
        if weight is not None and self._unit is not None:
            self._reads.add(weight)
        elif weight is not None and self.names.of(tensor) is None:
            self.record.shared_buffers.add(weight)
        mark = value_mark(tensor)
        if mark is None and weight is None and self._written_free and _storage_of(tensor) in self._written_free:
            # an alias, of which other stages lack the new values; the output is read after all code has run
            self.record.own_backward.add(self._running[-1][0] if self._running else "")
        if mark is None or mark[0][0] > here:  # a higher number is a mark of an earlier record, on a kept tensor
            return
        (maker, place), version = mark
        inside = self._unit is not None
        if place < 0 and not (inside and maker == self._unit):
            if inside:
                self.record.together.add((maker, here))
            else:
                self.record.escaping.add(maker)
        elif place >= 0 and ((inside and mark[0] not in self._given) or tensor._version != version):
            self.record.together.add((maker, here))

    def _add(
        self, name: str, number: int | None, operands: Sequence[Tensor], takes: Any, plain: tuple[str, ...],
        results: Any, written: Sequence[int], reads: frozenset[str], cost: Cost, raised: Exception | None = None,
    ) -> None:  # fmt: skip
        here = len(self.record.events)
        leaves, tree = tree_flatten(results)
        entries: list[Any] = []
        specs: dict[int, Any] = {
            id(tensor): SharedOperand(number) for number, tensor in reversed([*enumerate(operands)])
        }
        if number is None and name in PACKING:
            specs[id(leaves[1])] = LengthResult(1)
            self.vary(leaves[1])
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) not in specs:  # a tensor that is returned twice is one value
                specs[id(leaf)] = self._spec(leaf, (here, place))
            entries.append(specs[id(leaf)] if isinstance(leaf, Tensor) else leaf)
        for place in written:
            if takes[place] is None and (storage := _storage_of(operands[place])) is not None:
                self._written_free[storage] = operands[place]
        changed = tuple((place, self._spec(operands[place], (here, len(leaves) + place))) for place in written)
        event = ForwardEvent(name, number, takes, tree, plain, tuple(entries), changed, reads, cost, raised)
        self.record.events.append(event)

    def _spec(self, tensor: Tensor, name: ValueName) -> GhostSpec:
        check_not_nested(tensor)
        tag_value(tensor, name)
        self._made[name] = node_of(tensor)
        learns = tensor.requires_grad
        spec = GhostSpec(name, tuple(tensor.shape), tensor.stride(), tensor.dtype, learns)
        self.record.specs[name] = spec
        return spec

    def _note_callers(self, frame: FrameType | None, caller: str, called: str) -> None:
        """Notes a call that ``caller``'s code makes inside an autograd function, or inside ``torch.utils.checkpoint``.

        ``called`` is the name of a module, or "" for a function. ``frame`` is the frame that makes the call.
        """
        while frame is not None and frame.f_code is not self._code_of_call:
            if is_autograd_function(frame):
                self.record.own_backward.add(caller)
            elif frame.f_code.co_name == "checkpoint" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                self._checkpoints.setdefault(frame, (caller, []))[1].append(called)
            frame = frame.f_back

    def _note_functions(self, tensors: Sequence[Tensor]) -> None:
        """Notes the running module if autograd functions of the user's own have returned some of ``tensors``.

        The nodes of the tensors show this; a function that returns its argument unchanged makes no call to be seen.
        """
        with below_functions():
            nodes = {node for tensor in tensors if isinstance(node := node_of(tensor), BackwardCFunction)}
        for node in nodes:
            if node not in self._functions and self._unit is None:
                self.record.own_backward.add(self._running[-1][0])
            self._functions.add(node)

    def caller(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """Returns the function that runs in place of a module's call and records the call."""
        original: Callable[..., Any] = module._call_impl

        def call(*args: Any, **named: Any) -> Any:
            number = self._numbers[path]
            self._numbers[path] += 1
            is_unit = self._unit is None and path in self._units
            self.record.calls[path].append(len(self.record.events) if is_unit else self._unit)
            if self._unit is None and self._running:
                self._note_callers(sys._getframe(1), self._running[-1][0], path)
                self._note_functions(tensors_of((args, named)))
                if torch._C._functorch.peek_interpreter_stack() is not None:  # the call is inside of a transform
                    self.record.own_backward.add(self._running[-1][0])
            self._has_autocast |= torch._C._is_any_autocast_enabled()
            self._running.append((path, number))
            try:
                if is_unit:
                    return self._call_unit(path, number, original, args, named)
                return self._call_opened(path, original, args, named)
            finally:
                self._running.pop()

        self._code_of_call = call.__code__  # the code object is the same for all modules
        return call

    def _call_opened(self, path: str, original: Any, args: Any, named: Any) -> Any:
        """Calls a module that is not a unit, and notes the range of events inside the call and their cost."""
        scope, before, first = len(self.record.scopes), self._work.now(), len(self.record.events)
        self.record.scopes.append(ModuleSpan(path, self._scope, first, first, Cost(), False))
        outer, self._scope = self._scope, scope
        is_free = False
        try:
            results = original(*args, **named)
            self._note_functions(tensors_of(results))
            is_free = all(self._name(tensor) is None for tensor in tensors_of(results))
        finally:  # the code around the call may catch an exception
            self._scope = outer
            cost, stop = self._work.since(before), len(self.record.events)
            self.record.scopes[scope] = ModuleSpan(path, outer, first, stop, cost, is_free)
        return results

    def _call_unit(self, path: str, number: int, original: Any, args: Any, named: Any) -> Any:
        with below_functions():
            operands = tensors_of((args, named))
            for tensor in operands:
                self._look_at(tensor)
            takes = tuple(map(self._name, operands))
            versions = [tensor._version for tensor in operands]
        self._unit, self._reads = len(self.record.events), set()
        self._given = frozenset(name for name in takes if isinstance(name, tuple))
        self._varies_in_unit, num_reads = False, self._values.num_reads
        before, raised, kept = self._work.now(), None, None
        try:
            results = original(*args, **named)
        except Exception as failure:  # the code around the call may catch it, so the event is recorded
            results, raised, kept = (), failure, raised_again(failure)
        with below_functions():
            written = [place for place, tensor in enumerate(operands) if tensor._version != versions[place]]
            self._note_functions(tensors_of(results))
            if self._varies_in_unit and self._values.num_reads > num_reads:  # other inputs may give another result
                self.record.selections.add(self._unit)
            self._unit = None
            reads, cost = frozenset(self._reads), self._work.since(before)
            plain = (*plain_of(args, named), *shapes_from_inputs(operands, takes))
            self._add(path, number, operands, takes, plain, results, written, reads, cost, kept)
        if raised is not None:
            raise raised
        return results

    def finish(self, outputs: Any) -> ForwardRecord:
        """Adds to the record which values the model returns and which receive a gradient, and returns the record."""
        tensors = [*tensors_of(outputs), *(output.tensor for output in unseen_outputs(outputs))]
        self.record.outputs = tuple(name for t in tensors if (name := value_name(t)) is not None)
        self.record.returned = tuple(parameter for t in tensors if (parameter := self.names.of(t)) is not None)
        for tensor in tensors:  # notes returned tensors that a module has kept, which are no results of events
            self._look_at(tensor)
        behind = set(nodes_behind(tensors))
        learning = {name for name, node in self._made.items() if node is not None and node in behind}
        # a write to a view gives it a new node, which does not lead to the view's earlier node
        for event in reversed(self.record.events):
            before = (event.takes[place] for place, spec in event.written if spec.name in learning)
            added = {
                name for name in before if isinstance(name, tuple) and self.record.specs[name].needs_gradient
            } - learning
            if added:  # and all that these were computed from, which the new node does not lead to either
                behind.update(nodes_from(self._made[name] for name in added))
                learning |= added
                learning.update(name for name, node in self._made.items() if node is not None and node in behind)
        self.record.learning = frozenset(learning)
        for caller, called in self._checkpoints.values():
            self.record.checkpointed.add(called[0] if len(called) == 1 and called[0] else caller)
        self._checkpoints.clear()
        return self.record


def record_events(
    model: nn.Module, inputs: Any, units: Collection[str] = (), draw: Draw | None = None
) -> ForwardRecord:
    """Runs one forward of a model on the meta device and returns a record of its calls of modules and functions.

    ``model`` is on the meta device; inputs on another device keep their values, which code may read. ``units`` names
    the modules of which each call is recorded as one event, without the calls inside of it. ``draw`` returns the
    random numbers for draws that read no activation, such as a draw that decides whether a layer is skipped; without
    ``draw``, numbers drawn on the CPU are 0.5 (integers 0).

    Raises: ValueReadError: the code reads a value that depends on a parameter or on a meta tensor of the inputs.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU()).to("meta")
    >>> record = record_events(model, torch.empty(4, 2), ["0", "1"])
    >>> [(event.name, event.takes) for event in record.events]
    [('0', (None,)), ('1', ((0, 0),))]
    """
    work = CostCounting()
    with torch.inference_mode(False):
        inputs = cloned(inputs)  # a clone has version 0 until code writes into it
    input_tensors = tensors_of(inputs)
    with on_meta(model) as values, ignoring_batch_statistics(model), work:
        assert values is not None
        devices = (tensor.device.type for tensor in tensors_of(inputs) if not tensor.is_meta)
        mode = _ForwardRecorder(model, units, work, next(devices, "cpu"), values, draw)
        mode.begin(inputs)
        forget_values(model)
        paths = {module: path for path, module in model.named_modules()}
        mode.record.inside = {
            unit: tuple(paths[module] for module in model.get_submodule(unit).modules()) for unit in units
        }
        around = {module: mode.caller(path, module) for module, path in paths.items()}
        with buffers_put_back(model):
            try:
                with calls_replaced(around), mode:
                    outputs = call_model(model, inputs)
            finally:
                mode.note_changed_buffers()
        mode.record.writes_inputs = any(tensor._version > 0 for tensor in input_tensors)
        return mode.finish(outputs)


def _storage_of(tensor: Tensor) -> int | None:
    """Returns the id of a tensor's storage, which its views share; None inside of ``vmap``, where it has no storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return None
