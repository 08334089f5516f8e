"""Tells whether a user's loss may be called more often than it is for a step, on samples of which one rank knows."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from shardwright.analysis.reached import ATOMS, reached
from shardwright.comm.axis import Axis
from shardwright.comm.world import World

_MOST_ELEMENTS = 2**22
"""How many elements the tensors of a loss may have: a large network is neither copied nor run again."""

_WRITES = frozenset(("DELETE_ATTR", "DELETE_SUBSCR", "STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR"))
_ATTRIBUTES = frozenset(("DELETE_ATTR", "STORE_ATTR"))
"""Writes that a copy of a module takes, if they are to the module itself."""

_KNOWN = ("torch.", "shardwright.models.", "shardwright.forward_stack", "shardwright.parallelize.loss_settings",
          "builtins", "math", "functools", "operator", "collections", "typing", "enum", "types", "weakref")  # fmt: skip
"""Modules whose functions write to nothing outside of their arguments."""

_PLAIN = frozenset(("torch", "math", "functools", "operator", "itertools", "typing", "einops", "shardwright"))
"""Packages whose functions a loss may call, but for torch.distributed, by their modules' names."""

_PRINTS = frozenset(("open", "print", "input"))


def may_be_repeated(loss: nn.Module) -> bool:
    """Returns whether further calls of a copy of a loss send nothing and change nothing outside of it.

    A copy of a module has its own buffers and attributes. But functions and methods share what they close over, and
    what they know by a global name: one that writes to attributes, items or globals, prints, or knows a container, an
    object that does so, a module with buffers, another package than torch, or what sends messages, is called for a step
    alone. So is a loss with a large network.

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
    own, num_elements = {id(module) for module in loss.modules()}, 0
    waiting: list[Any] = [loss]
    while waiting:
        for _, each in reached(waiting.pop(), seen):
            if isinstance(each, Axis | World):
                return False
            if isinstance(each, Tensor):
                num_elements += each.numel()
            elif isinstance(each, ModuleType):
                if each.__name__.partition(".")[0] not in _PLAIN or each.__name__.startswith("torch.distributed"):
                    return False
            elif isinstance(each, FunctionType):
                if _is_known(each):
                    continue
                if _changes(each, _WRITES):
                    return False
                waiting += _globals_of(each)
            elif not isinstance(each, type) and not _is_known(type(each)):
                if isinstance(each, nn.Module) and id(each) not in own and any(True for _ in each.buffers()):
                    return False
                writes = _WRITES - _ATTRIBUTES if id(each) in own else _WRITES
                for method in _methods(type(each)):
                    if _changes(method, writes):
                        return False
                    waiting += _globals_of(method)
            elif isinstance(each, nn.Module) and id(each) not in own and any(True for _ in each.buffers()):
                return False
    return num_elements <= _MOST_ELEMENTS


def _is_known(value: Any) -> bool:
    return (value.__module__ or "").startswith(_KNOWN)


def _methods(kind: type) -> Iterator[FunctionType]:
    """Yields the methods of a class and of those that it inherits from, but for known ones; not its constructor."""
    for each in kind.__mro__:
        named = vars(each).items() if not _is_known(each) else ()
        yield from (value for name, value in named if isinstance(value, FunctionType) and name != "__init__")


def _codes(function: FunctionType) -> Iterator[CodeType]:
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        yield code


def _changes(function: FunctionType, writes: Collection[str]) -> bool:
    """Returns whether a function may write to what others see, or reads a container or prints, as it may then too."""
    outer, held = {*function.__code__.co_freevars}, [*_closed_over(function)]
    if any(isinstance(each, list | dict | set | deque | bytearray) for each in held):
        return True
    stores_in_class = any(isinstance(each, type) and not _is_known(each) for each in held)
    return any(
        each.opname in writes
        or (each.opname in _ATTRIBUTES and stores_in_class)
        or (each.opname == "STORE_DEREF" and each.argval in outer)
        or (each.opname.startswith("LOAD_GLOBAL") and each.argval in _PRINTS)
        for code in _codes(function)
        for each in dis.get_instructions(code)
    )


def _closed_over(function: FunctionType) -> Iterator[Any]:
    """Yields what a function closes over, and what it knows by a global name."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from (function.__globals__.get(name) for code in _codes(function) for name in code.co_names)


def _globals_of(function: FunctionType) -> list[Any]:
    """Returns the objects that a function knows by a global name, or closes over; those of plain values left out."""
    return [each for each in _closed_over(function) if type(each) not in ATOMS]
