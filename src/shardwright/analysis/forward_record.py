"""What is known of one forward of a model that was recorded as events: values by name, calls, and their costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_leaves

from shardwright.analysis.costs import Cost

_TAG = "_made_by_event"

ValueName = tuple[int, int]
"""A value: the number of the event that made it, and its place among that event's results."""


class GhostSpec(NamedTuple):
    """What is known of a value without its numbers: its name, shape, strides and dtype, and whether it learns."""

    name: ValueName
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool

    def ghost(self) -> Tensor:
        """Returns a tensor on the meta device that stands for the value."""
        ghost = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        tag_value(ghost.requires_grad_(self.needs_gradient), self.name)
        return ghost


class SharedOperand(NamedTuple):
    """Stands for a result that is one of the event's operands."""

    operand: int


@dataclass(frozen=True, eq=False)
class ForwardEvent:
    """One call: ``name`` is a module's path, or a function's name where ``number`` is None.

    ``takes`` names the tensors among the arguments: values, parameters by their names, None for others. ``plain`` are
    the numbers and words among them. ``results`` are the leaves of the returned tree, ``written`` the operands that the
    call writes to, with their new values.
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

    def __str__(self) -> str:
        return f"a call of {self.name}" if self.number is None else f"call {self.number} of '{self.name}'"


class ModuleSpan(NamedTuple):
    """One call of a module: the events it spans, its cost, and whether its results depend on inputs alone."""

    path: str
    caller: int
    first: int
    stop: int
    cost: Cost
    is_free: bool


@dataclass(eq=False)
class ForwardRecord:
    """The events of one forward, in order.

    ``calls`` lists, for each module, which event made each of its calls; None for calls by code between units.
    ``inside`` are the modules in each unit, itself included, by the names that they are called by in ``calls``.
    ``together`` are pairs of events which exchange a value on another way than by arguments and results; ``escaping``
    are events with a value that the code between units takes so. ``shared_buffers`` are those that this code reads.
    ``is_one_path``: the code between units has read no value of an input and no random number; if it has, other inputs
    of the same shapes may give other events. ``deciding`` are the units whose own code has, and ``draws`` says whether
    code has drawn numbers for no tensor, by which it may skip calls. ``selecting`` are the modules outside of units
    whose own code selects by a condition on values of events, as a mixture of experts does.
    """

    events: list[ForwardEvent] = field(default_factory=list)
    scopes: list[ModuleSpan] = field(default_factory=list)
    calls: dict[str, list[int | None]] = field(default_factory=lambda: defaultdict(list))
    inside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: tuple[ValueName, ...] = ()
    learning: frozenset[ValueName] = frozenset()
    together: set[tuple[int, int]] = field(default_factory=set)
    escaping: set[int] = field(default_factory=set)
    shared_buffers: set[str] = field(default_factory=set)
    specs: dict[ValueName, GhostSpec] = field(default_factory=dict)
    is_one_path: bool = True
    deciding: set[int] = field(default_factory=set)
    selecting: set[str] = field(default_factory=set)
    draws: bool = False


def tag_value(tensor: Tensor, name: ValueName | None) -> None:
    """Marks a tensor as a value of a forward."""
    tensor.__dict__[_TAG] = name, tensor._version


def value_mark(tensor: Tensor) -> tuple[ValueName, int] | None:
    """Returns the name of the value that a tensor is marked as, and the tensor's version at that time."""
    found: tuple[ValueName, int] | None = tensor.__dict__.get(_TAG)
    return found


def value_name(tensor: Tensor) -> ValueName | None:
    """Returns the name of the value that a tensor is marked as."""
    found = tensor.__dict__.get(_TAG)
    return None if found is None else found[0]


def plain_of(args: Any, named: Any) -> tuple[str, ...]:
    """Returns the numbers, words and ranges among the arguments of a call, as text that is equal for equal ones."""
    return tuple(repr(leaf) for leaf in tree_leaves((args, named)) if _is_plain(leaf))


def _is_plain(leaf: Any) -> bool:
    parts = (leaf.start, leaf.stop, leaf.step) if isinstance(leaf, slice) else (leaf,)
    return all(each is None or each is ... or isinstance(each, bool | int | float | str) for each in parts)
