"""The errors a user can meet. Each says what is wrong, what was given, what is allowed and how to fix it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def explain(what: str, *, given: object, allowed: object, fix: object) -> str:
    """The text of every error: what is wrong, what was given, what is allowed, how to fix it.

    >>> print(explain("no such axis", given="xp", allowed="pp, dp, cp, tp", fix="write pp"))
    no such axis
      given:   xp
      allowed: pp, dp, cp, tp
      fix:     write pp
    """
    return f"{what}\n  given:   {given}\n  allowed: {allowed}\n  fix:     {fix}"


class _ExplainedError(Exception):
    """An error made from four parts, or from one text that holds them already (as unpickling makes it)."""

    def __init__(self, what: str, *, given: object = None, allowed: object = None, fix: object = None) -> None:
        self.what, self.given, self.allowed, self.fix = what, given, allowed, fix
        super().__init__(what if fix is None else explain(what, given=given, allowed=allowed, fix=fix))


class LayoutError(_ExplainedError, ValueError):
    """A layout that cannot be run: a wrong line, or sizes that do not fit the model or the ranks.

    >>> raise LayoutError("no such axis", given="xp", allowed="pp, dp, cp, tp", fix="write pp")
    Traceback (most recent call last):
    shardwright.errors.LayoutError: no such axis
      given:   xp
      allowed: pp, dp, cp, tp
      fix:     write pp
    """


class GridError(LayoutError):
    """A grid that a model's layers do not fit; ``path`` names the layer that is too small, if there is one.

    The caller that knows the whole layout catches this error and adds the grids that do fit.
    """

    def __init__(self, what: str, *, path: str | None = None, **parts: object) -> None:
        super().__init__(what, **parts)
        self.path = path


class PlanError(_ExplainedError, ValueError):
    """A model, loss or optimizer that cannot run as asked."""


class CheckpointError(_ExplainedError, ValueError):
    """A checkpoint that cannot be written, or one that is missing, broken or foreign."""


class CommunicationError(_ExplainedError, RuntimeError):
    """Ranks that disagree on a call, wait for each other for ever, or have lost one of them."""


class RankFailedError(_ExplainedError, RuntimeError):
    """One rank raised or died, and ended the run; the message starts with that rank's own traceback."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most like ``word``; the first one when none is.

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


def check_cut(name: str, dim: int, size: int, axis: str, parts: int) -> None:
    """Raises LayoutError when a cut of ``size`` over ``parts`` ranks leaves one with nothing.

    >>> check_cut("up.weight", 0, 3, "tp", 4)
    Traceback (most recent call last):
    shardwright.errors.LayoutError: cannot cut 'up.weight' dim 0 over axis 'tp'
      given:   size 3, tp=4: 1 rank would hold nothing
      allowed: tp from 1 to 3
      fix:     set tp=3, or move the other ranks to 'dp'
    """
    if size < parts:  # an uneven cut is fine; an empty slice is not
        empty = parts - size
        raise LayoutError(
            f"cannot cut '{name}' dim {dim} over axis '{axis}'",
            given=f"size {size}, {axis}={parts}: {empty} rank{'s' * (empty > 1)} would hold nothing",
            allowed=f"{axis} from 1 to {size}",
            fix=f"set {axis}={size}, or move the other ranks to 'dp'",
        )
