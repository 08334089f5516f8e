"""The exceptions for users of the library; most say what is wrong, what was given, what is allowed and the fix."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LONG = re.compile(r"\S{1001,}")
"""A word so long that an error shows only its beginning and its length: nothing with 70,000 characters can be read."""


def explain(what: str, *, given: object, allowed: object, fix: object) -> str:
    """Returns the text of an error: what is wrong, what was given, what is allowed, how to fix it.

    >>> print(explain("no such axis", given="xp", allowed="pp, dp, cp, tp", fix="write pp"))
    no such axis
      given:   xp
      allowed: pp, dp, cp, tp
      fix:     write pp
    """
    return f"{what}\n  given:   {given}\n  allowed: {allowed}\n  fix:     {fix}"


def aligned(lines: Iterable[str]) -> str:
    """Returns several lines as one part of an error's text, aligned below each other.

    >>> print(explain("ranks disagree", given=aligned(["rank 0: 2", "rank 1: 3"]), allowed="one number", fix="agree"))
    ranks disagree
      given:   rank 0: 2
               rank 1: 3
      allowed: one number
      fix:     agree
    """
    return "\n           ".join(lines)


class ExplainedError(Exception):
    """An error made from its four parts, or from one text that contains them, as unpickling makes it."""

    def __init__(self, what: str, *, given: object = None, allowed: object = None, fix: object = None) -> None:
        self.what, self.given, self.allowed, self.fix = what, given, allowed, fix
        text = what if fix is None else explain(what, given=given, allowed=allowed, fix=fix)
        super().__init__(re.sub(_LONG, lambda word: f"{word[0][:100]}... ({len(word[0]):,} characters)", text))


class LayoutError(ExplainedError, ValueError):
    """Raised for a layout that cannot run: a malformed line, or sizes that do not fit the model or the ranks."""


class GridError(LayoutError):
    """Raised if the model's layers do not fit a tensor-parallel grid; ``path`` names the layer if one is too small.

    Callers catch it to keep that layer whole, or to name grids that do fit in the :class:`LayoutError` for the user.
    """

    def __init__(self, what: str, *, path: str | None = None, **parts: object) -> None:
        super().__init__(what, **parts)
        self.path = path


class UnknownCodeError(LayoutError):
    """Raised if a model's code cannot be traced; callers catch it to cut the model into pipeline stages another way."""


class PlanError(ExplainedError, ValueError):
    """Raised if a run is impossible for a reason other than its layout, such as its model, loss or device."""


class ShardError(PlanError):
    """Raised if code asks for the whole of a model or a parameter of which this rank holds a shard, or nothing."""


class NoValuesError(PlanError):
    """Raised if a model's constructor needs values of tensors that ``without_values`` keeps on the meta device.

    Examples are values drawn at random, which depend on a seed that is not known yet.
    """


class RankDifferenceError(PlanError):
    """Raised on every rank if a comparison during training finds that ranks differ in what they must have alike.

    That is their step, optimizer updates, batches or copies of parameters.

    The state of such a run is of no use, so the emergency checkpoint leaves it unsaved.
    """


class CheckpointError(ExplainedError, ValueError):
    """Raised for a checkpoint that cannot be written, or that is missing, broken or of another format."""


class CommunicationError(ExplainedError, RuntimeError):
    """Raised if ranks make different collective calls, deadlock, or lose a rank; and for a call with bad arguments."""


class RankFailedError(ExplainedError, RuntimeError):
    """Raised by the launcher if a rank raised or died, which ends the run, or if ranks could not be started.

    The message has the rank and its traceback, or how the rank died, as far as the launcher knows it.
    """


EXAMPLE = (
    "write sw.parallelize(model, layout, world, example=inputs), the inputs of one global batch as the loader has it; "
    "torch.zeros(...) of their shapes is enough, and leaves the loader's random generator alone, but for a model that "
    "looks for values, such as the tokens of images"
)
"""The line to write, for the ``fix`` of an error that an example of the inputs would avoid."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns the entry of ``known`` that begins with a mistyped ``word`` or is spelled like it; "" if none is similar.

    Upper and lower case count as alike.

    >>> nearest("lerning_rate", ["steps", "learning_rate"]), nearest("A100", ["a100-80gb"]), nearest("inner", ["tied"])
    ('learning_rate', 'a100-80gb', '')
    """
    plain = {entry.lower(): entry for entry in known}
    begun = [entry for entry in plain if word and entry.startswith(word.lower())]
    swapped = [entry for entry in plain if len(entry) > 1 and sorted(entry) == sorted(word.lower())]
    alike = begun[:1] or swapped[:1] or difflib.get_close_matches(word.lower(), plain, n=1, cutoff=0.6)
    return plain[alike[0]] if alike else ""


def fix_for(
    word: str, known: Iterable[str], otherwise: str = "write one of those allowed", *, before: str = "write "
) -> str:
    """Returns a ``fix`` for a mistyped word: ``before`` and the :func:`nearest` known entry.

    If no entry is similar, a guess would mislead, so ``otherwise`` is returned.

    >>> fix_for("A100", ["a100-80gb", "b200"]), fix_for("inner", ["hidden", "tied"])
    ('write a100-80gb', 'write one of those allowed')
    """
    entry = nearest(word, known)
    return f"{before}{entry}" if entry else otherwise


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
