"""Chooses the tensor-parallel mode and grid for ``tp8/auto``: those that send the fewest bytes.

If a grid that the user chose does not fit the model, it also finds grids that fit, which the error suggests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from math import prod
from typing import Any

from shardwright.analysis.objects.marked_inputs import sample_tensors
from shardwright.axes import mesh_axes
from shardwright.errors import EXAMPLE, GridError, LayoutError
from shardwright.grid_shapes import NUM_SIDES, shapes
from shardwright.layout import Factor, Layout, Option
from shardwright.plan.batch_shard import is_sequence
from shardwright.plan.plan import Job, Plan
from shardwright.strategies import choose

AUTO = "auto"


def candidates(factor: Factor) -> Iterator[Factor]:
    """Yields the layout factors that ``auto`` tries in place of ``tp8/auto``, simplest first.

    They are 1D, 1D with sequence parallelism (``tp8/sp``), every 2D grid of as many ranks, and every 3D grid with a
    first side of 2 or more. All of them shard weights over all ranks.

    2.5D grids are left out: they copy weights along their depth, so with enough tokens the grid whose depth is all
    ranks would always send the fewest bytes, and each rank would hold the whole model.
    """
    size = factor.size
    others = tuple(option for option in factor.options if option.name != AUTO)
    yield Factor("tp", (size,), others)
    yield Factor("tp", (size,), (*others, Option("sp")))
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    for rows in divisors:
        yield Factor("tp", (rows, size // rows), (*others, Option("2d")))
    for depth in divisors[1:]:
        for rows in (n for n in divisors if size // depth % n == 0):
            yield Factor("tp", (depth, rows, size // depth // rows), (*others, Option("3d")))


def settle(layout: Layout, price: Callable[[Layout], float]) -> Layout:
    """Returns the layout with ``auto`` replaced by the tensor-parallel mode and grid that send the least.

    ``price(candidate)`` plans a candidate layout and returns how much a rank sends in a step; a candidate for which it
    raises LayoutError is left out. Of equal candidates the simplest is chosen. A layout without ``auto`` is returned
    unchanged.

    Raises: LayoutError: no candidate fits the model (the error is that of the simplest), or ``auto`` is given together
        with a grid or ``sp``.
    """
    factor = layout.factor("tp")
    auto = factor.option(AUTO) if factor is not None else None
    if factor is None or auto is None:
        return layout
    if auto.value is not None or len(factor.sizes) > 1 or factor.option("sp") is not None:
        raise LayoutError(
            "'auto' chooses the mode and the grid itself",
            given=str(layout),
            allowed=f"tp{factor.size}/auto",
            fix=f"write tp{factor.size}/auto",
        )
    others = tuple(f for f in layout.factors if f.axis != "tp")
    best: tuple[float, Layout] | None = None
    errors: list[LayoutError] = []
    for candidate in candidates(factor):
        tried = replace(layout, factors=(*others, candidate))
        try:
            sent = price(tried)
        except LayoutError as error:
            errors.append(error)
            continue
        if best is None or sent < best[0] * (1 - 1e-9):  # of equal ones, but for rounding, the first and simplest stays
            best = (sent, tried)
    if best is None:
        raise errors[0]
    return best[1]


def tokens_of(inputs: Any, layout: Layout) -> int:
    """Returns the number of tokens in one microbatch of one model copy, rounded down but at least 1.

    ``inputs`` are those of a global batch; only the first tensor is counted. Each integer in it, or each vector of
    floating-point features (its last dim), is one token. Without a tensor the result is 1.
    """
    tensors = sample_tensors(inputs)
    if not tensors:
        return 1
    first = tensors[0]
    shape = first.shape[:-1] if first.is_floating_point() and first.dim() > 1 else first.shape
    return max(1, prod(shape) // num_shares(layout))


def samples_of(inputs: Any, layout: Layout) -> int | None:
    """Returns the number of samples in the smallest microbatch of one model copy, at least 1, for a global batch.

    Returns None if ``inputs`` have no tensors, or one of them has no dim of tokens.
    """
    tensors = sample_tensors(inputs)
    if not tensors or not all(map(is_sequence, tensors)):
        return None
    return max(1, tensors[0].shape[0] // num_shares(layout))


def num_shares(layout: Layout) -> int:
    """Returns the number of parts that a layout makes of a global batch: its microbatches times its model copies."""
    mesh = layout.mesh
    return layout.num_microbatches * prod(mesh[axis] for axis in mesh_axes("copies"))


MAX_SUGGESTIONS = 12
"""The most grids of as many ranks that :func:`with_suggestions` tries; it also bounds the smaller numbers of ranks."""


def with_suggestions(error: GridError, job: Job, layout: Layout) -> LayoutError:
    """Returns the error with a new ``fix``: the ``tp`` factors that were found to fit the model, or ``dp`` instead.

    The factors have as many ranks as the one that failed or, if none of those fits, fewer. An error of a layout without
    ``tp`` is returned unchanged.
    """
    factor = layout.factor("tp")
    if factor is None:
        return error
    same = [grid for grid in islice(_factors(factor, factor.size), MAX_SUGGESTIONS) if _fits(job, layout, grid)]
    fewer = (grid for n in _fewer_ranks(factor.size) for grid in _extremes(factor, n) if _fits(job, layout, grid))
    lines = [str(grid) for grid in same or islice(fewer, 1)]
    fix = ", ".join(lines) + f", or dp{factor.size}" if lines else f"dp{factor.size}; no grid that was tried fits"
    fix = f"write {fix}" if job.example is not None else f"{EXAMPLE}, by which its operators are known; or write {fix}"
    return LayoutError(error.what, given=error.given, allowed=error.allowed, fix=fix)


def _fewer_ranks(num_ranks: int) -> list[int]:
    """Returns smaller numbers of ranks to try, largest first: those just below, then repeated halves."""
    halves = [num_ranks >> shift for shift in range(1, num_ranks.bit_length() - 1)]
    return sorted({*range(max(2, num_ranks - MAX_SUGGESTIONS // 2), num_ranks), *halves}, reverse=True)


def _extremes(factor: Factor, num_ranks: int) -> list[Factor]:
    """Returns the most square and the least square grid of ``num_ranks`` ranks."""
    grids = list(_factors(factor, num_ranks))
    return list(dict.fromkeys((grids[0], grids[-1])))


def _factors(factor: Factor, num_ranks: int) -> Iterator[Factor]:
    """Yields the factor's mode on every grid of ``num_ranks`` ranks, and 1D variants of the factor.

    If ``num_ranks`` is the size of the factor, 1D without ``sp`` and without the mode is yielded too. A plain 1D
    factor, without options, also yields 1D with ``sp``, which cuts the samples too and needs no two layers to be cut
    together.
    """
    mode = next((option.name for option in factor.options if option.name in NUM_SIDES), "")
    for sides in shapes(mode, num_ranks):
        yield Factor("tp", sides, factor.options)
    if mode and num_ranks == factor.size:
        yield Factor("tp", (num_ranks,), tuple(o for o in factor.options if o.name not in (mode, "regather")))
    if not factor.options:
        yield Factor("tp", (num_ranks,), (Option("sp"),))
    elif not mode and num_ranks == factor.size:
        yield Factor("tp", (num_ranks,), tuple(o for o in factor.options if o.name not in ("sp", "seq")))


def _fits(job: Job, layout: Layout, factor: Factor) -> bool:
    tried = replace(layout, factors=tuple(factor if other.axis == "tp" else other for other in layout.factors))
    plan = Plan.of(job, tried)
    try:
        for strategy in choose(tried):
            if strategy.axis == "tp":
                strategy.place(job, plan)
    except LayoutError:
        return False
    return True
