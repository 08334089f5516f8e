"""Every strategy, one file each. A file here that defines ``STRATEGY`` is found by all that lists strategies."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace

from shardwright.errors import LayoutError, nearest
from shardwright.layout import Factor, Layout, Option
from shardwright.strategy import Strategy

PHASES = ("operators", "stages", "state")


def _found() -> dict[str, Strategy]:
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    folders = [module for module in modules if hasattr(module, "__path__")]
    modules += [
        importlib.import_module(f"{m.__name__}.{i.name}") for m in folders for i in pkgutil.iter_modules(m.__path__)
    ]
    values: list[Strategy] = [module.STRATEGY for module in modules if hasattr(module, "STRATEGY")]
    return {strategy.name: strategy for strategy in values}


STRATEGIES: Mapping[str, Strategy] = _found()
"""Every strategy by name."""


def choose(layout: Layout, known: Mapping[str, Strategy] = STRATEGIES) -> tuple[Strategy, ...]:
    """The strategies that a layout asks for, in the order in which they refine the plan.

    Raises: LayoutError: a factor, an option or a word that no strategy here runs; a value where none is taken.

    >>> [strategy.name for strategy in choose(Layout.parse("dp2 tp2"))]
    ['data_parallel', 'tensor_1d']
    """
    chosen = {phase: [s for f in layout.factors if (s := _choice(f, phase, layout, known))] for phase in PHASES}
    for factor in layout.factors:
        of_axis = [s for strategies in chosen.values() for s in strategies if s.axis == factor.axis]
        for option in factor.options:
            if not any(option.name in strategy.options for strategy in of_axis):
                raise _no_option(layout, factor, option.name, known)
            shown = (strategy.options.get(option.name, "") for strategy in of_axis)
            if option.value is not None and not any(f"{option.name}:" in text for text in shown):
                raise _no_value(layout, factor, option)
    return tuple(strategy for phase in PHASES for strategy in chosen[phase])


def _choice(factor: Factor, phase: str, layout: Layout, known: Mapping[str, Strategy]) -> Strategy | None:
    of_axis = [s for s in known.values() if s.axis == factor.axis]
    if not of_axis:
        raise LayoutError(
            f"no strategy for '{factor}' is built yet",
            given=str(layout),
            allowed="factors on " + ", ".join(sorted({s.axis for s in known.values()})),
            fix=f"leave out {factor}: {_without(layout, factor)}",
        )
    candidates = [s for s in of_axis if s.phase == phase]
    given = {option.name for option in factor.options}

    def is_named(strategy: Strategy) -> bool:
        """Whether an option is given that only this strategy has."""
        others = {name for s in candidates if s is not strategy for name in s.options}
        return not strategy.default and bool(given & (set(strategy.options) - others))

    return next(filter(is_named, candidates), next((s for s in candidates if s.default), None))


def _without(layout: Layout, factor: Factor) -> str:
    factors = tuple(other for other in layout.factors if other is not factor)
    return str(replace(layout, factors=factors))


def _no_option(layout: Layout, factor: Factor, option: str, known: Mapping[str, Strategy]) -> LayoutError:
    names = {name for s in known.values() if s.axis == factor.axis for name in s.options}
    options = sorted(names | ({"auto"} if factor.axis == "tp" else set()))
    plain = factor.axis + (f"{factor.size}")
    return LayoutError(
        f"no strategy here runs '{option}' on axis '{factor.axis}'",
        given=str(layout),
        allowed=f"{plain}" + "".join(f", {plain}/{name}" for name in options),
        fix=f"write {plain}" + (f", or {plain}/{nearest(option, options)}" if options else ""),
    )


def _no_value(layout: Layout, factor: Factor, option: Option) -> LayoutError:
    others = tuple(replace(each, value=None) if each == option else each for each in factor.options)
    mended = tuple(replace(each, options=others) if each is factor else each for each in layout.factors)
    return LayoutError(
        f"'{option.name}' on axis '{factor.axis}' takes no value",
        given=str(layout),
        allowed=f"/{option.name} alone",
        fix=f"write {replace(layout, factors=mended)}",
    )
