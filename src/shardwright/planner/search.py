"""Searches the layouts of a model on a cluster: estimates every candidate, and prices the best of them.

No axis and no option is named here: axes, sizes and options come from what strategies declare, so the options of a new
strategy are searched without a change here. Closed formulas estimate every division of the ranks over axes, with the
options of model copies and of pipeline stages. Layouts are then priced, the best estimate first: their step is recorded
on the meta device, and its schedule simulated. Layouts that differ from the best one by one option are estimated and
priced too. The search ends when no layout left can be among the fastest, even if its estimate is as much too long as
estimates of another model were (``TOO_LONG``), or when :attr:`SearchConstraints.most` are priced. If none fits the
memory, a few that are estimated to take less are priced too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from math import inf, isinf

from shardwright.axes import layout_axes
from shardwright.cost.cluster import Cluster
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Factor, Layout, Precision
from shardwright.parallelize.auto import num_shares
from shardwright.planner.candidate_layouts import FEWEST, first_estimates, options_beside
from shardwright.planner.estimate import TOO_LONG, TOO_MUCH, Estimate, Estimator, longer_over
from shardwright.planner.layout_records import LayoutRecords
from shardwright.planner.memory import host_bytes
from shardwright.planner.price import Price, Pricing
from shardwright.planner.records import UNLIKE_STAGES
from shardwright.planner.search_constraints import SearchConstraints
from shardwright.planner.search_result import SearchResult
from shardwright.planner.short import ShortModel

LOG = logging.getLogger("shardwright.planner")
"""Where a search says what it has priced, at level INFO, since it may take minutes."""

MOST_REFUSED = 50
"""How many layouts are tried, if the model refuses each, before a search gives up."""

LayoutRecorder = Callable[[Layout, int], LayoutRecords]
"""A function that returns the records of a layout on a global batch of a number of samples."""


def search(
    pricing: Pricing, batch: int, record: LayoutRecorder, wanted: SearchConstraints, short: ShortModel | None = None
) -> SearchResult:
    """Returns the best layouts found for a global batch of ``batch`` samples, on the cluster of ``pricing``.

    The result may have no layout that fits the memory, or none at all. ``record`` returns the operators, messages and
    memory of a layout's step; a layout for which it raises LayoutError or PlanError is left out. ``short`` does the
    same for estimates, from a model with few blocks; without it estimates use ``record`` too.
    """
    result = SearchResult(most=wanted.most)

    def alone(layout: Layout, samples: int) -> LayoutRecords | None:
        try:
            return (short.record if short is not None else record)(layout, samples)
        except (LayoutError, PlanError) as error:
            result.refused(error, replace(layout, own_statistics=wanted.own_statistics))
            return None

    num_blocks = short.blocks.number if short is not None and short.blocks is not None else 0
    arguments = (
        (
            short.plan,
            short.sent_bytes,
            wanted.most_stages,
            short.summed_bytes,
            num_blocks,
            short.kept,
            short.ends,
            short.refuses_microbatches,
            short.fewest,
        )
        if short is not None
        else ()
    )
    estimator = Estimator(pricing, batch, wanted.precision, alone, *arguments)
    search_from = _Search(estimator, record, wanted, result)
    search_from.price_best()
    search_from.price_until_one_fits()
    return search_from.result()


class _Search:
    """The layouts of one search: their estimates, which of them were tried, and the prices found."""

    def __init__(
        self, estimator: Estimator, record: LayoutRecorder, wanted: SearchConstraints, found: SearchResult
    ) -> None:
        self.estimator, self.record, self.wanted, self.found = estimator, record, wanted, found
        self.estimates = {str(estimate.layout): estimate for estimate in first_estimates(estimator, wanted, found)}
        LOG.info("estimated %s layouts; the best are rehearsed and priced", f"{len(self.estimates):,}")
        self.tried: set[str] = set()
        self.unlike: set[object] = set()  # the stages_of layouts that were refused since their stages are not alike
        self.done: set[tuple[object, ...]] = set()

    def price_best(self) -> None:
        """Prices the best estimates, until no other can be among the best or ``wanted.most`` layouts are priced."""
        while self.found.priced < self.wanted.most and not self._is_done():
            likely = [estimate for estimate in self.left() if self._least_s(estimate) < self._enough_s()]
            if not likely and not self.found.fit and self.found.priced < FEWEST:
                likely = self.left()  # by their estimates none fits, so those that nearly do are priced
            if not likely:
                return
            self._price(min(likely, key=self._order).layout)

    def left(self) -> list[Estimate]:
        """Returns the estimates of the layouts that are left to be tried.

        Left out are also layouts that do the same as one that was tried (:func:`_effect`), and layouts with the same
        stages as one that was refused because its stages are not alike.
        """
        return [
            estimate
            for line, estimate in self.estimates.items()
            if line not in self.tried
            and _effect(estimate) not in self.done
            and not (self.unlike and self.estimator.stages_of(estimate.layout) in self.unlike)
        ]

    def _least_s(self, estimate: Estimate) -> float:
        """Returns the fewest seconds that the price of an estimate may have; infinite if it cannot fit the memory."""
        return estimate.step_s / TOO_LONG if estimate.memory_bytes / TOO_MUCH <= self.wanted.limit_bytes else inf

    def _enough_s(self) -> float:
        """Returns the seconds of the :data:`FEWEST`-th fastest price that fits; infinite if fewer fit."""
        return sorted(price.step_s for price in self.found.fit)[FEWEST - 1] if len(self.found.fit) >= FEWEST else inf

    def _order(self, estimate: Estimate) -> tuple[float, int]:
        # of estimates that agree in three digits, the one with the fewest microbatches comes first
        return float(f"{estimate.over(self.wanted.limit_bytes):.3g}"), estimate.layout.num_microbatches

    def _add_beside(self, layout: Layout) -> None:
        """Adds the layouts that differ from a priced one by one option to the estimates to choose from.

        Recomputation is not added to a layout that fits, since it takes longer. If the layout has options of operators,
        these are not changed, since each further way to cut operators has to be rehearsed.
        """
        fits, kinds = any(price.layout == layout for price in self.found.fit), layout_axes()

        def of_operators(candidate: Layout) -> list[Factor]:
            return [f for f in candidate.factors if f.options and kinds[f.axis].kind == "operators"]

        for variant in options_beside(layout):
            is_slower = fits and variant.recompute is not None and layout.recompute is None
            is_second = bool(of_operators(layout)) and of_operators(variant) != of_operators(layout)
            if str(variant) not in self.estimates and not (is_slower or is_second) and self._may_be(variant):
                estimate = self.estimator.estimate(variant)
                if estimate is not None:
                    self.estimates[str(variant)] = estimate

    def price_until_one_fits(self) -> None:
        """Prices layouts that are estimated to take less memory, until one fits or ``wanted.most_to_fit`` are priced.

        Each time it is the fastest of those that would fit even if their memory were estimated too low by as much as it
        was for any layout of the same kind (:func:`_kind`). If there is none, it is the one estimated to take the least
        memory, if it fits by the lowest ratio of priced to estimated memory so far; if not, the search ends.
        """
        limit = self.wanted.limit_bytes
        for _ in range(self.wanted.most_to_fit):
            if self.found.fit or not self.found.misfits:
                return
            off = self._off()
            self._add_beside(_best(self.found).layout)
            estimates = self.left()
            likely = [
                estimate
                for estimate in estimates
                if estimate.memory_bytes * max(off.get(_kind(estimate.layout), [1.0])) <= limit
            ]
            if not likely:
                least = min(estimates, key=lambda estimate: estimate.memory_bytes, default=None)
                if least is None or least.memory_bytes * min([1.0, *chain(*off.values())]) > limit:
                    return
                likely = [least]
            self._price(min(likely, key=lambda estimate: (estimate.step_s, estimate.memory_bytes)).layout)

    def _off(self) -> dict[object, list[float]]:
        """Returns, by :func:`_kind`, the ratios of priced to estimated memory of the layouts that do not fit."""
        ratios: dict[object, list[float]] = {}
        for price in self.found.misfits:
            estimate = self.estimator.estimate(price.layout)
            if estimate is not None and estimate.memory_bytes:
                ratios.setdefault(_kind(price.layout), []).append(price.memory_bytes / estimate.memory_bytes)
        return ratios

    def _may_be(self, layout: Layout) -> bool:
        if self.estimator.refusal_of_microbatches(layout) or not self.wanted.allows(layout):
            return False
        return num_shares(layout) <= self.estimator.batch

    def result(self) -> SearchResult:
        """Returns the result of the search, sorted, with the reasons of all layouts that were left out."""
        result = self.found
        result.fit.sort(key=lambda price: price.step_s)
        best, limit = _best(result) if result.priced else None, self.wanted.limit_bytes
        own = self.estimator.estimate(best.layout) if best is not None else None
        for line, same in self.estimates.items():
            if line not in self.tried and _effect(same) in self.done:
                result.reject("options that change nothing there", same.layout)
            elif line not in self.tried and self.unlike and self.estimator.stages_of(same.layout) in self.unlike:
                result.reject(UNLIKE_STAGES, same.layout)
        for estimate in sorted(self.left(), key=self._order):
            if isinf(self._least_s(estimate)):
                detail = f"{estimate.memory_bytes / 1e9:.3g} of {limit / 1e9:.3g} GB, as estimated"
                result.reject("memory: estimated to be more than the limit", estimate.layout, detail)
            elif result.fit and self._least_s(estimate) < result.fit[0].step_s:
                result.unpriced += 1
                result.reject("it might be better than the best, but others were priced first", estimate.layout,
                              f"{estimate.step_s / TOO_LONG:.3g} s or more, as estimated")  # fmt: skip
            else:
                slower = f"{estimate.step_s / own.step_s - 1:+.0%} beside {own.layout}, as estimated" if own else ""
                result.reject("its estimate is not among the best", estimate.layout, slower)
        result.searched = result.priced + result.rejected.total()
        result.misfits.sort(key=lambda price: misfit_s(price, limit))
        for misfit in result.misfits:
            if misfit.memory_bytes <= limit:
                result.reject("host memory: more than a node has", misfit.layout)
                continue
            heaviest = max(misfit.memory, key=lambda memory: memory.num_bytes)
            kind = max(heaviest.by_kind, key=lambda name: heaviest.by_kind[name])
            detail = (
                f"{misfit.memory_bytes / 1e9:.3g} of {limit / 1e9:.3g} GB, {heaviest.by_kind[kind] / 1e9:.3g} {kind}"
            )
            result.reject("memory: more than the limit", misfit.layout, detail)
        return result

    def _is_done(self) -> bool:
        # refused layouts take time too, so they count; but until one is priced, MOST_REFUSED are tried at least
        return len(self.tried) >= max(3 * self.wanted.most, 0 if self.found.priced else MOST_REFUSED)

    def _price(self, layout: Layout) -> None:
        self.tried.add(str(layout))
        if (own := self.estimates.get(str(layout))) is not None:
            self.done.add(_effect(own))
        try:
            priced = self.estimator.pricing.price(layout, self.record(layout, self.estimator.batch))
        except (LayoutError, PlanError) as error:
            self.found.refused(error, layout)
            if error.what == UNLIKE_STAGES:
                self.unlike.add(self.estimator.stages_of(layout))
            return
        is_held = host_fits(priced, self.estimator.pricing.cluster) is not False
        fits = priced.memory_bytes <= self.wanted.limit_bytes and is_held
        (self.found.fit if fits else self.found.misfits).append(priced)
        LOG.info("priced %s: %.3g GB, %s", layout, priced.memory_bytes / 1e9, "fits" if fits else "does not fit")
        if fits and priced is _best(self.found):
            self._add_beside(layout)


def _kind(layout: Layout) -> tuple[object, ...]:
    """Returns a key for layouts whose estimates of memory are wrong in a similar way: the options of their stages."""
    return tuple(f.options for f in layout.factors if layout_axes()[f.axis].kind == "stages")


def _division(layout: Layout) -> tuple[tuple[str, int], ...]:
    return tuple((factor.axis, factor.size) for factor in layout.factors)


def _effect(estimate: Estimate) -> tuple[object, ...]:
    """Returns a key that is equal for layouts whose options make no difference: their estimates agree in every digit.

    An example is an option of messages where nothing is sent. Of such layouts one is priced.
    """
    return (
        _division(estimate.layout), estimate.layout.num_microbatches, estimate.layout.recompute, estimate.step_s,
        estimate.memory_bytes,
    )  # fmt: skip


def misfit_s(price: Price, limit: float) -> float:
    """Returns a layout's seconds, made longer the more its memory exceeds ``limit`` bytes (:func:`longer_over`)."""
    return longer_over(price.step_s, price.memory_bytes, limit)


def host_fits(price: Price, cluster: Cluster) -> bool | None:
    """Returns whether a node's host has the memory for what its ranks offload to it; None if that is not known.

    It is True if nothing is offloaded to hosts.
    """
    held, has = host_bytes(price.records, cluster.nodes.ranks_per_node), cluster.device.host_memory_bytes
    return True if not held else None if has is None else held <= has


def _best(found: SearchResult) -> Price:
    if found.fit:
        return min(found.fit, key=lambda price: price.step_s)
    return min(found.misfits, key=lambda price: price.memory_bytes)


def precision_of(cluster: Cluster) -> Precision:
    """Returns the precision to compute in on a cluster.

    It is bf16 if the device's profile has a peak for it, else fp16 if there is one for that, else fp32.
    """
    known = dict(cluster.device.peaks)
    return "bf16" if "bf16" in known else "fp16" if "fp16" in known else "fp32"
