"""Searches the layouts of a model on a cluster: estimates every candidate, and prices the best of them.

No axis and no option is named here: axes, sizes and options come from what strategies declare, so the options of a new
strategy are searched without a change here. Every division of the ranks over axes is estimated by closed formulas, with
the options of model copies and of pipeline stages. The best estimates are rehearsed and priced, and layouts that differ
from the best one by one option, until none that is left may be better, were its estimate too long by as much as those
that were compared, or :attr:`SearchConstraints.most` are priced. If none fits the memory, a few that are estimated to
take less are priced too.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import chain, product, zip_longest
from math import inf, isinf, prod

from shardwright.axes import layout_axes
from shardwright.cost.cluster import Cluster
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Factor, Layout, Option, Precision
from shardwright.parallelize.auto import num_shares
from shardwright.plan.recompute import OFFLOADS, WORDS
from shardwright.planner.estimate import Estimate, Estimator, declared_options, longer_over
from shardwright.planner.memory import host_bytes
from shardwright.planner.price import Price, Pricing
from shardwright.planner.records import LayoutRecords
from shardwright.planner.short import ShortModel
from shardwright.strategies import STRATEGIES, choose

LOG = logging.getLogger("shardwright.planner")
"""Where a search says what it has priced, at level INFO, since it may take minutes."""

MOST_PRICED = 4
"""The layouts that a search prices by default; each takes seconds of rehearsals."""

LARGEST_MICROBATCH = 8

MOST_SCHEDULED = 24
"""The number of best estimates whose layouts are also estimated with every other pipeline schedule."""

TOO_LONG, TOO_MUCH = 1.06, 1.11
"""How many times the price an estimate of seconds, and one of bytes, may be: rounded up from those of a GPT of 13 B
in `benchmarks/planner_search`. A layout is left out only if its estimate, divided by this, is no better than prices."""

FEWEST = 3
"""How many layouts are to be the best of all: prices end where no estimate left may be better than all but so few."""

MOST_TO_FIT = 8
"""The most further layouts that are priced where none of those priced fits the memory, until one does."""

MOST_NODES = 1
"""The most nodes over which ranks that compute operators together may lie: messages between nodes take far longer."""

RECOMPUTE = (None, *(word for word in WORDS if word not in OFFLOADS))

Recorder = Callable[[Layout, int], LayoutRecords]
"""A function that returns the records of a layout on a global batch of a number of samples."""


@dataclass
class SearchResult:
    """What a search has found: prices that fit the memory, prices that do not, and why other layouts were left out.

    ``searched`` is the number of layouts that were looked at. ``rejected`` counts layouts by the reason why they were
    left out, misfits included, and ``nearest`` has the first layout line for each reason.
    """

    fit: list[Price] = field(default_factory=list)
    misfits: list[Price] = field(default_factory=list)
    searched: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    nearest: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    """By reason, what the constraint is for the layout in ``nearest``, as "91 GB of 74"; not for all reasons."""
    unpriced: int = 0
    """The layouts that might be better than the best, by their estimates, and were not priced."""
    failure: PlanError | None = None
    """The first error of the model itself, such as code that cannot be rehearsed; None if there was none."""

    @property
    def priced(self) -> int:
        """The number of layouts that were priced."""
        return len(self.fit) + len(self.misfits)

    def reject(self, reason: str, layout: Layout | str, detail: str = "") -> None:
        """Counts a layout as left out for ``reason``, and keeps the first layout for each reason as an example.

        ``detail`` says what the constraint is for this layout. Layouts that are nearest to being allowed come first.
        """
        self.rejected[reason] += 1
        if self.nearest.setdefault(reason, str(layout)) == str(layout) and detail:
            self.details.setdefault(reason, detail)

    def refused(self, error: LayoutError | PlanError, layout: Layout | str) -> None:
        """Counts a layout as left out because of ``error``."""
        self.reject(error.what, layout)
        if isinstance(error, PlanError) and self.failure is None:
            self.failure = error


@dataclass(frozen=True)
class SearchConstraints:
    """The constraints of a search: parts that a layout line must have, words that it must not, precision and memory.

    ``fix`` has the parts, separated by spaces, such as "tp8 dp/zero1 mb32": each names an axis, with or without its
    size, and options that it must have, or is another word of a line: "mb32", "bf16", "recompute:full". ``without`` has
    the words, which name axes or options. ``limit_bytes`` is the memory that a rank may take, and ``most`` the most
    layouts to price.
    """

    fix: str = ""
    without: tuple[str, ...] = ()
    precision: Precision = "bf16"
    limit_bytes: float = 0.0
    most: int = MOST_PRICED
    most_stages: int = 0
    """The most stages that the model has whole blocks for. 0: unknown."""
    most_to_fit: int = MOST_TO_FIT
    """The most further layouts to price where none fits."""

    def allows(self, layout: Layout) -> bool:
        """Returns whether a layout has all parts that must be there, and none of the words that must not."""
        return not self.is_left_out(layout) and not self.lacking(layout)

    def is_left_out(self, layout: Layout) -> bool:
        """Returns whether a layout has one of the words that it must not have."""
        items = str(layout).split()
        words = {word for item in items for word in (item, *item.split("/"), *item.split("/")[1:])}
        words |= {word.partition(":")[0] for word in words}
        return bool(words & set(self.without)) or any(factor.axis in self.without for factor in layout.factors)

    def lacking(self, layout: Layout) -> str:
        """Returns the first part that the layout must have and has not; "" if it has all."""
        items = str(layout).split()
        words = {f"mb{layout.num_microbatches}", layout.precision, f"recompute:{layout.recompute}"}
        missing = (part for part in self.fix.split() if part not in words)
        return next((part for part in missing if not any(_has(item, part) for item in items)), "")

    @property
    def num_microbatches(self) -> int | None:
        """The number of microbatches that is fixed, as by "mb8"; None if any may be."""
        found = (part.removeprefix("mb") for part in self.fix.split() if part.startswith("mb"))
        return next((int(number) for number in found if number.isdecimal() and int(number)), None)

    @property
    def recomputed(self) -> tuple[str | None, ...]:
        """The ways to recompute activations that are tried: the one that is fixed, or all that a search tries."""
        head = "recompute:"
        found = tuple(part.removeprefix(head) for part in self.fix.split() if part.startswith(head))
        return found[:1] or RECOMPUTE


def _has(item: str, part: str) -> bool:
    """Whether an item of a line has all that a part asks for: its axis with the size, and its options.

    >>> _has("dp8/zero1", "dp8"), _has("dp8/zero1", "dp/zero1"), _has("dp8", "dp4"), _has("tp8", "tp/sp")
    (True, True, False, False)
    """
    head, *options = part.split("/")
    own, *others = item.split("/")
    return (own == head or own.rstrip("0123456789x") == head) and set(options) <= set(others)


def search(
    pricing: Pricing, batch: int, record: Recorder, wanted: SearchConstraints, short: ShortModel | None = None
) -> SearchResult:
    """Returns the best layouts found for a global batch of ``batch`` samples, on the cluster of ``pricing``.

    It may be that none of them fits the memory, or that there are none. ``record`` returns the operators, messages and
    memory of a layout's step; a layout for which it raises LayoutError or PlanError is left out. ``short`` gives those
    of a model with few blocks, for the estimates; without it they are of the whole model.
    """
    found = SearchResult()

    def alone(layout: Layout, samples: int) -> LayoutRecords | None:
        try:
            return (short.record if short is not None else record)(layout, samples)
        except (LayoutError, PlanError) as error:
            found.refused(error, layout)
            return None

    num_blocks = short.blocks.number if short is not None and short.blocks is not None else 0
    known = (
        (short.plan, short.sent_bytes, wanted.most_stages, short.summed_bytes, num_blocks, short.kept, short.ends)
        if short is not None
        else ()
    )
    estimator = Estimator(pricing, batch, wanted.precision, alone, *known)
    search_from = _Search(estimator, record, wanted, found)
    search_from.price_best()
    search_from.price_until_one_fits()
    return search_from.result()


class _Search:
    """The layouts of one search: their estimates, which of them were tried, and the prices found."""

    def __init__(self, estimator: Estimator, record: Recorder, wanted: SearchConstraints, found: SearchResult) -> None:
        self.estimator, self.record, self.wanted, self.found = estimator, record, wanted, found
        self.estimates = {str(each.layout): each for each in _estimates(estimator, wanted, found)}
        LOG.info("estimated %s layouts; the best are rehearsed and priced", f"{len(self.estimates):,}")
        self.tried: set[str] = set()
        self.done: set[tuple[object, ...]] = set()

    def price_best(self) -> None:
        """Prices the best estimates, until no other may be better than the best prices or the most are priced."""
        while self.found.priced < self.wanted.most and not self._is_done():
            likely = [each for each in self.left() if self._least_s(each) < self._enough_s()]
            if not likely and not self.found.fit and self.found.priced < FEWEST:
                likely = self.left()  # none fits, as estimated: those that are near to it
            if not likely:
                return
            self._price(min(likely, key=self._order).layout)

    def left(self) -> list[Estimate]:
        """Returns the estimates of layouts that were not tried, and do not do the same as one that was."""
        return [
            each for line, each in self.estimates.items() if line not in self.tried and _effect(each) not in self.done
        ]

    def _least_s(self, each: Estimate) -> float:
        """Returns the fewest seconds that the price of an estimate may have; infinite if it cannot fit the memory."""
        return each.step_s / TOO_LONG if each.memory_bytes / TOO_MUCH <= self.wanted.limit_bytes else inf

    def _enough_s(self) -> float:
        """Returns the seconds of the last of the prices that are to be the best of all; infinite if fewer fit."""
        return sorted(each.step_s for each in self.found.fit)[FEWEST - 1] if len(self.found.fit) >= FEWEST else inf

    def _order(self, each: Estimate) -> tuple[float, int]:
        # of estimates alike in three digits the one of the fewest microbatches comes first
        return float(f"{each.over(self.wanted.limit_bytes):.3g}"), each.layout.num_microbatches

    def _add_beside(self, layout: Layout) -> None:
        """Adds the estimates of what differs from a priced layout by one option to those to choose from.

        Recomputation of a layout that fits is not added: it takes longer. Nor is a second option of operators, of which
        each way to cut them has to be rehearsed.
        """
        fits, kinds = any(price.layout == layout for price in self.found.fit), layout_axes()

        def of_operators(each: Layout) -> list[Factor]:
            return [f for f in each.factors if f.options and kinds[f.axis].kind == "operators"]

        for each in options_beside(layout):
            is_slower = fits and each.recompute is not None and layout.recompute is None
            is_second = bool(of_operators(layout)) and of_operators(each) != of_operators(layout)
            if str(each) not in self.estimates and not (is_slower or is_second) and self._may_be(each):
                estimate = self.estimator.estimate(each)
                if estimate is not None:
                    self.estimates[str(each)] = estimate

    def price_until_one_fits(self) -> None:
        """Prices layouts that are estimated to take less memory, until one fits, as many as the constraints allow.

        The fastest one comes first that would fit if its estimate were too low by as much as that of layouts like it
        (:func:`_kind`) before; if there is none, the one that takes the least memory, as long as the lowest error of an
        estimate so far lets it fit.
        """
        limit = self.wanted.limit_bytes
        for _ in range(self.wanted.most_to_fit):
            if self.found.fit or not self.found.misfits:
                return
            off = self._off()
            self._add_beside(_best(self.found).layout)
            left = self.left()
            likely = [each for each in left if each.memory_bytes * max(off.get(_kind(each.layout), [1.0])) <= limit]
            if not likely:
                least = min(left, key=lambda each: each.memory_bytes, default=None)
                if least is None or least.memory_bytes * min([1.0, *chain(*off.values())]) > limit:
                    return
                likely = [least]
            self._price(min(likely, key=lambda each: (each.step_s, each.memory_bytes)).layout)

    def _off(self) -> dict[object, list[float]]:
        """Returns how many times as much memory layouts that do not fit take as was estimated, by :func:`_kind`."""
        found: dict[object, list[float]] = {}
        for price in self.found.misfits:
            own = self.estimator.estimate(price.layout)
            if own is not None and own.memory_bytes:
                found.setdefault(_kind(price.layout), []).append(price.memory_bytes / own.memory_bytes)
        return found

    def _may_be(self, layout: Layout) -> bool:
        return self.wanted.allows(layout) and num_shares(layout) <= self.estimator.batch

    def result(self) -> SearchResult:
        """Returns what was found, sorted, with all that was left out."""
        found = self.found
        found.fit.sort(key=lambda each: each.step_s)
        best, limit = _best(found) if found.priced else None, self.wanted.limit_bytes
        own = self.estimator.estimate(best.layout) if best is not None else None
        for line, same in self.estimates.items():
            if line not in self.tried and _effect(same) in self.done:
                found.reject("options that change nothing there", same.layout)
        for left in sorted(self.left(), key=self._order):
            if isinf(self._least_s(left)):
                detail = f"{left.memory_bytes / 1e9:.3g} of {limit / 1e9:.3g} GB, as estimated"
                found.reject("memory: estimated to be more than the limit", left.layout, detail)
            elif found.fit and self._least_s(left) < found.fit[0].step_s:
                found.unpriced += 1
                found.reject("it might be better than the best, but others were priced first", left.layout,
                             f"{left.step_s / TOO_LONG:.3g} s or more, as estimated")  # fmt: skip
            else:
                slower = f"{left.step_s / own.step_s - 1:+.0%} beside {own.layout}, as estimated" if own else ""
                found.reject("its estimate is not among the best", left.layout, slower)
        found.searched = found.priced + found.rejected.total()
        found.misfits.sort(key=lambda each: nearness(each, limit))
        for misfit in found.misfits:
            if misfit.memory_bytes <= limit:
                found.reject("host memory: more than a node has", misfit.layout)
                continue
            heaviest = max(misfit.memory, key=lambda each: each.num_bytes)
            kind = max(heaviest.by_kind, key=lambda name: heaviest.by_kind[name])
            detail = (
                f"{misfit.memory_bytes / 1e9:.3g} of {limit / 1e9:.3g} GB, {heaviest.by_kind[kind] / 1e9:.3g} {kind}"
            )
            found.reject("memory: more than the limit", misfit.layout, detail)
        return found

    def _is_done(self) -> bool:
        return len(self.tried) >= 3 * self.wanted.most  # refused ones take time too

    def _price(self, layout: Layout) -> None:
        self.tried.add(str(layout))
        if (own := self.estimates.get(str(layout))) is not None:
            self.done.add(_effect(own))
        try:
            priced = self.estimator.pricing.price(layout, self.record(layout, self.estimator.batch))
        except (LayoutError, PlanError) as error:
            self.found.refused(error, layout)
            return
        is_held = host_fits(priced, self.estimator.pricing.cluster) is not False
        fits = priced.memory_bytes <= self.wanted.limit_bytes and is_held
        (self.found.fit if fits else self.found.misfits).append(priced)
        LOG.info("priced %s: %.3g GB, %s", layout, priced.memory_bytes / 1e9, "fits" if fits else "does not fit")
        if fits and priced is _best(self.found):
            self._add_beside(layout)


def _kind(layout: Layout) -> tuple[object, ...]:
    """Returns what layouts share whose estimates of memory are off alike: the schedule of stages, if there are any."""
    return tuple(f.options for f in layout.factors if layout_axes()[f.axis].kind == "stages")


def _division(layout: Layout) -> tuple[tuple[str, int], ...]:
    return tuple((factor.axis, factor.size) for factor in layout.factors)


def _effect(each: Estimate) -> tuple[object, ...]:
    """Returns a key that is equal for layouts whose options make no difference: their estimates agree in every digit.

    An example is an option of messages where nothing is sent. Of such layouts one is priced.
    """
    return _division(each.layout), each.layout.num_microbatches, each.layout.recompute, each.step_s, each.memory_bytes


def nearness(price: Price, limit: float) -> float:
    """Returns how far a layout is from one that fits and is fast: its seconds, made longer as its memory exceeds it."""
    return longer_over(price.step_s, price.memory_bytes, limit)


def host_fits(price: Price, cluster: Cluster) -> bool | None:
    """Returns whether a node's host has the memory for what its ranks offload to it; None if that is not known.

    It is True if nothing is offloaded to hosts.
    """
    held, has = host_bytes(price.records, cluster.nodes.ranks_per_node), cluster.device.host_memory_bytes
    return True if not held else None if has is None else held <= has


def _best(found: SearchResult) -> Price:
    if found.fit:
        return min(found.fit, key=lambda each: each.step_s)
    return min(found.misfits, key=lambda each: each.memory_bytes)


def options_beside(layout: Layout) -> Iterator[Layout]:
    """Yields the layouts that differ from ``layout`` in recomputation, the number of microbatches, or one option.

    An option is added to those of an axis, or replaces one of them; one option of each axis is tried before the next.

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
    yield from (found for turn in turns for found in turn if found is not None)


