"""What would fit where nothing does: another layout, more devices or a shorter sequence, each priced, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from math import ceil
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.cost.cluster import Cluster
from shardwright.errors import LayoutError, PlanError
from shardwright.formatting import format_decimal_bytes, format_seconds
from shardwright.layout import Layout
from shardwright.parallelize.auto import num_shares
from shardwright.parallelize.planning import num_rows
from shardwright.planner.memory import held_at_rest
from shardwright.planner.plan_results import Plans
from shardwright.planner.price import Price
from shardwright.planner.search_result import SearchResult

_STATE = ("parameters", "optimizer")
MOST_TIMES, SHORTEST = 4, 128
"""The largest multiple of the cluster's devices that is tried, and the fewest tokens of a sequence that are tried."""


def ways_out(
    nearest: Price, cluster: Cluster, batch: tuple[Any, Any], limit: float, searched: Callable[[Cluster], SearchResult],
    priced: Callable[[Layout, tuple[Any, Any]], Price],
) -> Iterator[str]:  # fmt: skip
    """Yields what to change so that a layout fits ``limit`` bytes, as sentences with the layout and its memory.

    ``nearest`` is the layout that takes the least memory of those priced. ``searched`` returns what a search finds on
    another cluster, and ``priced`` the price of a layout with another batch.
    """
    needed = nearest.memory_bytes / cluster.device.memory_bytes
    if needed <= 1:
        share = ceil(1000 * needed) / 1000
        yield f"--memory-limit {share:g}: {nearest.layout} takes {format_decimal_bytes(nearest.memory_bytes)}"
    times = 2
    while times <= MOST_TIMES:
        more = cluster.with_ranks(times * cluster.num_ranks)
        with suppress(LayoutError, PlanError):
            prices = searched(more).fit
            if prices:
                best = min(prices, key=lambda price: price.step_s)
                yield f"{more.num_ranks} devices: {best.layout} takes {format_decimal_bytes(best.memory_bytes)}"
                break
        times *= 2
    else:
        most = MOST_TIMES * cluster.num_ranks
        yield f"more devices: no layout that was priced on up to {most} fits"
    tokens = _num_tokens(batch)
    stages = range(nearest.records.schedule.num_stages)
    state = max(sum(held_at_rest(nearest.records, stage)[kind] for kind in _STATE) for stage in stages)
    while tokens // 2 >= SHORTEST and state <= limit:  # if state alone exceeds the limit, no sequence is short enough
        tokens //= 2
        with suppress(LayoutError, PlanError):
            shorter = priced(nearest.layout, _first_tokens(batch, tokens))
            if shorter.memory_bytes <= limit:
                taken = format_decimal_bytes(shorter.memory_bytes)
                yield f"sequences of {tokens:,} tokens: {nearest.layout} takes {taken}"
                break
    if num_rows(batch) <= num_shares(nearest.layout):
        yield "a smaller batch does not help: a microbatch has one sample already"


def ways_beside(layout: Layout, plan: Callable[..., Plans]) -> tuple[str, ...]:
    """Returns sentences that name a layout to use in place of ``layout``, which does not fit the memory.

    The one named is the fastest found with the same axes of the same sizes, or, if none of these fits, with any. If no
    layout was found that fits, the sentences are those of :func:`ways_out`. ``plan`` is
    :func:`~shardwright.plan_layouts` of the model, which is called with ``fix`` and ``look_further``.
    """
    sizes = " ".join(f"{factor.axis}{'x'.join(map(str, factor.sizes))}" for factor in layout.factors)
    ways: tuple[str, ...] = ()
    for fix in dict.fromkeys((f"{sizes} {layout.precision}".strip(), layout.precision)):
        with suppress(LayoutError, PlanError):
            plans = plan(fix=fix, look_further=fix == layout.precision)
            if plans.fits(plans.best):
                seconds = format_seconds(plans.expected_s(plans.best.step_s))
                return (f"{plans.best.layout} takes {format_decimal_bytes(plans.best.memory_bytes)}, {seconds} a step",)
            ways = plans.ways_out
    return ways


def _sequences(batch: tuple[Any, Any]) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.dim() == 2 and not leaf.is_floating_point()]


def _num_tokens(batch: tuple[Any, Any]) -> int:
    """Returns the tokens of a sequence where all 2-D tensors of integers have as many; else 0."""
    sizes = {sequence.shape[1] for sequence in _sequences(batch)}
    return sizes.pop() if len(sizes) == 1 else 0


def _first_tokens(batch: tuple[Any, Any], number: int) -> tuple[Any, Any]:
    sequences = {id(sequence) for sequence in _sequences(batch)}
    cut: tuple[Any, Any] = tree_map_only(Tensor, lambda t: t[:, :number] if id(t) in sequences else t, batch)
    return cut
