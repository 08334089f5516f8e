"""Calls on tensor shards as they repeat: the keys of their plans, and plans made ready to run again and again.

A training step makes the same few hundred calls each time, and on a small model their bookkeeping costs as much as the
messages. So what does not depend on the tensors is decided once: which arguments are tensors, and what is done to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_leaves

from shardwright.comm.autograd import partial_to_whole
from shardwright.comm.axis import Axis
from shardwright.sharding.tensor_shard import tag, tagged
from shardwright.strategies.tensor_parallel.call_plans import COPIED, CallPlan, OperandChange, OperatorStep, Slot

_TENSORS = frozenset((Tensor, nn.Parameter))
_ATOMS = frozenset((type(None), bool, int, float, str, type(...), torch.dtype, torch.device, torch.Size))

Fill = Callable[[Sequence[Any]], Any]
"""A function from the tensors of a call plan, by slot number, to arguments or results with these in place."""


def has_shard(values: Iterable[Any]) -> bool:
    """Returns whether a tensor among a call's arguments is a shard; lists and tuples of tensors are searched too."""
    for x in values:
        kind = type(x)
        if kind in _TENSORS or isinstance(x, Tensor):
            if tagged(x) is not None:
                return True
        elif isinstance(x, list | tuple) and has_shard(x):
            return True
    return False


