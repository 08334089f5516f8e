"""Records one forward of a model on the meta device: every operator that runs, and the module that called it.

The user's own forward runs once, on tensors without values. Operators are recorded as torch's dispatcher sees them
below autograd, so the set of operators does not depend on the user's classes. Functions that torch splits into other
operators on each device (``WHOLE_CALLS``) are recorded as one call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwright.analysis.autograd_graph import nodes_behind
from shardwright.analysis.device_moves import TAKES_GRADIENT, call_on_meta
from shardwright.analysis.marked_inputs import marks_in, packed_in, sample_tensors
from shardwright.analysis.meta_values import MetaValues, view_key
from shardwright.analysis.module_calls import call_model
from shardwright.analysis.operator_results import leaves_of, map_tensors, tensors_of
from shardwright.analysis.structure import owners
from shardwright.operator_schemas import written_arguments

WHOLE_CALLS: dict[Callable[..., Any], tuple[str, ...]] = {
    functional.scaled_dot_product_attention: ("query", "key", "value"),
    functional.linear: ("input", "weight", "bias"),
}
"""Functions that are recorded as one call, although torch runs several operators for each, with their operands.

Operands that code passes by keyword are recorded as positional ones.
"""


@dataclass(eq=False, slots=True)
class TensorUse:
    """One tensor of a recorded run: its shape, its dtype, and where its values come from.

    ``kind`` is ``parameter``, ``buffer``, ``input``, ``constant`` (computed from none of these, nor from random
    numbers), or empty for other tensors. ``name`` is the name of a parameter or buffer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = ""
    name: str = ""


