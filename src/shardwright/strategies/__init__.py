"""The registry of parallelization strategies: importing it registers every ``STRATEGY`` that a file here defines.

Files of the folders here count too. A layout axis, such as ``dp``, is registered in the same way, from the ``AXIS`` of
one file: the layout line, the mesh, gradient sync, the ledger and the tests take it from there. Strategies that share
an axis define it once. Read ``data_parallel``, ``zero``, ``pipeline``, ``spatial`` and ``tensor_parallel``, in this
order; ``context_parallel`` defines an axis without a strategy.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

from shardwright.axes import OPTIONS, LayoutAxis, layout_axes, register, unregister
from shardwright.errors import LayoutError, nearest
from shardwright.layout import Factor, Layout, Option, nearest_line
from shardwright.strategy import Strategy

PHASES = ("operators", "stages", "state")

_REGISTERED: dict[str, Strategy] = {}

STRATEGIES: Mapping[str, Strategy] = _REGISTERED
"""Every registered strategy by its name, such as ``"tensor_1d"``; the values follow the ``Strategy`` protocol."""


def _modules() -> Iterator[ModuleType]:
    """Imports and yields the modules of this package and of its subpackages."""
    for info in pkgutil.iter_modules(__path__, f"{__name__}."):
        module = importlib.import_module(info.name)
        yield module
        for inner in pkgutil.iter_modules(module.__path__, f"{info.name}.") if info.ispkg else ():
            yield importlib.import_module(inner.name)


def _register_all() -> None:
    modules = list(_modules())
    for axis in {id(m.AXIS): m.AXIS for m in modules if hasattr(m, "AXIS")}.values():
        if layout_axes().get(axis.name) is not axis:  # not again if this file runs twice, as in doctests
            register(axis)
    for strategy in {id(m.STRATEGY): m.STRATEGY for m in modules if hasattr(m, "STRATEGY")}.values():
        _add(strategy)


def _add(strategy: Strategy) -> None:
    """Registers a strategy.

    Raises LayoutError if its name is taken, its axis is not defined, or its axis has another default in the same phase.
    """
    if strategy.name in _REGISTERED:
        what, allowed = f"two strategies are called '{strategy.name}'", f"a name beside {', '.join(_REGISTERED)}"
        raise LayoutError(what, given=strategy.name, allowed=allowed, fix="rename one")
    if strategy.axis not in layout_axes():
        what, fix = (
            f"no strategy defines the axis '{strategy.axis}'",
            "define AXIS beside STRATEGY, or name another axis",
        )
        raise LayoutError(what, given=strategy.name, allowed=", ".join(layout_axes()), fix=fix)
    for other in _REGISTERED.values():
        if strategy.default and other.default and (strategy.axis, strategy.phase) == (other.axis, other.phase):
            raise LayoutError(
                f"two strategies are the default of '{strategy.axis}'",
                given=f"'{strategy.name}' and '{other.name}', in the phase '{strategy.phase}'",
                allowed="one in each phase",
                fix=f"let an option choose '{strategy.name}'",
            )
    _REGISTERED[strategy.name] = strategy
    OPTIONS[strategy.name] = (strategy.axis, strategy.options)


@contextmanager
def registered(strategy: Strategy, axis: LayoutAxis | None = None) -> Iterator[None]:
    """Returns a ``with`` context in which ``strategy`` is registered, and before it the layout axis ``axis`` if given.

    It is for strategies that are defined outside of this package. Leaving the context removes both again.

    Raises: LayoutError: the strategy's name is taken, no such axis is registered, or its axis has another default
        strategy in the same phase (operators, stages or state); or ``axis`` has a name or an order that is taken or not
        allowed.
    """
    if axis is not None:
        register(axis)
    try:
        _add(strategy)
        try:
            yield
        finally:
            del _REGISTERED[strategy.name], OPTIONS[strategy.name]
    finally:
        if axis is not None:
            unregister(axis)


_register_all()


def choose(layout: Layout, known: Mapping[str, Strategy] = STRATEGIES) -> tuple[Strategy, ...]:
    """Returns the strategies that run a layout (``dp2/zero3 tp4``), in the order in which they refine the plan.

    ``known`` are the strategies to choose from, by name; by default all that are registered.

    Raises: LayoutError: no strategy has an axis of the layout, none of the chosen strategies has an option, or an
        option that takes no value has one.

    >>> [strategy.name for strategy in choose(Layout.parse("dp2 tp2"))]
    ['data_parallel', 'tensor_1d']
    """
    chosen = {phase: [s for f in layout.factors if (s := _choice(f, phase, layout, known))] for phase in PHASES}
    for factor in layout.factors:
        of_axis = [s for strategies in chosen.values() for s in strategies if s.axis == factor.axis]
        for option in factor.options:
            if not any(option.name in strategy.options for strategy in of_axis):
                raise _no_option(layout, factor, option, known)
            texts = (strategy.options[option.name].text for strategy in of_axis if option.name in strategy.options)
            if option.value is not None and not any(f"{option.name}:" in text for text in texts):
                raise _no_value(layout, factor, option)
    return tuple(strategy for phase in PHASES for strategy in chosen[phase])


def _choice(factor: Factor, phase: str, layout: Layout, known: Mapping[str, Strategy]) -> Strategy | None:
    of_axis = [s for s in known.values() if s.axis == factor.axis]
    if not of_axis:
        raise LayoutError(
            f"no strategy for '{factor}' is built yet",
            given=str(layout),
            allowed="factors on " + ", ".join(sorted({s.axis for s in known.values()})),
            fix=f"leave out {factor}: {replace(layout, factors=tuple(f for f in layout.factors if f is not factor))}",
        )
    candidates = [s for s in of_axis if s.phase == phase]
    option_names = {option.name for option in factor.options}

    def is_named(strategy: Strategy) -> bool:
        """Returns whether the layout has an option that no other strategy of this axis and phase has."""
        others = {name for s in candidates if s is not strategy for name in s.options}
        return not strategy.default and bool(option_names & (set(strategy.options) - others))

    return next(filter(is_named, candidates), next((s for s in candidates if s.default), None))


def _no_option(layout: Layout, factor: Factor, option: Option, known: Mapping[str, Strategy]) -> LayoutError:
    texts = {name: entry.text for s in known.values() if s.axis == factor.axis for name, entry in s.options.items()}
    options = sorted({*texts, *layout_axes()[factor.axis].automatic})
    plain = f"{factor.axis}{factor.size}"
    others = tuple(other for other in factor.options if other != option)
    items = [str(replace(part, options=others) if part is factor else part) for part in layout.factors]
    items += str(replace(layout, factors=())).removeprefix("single").split()
    meant = nearest(option.name, options) or option.name
    takes_value = option.value is not None and f"{meant}:" in texts.get(meant, "")
    line = nearest_line([*items, f"{meant}:{option.value}" if takes_value else meant])
    return LayoutError(
        f"no strategy here runs '{option.name}' on axis '{factor.axis}'",
        given=str(layout),
        allowed=plain + "".join(f", {plain}/{name}" for name in options),
        fix=f"write {line}",
    )


def _no_value(layout: Layout, factor: Factor, option: Option) -> LayoutError:
    options = tuple(replace(entry, value=None) if entry == option else entry for entry in factor.options)
    factors = tuple(replace(part, options=options) if part is factor else part for part in layout.factors)
    return LayoutError(
        f"'{option.name}' on axis '{factor.axis}' takes no value",
        given=str(layout),
        allowed=f"/{option.name} alone",
        fix=f"write {replace(layout, factors=factors)}",
    )
