"""The one place that replaces a module's ``forward``: wrappers by rung, in one order.

::

    module(x) -> hooks        UNSHARD > GATHER > FRAME                         run by torch, outside of the forward
                 forward      OFFLOAD > RECOMPUTE > CONTRIBUTE_ONCE > ...      run by this stack, outermost first
                 own code     the class's forward, or the one that a user has put on the module

A wrapper states its rung, and the rung decides where it stands; the order in which strategies come does not. The
forwards are composed when a wrapper is added: ``module.forward`` *is* the composed function, so that a call costs what
the wrappers cost and nothing more. The record of them stands beside it, see :func:`stack_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from torch import nn

from shardwright.errors import PlanError

Forward = Callable[..., Any]


class Rung(IntEnum):
    """Where a wrapper stands, outermost first. The order is part of the results: each line says why it is there."""

    # hooks: torch runs them around the forward, and not again where a block is computed a second time
    UNSHARD = 1  # ZeRO gathers parameters first: all below read them
    GATHER = 2  # an input that lies cut is made whole before the hooks of a user see it
    FRAME = 3  # around the whole model's forward: its input is cut, its output gathered, its begin and end are noted

    # wrappers of the forward
    OFFLOAD = 4  # outside of all that computes: what autograd saves anywhere below goes to host memory or disk
    RECOMPUTE = 5  # outside of all whose results it drops: the second run repeats everything below
    CONTRIBUTE_ONCE = 6  # inside RECOMPUTE: also in the second run these parameters are constants
    CALLERS = 7  # refuses callers that were not followed, before anything is sent
    FOLLOWED = 8  # notes which module runs, for the CALLERS of modules inside
    ENTRY = 9  # gathers an input once, for several operators inside the module's own code
    OPERATOR = 10  # tensor-parallel and spatial operators: most run in place of the module's code and all below
    ATTEND = 11  # no wrapper: a function that the module's own code calls, exchanged
    NO_SAMPLES = 12  # around torch's own code, and around DROPOUT in it: both fail on an empty batch
    STATISTICS = 13  # BatchNorm over all samples, in place of torch's code; an OPERATOR may call it on its rows
    DROPOUT = 14  # masks that do not depend on the layout, in place of torch's code
    SPLIT_BACKWARD = 15  # in place of torch's code, for layers that nothing else has changed
    GUARD = 16  # no wrapper: the module's class, whose parameters refuse to be read by other code


SEVERAL = frozenset((Rung.FRAME, Rung.CALLERS, Rung.FOLLOWED, Rung.STATISTICS))
"""The rungs on which several wrappers may stand, the later one outside; on any other a second one is an error."""


NO_FORWARD = frozenset((Rung.UNSHARD, Rung.GATHER, Rung.FRAME, Rung.ATTEND, Rung.GUARD))
"""The rungs of what is no wrapper of the forward: torch's hooks, functions exchanged, classes."""


class Wrapper(NamedTuple):
    """One entry of a stack. ``around`` makes the new forward from the one inside; None for what is no forward.

    ``replaces``: it runs in place of all that stands below.
    """

    rung: Rung
    name: str
    by: str
    around: Callable[[Forward], Forward] | None = None
    replaces: bool = False


class ForwardStack:
    """What stands around one module's own forward, outermost first."""

    def __init__(self, original: Forward | None = None, wrappers: tuple[Wrapper, ...] = ()) -> None:
        self.wrappers = wrappers
        self.forward: Forward | None = original
        """The composed forward; None while the module has its class's."""
        self._original = original

    def __reduce__(self) -> tuple[type[ForwardStack], tuple[Any, ...]]:
        """A copy is a record: the module's copied ``forward`` is composed already, and what made it stays behind."""
        return ForwardStack, (None, tuple(each._replace(around=None) for each in self.wrappers))

    def __str__(self) -> str:
        return "\n".join(f"{each.rung.name:<15}  {each.name} (by {each.by})" for each in self.wrappers)

    def _add(self, wrapper: Wrapper, own: Forward) -> None:
        """Puts the wrapper on its rung; ``own`` is the module's code."""
        place = sum(each.rung < wrapper.rung for each in self.wrappers)
        self.wrappers = (*self.wrappers[:place], wrapper, *self.wrappers[place:])
        if wrapper.around is not None:
            self._original = self.forward = own if self._original is None else self._original
            for each in reversed(self.wrappers):
                self.forward = self.forward if each.around is None else each.around(self.forward)


