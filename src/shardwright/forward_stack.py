"""Wraps the ``forward`` of a model's modules, so that the wrappers of several strategies nest in a fixed order.

The *rung* of a wrapper is its position in this order::

    module(x) -> hooks        UNSHARD > GATHER > FRAME                         run by torch, outside of the forward
                 forward      OFFLOAD > RECOMPUTE > UNSHARD_BLOCK > COMPILE >  run by this stack, outermost first
                              CONTRIBUTE_ONCE > ...
                 own code     the class's forward, or one that the user has assigned to the module

The order of the rungs, not the order in which strategies add wrappers, decides how wrappers nest. Hooks are only
recorded here: strategies register them with torch, those of UNSHARD and GATHER in front of others, so that the hooks of
the strategy that is applied last, ZeRO, run first. The forwards are composed when a wrapper is added:
``module.forward`` *is* the composed function, so the stack itself costs nothing per call. :func:`stack_of` returns the
record of the wrappers.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from shardwright.errors import PlanError

Forward = Callable[..., Any]


class Rung(IntEnum):
    """The position of a wrapper, hook or other change in the fixed order around a module's forward, outermost first."""

    # hooks: torch runs them around the forward, and not again where a block is recomputed
    UNSHARD = 1  # ZeRO unshards parameters first: all below read them
    GATHER = 2  # a cut input is gathered before the user's hooks see it
    FRAME = 3  # around the model's forward: cuts its input, gathers its output, notes its begin and end

    # wrappers of the forward
    OFFLOAD = 4  # outside of all that computes: everything that autograd saves below is offloaded
    RECOMPUTE = 5  # outside of all whose activations it drops: the recomputation repeats everything below
    UNSHARD_BLOCK = 6  # inside RECOMPUTE, which does not repeat hooks; outside of COMPILE: compiled code cannot unshard
    COMPILE = 7  # outside of all that computes: one compiled function in place of everything below
    CONTRIBUTE_ONCE = 8  # inside RECOMPUTE: parameters whose gradient another rank contributes are constants there too
    ON_SHARDS = 9  # the user's code on shards of tensors; inside RECOMPUTE: the recomputation runs on shards too
    DRAWS = 10  # the code's random numbers; inside ON_SHARDS: it draws for the whole tensor, of which a rank has a part
    CALLERS = 11  # refuses callers that the analysis has not followed, before anything is sent
    FOLLOWED = 12  # notes which module runs, for CALLERS of the modules inside
    ENTRY = 13  # gathers an input once for several operators inside the module's own code
    OPERATOR = 14  # tensor-parallel and spatial operators: most replace the module's code and all below
    ATTEND = 15  # no wrapper: replaces a function that the module's own code calls
    NO_SAMPLES = 16  # around torch's own code and DROPOUT: both fail on an empty batch
    STATISTICS = 17  # BatchNorm over all samples, in place of torch's code; an OPERATOR may call it
    DROPOUT = 18  # masks that do not depend on the layout, in place of torch's code
    SPLIT_BACKWARD = 19  # in place of torch's code, for layers without other wrappers
    GUARD = 20  # no wrapper: replaces the module's class, so that other code cannot read its parameters


SEVERAL = frozenset((Rung.FRAME, Rung.CALLERS, Rung.FOLLOWED, Rung.STATISTICS))
"""The rungs that may have several changes, the later one outside; on any other, :func:`wrap` refuses a second one."""

NO_FORWARD = frozenset((Rung.UNSHARD, Rung.GATHER, Rung.FRAME, Rung.ATTEND, Rung.GUARD))
"""The rungs of changes that do not wrap the forward: hooks of torch, replaced functions and replaced classes."""


class Wrapper(NamedTuple):
    """One change to a module's forward: ``around(inner)`` returns the new forward, made from the forward inside of it.

    ``rung`` is the wrapper's position among others, ``name`` says what it does, and ``by`` which strategy added it.
    ``around`` is None for a hook, a replaced function or a replaced class, which are only recorded. ``replaces`` says
    that the new forward does not call ``inner``.
    """

    rung: Rung
    name: str
    by: str
    around: Callable[[Forward], Forward] | None = None
    replaces: bool = False