def signature_of(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Returns the key under which a call's plan is cached, and the tensors among the call's arguments, in order.

    The key has all that the plan depends on. It cannot be hashed if one of the arguments cannot.

    >>> signature_of(torch.add, (torch.ones(2), 1), {})[0][2:]
    (torch.Size([2]), (1,), torch.float32, False, <class 'int'>, 1, ())
    """
    key: list[Any] = [func, torch.is_grad_enabled()]
    tensors: list[Tensor] = []
    _read(args, key, tensors)
    key.append((*named,))
    if named:
        _read(named.values(), key, tensors)
    if len(tensors) > 1:
        numbers = [*map(id, tensors)]
        if len(set(numbers)) < len(numbers):  # a tensor that is given twice
            key.append(tuple(map(numbers.index, numbers)))
    return tuple(key), tensors


def _read(values: Iterable[Any], key: list[Any], tensors: list[Tensor]) -> None:
    for x in values:
        kind = type(x)
        if kind in _TENSORS or isinstance(x, Tensor):
            shard = tagged(x)
            key += (x.shape if shard is None else shard, x.stride(), x.dtype, x.requires_grad)
            tensors.append(x)
        elif kind in _ATOMS:
            key += (kind, x)
        elif kind is tuple or kind is list:
            key += (kind, len(x))
            _read(x, key, tensors)
        elif kind is slice:
            key += (kind, *(b.__index__() if isinstance(b, Tensor) else b for b in (x.start, x.stop, x.step)))
        else:
            leaves, spec = tree_flatten(x)
            if len(leaves) == 1 and leaves[0] is x:
                key += (kind, x)
            else:
                key.append(spec)
                _read(leaves, key, tensors)


class CallHost(Protocol):
    """The methods of a torch function mode that operator calls on tensor shards use.

    They convert operands for a call, run a call on gathered tensors, and give the error for a write to a copy.
    """

    axis: Axis

    def changed(self, x: Tensor, change: OperandChange, gradient_is_new: bool) -> Tensor:
        """Returns an operand as an operator on shards needs it."""

    def on_whole(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs a call on tensors that are all-gathered first."""

    def refuse_write(self, function: Any) -> Exception:
        """Returns the error for a write to a tensor that would be a view on one device, and is a copy here."""


class ReadyCall:
    """One plan of a call, made ready to run: with shards of the shapes that it was planned for.

    ``plan`` is None for a call that cannot run on shards, and runs on whole tensors.
    """

    __slots__ = ("_given", "_made", "_num_slots", "_results", "_steps", "run", "runs_as_is")

    run: Callable[[CallHost, Any, tuple[Any, ...], dict[str, Any], Sequence[Tensor]], Any]
    """Runs the call; it takes a mode, the function, its arguments (positional, named), and the tensors among these."""

    def __init__(self, plan: CallPlan | None) -> None:
        self.runs_as_is = plan is not None and plan.runs_as_is
        self.run = _run_on_whole
        if plan is None:
            return
        self._made = tuple((slot, plan.shards[slot]) for slot in plan.made)
        if self.runs_as_is:
            self.run = self._run_as_is
            return
        self.run = self._run_steps
        self._given, self._num_slots = plan.given, plan.num_slots
        self._steps, self._results = [_ReadyStep(step) for step in plan.steps], filling(plan.results)

    def _run_as_is(
        self, mode: CallHost, func: Any, args: tuple[Any, ...], named: dict[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        results = func(*args, **named)
        for result, (_, shard) in zip((results,) if isinstance(results, Tensor) else results, self._made, strict=True):
            tag(result, shard)
        return results

    def _run_steps(
        self, mode: CallHost, func: Any, args: tuple[Any, ...], named: dict[str, Any], tensors: Sequence[Tensor]
    ) -> Any:
        values: list[Any] = [None] * self._num_slots
        for slot, tensor in zip(self._given, tensors, strict=True):
            values[slot] = tensor
        for step in self._steps:
            step.run(mode, values)
        for slot, shard in self._made:
            tag(values[slot], shard)
        return self._results(values)


def _run_on_whole(
    mode: CallHost, func: Any, args: tuple[Any, ...], named: dict[str, Any], tensors: Sequence[Tensor]
) -> Any:
    return mode.on_whole(func, args, named)


class _ReadyStep:
    """One operator of a call plan, made ready: what does not depend on the tensors is decided."""

    __slots__ = ("addend", "addend_dim", "args", "changes", "function", "named", "results", "summed", "written")

    def __init__(self, step: OperatorStep) -> None:
        self.function, self.args = step.function, filling(step.args)
        self.named = filling(step.named) if step.named else None
        # the backward of a linear layer makes a new tensor for its input's gradient, so an all-reduce may overwrite it
        is_linear = step.function is functional.linear
        self.changes = [(change, is_linear and step.args[0] == Slot(change.slot)) for change in step.changes]
        self.results, self.written, self.summed = step.results, step.written, step.summed
        self.addend, self.addend_dim = step.addend, step.addend_dim

    def run(self, mode: CallHost, values: list[Any]) -> None:
        """Runs the operator on the tensors in ``values``, and puts its results there.

        Operands are gathered or sliced before, and results that are partial sums are all-reduced, as the plan says. A
        write to a copy, where one device would have a view, raises the error of :meth:`CallHost.refuse_write`.
        """
        for slot in self.written:
            if COPIED in values[slot].__dict__:
                raise mode.refuse_write(self.function)
        operands = values
        if self.changes:
            operands = [*values]
            for change, is_new in self.changes:
                operands[change.slot] = mode.changed(operands[change.slot], change, is_new)
        args = self.args(operands)
        results = self.function(*args) if self.named is None else self.function(*args, **self.named(operands))
        if isinstance(results, Tensor) and not self.summed:
            (slot,) = self.results
            values[slot] = results
            return
        tensors = (
            [results] if isinstance(results, Tensor) else [x for x in tree_leaves(results) if isinstance(x, Tensor)]
        )
        if self.summed:
            tensors = [partial_to_whole(x, mode.axis) for x in tensors]
            if self.addend is not None:
                addend = operands[self.addend.number]
                if self.addend_dim >= 0:
                    addend = addend.view(-1, *(1,) * (tensors[0].dim() - 1 - self.addend_dim))
                tensors[0] = tensors[0] + addend
        for slot, x in zip(self.results, tensors, strict=True):
            values[slot] = x


def filling(tree: Any) -> Fill:
    """Returns a function that puts values in the place of a tree's slots; the tree has a call's arguments or results.

    >>> filling((Slot(1), [2, Slot(0)]))("ab")
    ('b', [2, 'a'])
    """
    kind = type(tree)
    if kind is Slot:
        return itemgetter(tree.number)
    if _is_fixed(tree):
        return lambda values: tree
    if kind is dict:
        by_name = [(key, filling(child)) for key, child in tree.items()]
        return lambda values: {key: fill(values) for key, fill in by_name}
    fills = [filling(child) for child in tree]
    if hasattr(tree, "_fields"):
        return lambda values: kind(*[fill(values) for fill in fills])
    return lambda values: kind([fill(values) for fill in fills])


def _is_fixed(tree: Any) -> bool:
    """Returns whether a tree has no slot, and nothing that other code could change, such as a list."""
    if isinstance(tree, tuple):
        return type(tree) is not Slot and all(map(_is_fixed, tree))
    return not isinstance(tree, list | dict)
