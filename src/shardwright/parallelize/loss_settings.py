"""Follows the settings of a loss that a user changes between steps, on the copy of it that a run computes with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.analysis.objects.reached import ATOMS
from shardwright.models.given_loss import FunctionLoss, SumLoss

MOST_ENTRIES = 100
"""A dict with more entries is taken for a table, such as a vocabulary, not for settings that are read in each step."""

FOLLOWED = "_followed_settings"


class LossSettings:
    """The numbers, text, flags and tensors that a user's loss holds, which a run's copy of the loss takes over.

    They are searched once, in the loss (``given``) and its copy (``own``) side by side: in attributes, dicts, lists,
    buffers, closures and arguments of partials. Each is kept with the value that the copy took over last, so that a
    change is noticed; a tensor has changed too if it was written to. ``renewed`` has the names of the settings that
    were taken over after a change.
    """

    def __init__(self, given: Any, own: Any) -> None:
        self.renewed = set[str]()
        self._settings = [
            _Setting(mine, theirs, key, value, _state_of(value))
            for mine, theirs in _pairs(given, own, set())
            for key, value in entries_of(theirs)
            if _is_followed(value) and _is_same(entry_at(mine, key), value)
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> LossSettings:
        return LossSettings(None, None)  # a copy of a run's loss, as for a rehearsal, follows nothing

    def renew(self) -> None:
        """Gives the copy each setting that has changed since, as by ``loss.beta = 0.5``; called before each step."""
        for number, (mine, theirs, key, before, state) in enumerate(self._settings):
            value = entry_at(theirs, key, before)
            is_there = not isinstance(mine, list) or key < len(mine)
            if (value is not before or _state_of(value) != state) and is_there and _is_followed(value):
                mine[key] = _taken_over(value, entry_at(mine, key))
                self.renewed.add(str(key))
                self._settings[number] = _Setting(mine, theirs, key, value, _state_of(value))


class _Setting(NamedTuple):
    mine: Any
    theirs: Any
    key: Any
    before: Any
    state: Any


def _is_followed(value: Any) -> bool:
    """Returns whether a value is plain data, a list of some, or a tensor."""
    if type(value) in (list, tuple):
        return len(value) <= MOST_ENTRIES and all(type(entry) in ATOMS for entry in value)
    return type(value) in ATOMS or isinstance(value, Tensor)


def _state_of(value: Any) -> Any:
    """Returns what changes with a value in place: a list's items, or the number of writes to a tensor."""
    if isinstance(value, Tensor):
        return 0 if value.is_inference() else value._version
    return tuple(value) if type(value) is list else None


def _is_same(mine: Any, theirs: Any) -> bool:
    """Returns whether the copy has a setting as the original has it; tensors are not compared."""
    if isinstance(theirs, Tensor):
        return isinstance(mine, Tensor)
    return type(mine) is type(theirs) and bool(mine == theirs)


def _taken_over(value: Any, mine: Any) -> Any:
    """Returns the copy's new value of a setting that is ``value`` in the original; ``mine`` is the copy's old value.

    A list is copied, and so is a tensor, to the device of ``mine``. A parameter shares its memory with that of the
    original.
    """
    if not isinstance(value, Tensor) or mine is value:
        return list(value) if type(value) is list else value
    device = mine.device if isinstance(mine, Tensor) else value.device
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().to(device), requires_grad=value.requires_grad)
    if isinstance(mine, Tensor) and mine.shape == value.shape:
        with torch.no_grad():
            mine.copy_(value)
        return mine
    return value.detach().to(device, copy=True)


def entries_of(holder: Any) -> list[tuple[Any, Any]]:
    """Returns the keys and values of a dict, or the indices and items of a list or tuple."""
    return list(dict.copy(holder).items() if isinstance(holder, dict) else enumerate(holder))


def entry_at(holder: Any, key: Any, otherwise: Any = None) -> Any:
    """Returns the item of a dict or a list, or ``otherwise`` if there is none."""
    if isinstance(holder, dict):
        return holder.get(key, otherwise)
    return holder[key] if key < len(holder) else otherwise


def follow_settings(given: Any, own: nn.Module) -> None:
    """Lets a run's copy ``own`` of a loss take over what a user changes in the loss that was ``given``.

    >>> class Penalised(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.beta = 0.0
    >>> given, own = Penalised(), Penalised()
    >>> follow_settings(given, own)
    >>> given.beta = 0.5
    >>> settings_of(own).renew()
    >>> own.beta
    0.5
    """
    copy: Any = own.loss if isinstance(own, SumLoss) and not isinstance(given, SumLoss) else own
    copy = own.function if isinstance(own, FunctionLoss) and not isinstance(given, FunctionLoss) else copy
    vars(own)[FOLLOWED] = LossSettings(given, copy)


def settings_of(loss: nn.Module) -> LossSettings | None:
    """Returns the settings that a run's loss takes over; None for a loss that ``parallelize`` has not copied."""
    settings: LossSettings | None = vars(loss).get(FOLLOWED)
    return settings


def _pairs(source: Any, own: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    """Yields the dicts and lists of a copied loss that may hold settings, each with its counterpart in the original."""
    if source is own or id(source) in seen or type(source) is not type(own) or isinstance(source, Tensor | type):
        return
    seen.add(id(source))
    if isinstance(source, MethodType):
        yield from _pairs(source.__self__, own.__self__, seen)
    elif isinstance(source, partial):
        for part in ("func", "args", "keywords"):
            yield from _pairs(getattr(source, part), getattr(own, part), seen)
    elif isinstance(source, list | tuple) and len(source) == len(own) <= MOST_ENTRIES:
        if isinstance(source, list):
            yield own, source
        for theirs, mine in zip(source, own, strict=True):
            yield from _pairs(theirs, mine, seen)
    elif isinstance(source, FunctionType):  # it was rebuilt, because it holds a module that the copy has a copy of
        yield vars(own), vars(source)
        for theirs, mine in zip(source.__closure__ or (), own.__closure__ or (), strict=True):
            with suppress(ValueError):  # a cell may be empty
                yield from _pairs(theirs.cell_contents, mine.cell_contents, seen)
    else:
        theirs, mine = (
            value if isinstance(value, dict) else getattr(value, "__dict__", None) for value in (source, own)
        )
        is_table = isinstance(source, dict) and len(source) > MOST_ENTRIES
        if isinstance(theirs, dict) and isinstance(mine, dict) and not is_table:
            yield mine, theirs
            for key in theirs.keys() & mine.keys():
                yield from _pairs(theirs[key], mine[key], seen)
