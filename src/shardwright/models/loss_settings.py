"""Follows the settings of a loss that a user changes between steps, on the copy of it that a run computes with."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwright.models.given_loss import FunctionLoss, SumLoss

PLAIN = (bool, int, float, str, type(None))
"""The types of settings: other values, such as tensors, are shared by the loss and its copy, or copied for good."""

_FOLLOWED = "_followed_settings"


class LossSettings:
    """The settings of a loss that was given, with what they were when the copy of the loss last took them."""

    def __init__(self, given: Any, own: Any) -> None:
        self._settings = [
            _Setting(mine, theirs, key, value)
            for mine, theirs in _pairs(given, own, set())
            for key, value in theirs.items()
            if isinstance(value, PLAIN) and mine.get(key, _MISSING) == value
        ]

    def renew(self) -> None:
        """Gives the copy each setting that has changed since, as by ``loss.beta = 0.5``; called before each step."""
        for number, (mine, theirs, key, before) in enumerate(self._settings):
            value = theirs.get(key, before)
            if value is not before and isinstance(value, PLAIN):
                mine[key] = value
                self._settings[number] = _Setting(mine, theirs, key, value)


class _Setting(NamedTuple):
    mine: MutableMapping[str, Any]
    theirs: MutableMapping[str, Any]
    key: str
    before: Any


_MISSING = object()


def follow_settings(given: Any, own: nn.Module) -> None:
    """Has the copy ``own`` of a loss take the settings of the loss that was ``given``, whenever these change.

    >>> class Penalised(nn.Module):
    ...     beta = 0.0
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
    """Returns the settings that a run's loss follows; None for one that was not made by ``parallelize``."""
    found: LossSettings | None = vars(loss).get(_FOLLOWED)
    return found


def _pairs(given: Any, own: Any, seen: set[int]) -> Iterator[tuple[MutableMapping[str, Any], MutableMapping[str, Any]]]:
    """Yields the attributes or items of each object in the copy, and those of the one in the given loss."""
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
        if isinstance(theirs, dict) and isinstance(mine, dict):
            yield mine, theirs
            for key in theirs.keys() & mine.keys():
                yield from _pairs(theirs[key], mine[key], seen)