@dataclass(eq=False, slots=True)
class RecordedCall:
    """One operator call of a recorded run; its arguments have a :class:`TensorUse` in place of each tensor.

    ``args`` are positional and ``named`` keyword arguments. ``module`` is the name of the module whose forward was
    running, and ``number`` says in which of its calls, counted from 0. ``is_hidden`` says that no function mode sees in
    a run what the operator takes: it ran inside code that ``torch.jit.script`` has compiled, which calls no torch
    function, or inside a transform such as ``torch.vmap``, which wraps tensors; or that a backward runs it again by
    itself, as it does with code that is passed to ``torch.utils.checkpoint`` and is no module.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[TensorUse, ...]
    module: str = ""
    number: int = 0
    is_hidden: bool = False

    @property
    def name(self) -> str:
        """The operator's name without its overload, such as ``addmm``."""
        return str(getattr(self.function, "overloadpacket", self.function).__name__)

    @property
    def operands(self) -> list[TensorUse]:
        """The tensors among the arguments, in order."""
        return leaves_of((self.args, self.named), (TensorUse,))

    @property
    def written(self) -> list[TensorUse]:
        """The tensors among the arguments that the operator writes to, as its schema says."""
        return written_arguments(self.function, self.args, self.named, TensorUse)

    @property
    def statistics(self) -> list[TensorUse]:
        """The running mean and variance that a batch norm updates in training, writes that its schema lacks."""
        updates = self.name in ("native_batch_norm", "batch_norm") and self.argument(5, "training", False)
        return [each for each in self.args[3:5] if isinstance(each, TensorUse)] if updates else []

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Returns an argument that was passed by position (``place``) or keyword (``name``), or else ``default``."""
        return self.args[place] if len(self.args) > place else self.named.get(name, default)


@dataclass(eq=False)
class Recording:
    """All operator calls of one recorded run in order, with the run's parameters, buffers, inputs and outputs."""

    calls: list[RecordedCall] = field(default_factory=list)
    parameters: dict[str, TensorUse] = field(default_factory=dict)
    buffers: dict[str, TensorUse] = field(default_factory=dict)
    inputs: list[TensorUse] = field(default_factory=list)
    """The inputs that have samples in dim 0. ``marked_inputs`` are those that are marked to have none, of which
    ``packed_inputs`` have rows of samples."""
    marked_inputs: list[TensorUse] = field(default_factory=list)
    packed_inputs: list[TensorUse] = field(default_factory=list)
    outputs: list[TensorUse] = field(default_factory=list)
    functions: Mapping[str, Sequence[RecordedCall]] = field(default_factory=dict)
    """The operators in the backward of the user's own autograd functions that lead to the outputs.

    The keys are the names of the backward's nodes: ``SquareBackward`` for a class ``Square``. A gradient has the
    :class:`TensorUse` of the function's result that it belongs to, and what the backward returns is copied to the
    function's operand."""
    measured_in_backward: list[TensorUse] = field(default_factory=list)
    """The tensors that the backward of one of these functions measures or cuts by numbers, which would be shards."""
    replaced: dict[str, str] = field(default_factory=dict)
    """The parameters whose data code replaces, by ``parameter.data = ...``, each with the module that was running."""
    measured: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Maps the name of a parameter to the modules whose code reads its shape or size."""

    uses: list[tuple[Literal["use", "hold", "release"], str]] = field(default_factory=list)
    """The uses of parameters in order, each as the kind of use and the parameter's name.

    A call of a module uses all of its own parameters. Code that reads one as an attribute uses it. If the forward of
    the module that has the parameter is running then, the read also holds it, and the end of that forward releases it.
    """
    selecting: dict[str, int] = field(default_factory=dict)
    """The modules whose code selects by a condition on values, as a mixture of experts does.

    Each has the number of operators that were recorded before it first did so. The recording took these conditions as
    true everywhere."""

    read: list[tuple[str, TensorUse]] = field(default_factory=list)
    """The tensors of which code read a value that only a real run has, each with the module that was running."""

    num_numbers: int = 0
    """How many numbers code read that only a real run has; each counted as 1."""

    @property
    def parameters_used(self) -> set[str]:
        """The names of the parameters that operators read."""
        return {use.name for call in self.calls for use in call.operands if use.kind == "parameter"}


class Recorded(MetaValues):
    """A dispatch mode that records the operators that run inside it, in order, into ``recording``.

    Not recorded are reads of values such as ``item``, ``detach``, ``alias`` and ``lift_fresh``, and what runs in a
    :meth:`quiet` context. A function of :data:`WHOLE_CALLS` is recorded as one operator. ``where`` is a function that
    returns the name of the running module and the number of its call, and ``runs_again`` one that tells whether a
    backward will run the running code again without calling that module. ``guess`` is as in :class:`MetaValues`; if it
    is given, ``selects_all`` is set too.

    Raises: NotImplementedError: code inside it calls autograd, such as ``backward``.
    """

    def __init__(
        self, where: Callable[[], tuple[str, int]] = lambda: ("", 0), *, guess: bool | None = None,
        runs_again: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        super().__init__(guess=guess, selects_all=guess is not None)
        self.recording = Recording()
        self.runs_again = runs_again
        self.where, self._uses = where, dict[Any, TensorUse]()
        self._kept: list[Tensor] = []  # so that no storage is freed and its address used again
        self._quiet = 0
        self.depth = 0  # of torch functions that are running
        self.transformed = 0  # of these, the ones that run inside a transform such as torch.vmap
        self._above = _WholeCalls(self)

    def __enter__(self) -> Any:
        self._above.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._above.__exit__(*error)

    def use(self, tensor: Tensor, kind: str = "", name: str = "") -> TensorUse:
        """Returns the record of a tensor of the run (:class:`TensorUse`), a new one if it was not seen before.

        ``kind`` and ``name`` are those of a new record.
        """
        key = view_key(tensor)
        if key not in self._uses:
            self._uses[key] = TensorUse(tuple(tensor.shape), tensor.dtype, kind, name)
            self._kept.append(tensor)
        return self._uses[key]

    def treat_as(self, gradient: Tensor, tensor: Tensor) -> None:
        """Notes that the dims of ``gradient`` are those of ``tensor``, whose gradient it is."""
        self._uses[view_key(gradient)] = self.use(tensor)
        self._kept.append(gradient)

    def kept(self) -> Sequence[Tensor]:
        """Returns the tensors that the run has seen so far."""
        return tuple(self._kept)

    def selected(self) -> None:
        """Notes that the running module's code selects by a condition on values, as a mixture of experts does."""
        self.recording.selecting.setdefault(self.where()[0], len(self.recording.calls))

    def read(self, tensor: Tensor) -> None:
        """Notes that the running module's code read a value of ``tensor`` that only a real run has."""
        self.recording.read.append((self.where()[0], self.use(tensor)))

    def moved(self, tensor: Tensor, on_meta: Tensor) -> None:
        """Notes that ``on_meta`` stands for the same tensor of the run as ``tensor``."""
        self._uses[view_key(on_meta)] = self.use(tensor, "constant")
        self._kept.append(on_meta)

    def ran(self, function: Any, args: Any, named: dict[str, Any], results: Any, *, random: bool) -> None:
        """Records one operator call, its operands and its results, unless it runs in a :meth:`quiet` context.

        ``random`` says whether the operator draws random numbers; its results are then not constants.
        """
        if self._quiet:
            return
        # a tensor that is seen for the first time was made where nothing is recorded
        operands: list[TensorUse] = []

        def seen(tensor: Tensor) -> TensorUse:
            operands.append(self.use(tensor, "constant"))
            return operands[-1]

        seen_args, seen_named = map_tensors((tuple(args), named), seen)
        constant = not random and all(each.kind == "constant" for each in operands)
        if not constant:
            for written in written_arguments(function, seen_args, seen_named, TensorUse):
                written.kind = "" if written.kind == "constant" else written.kind
        made = tuple(self.use(t, "constant" if constant else "") for t in tree_leaves(results) if isinstance(t, Tensor))
        hidden = self.depth == 0 or self.transformed > 0 or self.runs_again()
        self.recording.calls.append(RecordedCall(function, seen_args, seen_named, made, *self.where(), hidden))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Returns a context in which operators run without being recorded."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1


