"""Records one forward of a model on the meta device: every operator that runs, and the module that called it.

The user's own forward runs once, on tensors without values. Operators are recorded as torch's dispatcher sees them
below autograd, so the set of operators does not depend on the user's classes. Functions that torch splits into other
operators on each device (``WHOLE_CALLS``) are recorded as one call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwright.analysis.calls.checkpoint_calls import is_in_checkpoint
from shardwright.analysis.calls.recurrent_calls import recurrent_call, with_given_states, with_states
from shardwright.analysis.on_meta.device_moves import TAKES_GRADIENT, call_on_meta
from shardwright.analysis.on_meta.meta_values import MetaValues, view_key
from shardwright.analysis.on_meta.operator_results import check_not_nested, leaves_of, map_tensors, tensors_of
from shardwright.analysis.recorded.module_log import UseEvent
from shardwright.operator_schemas import viewed_arguments, written_arguments

WHOLE_CALLS: dict[Callable[..., Any], tuple[str, ...]] = {
    functional.scaled_dot_product_attention: ("query", "key", "value"),
    functional.linear: ("input", "weight", "bias"),
}
"""Functions that are recorded as one call, although torch runs several operators for each, with their operands.

Operands that code passes by keyword are recorded as positional ones.
"""


PRODUCTS = {"linear": 0, "mm": 0, "addmm": 1}
"""The products with a weight, each with the place, among its operands, of the one that the weight multiplies."""


def name_of(function: Callable[..., Any]) -> str:
    """Returns an operator's name without its overload, such as ``addmm``."""
    return str(getattr(function, "overloadpacket", function).__name__)


@dataclass(eq=False, slots=True)
class TensorUse:
    """One tensor of a recorded run: its shape, its dtype, and where its values come from.

    ``kind`` is ``parameter``, ``buffer``, ``input``, ``constant`` (computed from none of these, nor from random
    numbers), or empty for other tensors. ``name`` is the name of a parameter or buffer. ``counts`` says that the
    elements are 0, 1, 2 and so on, as those of ``torch.arange(n)``: an index by it takes all elements, in order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = ""
    name: str = ""
    counts: bool = False

    @property
    def has_fractions(self) -> bool:
        """Whether its elements are floating-point or complex numbers."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(eq=False, slots=True)