def _with_options(layout: Layout, place: int) -> Iterator[Layout]:
    factor = layout.factors[place]
    for option in declared_options(factor.axis):
        kept = [(*factor.options, option), *_replaced(factor.options, option)]
        for options in kept if option.name not in {each.name for each in factor.options} else ():
            with suppress(LayoutError):
                changed = Factor(factor.axis, factor.sizes, options)
                factors = (*layout.factors[:place], changed, *layout.factors[place + 1 :])
                found = replace(layout, factors=factors)
                choose(found)
                yield found


def _replaced(options: tuple[Option, ...], option: Option) -> Iterator[tuple[Option, ...]]:
    for place in range(len(options)):
        yield (*options[:place], option, *options[place + 1 :])


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


def _estimates(estimator: Estimator, wanted: SearchConstraints, found: SearchResult) -> list[Estimate]:
    """Returns the estimates of every division of the ranks that the words of the search allow.

    Each is estimated with every option of copies that saves memory, the best then with every schedule of stages.
    """
    built = {each.axis for each in STRATEGIES.values() if each.default}
    kinds: dict[str, str] = {name: axis.kind for name, axis in layout_axes().items() if name in built}
    cluster, saving = estimator.pricing.cluster, dict[str, list[Option]]()
    estimates: list[Estimate] = []
    for sizes in divisions(cluster.num_ranks, kinds):
        for layout in _layouts(sizes, kinds, estimator.batch, wanted, found, cluster.nodes.ranks_per_node):
            first = estimator.estimate(layout)
            if first is None:  # refused for its operators or its schedule, whatever the microbatches
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
    for estimate in (_named(estimator, each, kinds) for each in estimates):
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
    """Returns the best of the estimates with every other schedule of stages."""
    best = sorted(estimates, key=lambda each: each.over(wanted.limit_bytes))
    return [
        scheduled
        for each in (best[:MOST_SCHEDULED] if estimator.plan is not None else ())
        for place, factor in enumerate(each.layout.factors)
        if kinds[factor.axis] == "stages" and not factor.options
        for scheduled in _with_each(estimator, each.layout, place, estimator.schedules(factor.axis), wanted, found)
    ]


