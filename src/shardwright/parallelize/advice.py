"""What to write where a grid does not fit a model: the grids that do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from shardwright.errors import GridError, LayoutError
from shardwright.grid_shapes import NUM_SIDES, shapes
from shardwright.layout import Factor, Layout
from shardwright.plan.plan import Job, Plan
from shardwright.strategies import choose

TRIED = 12
"""How many grids of as many ranks are tried, and how many numbers of fewer ranks."""


def advised(error: GridError, job: Job, layout: Layout) -> LayoutError:
    """The error with the grids in its ``fix`` that fit the model: of as many ranks, or else the largest of fewer."""
    factor = layout.factor("tp")
    if factor is None:
        return error
    same = [each for each in islice(_factors(factor, factor.size), TRIED) if _fits(job, layout, each)]
    fewer = (each for number in _fewer(factor.size) for each in _ends(factor, number) if _fits(job, layout, each))
    lines = [str(each) for each in same or islice(fewer, 1)]
    fix = ", ".join(lines) + f", or dp{factor.size}" if lines else f"dp{factor.size}; no grid that was tried fits"
    return LayoutError(error.what, given=error.given, allowed=error.allowed, fix=f"write {fix}")


def _fewer(num_ranks: int) -> list[int]:
    """Fewer ranks, the largest numbers first: those just below, then halves of halves.

    >>> _fewer(64)
    [63, 62, 61, 60, 59, 58, 32, 16, 8, 4, 2]
    """
    halves = [num_ranks >> shift for shift in range(1, num_ranks.bit_length() - 1)]
    return sorted({*range(max(2, num_ranks - TRIED // 2), num_ranks), *halves}, reverse=True)


def _ends(factor: Factor, num_ranks: int) -> list[Factor]:
    """The most and the least even grid of so many ranks."""
    found = list(_factors(factor, num_ranks))
    return list(dict.fromkeys((found[0], found[-1])))


def _factors(factor: Factor, num_ranks: int) -> Iterator[Factor]:
    """The factor's mode on every grid of so many ranks; with all of them, one line of ranks too."""
    mode = next((option.name for option in factor.options if option.name in NUM_SIDES), "")
    others = tuple(option for option in factor.options if option.name != mode)
    for sides in shapes(mode, num_ranks):
        yield Factor("tp", sides, factor.options)
    if mode and num_ranks == factor.size:
        yield Factor("tp", (num_ranks,), tuple(option for option in others if option.name != "regather"))


def _fits(job: Job, layout: Layout, factor: Factor) -> bool:
    others = tuple(factor if each.axis == "tp" else each for each in layout.factors)
    tried = replace(layout, factors=others)
    plan = Plan.of(job, tried)
    try:
        for strategy in choose(tried):
            if strategy.axis == "tp":
                strategy.place(job, plan)
    except LayoutError:
        return False
    return True