_ASKS_SIZES = frozenset(
    (
        Tensor.shape.__get__,  # type: ignore[attr-defined]  # torch's stubs declare a property of C as a plain attribute
        Tensor.size,
        Tensor.numel,
        Tensor.nelement,
        Tensor.__len__,
    )
)
"""The functions that a TorchFunctionMode sees when code reads the shape or size of a tensor."""


_SETS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # torch's stubs declare it as a plain attribute
"""The function that a TorchFunctionMode sees when code replaces a tensor's data; no operator runs."""

_MEASURES = frozenset(
    (
        "__get__", "__getitem__", "__len__", "__setitem__", "as_strided", "element_size", "expand", "expand_as",
        "narrow", "nelement", "numel", "pad", "repeat", "reshape", "select", "size", "split", "split_with_sizes",
        "stride", "tile", "unflatten", "untyped_storage", "view",
    )
)  # fmt: skip
"""Names of torch functions that read sizes of a tensor, or take sizes and indices as numbers.

In the backward of a user's own function these would be those of a rank's shard.
"""


class _BackwardReads(TorchFunctionMode):
    """Notes the tensors that code measures, in ``found``; functions run as without a mode."""

    def __init__(self, recorded: Recorded, found: list[TensorUse]) -> None:
        super().__init__()
        self._recorded, self._found = recorded, found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            if getattr(func, "__name__", "") in _MEASURES:
                self._found += map(self._recorded.use, tensors_of((args, kwargs or {})))
            return func(*args, **(kwargs or {}))


class _WholeCalls(TorchFunctionMode):
    """Records the functions of ``WHOLE_CALLS`` as one operator each."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _ASKS_SIZES and isinstance(args[0], nn.Parameter):
            recorded = self._recorded
            recorded.recording.measured[recorded.use(args[0].detach()).name].add(recorded.where()[0])
        if func == _SETS_DATA and isinstance(args[0], nn.Parameter):
            recorded = self._recorded
            recorded.recording.replaced.setdefault(recorded.use(args[0].detach()).name, recorded.where()[0])
        if func in TAKES_GRADIENT:
            raise NotImplementedError("the forward takes a gradient itself, which no record of operators has")
        # torch.vmap and similar transforms wrap tensors, so the mode that runs a model on shards does not know a shard
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        self._recorded.depth += 1
        self._recorded.transformed += transformed
        try:
            # a transform wraps tensors, and the operators that it runs take what is inside of them
            if transformed or func not in WHOLE_CALLS:
                return call_on_meta(*self._recorded.indexing(func, args), named, "cpu")
            args, named = _with_positional(WHOLE_CALLS[func], args, named)
            # torch's attention makes masks inside, of megabytes for long sequences: no code of the user's reads them
            self._recorded.keeps_values = all(self._recorded.values(t) is not None for t in tensors_of((args, named)))
            with self._recorded.quiet():
                results = func(*args, **named)
            self._recorded.ran(func, args, named, results, random=False)
            return results
        finally:
            self._recorded.keeps_values = True
            self._recorded.depth -= 1
            self._recorded.transformed -= transformed


def _with_positional(
    operands: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with those of its ``operands`` that are named made positional."""
    for name in operands[len(args) :]:
        if name not in named:
            break
        args = (*args, named[name])
    return args, {name: value for name, value in named.items() if name not in operands[: len(args)]}


