"""The layouts that a search estimates: every division of the ranks over axes, with the options that may be of use.

A division is estimated with each size of a microbatch and with each option of model copies that saves memory, such as a
ZeRO stage; the best estimates then with every pipeline schedule and with recomputation. Later, a search adds the
layouts that differ by one option from one that it has priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from heapq import nsmallest
from itertools import product, zip_longest
from math import inf, prod

from shardwright.axes import layout_axes
from shardwright.errors import LayoutError
from shardwright.layout import Factor, Layout, Option
from shardwright.planner.estimate import TOO_LONG, TOO_MUCH, Estimate, Estimator, declared_options
from shardwright.planner.search_constraints import RECOMPUTE, SearchConstraints
from shardwright.planner.search_result import SearchResult
from shardwright.strategies import STRATEGIES, choose

LARGEST_MICROBATCH = 8

MOST_SCHEDULED = 24
"""The number of best estimates whose layouts are also estimated with every other pipeline schedule."""

FEWEST = 3
"""The number N: a search ends once no layout left can be faster than the N-th fastest that was priced and fits."""

MOST_NODES = 1
"""The most nodes over which tensor-parallel ranks may lie: messages between nodes take far longer."""


def divisions(num_ranks: int, kinds: Mapping[str, str]) -> Iterator[dict[str, int]]:
    """Yields every way to divide ranks over axes, as the size of each axis; the sizes multiply to ``num_ranks``.

    ``kinds`` has the names of the axes as its keys.

    >>> [each for each in divisions(4, {"dp": "copies", "tp": "operators"})]
    [{'dp': 1, 'tp': 4}, {'dp': 2, 'tp': 2}, {'dp': 4, 'tp': 1}]
    """
    axes = list(kinds)
    divisors = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
    for sizes in product(divisors, repeat=len(axes)):
        if prod(sizes) == num_ranks:
            yield dict(zip(axes, sizes, strict=True))


def first_estimates(estimator: Estimator, wanted: SearchConstraints, found: SearchResult) -> list[Estimate]:
    """Returns the estimates of all layouts that a search begins with and that ``wanted`` allows.

    Every division of the ranks is estimated with every option of model copies that saves memory, and the best also with
    every pipeline schedule and with recomputation. ``found`` counts the layouts that are left out, by reason.
    """
    default_axes = {strategy.axis for strategy in STRATEGIES.values() if strategy.default}
    kinds: dict[str, str] = {name: axis.kind for name, axis in layout_axes().items() if name in default_axes}
    cluster, saving = estimator.pricing.cluster, dict[str, list[Option]]()
    estimates: list[Estimate] = []
    refusal = estimator.refusal_of_microbatches(Layout((), 2, own_statistics=wanted.own_statistics))
    for sizes in divisions(cluster.num_ranks, kinds):
        for layout in _layouts(sizes, kinds, estimator.batch, wanted, found, cluster.nodes.ranks_per_node, refusal):
            first = estimator.estimate(layout)
            if first is None:  # its operators or its schedule are refused, and so with any other microbatches
                why = estimator.refusal(layout)
                if why:
                    found.reject(why, layout)
                break
            estimates.append(first)
            for place, factor in enumerate(layout.factors):
                if kinds[factor.axis] == "copies" and not factor.options:
                    if factor.axis not in saving:
                        saving[factor.axis] = estimator.saving_options(factor.axis)
                    estimates += _with_each(estimator, layout, place, saving[factor.axis], wanted, found)
    estimates += _scheduled(estimator, estimates, wanted, found, kinds)
    for recompute in wanted.recomputed[1:]:
        again = _recomputed(estimator, estimates, recompute, wanted, found)
        estimates += [*again, *_scheduled(estimator, again, wanted, found, kinds)]
    allowed = []
    for estimate in (_named(estimator, candidate, kinds) for candidate in estimates):
        if wanted.is_left_out(estimate.layout):
            found.reject("--without", estimate.layout)
        elif lacking := wanted.lacking(estimate.layout):
            found.reject(f"--fix: not {lacking}", estimate.layout)
        else:
            allowed.append(estimate)
    return allowed


def _scheduled(
    estimator: Estimator, estimates: Iterable[Estimate], wanted: SearchConstraints, found: SearchResult,
    kinds: Mapping[str, str],
) -> list[Estimate]:  # fmt: skip
    """Returns estimates of the best :data:`MOST_SCHEDULED` layouts under each schedule other than the default."""
    best = sorted(estimates, key=lambda estimate: estimate.over(wanted.limit_bytes))
    return [
        scheduled
        for estimate in (best[:MOST_SCHEDULED] if estimator.plan is not None else ())
        for place, factor in enumerate(estimate.layout.factors)
        if kinds[factor.axis] == "stages" and not factor.options
        for scheduled in _with_each(estimator, estimate.layout, place, estimator.schedules(factor.axis), wanted, found)
    ]


def _recomputed(
    estimator: Estimator, estimates: Iterable[Estimate], recompute: str | None, wanted: SearchConstraints,
    found: SearchResult,
) -> list[Estimate]:  # fmt: skip
    """Returns estimates of the layouts with ``recompute``, where these may be among the best.

    Recomputation saves memory and takes longer. So it is left out where a layout fits without it, and where the step
    with it takes longer than those of :data:`FEWEST` layouts that fit.
    """
    limit = wanted.limit_bytes
    plain = [candidate for candidate in estimates if candidate.layout.recompute == wanted.recomputed[0]]
    fit = [candidate.step_s for candidate in estimates if candidate.memory_bytes * TOO_MUCH <= limit]
    again, longer = list[Estimate](), inf  # the least ratio so far of a step with recomputation to that without it
    for base in sorted(plain, key=lambda candidate: candidate.step_s):
        layout = replace(base.layout, recompute=recompute)
        if base.memory_bytes * TOO_MUCH <= limit:
            found.reject("recomputation where all fits without it", layout)
        elif len(fit) >= FEWEST and base.step_s * (longer if again else 1.0) > nsmallest(FEWEST, fit)[-1] * TOO_LONG:
            found.reject("recomputation that takes longer than others do without it", layout)
        elif (estimate := estimator.estimate(layout)) is not None:
            again.append(estimate)
            longer = min(longer, estimate.step_s / base.step_s)
            if estimate.memory_bytes * TOO_MUCH <= limit:
                fit.append(estimate.step_s)
        elif why := estimator.refusal(layout):
            found.reject(why, layout)
    return again


def _named(estimator: Estimator, estimate: Estimate, kinds: Mapping[str, str]) -> Estimate:
    """Returns ``estimate`` with the default schedule named in its layout, if the layout names none."""
    factors = tuple(
        replace(f, options=f.options or estimator.default_schedule(f.axis)) if kinds[f.axis] == "stages" else f
        for f in estimate.layout.factors
    )
    return estimate._replace(layout=replace(estimate.layout, factors=factors))


def _with_each(
    estimator: Estimator,
    layout: Layout,
    place: int,
    options: Iterable[Option],
    wanted: SearchConstraints,
    found: SearchResult,
) -> Iterator[Estimate]:
    """Yields estimates of ``layout`` with each of ``options`` in turn as the only option of its factor ``place``."""
    for option in options:
        factor = replace(layout.factors[place], options=(option,))
        tried = replace(layout, factors=(*layout.factors[:place], factor, *layout.factors[place + 1 :]))
        if wanted.is_left_out(tried):
            found.reject("--without", tried)
            continue
        estimate = estimator.estimate(tried)
        if estimate is not None:
            yield estimate
        elif why := estimator.refusal(tried):
            found.reject(why, tried)


def _layouts(
    sizes: Mapping[str, int],
    kinds: Mapping[str, str],
    batch: int,
    wanted: SearchConstraints,
    found: SearchResult,
    in_node: int,
    refusal: str = "",
) -> Iterator[Layout]:
    """Yields a layout for each size of a microbatch, for one division of the ranks over axes.

    ``found`` counts the layouts that are left out, by reason, and ``in_node`` is the number of ranks of a node.
    ``refusal`` is text on why the model can have no microbatches: then the layouts take the whole batch at once.
    """
    factors = tuple(_fixed(Factor(axis, (size,)), wanted) for axis, size in sizes.items() if size > 1)
    copies = prod(size for axis, size in sizes.items() if kinds[axis] == "copies")
    stages = prod(size for axis, size in sizes.items() if kinds[axis] == "stages")
    together = prod(size for axis, size in sizes.items() if kinds[axis] == "operators")
    if together > MOST_NODES * in_node:
        found.reject(f"operators cut over more than {MOST_NODES} node", Layout(factors))
        return
    if 0 < wanted.most_stages < stages:
        found.reject("more stages than alike blocks", Layout(factors))
        return
    if copies > batch:
        found.reject("the batch has fewer samples than the layout has copies of the model", Layout(factors))
        return
    local, most, fixed = batch // copies, -(-batch // copies), wanted.num_microbatches
    sizes_tried = [n for n in range(1, min(local, LARGEST_MICROBATCH) + 1) if n & (n - 1) == 0]
    if refusal or "mb" in wanted.without:
        sizes_tried.append(most)
    # where the batch is uneven, some model copies have ``most`` samples, one more than ``local``: the number of their
    # microbatches is rounded up, so that no microbatch has more samples than the size that is tried
    numbers = [min(local, -(-most // samples)) for samples in sizes_tried] if fixed is None else [fixed]
    for number in dict.fromkeys(numbers):
        layout = Layout(factors, number, wanted.precision, wanted.recomputed[0], wanted.own_statistics)
        if refusal and number > 1:
            found.reject(refusal, layout)
        elif number > local:
            found.reject(f"--fix mb{number}: more microbatches than samples in a copy of the model", layout,
                         f"{local} samples")  # fmt: skip
        elif number < stages:
            found.reject("fewer microbatches than stages", layout, f"{number} of {stages}")
        elif wanted.is_left_out(layout):
            found.reject("--without", layout)
        elif lacking := wanted.lacking(layout, may_get_options=True):
            found.reject(f"--fix: not {lacking}", layout)
        else:
            yield layout


def _fixed(factor: Factor, wanted: SearchConstraints) -> Factor:
    """Returns the factor with the options that ``--fix`` names for its axis, and with its sizes, such as 2x2.

    The sizes are left as they are if those of ``--fix`` do not multiply to the factor's size.
    """
    for part in wanted.fix.split():
        head, *options = part.split("/")
        sizes = head.removeprefix(factor.axis)
        if options and head.rstrip("0123456789x") == factor.axis:
            numbers = tuple(map(int, sizes.split("x"))) if all(map(str.isdecimal, sizes.split("x"))) else factor.sizes
            with suppress(LayoutError):
                chosen = tuple(Option(*word.split(":", 1)) for word in options)
                return Factor(factor.axis, numbers if prod(numbers) == factor.size else factor.sizes, chosen)
    return factor


def options_beside(layout: Layout) -> Iterator[Layout]:
    """Yields the layouts that differ from ``layout`` in recomputation, the number of microbatches, or one option.

    The number of microbatches is doubled or halved. An option is added to those of an axis, or replaces one of them;
    the axes take turns, one option each.

    >>> list(map(str, options_beside(Layout.parse("dp2"))))[:3]
    ['dp2 recompute:full', 'dp2 recompute:selective', 'mb2 dp2']
    """
    for recompute in RECOMPUTE:
        if recompute != layout.recompute:
            yield replace(layout, recompute=recompute)
    for number in (2 * layout.num_microbatches, layout.num_microbatches // 2):
        if number:
            with suppress(LayoutError):
                yield replace(layout, num_microbatches=number)
    turns = zip_longest(*(_with_options(layout, place) for place in range(len(layout.factors))))
    yield from (variant for turn in turns for variant in turn if variant is not None)


def _with_options(layout: Layout, place: int) -> Iterator[Layout]:
    factor = layout.factors[place]
    for option in declared_options(factor.axis):
        choices = [(*factor.options, option), *_replaced(factor.options, option)]
        for options in choices if option.name not in {other.name for other in factor.options} else ():
            with suppress(LayoutError):
                changed = Factor(factor.axis, factor.sizes, options)
                factors = (*layout.factors[:place], changed, *layout.factors[place + 1 :])
                variant = replace(layout, factors=factors)
                choose(variant)
                yield variant


def _replaced(options: tuple[Option, ...], option: Option) -> Iterator[tuple[Option, ...]]:
    for place in range(len(options)):
        yield (*options[:place], option, *options[place + 1 :])