class RecordedCall:
    """One operator call of a recorded run; its arguments have a :class:`TensorUse` in place of each tensor.

    ``args`` are positional and ``named`` keyword arguments. ``module`` is the name of the module whose forward was
    running, and ``number`` the number of that call of the module, from 0.

    ``is_hidden`` says that in a real run no function mode can handle the operator's operands as shards. It ran inside
    code that ``torch.jit.trace`` has compiled, which calls no torch function, or inside a transform such as
    ``torch.vmap``, which wraps tensors, or hooks of the user's own keep the tensors that it saves for the backward.

    ``is_gathered`` says that the call takes or gives the state of a recurrent layer. Ranks that compute some of the
    layer's units all-gather the state at every step. So the features that the call takes are an index of their own,
    not the index of the features that the layer's weights give.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[TensorUse, ...]
    module: str = ""
    number: int = 0
    is_hidden: bool = False
    is_gathered: bool = False

    @property
    def name(self) -> str:
        """The operator's name without its overload, such as ``addmm``."""
        return name_of(self.function)

    @property
    def operands(self) -> list[TensorUse]:
        """The tensors among the arguments, in order."""
        return leaves_of((self.args, self.named), (TensorUse,))

    @property
    def written(self) -> list[TensorUse]:
        """The tensors among the arguments that the operator writes to, as its schema says."""
        return written_arguments(self.function, self.args, self.named, TensorUse)

    @property
    def viewed(self) -> list[TensorUse]:
        """The arguments that the results are views of, or that are returned themselves, according to the schema."""
        return viewed_arguments(self.function, self.args, self.named, TensorUse)

    @property
    def statistics(self) -> list[TensorUse]:
        """The running mean and variance that a batch norm updates in training, which its schema does not show."""
        updates = self.name in ("native_batch_norm", "batch_norm") and self.argument(5, "training", False)
        return [use for use in self.args[3:5] if isinstance(use, TensorUse)] if updates else []

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Returns an argument that was passed by position (``place``) or keyword (``name``), or else ``default``."""
        return self.args[place] if len(self.args) > place else self.named.get(name, default)


@dataclass(eq=False)
class Recording:
    """All operator calls of one recorded run in order, with the run's parameters, buffers, inputs and outputs."""

    calls: list[RecordedCall] = field(default_factory=list)
    parameters: dict[str, TensorUse] = field(default_factory=dict)
    buffers: dict[str, TensorUse] = field(default_factory=dict)
    new_buffers: dict[str, TensorUse] = field(default_factory=dict)
    """The tensors that code puts in the place of buffers (``self.memory = state.detach()``), by the buffer's name."""
    set_attributes: dict[tuple[str, str], list[TensorUse]] = field(default_factory=dict)
    """The computed tensors that code has stored in attributes of modules (``self.loss = ...``, or in a list there), by
    (module path, attribute name)."""
    inputs: list[TensorUse] = field(default_factory=list)
    """The inputs that have samples in dim 0; if no input has, one that no code reads stands for them.
    ``marked_inputs`` are the tensors that the user marked as having no samples in dim 0 (:func:`is_mark`), and
    ``packed_inputs`` those of them whose rows or entries belong to single samples."""
    marked_inputs: list[TensorUse] = field(default_factory=list)
    packed_inputs: list[TensorUse] = field(default_factory=list)
    rows_of_samples: dict[TensorUse, tuple[int, ...]] = field(default_factory=dict)
    """For each of the ``packed_inputs``, the sample of each row; a tensor in an entry of a list has one sample."""
    outputs: list[TensorUse] = field(default_factory=list)
    loss: TensorUse | None = None
    """The output that is the model's own loss: ``output.loss``, ``output["loss"]`` or the first of a tuple; or None."""
    hidden_in: type | None = None
    """The class of an output object whose tensors the loss needs but torch's tree functions do not see, or None.

    :func:`unseen_outputs` finds them."""
    kept_outside: tuple[str, ...] = ()
    """The global variables and class attributes in which the forward leaves tensors that it has computed from its
    inputs or parameters."""
    functions: dict[str, list[RecordedCall]] = field(default_factory=dict)
    """The operators in the backward of the user's own autograd functions that lead to the outputs.

    The keys are the names of the backward's nodes: ``SquareBackward`` for a class ``Square``. A gradient has the
    :class:`TensorUse` of the function's result that it belongs to, and what the backward returns is copied to the
    function's operand."""
    measured_in_backward: list[TensorUse] = field(default_factory=list)
    """The tensors whose sizes a user's backward reads, or that it cuts by numbers; on a rank they would be shards."""
    drawing_backwards: list[str] = field(default_factory=list)
    """The names of the nodes of users' backwards that draw new random numbers, not a forward's numbers once more."""
    adding_backwards: list[str] = field(default_factory=list)
    """The names of the nodes of users' backwards that return gradients with added terms, as a balance loss has them.

    These terms do not depend on the gradients that the nodes are given."""
    replaced: dict[str, str] = field(default_factory=dict)
    """The parameters whose tensors code replaces, by ``parameter.data = ...`` or ``set_``, each with the module that
    was running."""
    assigned: list[tuple[TensorUse, TensorUse]] = field(default_factory=list)
    """Each parameter whose tensor code replaces, with the one that takes its place."""
    refrozen: dict[str, bool] = field(default_factory=dict)
    """The parameters whose ``requires_grad`` code changes, each with whether the forward ends with the value it had."""
    in_other_modes: list[str] = field(default_factory=list)
    """The modules that code calls in another mode, training or evaluation, than they have when the forward ends."""
    converted: dict[str, str] = field(default_factory=dict)
    """The parameters for which code sets ``parameter.data = parameter``, each with the module that was running.

    ``module.to(dtype)`` does so for parameters that already have that dtype. In a layout of another dtype, the same
    code would replace the parameters.
    """
    measured: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Maps the name of a parameter to the modules whose code reads its shape or size."""

    uses: list[UseEvent] = field(default_factory=list)
    """The uses of parameters in order, as :class:`ModuleLog` lists them."""
    selecting: dict[str, int] = field(default_factory=dict)
    """The modules whose code selects by a condition on values, as a mixture of experts does.

    The value is the number of operators that were recorded before the module first selected. The recording took these
    conditions as true everywhere."""

    read: list[tuple[str, TensorUse]] = field(default_factory=list)
    """The tensors whose values code read although only a real run has them, each with the module that was running."""

    num_numbers: int = 0
    """How many numbers the code read that only a real run has; the recording took each as 1."""

    num_masks: int = 0
    """How many times code selected by a mask whose values only a real run has; the record took every element."""

    reads_values: bool = False
    """Whether code called ``item``, ``tolist`` or the like, or an operator whose result's shape depends on values."""

    guess: bool | None = None
    """The answer taken for conditions on values that only a real run has; None if there was no such condition."""

    other_branch: Recording | None = None
    """The recording of the same forward with the other answer to these conditions; None if there was no such condition,
    or the code raises in the other branch."""

    @property
    def branches(self) -> tuple[Recording, ...]:
        """This recording, and that with the other answer to conditions on values if there is one."""
        return (self,) if self.other_branch is None else (self, self.other_branch)

    @cached_property
    def bases(self) -> dict[TensorUse, TensorUse]:
        """Maps each view, which shows a part of a tensor or all of it in another shape, to that tensor.

        It is computed once, when the run has ended.
        """
        bases = dict[TensorUse, TensorUse]()
        for call in self.calls:
            for use in call.viewed:
                bases |= dict.fromkeys((result for result in call.results if result is not use), bases.get(use, use))
        return bases

    @property
    def num_samples(self) -> int:
        """The size of the recorded batch, in samples; 1 if no input has a dim of samples."""
        return next((use.shape[0] for use in self.inputs if use.shape), 1)

    def of_modules(self) -> dict[str, Recording]:
        """Splits the recording by module: returns, by path, a recording of the operators that its own code ran.

        The inputs of such a recording are the tensors that its operators took from other modules, and its parameters
        are the ones that the operators read. It has no outputs, since it leaves out what other modules, submodules
        included, do with the results.
        """
        calls = defaultdict[str, list[RecordedCall]](list)
        for call in self.calls:
            calls[call.module].append(call)
        recordings = {}
        for module, own_calls in calls.items():
            made = {result for call in own_calls for result in call.results}
            operands = dict.fromkeys(use for call in own_calls for use in call.operands)
            recordings[module] = Recording(
                calls=own_calls,
                parameters={use.name: use for use in operands if use.kind == "parameter"},
                inputs=[use for use in operands if use.kind not in ("parameter", "constant") and use not in made],
                functions=self.functions,
                measured_in_backward=self.measured_in_backward,
                assigned=self.assigned,
            )
        return recordings

    @property
    def parameters_used(self) -> set[str]:
        """The names of the parameters that operators read."""
        return {use.name for call in self.calls for use in call.operands if use.kind == "parameter"}


