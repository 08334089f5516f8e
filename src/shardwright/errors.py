"""The errors for users. Each says what is wrong, what was given, what is allowed and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def explain(what: str, *, given: object, allowed: object, fix: object) -> str:
    """Returns the text of an error: what is wrong, what was given, what is allowed, how to fix it.

    >>> print(explain("no such axis", given="xp", allowed="pp, dp, cp, tp", fix="write pp"))
    no such axis
      given:   xp
      allowed: pp, dp, cp, tp
      fix:     write pp
    """
    return f"{what}\n  given:   {given}\n  allowed: {allowed}\n  fix:     {fix}"


class _ExplainedError(Exception):
    """An error made from its four parts, or from one text that contains them, as unpickling makes it."""

    def __init__(self, what: str, *, given: object = None, allowed: object = None, fix: object = None) -> None:
        self.what, self.given, self.allowed, self.fix = what, given, allowed, fix
        super().__init__(what if fix is None else explain(what, given=given, allowed=allowed, fix=fix))


class LayoutError(_ExplainedError, ValueError):
    """Raised for a layout that cannot run: a wrong line, or sizes that do not fit the model or the ranks."""


class GridError(LayoutError):
    """Raised for a tensor-parallel grid that layers do not fit; ``path`` names the layer that is too small, if any.

    The caller that has the whole layout catches this error and adds the grids that do fit.
    """

    def __init__(self, what: str, *, path: str | None = None, **parts: object) -> None:
        super().__init__(what, **parts)
        self.path = path


class UnknownCodeError(LayoutError):
    """Raised if a model's code cannot be traced, so that the caller may cut the model into stages in another way."""


class PlanError(_ExplainedError, ValueError):
    """Raised for a model, loss or optimizer that cannot run as asked."""


class NoValuesError(PlanError):
    """Raised if a model's constructor, run under ``without_values``, reads values that only the seed will decide."""


class CheckpointError(_ExplainedError, ValueError):
    """Raised for a checkpoint that cannot be written, or that is missing, broken or of another format."""


class CommunicationError(_ExplainedError, RuntimeError):
    """Raised when ranks make different calls, deadlock, or lose one of them."""


class RankFailedError(_ExplainedError, RuntimeError):
    """Raised when a rank raised or died and ended the run; the message starts with its own traceback."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns the entry of ``known`` most like a mistyped ``word``, or the first one if none is alike.

    >>> nearest("lerning_rate", ["steps", "learning_rate"])
    'learning_rate'
    """
    known = list(known)
    return (difflib.get_close_matches(word, known, n=1, cutoff=0.0) or known)[0]


def check_at_least(name: str, value: int, least: int, *, fix: str) -> None:
    """Raises LayoutError unless ``value >= least``.

    >>> check_at_least("num_microbatches", 0, 1, fix="start at 4 * pp")
    Traceback (most recent call last):
    shardwright.errors.LayoutError: 'num_microbatches' is too small
      given:   0
      allowed: 1 or more
      fix:     start at 4 * pp
    """
    if value < least:
        raise LayoutError(f"'{name}' is too small", given=value, allowed=f"{least} or more", fix=fix)
