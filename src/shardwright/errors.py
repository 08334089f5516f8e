"""The errors a person can meet, and the checks that raise them: given, allowed, fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LayoutError(ValueError):
    """A layout that cannot be: a wrong line, or sizes that do not fit the model or the ranks."""


class GridError(LayoutError):
    """A grid that a model's layers do not fit; ``path`` is the layer that is too small, where there is one.

    ``what``, ``given`` and ``allowed`` are the text's, so that whoever knows the whole layout can say what fits.
    """

    def __init__(self, what: str, *, given: str, allowed: str, fix: str, path: str | None = None) -> None:
        super().__init__(explain(what, given=given, allowed=allowed, fix=fix))
        self.what, self.given, self.allowed, self.fix, self.path = what, given, allowed, fix, path


class PlanError(ValueError):
    """A model, loss or optimizer that cannot run as asked."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, or one that is missing, broken or foreign."""


class CommunicationError(RuntimeError):
    """Ranks that disagree on a call, wait for each other for ever, or have lost one of them."""


class RankFailedError(RuntimeError):
    """One rank raised or died, and ended the run; the message starts with that rank's own traceback."""


def explain(what: str, *, given: object, allowed: object, fix: object) -> str:
    """The text every error has: what is wrong, what was given, what is allowed, how to fix it.

    >>> print(explain("no such axis", given="xp", allowed="pp, dp, cp, tp", fix="write pp"))
    no such axis
      given:   xp
      allowed: pp, dp, cp, tp
      fix:     write pp
    """
    return f"{what}\n  given:   {given}\n  allowed: {allowed}\n  fix:     {fix}"


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
        raise LayoutError(explain(f"'{name}' is too small", given=value, allowed=f"{least} or more", fix=fix))


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
            explain(
                f"cannot cut '{name}' dim {dim} over axis '{axis}'",
                given=f"size {size}, {axis}={parts}: {empty} rank{'s' * (empty > 1)} would hold nothing",
                allowed=f"{axis} from 1 to {size}",
                fix=f"set {axis}={size}, or move the other ranks to 'dp'",
            )
        )