class Recorded(MetaValues):
    """A dispatch mode that records the operators that run inside it, in order, into ``recording``.

    Not recorded are reads of values such as ``item``, the operators ``detach``, ``alias`` and ``lift_fresh``, and what
    runs in a :meth:`quiet` context. A function of :data:`WHOLE_CALLS` is recorded as one operator. ``where`` is a
    function that returns the name of the running module and the number of its call. ``runs_again`` is a function that
    tells whether a backward will run the running code again without a call of that module. ``guess`` is as in
    :class:`MetaValues`; if it is given, ``selects_all`` is set too.

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
        self._of_storage: defaultdict[Any, list[TensorUse]] = defaultdict(list)
        self._quiet = 0
        self.depth = 0  # how many torch functions are running, one inside the other
        self.transformed = 0  # how many of them run inside a transform such as torch.vmap
        self.recurring = 0  # how many of them are recurrent layers
        self.digest: Any = None
        """A hash object of ``hashlib`` that is updated with each operator and the known values, or None."""
        self._met: dict[int, int] = {}
        self._above = _WholeCalls(self)

    def __enter__(self) -> Any:
        self._above.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._above.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():  # function modes must not see the recorder's own reads of tensors
            if func.overloadpacket is torch.ops.aten.set_ and self.use(args[0]).kind == "parameter":
                self.assigns(args[0], next(iter(args[1:]), None))
            return super().__torch_dispatch__(func, types, args, kwargs)

    def use(self, tensor: Tensor, kind: str = "", name: str = "") -> TensorUse:
        """Returns the record of a tensor of the run (:class:`TensorUse`), a new one if it was not seen before.

        ``kind`` and ``name`` are those of a new record. Raises: ValueError: it is a nested tensor.
        """
        check_not_nested(tensor)
        key = view_key(tensor)
        if key not in self._uses:
            self._uses[key] = TensorUse(tuple(tensor.shape), tensor.dtype, kind, name)
            self._of_storage[key[0]].append(self._uses[key])
            self._kept.append(tensor)
        return self._uses[key]

    def is_computed(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is the result of an operator on inputs or parameters of the run."""
        use = self._uses.get(view_key(tensor))
        return use is not None and use.kind == ""

    def treat_as(self, gradient: Tensor, tensor: Tensor) -> None:
        """Notes that the dims of ``gradient`` are those of ``tensor``, whose gradient it is."""
        self._uses[view_key(gradient)] = self.use(tensor)
        self._kept.append(gradient)

    def kept(self) -> Sequence[Tensor]:
        """Returns the tensors that the run has seen so far."""
        return tuple(self._kept)

    def assigns(self, parameter: Tensor, value: Any, *, is_same: bool = False) -> None:
        """Notes that the running module's code replaces the tensor of a parameter by ``value``.

        ``is_same`` says that ``value`` is the parameter itself, as where ``module.to(dtype)`` finds that dtype already.
        """
        use, recording = self.use(parameter), self.recording
        (recording.converted if is_same else recording.replaced).setdefault(use.name, self.where()[0])
        if not is_same and isinstance(value, Tensor):
            recording.assigned.append((use, self.use(value, "constant")))

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

    def note_in_digest(self, function: Any, args: Any, named: Any = None) -> None:
        """Adds a call of a function or an operator to the :attr:`digest`, if there is one.

        A tensor is described by its number in the order in which the run has met tensors, by its name if it is a
        parameter or a buffer, and by its values where these are known.
        """
        if self.digest is None:
            return

        def described(tensor: Tensor) -> tuple[Any, ...]:
            use, values = self.use(tensor), self.values(tensor)
            number = self._met.setdefault(id(use), len(self._met))
            known = None
            if values is not None and values.layout is torch.strided:
                elements = values.detach().reshape(-1).contiguous().view(torch.uint8)
                known = sha256(elements.numpy().tobytes()).hexdigest()
            return number, use.name, tuple(tensor.shape), tensor.dtype, known

        with self.quiet(), torch._C.DisableTorchFunction():
            arguments = map_tensors((args, named), described)
        self.digest.update(repr((str(function), self.where(), arguments)).encode())

    def ran(self, function: Any, args: Any, named: dict[str, Any], results: Any, *, random: bool) -> None:
        """Records one operator call, its operands and its results, unless it runs in a :meth:`quiet` context.

        ``random`` says whether the operator draws random numbers; its results are then not constants.
        """
        self.note_in_digest(function, args, (named, results))  # results get their numbers here, where they are made
        if self._quiet:
            return
        # a tensor that is seen for the first time was made where nothing is recorded
        operands: list[TensorUse] = []

        def seen(tensor: Tensor) -> TensorUse:
            operands.append(self.use(tensor, "constant"))
            return operands[-1]

        seen_args, seen_named = map_tensors((tuple(args), named), seen)
        constant = not random and all(operand.kind == "constant" for operand in operands)
        for written in written_arguments(function, args, named, Tensor):
            for use in self._of_storage[view_key(written)[0]]:  # a write to a view also changes the base and its views
                use.kind = "" if use.kind == "constant" and not constant else use.kind
                use.counts = False
        made = tuple(self.use(t, "constant" if constant else "") for t in tree_leaves(results) if isinstance(t, Tensor))
        if constant and len(made) == 1 and _counts(function, seen_args, made[0]):
            made[0].counts = True
        hidden = self.depth == 0 or self.transformed > 0 or (self.runs_again() and not is_in_checkpoint())
        self._append(
            function, seen_args, seen_named, made, hidden, self.recurring > 0 and name_of(function) in PRODUCTS
        )

    def is_input(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is an input of the model."""
        return self.use(tensor, "constant").kind == "input"

    def gathered(self, tensor: Tensor) -> Tensor:
        """Returns a copy of what a recurrent layer gives, recorded as one that ranks gather (:class:`RecordedCall`)."""
        with self.quiet(), torch._C.DisableTorchFunction():
            made = tensor.clone()
        use = self.use(tensor, "constant")
        kind = "constant" if use.kind == "constant" else ""
        self._append(torch.ops.aten.clone.default, (use,), {}, (self.use(made, kind),), False, True)
        return made

    def _append(self, function: Any, args: Any, named: Any, results: Any, is_hidden: bool, is_gathered: bool) -> None:
        call = RecordedCall(function, args, named, results, *self.where(), is_hidden, is_gathered)
        self.recording.calls.append(call)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Returns a context in which operators run without being recorded."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1


_COPIES = frozenset(("_to_copy", "clone", "contiguous"))


def _counts(function: Any, args: tuple[Any, ...], result: TensorUse) -> bool:
    """Returns whether the elements of an operator's ``result`` are 0, 1, 2 and so on."""
    name = getattr(function, "overloadpacket", function).__name__
    if name == "arange":
        start, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
        return len(result.shape) == 1 and (start, step) == (0, 1)
    return name in _COPIES and isinstance(args[0], TensorUse) and args[0].counts


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


_SETS_REQUIRES_GRAD = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
"""The functions that a TorchFunctionMode sees when code freezes a parameter, or has it trained."""

_SETS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # torch's stubs declare it as a plain attribute
"""The function that a TorchFunctionMode is given for ``tensor.data = ...``, which calls no operator."""


class _WholeCalls(TorchFunctionMode):
    """Records the functions of ``WHOLE_CALLS`` as one operator each."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded
        # the parameter that was last moved to a device without a change of dtype, as by module.to(x.device), which sets
        # ``.data`` next
        self._moved: nn.Parameter | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        self._recorded.note_in_digest(getattr(func, "__name__", ""), args, named)
        if func in _ASKS_SIZES and isinstance(args[0], nn.Parameter):
            recorded = self._recorded
            recorded.recording.measured[recorded.use(args[0].detach()).name].add(recorded.where()[0])
        if func == Tensor.to and isinstance(args[0], nn.Parameter):
            self._moved = None if any(isinstance(arg, torch.dtype) for arg in (*args, *named.values())) else args[0]
        is_same = func == _SETS_DATA and args[1] is args[0]
        if func == _SETS_DATA and isinstance(args[0], nn.Parameter) and not (is_same and self._moved is args[0]):
            self._recorded.assigns(args[0].detach(), args[1], is_same=is_same)
        if func in _SETS_REQUIRES_GRAD and isinstance(args[0], nn.Parameter):
            refrozen, name = self._recorded.recording.refrozen, self._recorded.use(args[0].detach()).name
            value = args[1] if len(args) > 1 else named.get("requires_grad", True)
            if name and value != args[0].requires_grad:  # one without a name was made by the forward
                refrozen[name] = not refrozen.get(name, True)
        if func in TAKES_GRADIENT:
            raise NotImplementedError("the forward takes a gradient itself, which no record of operators has")
        # torch.vmap and similar transforms wrap tensors, so the mode that runs a model on shards does not know a shard
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        recurs = not transformed and recurrent_call(func, args, named) is not None
        if recurs:
            args = with_given_states(func, args, self._recorded.gathered, self._recorded.is_input)
        self._recorded.depth += 1
        self._recorded.transformed += transformed
        self._recorded.recurring += recurs
        try:
            # a transform wraps tensors, and the operators that it runs take what is inside of them
            if transformed or func not in WHOLE_CALLS:
                results = call_on_meta(*self._recorded.indexing(func, args), named, "cpu")
                return with_states(func, results, self._recorded.gathered) if recurs else results
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
            self._recorded.recurring -= recurs


def _with_positional(
    operands: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call's arguments, with the ``operands`` that were passed by keyword moved to the positional ones."""
    for name in operands[len(args) :]:
        if name not in named:
            break
        args = (*args, named[name])
    return args, {name: value for name, value in named.items() if name not in operands[: len(args)]}