def _recomputed(
    estimator: Estimator, estimates: Iterable[Estimate], recompute: str | None, wanted: SearchConstraints,
    found: SearchResult,
) -> list[Estimate]:  # fmt: skip
    """Returns the estimates with activations recomputed, where that may be better than the best of them.

    Recomputation takes longer and less memory: it is no better where all fits, or where the layout without it is slower
    already than others that fit.
    """
    limit = wanted.limit_bytes
    plain = [each for each in estimates if each.layout.recompute == wanted.recomputed[0]]
    fit = [each.step_s for each in estimates if each.memory_bytes * TOO_MUCH <= limit]
    again, longer = list[Estimate](), inf  # how many times as long a step takes with recomputation, at least
    for each in sorted(plain, key=lambda each: each.step_s):
        layout = replace(each.layout, recompute=recompute)
        if each.memory_bytes * TOO_MUCH <= limit:
            found.reject("recomputation where all fits without it", layout)
        elif len(fit) >= FEWEST and each.step_s * (longer if again else 1.0) > nsmallest(FEWEST, fit)[-1] * TOO_LONG:
            found.reject("recomputation that takes longer than others do without it", layout)
        elif (estimate := estimator.estimate(layout)) is not None:
            again.append(estimate)
            longer = min(longer, estimate.step_s / each.step_s)
            if estimate.memory_bytes * TOO_MUCH <= limit:
                fit.append(estimate.step_s)
        elif why := estimator.refusal(layout):
            found.reject(why, layout)
    return again