_KEY = "_forward_stack"


def stack_of(module: nn.Module) -> ForwardStack:
    """The stack around a module's forward; an empty one where nothing was added.

    >>> layer = nn.ReLU()
    >>> wrap(layer, Rung.RECOMPUTE, "recompute", by="core", around=lambda inner: lambda x: inner(x))
    >>> wrap(layer, Rung.OPERATOR, "doubled", by="toy", around=lambda inner: lambda x: 2 * inner(x))
    >>> print(stack_of(layer))
    RECOMPUTE        recompute (by core)
    OPERATOR         doubled (by toy)
    """
    stack: ForwardStack | None = vars(module).get(_KEY)
    forward = vars(module).get("forward")
    if stack is not None and stack.forward is forward:
        return stack
    # in a copy, or where a user has assigned a forward since, what is there now is the module's own code
    return ForwardStack(forward, () if stack is None else tuple(e for e in stack.wrappers if e.rung in NO_FORWARD))


def wrap(
    module: nn.Module, rung: Rung, name: str, *, by: str, around: Callable[[Forward], Forward], replaces: bool = False
) -> None:
    """Puts ``around(inner)`` on a rung of the module's forward, where ``inner`` is all that stands below.

    ``around`` may be called again, when something is put below. ``name`` says what it does and ``by`` which strategy
    put it there, or "core". With ``replaces`` what it makes does not run ``inner``; see :func:`set_forward`.

    Raises: PlanError: the rung is taken.

    >>> layer = nn.ReLU()
    >>> wrap(layer, Rung.OPERATOR, "doubled", by="toy", around=lambda inner: lambda x: 2 * inner(x))
    >>> wrap(layer, Rung.OPERATOR, "halved", by="other", around=lambda inner: lambda x: inner(x) / 2)
    Traceback (most recent call last):
    shardwright.errors.PlanError: two wrappers want the rung OPERATOR of one ReLU
      given:   'doubled' by toy, and 'halved' by other
      allowed: one on a rung; several on FRAME, CALLERS, FOLLOWED, STATISTICS
      fix:     leave one of the two out, or give it a rung of its own
    """
    stack = stack_of(module)
    taken = next((each for each in stack.wrappers if each.rung == rung and rung not in SEVERAL), None)
    if taken is not None:
        raise PlanError(
            f"two wrappers want the rung {rung.name} of one {type(module).__name__}",
            given=f"'{taken.name}' by {taken.by}, and '{name}' by {by}",
            allowed=f"one on a rung; several on {', '.join(each.name for each in sorted(SEVERAL))}",
            fix="leave one of the two out, or give it a rung of its own",
        )
    own: Forward = module.forward
    stack._add(Wrapper(rung, name, by, around, replaces), own)
    vars(module)[_KEY] = stack
    module.forward = stack.forward  # type: ignore[assignment]


def set_forward(module: nn.Module, rung: Rung, name: str, *, by: str, forward: Forward) -> None:
    """Puts ``forward`` on a rung, in place of the module's code and of all that stands below. Raises: as :func:`wrap`.

    >>> layer = nn.ReLU()
    >>> set_forward(layer, Rung.OPERATOR, "doubled", by="toy", forward=lambda x: 2 * x)
    >>> layer(-1)
    -2
    """
    wrap(module, rung, name, by=by, around=lambda _: forward, replaces=True)


def record(module: nn.Module, rung: Rung, name: str, *, by: str) -> None:
    """Records, for :func:`stack_of`, what is done on one of the rungs :data:`NO_FORWARD`.

    >>> layer = nn.ReLU()
    >>> record(layer, Rung.UNSHARD, "gathers parameters", by="zero")
    >>> print(stack_of(layer), "forward" in vars(layer))
    UNSHARD          gathers parameters (by zero) False
    """
    stack = stack_of(module)
    stack._add(Wrapper(rung, name, by), module.forward)
    vars(module)[_KEY] = stack


__all__ = ["SEVERAL", "Forward", "ForwardStack", "Rung", "Wrapper", "record", "set_forward", "stack_of", "wrap"]
