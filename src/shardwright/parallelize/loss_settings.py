"""Follows the settings of a loss that a user changes between steps, on the copy of it that a run computes with."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwright.analysis.reached import ATOMS
from shardwright.models.given_loss import FunctionLoss, SumLoss

MOST_ENTRIES = 100
"""A dict with more entries is a table, such as a vocabulary, and not settings, which are read before each step."""

_FOLLOWED = "_followed_settings"


class LossSettings:
    """The numbers, text and flags among the attributes of a user's loss, which a run's copy of the loss takes over.

    They are found once, in both. Each has the value that it had when the copy last took it.
    """

    def __init__(self, given: Any, own: Any) -> None:
        self._settings = [
            _Setting(mine, theirs, key, value)
            for mine, theirs in _pairs(given, own, set())
            for key, value in theirs.items()
            if type(value) in ATOMS and mine.get(key, _MISSING) == value
        ]

    def renew(self) -> None:
        """Gives the copy each setting that has changed since, as by ``loss.beta = 0.5``; called before each step."""
        for number, (mine, theirs, key, before) in enumerate(self._settings):
            value = theirs.get(key, before)
            if value is not before and type(value) in ATOMS:
                mine[key] = value
                self._settings[number] = _Setting(mine, theirs, key, value)


class _Setting(NamedTuple):
    mine: MutableMapping[str, Any]
    theirs: MutableMapping[str, Any]
    key: str
    before: Any


_MISSING = object()


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
    vars(own)[_FOLLOWED] = LossSettings(given, copy)


def settings_of(loss: nn.Module) -> LossSettings | None:
    """Returns the settings that a run's loss takes over; None for a loss that ``parallelize`` has not copied."""
    found: LossSettings | None = vars(loss).get(_FOLLOWED)
    return found


def _pairs(given: Any, own: Any, seen: set[int]) -> Iterator[tuple[MutableMapping[str, Any], MutableMapping[str, Any]]]:
    """Yields, for each object that the loss was copied with, the copy's attributes or items and the original's."""
    if given is own or id(given) in seen or type(given) is not type(own) or isinstance(given, Tensor | type):
        return
    seen.add(id(given))
    if isinstance(given, MethodType):
        yield from _pairs(given.__self__, own.__self__, seen)
    elif isinstance(given, partial):
        yield from _pairs(given.func, own.func, seen)
        yield from _pairs(given.keywords, own.keywords, seen)
    else:
        theirs, mine = (each if isinstance(each, dict) else getattr(each, "__dict__", None) for each in (given, own))
        is_table = isinstance(given, dict) and len(given) > MOST_ENTRIES
        if isinstance(theirs, dict) and isinstance(mine, dict) and not is_table:
            yield mine, theirs
            for key in theirs.keys() & mine.keys():
                yield from _pairs(theirs[key], mine[key], seen)