def _named(estimator: Estimator, estimate: Estimate, kinds: Mapping[str, str]) -> Estimate:
    """Returns an estimate of a layout that names the schedule of its stages."""
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
    """Yields the estimates of a layout with each of the options of one factor."""
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
) -> Iterator[Layout]:
    """Yields the layouts of one division of the ranks: each size of a microbatch."""
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
    sizes_tried = (n for n in range(1, min(local, LARGEST_MICROBATCH) + 1) if n & (n - 1) == 0)
    # rounded up, so that no microbatch has more samples than are tried, where the batch leaves copies one more
    for number in [min(local, -(-most // samples)) for samples in sizes_tried] if fixed is None else [fixed]:
        layout = Layout(factors, number, wanted.precision, wanted.recomputed[0])
        if number > local:
            found.reject(f"--fix mb{number}: more microbatches than samples in a copy of the model", layout,
                         f"{local} samples")  # fmt: skip
        elif number < stages:
            found.reject("fewer microbatches than stages", layout, f"{number} of {stages}")
        elif wanted.is_left_out(layout):
            found.reject("--without", layout)
        elif (lacking := wanted.lacking(layout)) and not _is_option(lacking):
            found.reject(f"--fix: not {lacking}", layout)
        else:
            yield layout


def _is_option(part: str) -> bool:
    """Returns whether a fixed part names options, which layouts are given later: a schedule, or a stage of ZeRO."""
    return "/" in part


def _fixed(factor: Factor, wanted: SearchConstraints) -> Factor:
    """Returns the factor with the options that must hold for its axis."""
    for part in wanted.fix.split():
        head, *options = part.split("/")
        sizes = head.removeprefix(factor.axis)
        if options and head.rstrip("0123456789x") == factor.axis:
            given = tuple(map(int, sizes.split("x"))) if all(map(str.isdecimal, sizes.split("x"))) else factor.sizes
            with suppress(LayoutError):
                chosen = tuple(Option(*each.split(":", 1)) for each in options)
                return Factor(factor.axis, given if prod(given) == factor.size else factor.sizes, chosen)
    return factor


def precision_of(cluster: Cluster) -> Precision:
    """Returns the precision to compute in on a cluster.

    It is bf16 if the device's profile has a peak for it, else fp16 if there is one for that, else fp32.
    """
    known = dict(cluster.device.peaks)
    return "bf16" if "bf16" in known else "fp16" if "fp16" in known else "fp32"
