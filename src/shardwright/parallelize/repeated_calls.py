"""Tells whether a user's loss may be called more often than it is for a step, on samples of which one rank knows."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from shardwright.analysis.reached import reached
from shardwright.comm.axis import Axis
from shardwright.comm.world import World

_MOST_ELEMENTS = 2**22
"""How many elements the tensors of a loss may have: a large network is neither copied nor run again."""

_WRITES = frozenset(("DELETE_ATTR", "DELETE_SUBSCR", "STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR"))
_OF_OTHERS = ("threading", "_thread", "queue", "multiprocessing", "torch.distributed", "torch._C._distributed",
              "numpy.random", "random")  # fmt: skip
"""Modules of whose classes an object waits for others, or changes with each use."""

_KNOWN = ("torch.", "shardwright.models.")
"""Modules whose functions write to nothing outside of their arguments."""


def may_be_repeated(loss: nn.Module) -> bool:
    """Returns whether further calls of a copy of a loss send nothing and change nothing outside of it.

    A copy of a module has its own buffers and attributes. But functions share what they close over, and what they know
    by a global name: one that writes to attributes, items or globals, or that holds a container, a module with
    buffers, a lock, a generator of random numbers or what sends messages, is called for a step alone. So is a loss with
    a large network.

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
    waiting = [loss]
    while waiting:
        for _, each in reached(waiting.pop(), seen):
            if isinstance(each, Axis | World) or type(each).__module__.startswith(_OF_OTHERS):
                return False
            if isinstance(each, Tensor):
                num_elements += each.numel()
            elif isinstance(each, nn.Module):
                if id(each) not in own and any(True for _ in each.buffers()):
                    return False
            elif isinstance(each, FunctionType) and not (each.__module__ or "").startswith(_KNOWN):
                if _writes(each) or any(_is_container(held) for held in _closed_over(each)):
                    return False
                waiting += _globals_of(each)
    return num_elements <= _MOST_ELEMENTS


def _codes(function: FunctionType) -> Iterator[CodeType]:
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
        yield code


def _writes(function: FunctionType) -> bool:
    outer = {*function.__code__.co_freevars}
    return any(
        each.opname in _WRITES or (each.opname == "STORE_DEREF" and each.argval in outer)
        for code in _codes(function)
        for each in dis.get_instructions(code)
    )


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue
    yield from (function.__globals__.get(name) for code in _codes(function) for name in code.co_names)


def _globals_of(function: FunctionType) -> list[Any]:
    """Returns the functions, modules and other objects that a function knows by a global name."""
    return [each for each in _closed_over(function) if each is not None and not _is_plain(each)]


def _is_plain(value: Any) -> bool:
    name = type(value).__module__ if not isinstance(value, FunctionType) else value.__module__ or ""
    return isinstance(value, type) or type(value).__name__ == "module" or name.startswith(("torch.", "builtins"))


def _is_container(value: Any) -> bool:
    return isinstance(value, list | dict | set | deque | bytearray)