class ForwardStack:
    """The wrappers around one module's own forward, outermost first, as :func:`stack_of` returns them."""

    def __init__(self, original: Forward | None = None, wrappers: tuple[Wrapper, ...] = ()) -> None:
        self.wrappers = wrappers
        self.forward: Forward | None = original
        """The composed forward, or None while the module runs its class's."""
        self._original = original
        self._as_functions = False

    def __reduce__(self) -> tuple[type[ForwardStack], tuple[Any, ...]]:
        """Copies the record only, because the copied module's ``forward`` is already the composed function."""
        return ForwardStack, (None, tuple(wrapper._replace(around=None) for wrapper in self.wrappers))

    def __str__(self) -> str:
        return "\n".join(f"{wrapper.rung.name:<15}  {wrapper.name} (by {wrapper.by})" for wrapper in self.wrappers)

    def _add(self, wrapper: Wrapper, own: Forward) -> None:
        """Inserts the wrapper on its rung and composes the forward; ``own`` is the module's code."""
        place = sum(old_wrapper.rung < wrapper.rung for old_wrapper in self.wrappers)
        self.wrappers = (*self.wrappers[:place], wrapper, *self.wrappers[place:])
        if wrapper.around is not None:
            self._original = own if self._original is None else self._original
            self._compose()

    def _compose(self) -> None:
        self.forward = self._original
        for wrapper in reversed(self.wrappers):
            if wrapper.around is not None:
                assert self.forward is not None, "a wrapper of a forward wraps one"
                around = wrapper.around(self.forward)
                self.forward = _as_function(around) if self._as_functions else around


def _as_function(forward: Forward) -> Forward:
    """Returns a partial as a function, and any other forward unchanged."""
    if not isinstance(forward, partial):
        return forward
    function, before, keywords = forward.func, forward.args, forward.keywords

    def run(*args: Any, **named: Any) -> Any:
        return function(*before, *args, **keywords, **named)

    return run


STACK = "_forward_stack"
"""The attribute under which a module has the record of what wraps its forward."""


def stack_of(module: nn.Module) -> ForwardStack:
    """Returns the record of the wrappers around a module's forward; printed, it has one line for each.

    It is empty if there are none. If the module is a copy, or its ``forward`` was assigned from elsewhere since, that
    forward counts as the module's own code, and the record keeps only hooks and other changes that wrap no forward.

    >>> layer = nn.ReLU()
    >>> wrap(layer, Rung.RECOMPUTE, "recompute", by="core", around=lambda inner: lambda x: inner(x))
    >>> wrap(layer, Rung.OPERATOR, "doubled", by="toy", around=lambda inner: lambda x: 2 * inner(x))
    >>> print(stack_of(layer))
    RECOMPUTE        recompute (by core)
    OPERATOR         doubled (by toy)
    """
    stack: ForwardStack | None = vars(module).get(STACK)
    forward = vars(module).get("forward")
    if stack is not None and stack.forward is forward:
        return stack
    # the module is a copy, or the user has assigned its forward since: that forward counts as its own code now
    return ForwardStack(forward, () if stack is None else tuple(e for e in stack.wrappers if e.rung in NO_FORWARD))


def own_forward(module: nn.Module) -> Forward:
    """Returns a module's own forward, without the wrappers around it: its class's, or one that the user has assigned.

    >>> layer = nn.ReLU()
    >>> wrap(layer, Rung.OPERATOR, "doubled", by="toy", around=lambda inner: lambda x: 2 * inner(x))
    >>> own_forward(layer) == layer.forward, own_forward(layer).__func__ is nn.ReLU.forward
    (False, True)
    """
    original = stack_of(module)._original
    return module.forward if original is None else original