class _RecordedParameters(dict[str, Any]):
    """A module's ``_parameters`` dict that notes which parameters code reads as attributes."""

    def __init__(self, parameters: Mapping[str, Any], names: Mapping[str, str], uses: list[Any]) -> None:
        super().__init__(parameters)
        self.names, self._uses = names, uses
        self._read: list[list[str]] = []  # by each call of the module's forward that runs

    def __getitem__(self, name: str) -> Any:
        if name in self.names:
            self._uses.append(("use", self.names[name]))
            if self._read:
                self._uses.append(("hold", self.names[name]))
                self._read[-1].append(self.names[name])
        return super().__getitem__(name)

    def enter(self) -> None:
        """Notes that the module's forward begins."""
        self._read.append([])
        self._uses.extend(("use", name) for name in self.names.values())

    def leave(self) -> None:
        """Notes that the module's forward has ended, so that the parameters it read are released."""
        self._uses.extend(("release", name) for name in self._read.pop())


@contextmanager
def _running(model: nn.Module, uses: list[Any]) -> Iterator[tuple[Callable[[], tuple[str, int]], Callable[[], bool]]]:
    """Yields the functions ``where`` and ``runs_again`` of :class:`Recorded`.

    Uses of parameters are appended to ``uses``.
    """
    stack, calls, handles = [("", 0)], Counter[str](), []
    saving = [_saved_by()]  # how autograd's saved tensors were kept where each running module was called
    named: dict[nn.Module, dict[str, str]] = {}
    for _, module, own, name in owners(model):
        named.setdefault(module, {})[own] = name
    plain = {module: module._parameters for module in named}
    for module, names in named.items():
        module._parameters = _RecordedParameters(module._parameters, names, uses)
    for path, module in model.named_modules():

        def enter(module: nn.Module, args: Any, path: str = path) -> None:
            stack.append((path, calls[path]))
            saving.append(_saved_by())
            calls[path] += 1
            if isinstance(module._parameters, _RecordedParameters):
                module._parameters.enter()

        def leave(module: nn.Module, *_: Any) -> None:
            stack.pop()
            saving.pop()
            if isinstance(module._parameters, _RecordedParameters):
                module._parameters.leave()

        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield lambda: stack[-1], lambda: _saved_by() is not saving[-1]
    finally:
        for handle in handles:
            handle.remove()
        for module, parameters in plain.items():
            module._parameters = parameters


def _saved_by() -> Any:
    """Returns the hook by which autograd packs what it saves now, as inside of a checkpoint; None if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def _own_functions(outputs: Sequence[Tensor], recorded: Recorded) -> dict[str, list[RecordedCall]]:
    """Returns the operators in the backward of each user-defined autograd function that leads to the outputs.

    ``recorded`` has recorded the forward. It knows the tensors that the functions have saved.
    """
    found: dict[str, list[RecordedCall]] = {}
    nodes = [node for node in nodes_behind(outputs) if isinstance(node, BackwardCFunction)]
    if not nodes:
        return found
    forward, recorded.recording = recorded.recording, Recording()
    running: list[ExitStack] = []
    made = {(each.grad_fn, each.output_nr): each for each in recorded.kept() if each.grad_fn is not None}
    for node in nodes:
        calls = found.setdefault(type(node).__name__, [])
        node.register_prehook(partial(_begin, recorded, node, made, running, forward.measured_in_backward))
        node.register_hook(partial(_end, recorded, node, made, running, calls))
    learning = [output for output in outputs if output.requires_grad]
    with recorded, torch._C.DisableTorchFunction():  # it is ours, and not a call of the forward
        torch.autograd.backward(learning, [torch.empty_like(output) for output in learning])
    recorded.recording = forward
    return found


_Made = Mapping[tuple[Any, int], Tensor]
"""Tensors of a forward by the autograd node that made each, and its place among that node's results."""


