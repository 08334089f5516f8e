"""Finds the models in the process that calls ``launch`` of which ranks, in other processes, have trained copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

from torch import nn
from torch.utils._pytree import tree_leaves

_TRAINED: list[ReferenceType[nn.Module]] = []  # a list, since a module may have no hash (dataclass)

ON_RETURN: list[Callable[[nn.Module], None]] = []
"""Functions that are called, in the process that called ``launch``, with each model of which ranks trained a copy."""


def note_trained(model: nn.Module) -> None:
    """Remembers ``model`` as a plain model whose run has trained in this process."""
    _TRAINED[:] = [entry for entry in _TRAINED if (other := entry()) is not None and other is not model] + [ref(model)]


def objects_of(work: Any, args: Sequence[Any]) -> list[Any]:
    """Returns what the ranks' function may train, in an order that is the same in each process: arguments first.

    These are the objects in ``args``, those that ``work`` holds as a partial, a method or a closure, and the globals
    that its code names.

    >>> model = nn.Linear(2, 2)
    >>> objects_of(partial(print, model), ({"a": 1}, 2))[:3] == [1, 2, model]
    True
    """
    objects = tree_leaves(args)
    if isinstance(work, partial):
        return [*objects, *objects_of(work.func, [work.args, work.keywords])]
    if (owner := getattr(work, "__self__", None)) is not None:
        objects += [owner, *vars(owner).values()] if hasattr(owner, "__dict__") else [owner]
    work = getattr(work, "__func__", work)
    code, names = getattr(work, "__code__", None), getattr(work, "__globals__", {})
    objects += [names.get(name) for name in code.co_names] if code is not None else []
    for cell in getattr(work, "__closure__", None) or ():
        try:
            objects.append(cell.cell_contents)
        except ValueError:  # an empty cell
            objects.append(None)
    return objects


def trained_among(objects: Sequence[Any]) -> list[int]:
    """Returns the indices, in ``objects``, of the models that runs of this process have trained."""
    trained = {id(model) for entry in _TRAINED if (model := entry()) is not None}
    return [place for place, value in enumerate(objects) if id(value) in trained]


def tell_trained(objects: Sequence[Any], places: Iterable[int]) -> None:
    """Calls the functions of ``ON_RETURN`` with the models at these places of ``objects``."""
    for place in sorted(set(places)):
        if place < len(objects) and isinstance(objects[place], nn.Module):
            for tell in ON_RETURN:
                tell(objects[place])