def wrap(
    module: nn.Module, rung: Rung, name: str, *, by: str, around: Callable[[Forward], Forward], replaces: bool = False
) -> None:
    """Wraps a module's forward in place by ``around(inner)``, at the position of ``rung`` among its other wrappers.

    ``inner`` is the module's own forward with all wrappers whose rungs are further inside. ``around`` is called again
    whenever another wrapper is added to the module. ``name`` says what the wrapper does and ``by`` which strategy added
    it, or "core". ``replaces`` says that the new forward does not call ``inner``; see :func:`set_forward`.

    Raises: PlanError: the rung has a wrapper already and is not one that allows several.

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
    assert rung not in NO_FORWARD, f"{rung.name} is no wrapper of the forward: record() it"
    taken = next((wrapper for wrapper in stack.wrappers if wrapper.rung == rung and rung not in SEVERAL), None)
    if taken is not None:
        raise PlanError(
            f"two wrappers want the rung {rung.name} of one {type(module).__name__}",
            given=f"'{taken.name}' by {taken.by}, and '{name}' by {by}",
            allowed=f"one on a rung; several on {', '.join(allowed_rung.name for allowed_rung in sorted(SEVERAL))}",
            fix="leave one of the two out, or give it a rung of its own",
        )
    stack._add(Wrapper(rung, name, by, around, replaces), module.forward)
    vars(module)[STACK] = stack
    module.forward = stack.forward  # type: ignore[assignment]


def is_composed(module: nn.Module) -> bool:
    """Returns whether a module's forward is the one that its wrappers make up."""
    stack = vars(module).get(STACK)
    return stack is not None and vars(module).get("forward") is stack.forward


def rename(module: nn.Module, rung: Rung, name: str) -> None:
    """Renames the wrapper on ``rung`` in a module's forward stack, which ``run.explain`` prints.

    Use it for a wrapper whose work is decided only during a step, so that its name tells what was decided. Without a
    wrapper on ``rung``, nothing is changed.

    >>> layer = nn.ReLU()
    >>> wrap(layer, Rung.ON_SHARDS, "on shards", by="toy", around=lambda inner: inner)
    >>> rename(layer, Rung.ON_SHARDS, "on whole logits")
    >>> print(stack_of(layer))
    ON_SHARDS         on whole logits (by toy)
    """
    stack = stack_of(module)
    stack.wrappers = tuple(
        wrapper._replace(name=name) if wrapper.rung == rung else wrapper for wrapper in stack.wrappers
    )


def set_forward(module: nn.Module, rung: Rung, name: str, *, by: str, forward: Forward) -> None:
    """Replaces a module's own forward, and all its wrappers further inside than the position ``rung``, by ``forward``.

    Wrappers further outside stay and call ``forward``. ``name`` says what it does, and ``by`` which strategy set it.

    Raises: PlanError: ``rung`` has a wrapper already and does not allow several.

    >>> layer = nn.ReLU()
    >>> set_forward(layer, Rung.OPERATOR, "doubled", by="toy", forward=lambda x: 2 * x)
    >>> layer(-1)
    -2
    """
    wrap(module, rung, name, by=by, around=lambda _: forward, replaces=True)


def without_partials(module: nn.Module) -> None:
    """Replaces each ``functools.partial`` among a module's wrapped forwards by a plain function.

    Use it before ``torch.compile``, which shares compiled code between functions of equal code, but not between
    partials. It changes nothing in a module whose forward is not wrapped.

    >>> layer = nn.ReLU()
    >>> set_forward(layer, Rung.OPERATOR, "multiplied", by="toy", forward=partial(lambda by, x: by * x, 3))
    >>> without_partials(layer)
    >>> layer(-1), isinstance(layer.forward, partial)
    (-3, False)
    """
    stack = stack_of(module)
    if stack.forward is not None and stack._original is not None and vars(module).get(STACK) is stack:
        stack._as_functions = True
        stack._compose()
        module.forward = stack.forward


def record(module: nn.Module, rung: Rung, name: str, *, by: str) -> None:
    """Records a change that does not wrap a module's forward, such as a hook, so that :func:`stack_of` shows it.

    Unlike :func:`wrap`, it allows several records on one rung. ``rung`` is where the change acts: UNSHARD, GATHER,
    FRAME, ATTEND or GUARD. ``name`` says what it does, and ``by`` which strategy made it.

    >>> layer = nn.ReLU()
    >>> record(layer, Rung.UNSHARD, "gathers parameters", by="zero")
    >>> print(stack_of(layer), "forward" in vars(layer))
    UNSHARD          gathers parameters (by zero) False
    """
    stack = stack_of(module)
    stack._add(Wrapper(rung, name, by), module.forward)
    vars(module)[STACK] = stack
