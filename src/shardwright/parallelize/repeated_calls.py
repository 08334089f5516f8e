"""Tells whether a user's loss may be called more often than a step calls it, on the samples of one rank alone."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from shardwright.analysis.objects.reached import ATOMS, code_objects, reached
from shardwright.comm.axis import Axis
from shardwright.comm.world import World

_MOST_ELEMENTS = 2**22
"""The most elements that the tensors of a loss may have: a large network is neither copied nor run again."""

_WRITES = frozenset(("DELETE_ATTR", "DELETE_SUBSCR", "STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR"))
_ATTRIBUTES = frozenset(("DELETE_ATTR", "STORE_ATTR"))
"""Python's opcodes that set or delete an attribute. A method of the loss may have them: it is called on a copy of the
loss, so what it writes to itself is lost with the copy."""

_KNOWN = ("torch.", "shardwright.models.", "shardwright.forward_stack", "shardwright.parallelize.loss_settings",
          "builtins", "math", "functools", "operator", "collections", "typing", "enum", "types", "weakref")  # fmt: skip
"""Modules whose functions write to nothing outside of their arguments."""

_PLAIN = frozenset(("torch", "math", "functools", "operator", "itertools", "typing", "einops", "shardwright"))
"""The names of packages whose functions a loss may call; of torch, all but torch.distributed."""

_PRINTS = frozenset(("open", "print", "input"))
"""Built-in functions of Python with an effect outside of the program."""


def may_be_repeated(loss: nn.Module) -> bool:
    """Returns whether a copy of a loss can be called without effect on anything else: nothing is sent or written.

    A copy of a module has its own buffers and attributes. But functions and methods share the objects that they refer
    to, by a closure or a global name. So the result is False for a loss with a function that writes to attributes,
    items or globals, or prints, or that refers to a container, to an object with such a function, to a module with
    buffers, to a package that is not known to be harmless, or to an axis or world, which send messages. It is False too
    for a loss with a large network.

    >>> import torch
    >>> from shardwright.models.given_loss import as_loss
    >>> seen = {"calls": 0}
    >>> def counted(output, targets):
    ...     seen["calls"] += 1
    ...     return output.sum(), len(targets)
    >>> may_be_repeated(as_loss(counted)), may_be_repeated(as_loss(lambda output, targets: (output.sum(), 1)))
    (False, True)
    """
    seen: dict[int, Any] = {}
    own_ids, num_elements = {id(module) for module in loss.modules()}, 0
    waiting: list[Any] = [loss]
    while waiting:
        for _, member in reached(waiting.pop(), seen):
            if isinstance(member, Tensor):
                num_elements += member.numel()
                continue
            functions = _functions_of(member)
            writes = _WRITES - _ATTRIBUTES if id(member) in own_ids else _WRITES
            if _is_shared(member, id(member) in own_ids) or any(_changes(function, writes) for function in functions):
                return False
            waiting += [value for function in functions for value in _known_to(function) if type(value) not in ATOMS]
    return num_elements <= _MOST_ELEMENTS


def _is_shared(value: Any, is_own: bool) -> bool:
    """Returns whether an object is shared with other code: it sends messages, is a package, or has shared buffers."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] not in _PLAIN or value.__name__.startswith("torch.distributed")
    has_buffers = isinstance(value, nn.Module) and any(True for _ in value.buffers())
    return isinstance(value, Axis | World) or (has_buffers and not is_own)


def _functions_of(value: Any) -> list[FunctionType]:
    """Returns the functions that an object may run: itself, or its class's methods; without those of known modules."""
    if isinstance(value, FunctionType):
        return [] if _is_known(value) else [value]
    kinds = () if isinstance(value, type) else (kind for kind in type(value).__mro__ if not _is_known(kind))
    named = [item for kind in kinds for item in vars(kind).items()]
    return [method for name, method in named if isinstance(method, FunctionType) and name != "__init__"]


def _is_known(value: Any) -> bool:
    return (value.__module__ or "").startswith(_KNOWN)


def _changes(function: FunctionType, writes: Collection[str]) -> bool:
    """Returns whether a function may change what other code sees: it writes, prints, or refers to a container."""
    outer, values = {*function.__code__.co_freevars}, [*_known_to(function)]
    if any(isinstance(value, list | dict | set | deque | bytearray) for value in values):
        return True
    stores_in_class = any(isinstance(value, type) and not _is_known(value) for value in values)
    return any(
        instruction.opname in writes
        or (instruction.opname in _ATTRIBUTES and stores_in_class)
        or (instruction.opname == "STORE_DEREF" and instruction.argval in outer)
        or (instruction.opname.startswith("LOAD_GLOBAL") and instruction.argval in _PRINTS)
        for code in code_objects(function)
        for instruction in dis.get_instructions(code)
    )


def _known_to(function: FunctionType) -> Iterator[Any]:
    """Yields the objects that a function refers to by its closure or by a global name."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from (function.__globals__.get(name) for code in code_objects(function) for name in code.co_names)