def _begin(
    recorded: Recorded, node: Any, made: _Made, running: list[ExitStack], measured: list[TensorUse], gradients: Any
) -> None:  # fmt: skip
    recorded.recording.calls.clear()
    for place, gradient in enumerate(gradients):
        if gradient is not None and (node, place) in made:
            recorded.treat_as(gradient, made[node, place])
    running.append(ExitStack())
    running[-1].enter_context(torch._C._EnableTorchFunction())
    running[-1].enter_context(_BackwardReads(recorded, measured))


def _end(
    recorded: Recorded, node: Any, made: _Made, running: list[ExitStack], calls: list[RecordedCall], gradients: Any,
    _: Any,
) -> None:  # fmt: skip
    running.pop().close()
    calls += recorded.recording.calls
    for gradient, (before, place) in zip(gradients, node.next_functions, strict=True):
        operand = getattr(before, "variable", None) if (before, place) not in made else made[before, place]
        if gradient is not None and operand is not None and operand.shape == gradient.shape:
            copy = recorded.use(gradient), recorded.use(operand.detach())
            calls.append(RecordedCall(torch.ops.aten.clone.default, copy[:1], {}, copy[1:]))


def record_forward(
    model: nn.Module, inputs: Any, within: Callable[[Recorded], AbstractContextManager[Any]] = nullcontext
) -> Recording:
    """Runs one forward of a model and returns a record of its operators; model and inputs are on the meta device.

    The forward runs inside the context that ``within`` returns for the recorder. A yes-or-no condition on values of
    inputs or parameters counts as false, and a mask that selects elements by them as true everywhere. If the code then
    raises, or parameters stay unused behind such a condition, it is run again with the conditions true, and the record
    that uses more parameters is returned. The backward runs too if the user's own autograd functions lead to the
    outputs, and adds gradients to the parameters.

    Raises: ValueReadError: the code reads a number that depends on a parameter or an input. NotImplementedError: the
        forward takes a gradient itself. If the code raises in both runs, the second exception is raised.

    >>> recording = record_forward(nn.Linear(3, 4, device="meta"), torch.empty(2, 3, device="meta"))
    >>> [call.name for call in recording.calls], recording.calls[0].results[0].shape
    (['linear'], (2, 4))
    """
    try:
        recording, num_guessed = _record(model, inputs, within, guess=False)
    except Exception:  # of the user's own code: a check that has failed, for example
        return _record(model, inputs, within, guess=True)[0]
    if num_guessed and len(recording.parameters_used) < len(recording.parameters):
        with suppress(Exception):  # as above
            other, _ = _record(model, inputs, within, guess=True)
            return max(recording, other, key=lambda each: len(each.parameters_used))
    return recording


def _record(
    model: nn.Module, inputs: Any, within: Callable[[Recorded], Any], *, guess: bool
) -> tuple[Recording, int]:  # fmt: skip
    uses: list[Any] = []
    with _running(model, uses) as (where, runs_again):
        recorded = Recorded(where, guess=guess, runs_again=runs_again)
        recording = recorded.recording
        recording.uses = uses
        for name, parameter in model.named_parameters():
            recording.parameters[name] = recorded.use(parameter.detach(), "parameter", name)
        for name, buffer in model.named_buffers():
            recording.buffers[name] = recorded.use(buffer.detach(), "buffer", name)
        recording.inputs = [recorded.use(tensor, "input") for tensor in sample_tensors(inputs)]
        for found, marks in ((recording.marked_inputs, marks_in(inputs)), (recording.packed_inputs, packed_in(inputs))):
            found += [recorded.use(tensor, "input") for mark in marks for tensor in tree_leaves(mark)
                      if isinstance(tensor, Tensor)]  # fmt: skip
        with torch.enable_grad(), within(recorded), recorded:
            outputs = call_model(model, inputs)
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    recording.outputs = [recorded.use(tensor) for tensor in tensors]
    recording.num_numbers = recorded.num_numbers
    recording.functions = _own_functions(tensors, recorded)
    return recording, recorded.num_guessed
