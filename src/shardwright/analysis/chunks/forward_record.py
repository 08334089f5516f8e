"""The record of one forward of a model as events: its module and function calls, their values, and their costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves

from shardwright.analysis.chunks.costs import Cost
from shardwright.analysis.on_meta.meta_values import PACK

_TAG = "_made_by_event"

ValueName = tuple[int, int]
"""The name of an activation: the index of the event that made it, and its place among that event's results.

An operand that the event writes to in place becomes a new value. The places of such values follow those of the results.
"""


class GhostSpec(NamedTuple):
    """The name, shape, strides and dtype of an activation, and whether it needs a gradient.

    A pipeline stage that does not compute the activation makes a ghost (a meta tensor that stands for it) from these.
    """

    name: ValueName
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def ghost(self) -> Tensor:
        """Returns the activation's ghost: a meta tensor of its shape, strides and dtype, marked with its name.

        The ghost requires a gradient if ``needs_gradient`` is set. :func:`value_name` reads its name.
        """
        ghost = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        tag_value(ghost.requires_grad_(self.needs_gradient), self.name)
        return ghost


class SharedOperand(NamedTuple):
    """Stands for a result that is no new tensor but one of the call's arguments, as in-place functions return it.

    ``operand`` is the number of that argument among the tensors that the call takes.
    """

    operand: int


class LengthResult(NamedTuple):
    """Stands for a result that follows from the lengths of packed sequences alone, so that every stage computes it.

    Torch keeps it on the CPU. ``place`` is its place among the call's results.
    """

    place: int


PACKING = frozenset((PACK, "_pad_packed_sequence"))
"""The torch functions whose second result follows from the lengths alone (:class:`LengthResult`)."""


@dataclass(frozen=True, eq=False)
class ForwardEvent:
    """One recorded call: of a module, or of a function outside of modules.

    ``name`` is a module's path and ``number`` counts its calls; for a function, ``name`` is the function's name and
    ``number`` is None. ``takes`` names the tensors among the arguments: values by :data:`ValueName`, parameters by
    their names, and None for other tensors. ``plain`` is what :func:`plain_of` returns for the arguments; for
    a module's call the result of :func:`shapes_from_inputs` is added.
    ``results`` are the leaves of the returned ``tree``, with a :class:`GhostSpec`, :class:`SharedOperand` or
    :class:`LengthResult` for each tensor. ``written`` lists the operands that the call writes to, as pairs of their
    index in ``takes`` and their new value. ``reads`` has the names of the parameters that the call uses and, for a
    module, of the buffers too. ``cost`` is the cost of the forward call. ``raised`` is an exception that the module has
    raised and that the code around the call has caught.
    """

    name: str
    number: int | None
    takes: tuple[ValueName | str | None, ...]
    tree: TreeSpec
    plain: tuple[str, ...]
    results: tuple[Any, ...]
    written: tuple[tuple[int, GhostSpec], ...]
    reads: frozenset[str]
    cost: Cost
    raised: Exception | None = None

    @cached_property
    def is_leaf(self) -> bool:
        """Whether the call returns its one result itself, not in a tuple or dict."""
        return self.tree.is_leaf()

    def __str__(self) -> str:
        return f"a call of {self.name}" if self.number is None else f"call {self.number} of '{self.name}'"


class ModuleSpan(NamedTuple):
    """One module call whose inner calls are recorded as events: the range of these events, and the cost of the call.

    The events are ``first`` to ``stop - 1``. ``caller`` is the index of the :class:`ModuleSpan` around this one, or -1.
    ``cost`` also counts functions of inputs and constants, which are not events. ``is_free`` says that the call's
    results depend on the model's inputs alone.
    """

    path: str
    caller: int
    first: int
    stop: int
    cost: Cost
    is_free: bool


@dataclass(eq=False)
class ForwardRecord:
    """The events (recorded calls) of one forward in order, their values, and the weights that they use.

    A unit is a module whose call is one event. Events are numbered by their index in ``events``. ``scopes`` lists the
    calls of modules that are not units. ``calls`` gives, for each module, the event that contains each of its calls, or
    None for a call outside of units. ``inside`` lists the modules in each unit, the unit itself included. ``specs``
    describes the values, ``outputs`` names those that the model returns, and ``learning`` those that get a gradient;
    ``returned`` names the parameters that the model returns.

    ``together`` holds pairs of events that exchange a value other than by arguments and results, for example through an
    attribute. ``escaping`` are events whose values reach code outside of units in this way. ``shared_buffers`` are the
    buffers that code outside of units reads.

    ``is_one_path`` is False if code outside of units has read values of an input or random numbers, so that other
    inputs of the same shapes may give other events. ``deciding`` are the events of units whose own code has read such
    values. ``selections`` are the events whose results may have another shape for other inputs: functions that select
    from an activation by values of inputs, as ``x[mask]`` does, and modules that read such values. ``draws`` says
    whether code has called a random function that takes sizes and no tensor, such as ``torch.rand``, because code may
    skip calls by its numbers.

    The other sets name modules that are not units. In ``selecting``, the module's code selects by a condition on values
    of events, as a mixture of experts does. In ``checkpointed``, a backward runs the code again, because it runs inside
    ``torch.utils.checkpoint``. In ``own_backward``, the code calls an autograd function of the user's own or a function
    compiled by ``torch.jit.trace``, runs functions inside of a transform such as ``torch.vmap``, takes a gradient
    itself, or sets a hook on the gradient of a tensor. In ``writing``, the code writes values of events into a
    parameter or buffer, or replaces a buffer.

    ``writes_inputs`` says that the forward writes into a tensor of its inputs.
    """

    events: list[ForwardEvent] = field(default_factory=list)
    scopes: list[ModuleSpan] = field(default_factory=list)
    calls: dict[str, list[int | None]] = field(default_factory=lambda: defaultdict(list))
    inside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: tuple[ValueName, ...] = ()
    returned: tuple[str, ...] = ()
    learning: frozenset[ValueName] = frozenset()
    together: set[tuple[int, int]] = field(default_factory=set)
    escaping: set[int] = field(default_factory=set)
    shared_buffers: set[str] = field(default_factory=set)
    specs: dict[ValueName, GhostSpec] = field(default_factory=dict)
    is_one_path: bool = True
    deciding: set[int] = field(default_factory=set)
    selections: set[int] = field(default_factory=set)
    selecting: set[str] = field(default_factory=set)
    checkpointed: set[str] = field(default_factory=set)
    own_backward: set[str] = field(default_factory=set)
    writing: set[str] = field(default_factory=set)
    draws: bool = False
    writes_inputs: bool = False


def raised_again(failure: Exception) -> Exception:
    """Returns an exception of the same class, text and attributes, without the frames and causes of ``failure``.

    The class is not called, because its constructor may take other arguments than the exception has kept.

    >>> raised_again(ValueError("too long"))
    ValueError('too long')
    """
    made = type(failure).__new__(type(failure), *failure.args)
    made.args = failure.args
    vars(made).update(vars(failure))
    return made


def tag_value(tensor: Tensor, name: ValueName | None) -> None:
    """Marks a tensor with the name of the value that it holds, and with its version, which shows later in-place writes.

    A ``name`` of None marks it as no known value. :func:`value_name` and :func:`value_mark` read the mark.
    """
    tensor.__dict__[_TAG] = name, tensor._version


def forget_values(model: nn.Module) -> None:
    """Removes the names that :func:`tag_value` gave to buffers and tensor attributes of a model's modules.

    Otherwise a table that code keeps there would enter the next record under a name from the previous record.
    """
    for module in model.modules():
        for tensor in (*module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, Tensor):
                tensor.__dict__.pop(_TAG, None)


def value_mark(tensor: Tensor) -> tuple[ValueName, int] | None:
    """Returns the name that :func:`tag_value` gave a tensor and its version at that time, or None without a mark."""
    mark: tuple[ValueName, int] | None = tensor.__dict__.get(_TAG)
    return mark


def value_name(tensor: Tensor) -> ValueName | None:
    """Returns the name that :func:`tag_value` gave a tensor, or None."""
    mark = tensor.__dict__.get(_TAG)
    return None if mark is None else mark[0]


def plain_of(args: Any, named: Any) -> tuple[str, ...]:
    """Returns the numbers, strings, slices, Nones and ellipses among a call's arguments, each as text (``repr``).

    Arguments inside lists, tuples and dicts are included; a slice with a tensor as a bound is left out.
    """
    return tuple(repr(leaf) for leaf in tree_leaves((args, named)) if _is_plain(leaf))


def shapes_from_inputs(operands: Iterable[Tensor], takes: Iterable[Any]) -> tuple[str, ...]:
    """Returns, as text, the shape of each operand of a call that depends on the model's inputs and constants alone.

    These are masks or indices, for example, and not activations. ``takes`` is that of the :class:`ForwardEvent`: it has
    None for them.
    """
    return tuple(str(tuple(x.shape)) for x, name in zip(operands, takes, strict=True) if name is None)


def _is_plain(leaf: Any) -> bool:
    parts = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
    return all(part is None or part is ... or isinstance(part, bool | int | float | str) for part in parts)
