"""``plan_layouts``: predicts what layouts of a model cost on a cluster, and which is best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from time import process_time
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.objects.marked_inputs import packed_in
from shardwright.analysis.traced.kept_traces import traces_kept
from shardwright.axes import layout_axes
from shardwright.cost.cluster import Cluster
from shardwright.errors import LayoutError, PlanError
from shardwright.garbage_collection import collection_paused
from shardwright.layout import OWN, Layout, Precision
from shardwright.models.given_loss import loss_for
from shardwright.models.model_loss import ModelLoss
from shardwright.parallelize.auto import tokens_of
from shardwright.parallelize.batches import pairs
from shardwright.parallelize.planning import job_for
from shardwright.planner.anchors import scale_of, seconds_by_layout
from shardwright.planner.explain import simplest_first
from shardwright.planner.layout_records import LayoutRecords
from shardwright.planner.outline import ModelPlans
from shardwright.planner.plan_arguments import (
    check_batch,
    check_kinds,
    check_numbers,
    check_ranks,
    check_samples,
    check_words,
)
from shardwright.planner.plan_results import Plans
from shardwright.planner.price import LEFT, Price, Pricing
from shardwright.planner.records import few_inputs, first_rows, record_layout
from shardwright.planner.records_file import RecordsFile
from shardwright.planner.search import LayoutRecorder, host_fits, misfit_s, precision_of, search
from shardwright.planner.search_constraints import MOST_PRICED, SearchConstraints
from shardwright.planner.search_result import SearchResult
from shardwright.planner.short import ShortModel
from shardwright.planner.ways_out import ways_out

MOST_WHOLE, MOST_WHOLE_OF_FEW, FEW_BLOCKS = 4, 8, 32
"""``MOST_WHOLE`` is the most pipeline stages that a search rehearses one by one, for a layout whose stages are not
alike; ``MOST_WHOLE_OF_FEW`` is the same for a model of ``FEW_BLOCKS`` repeated blocks or fewer.

A rehearsal of 24 blocks on eight stages takes some five seconds.
"""


@collection_paused()
@traces_kept()
def plan_layouts(
    model: nn.Module, cluster: Cluster | str, batch: Any, *, loss: Any = None,
    layout: Layout | str | None = None, fix: str = "", without: Sequence[str] = (), top: int = 10,
    most_priced: int = MOST_PRICED, anchors: Mapping[str, float] = MappingProxyType({}), tokens: int = 0,
    memory_limit: float = LEFT,
    roles: Mapping[str, str] = MappingProxyType({}), keep_in: Path | str | None = None, look_further: bool = True,
) -> Plans:  # fmt: skip
    """Returns the predicted cost of layouts of a model on a cluster, the best first, or of ``layout`` alone.

    Of layouts that fit and are within one percent of the fastest, the simplest comes first: it does not offload, or has
    fewer axes and options. Layouts that do not fit come last. A search skips layouts with more than four pipeline
    stages that are not alike (eight in a model of 32 blocks or fewer), since each stage would have to be rehearsed.

    Args:
        model: the plain model.
        cluster: a :class:`Cluster`, text such as "a100-80gb:128x8", or the name of a TOML file.
        batch: the global batch (inputs, targets), or with ``loss=sw.ModelLoss()`` a mapping. Only shapes and dtypes
            matter; a condition on values, such as whether a mask is all ones, counts as true.
        loss: as in ``parallelize``; by default the cross entropy.
        layout: the one layout to price. Without it layouts are searched.
        fix: parts of a layout line that a layout must have, such as "tp8 dp/zero1".
        without: axes and options that a layout must not have.
        top: how many layouts tables list.
        most_priced: the most layouts that are priced. More find better ones, and take longer.
        anchors: runs on this cluster with this batch, as seconds of a step by layout line. They correct all prices.
        tokens: the number of tokens of the batch, for tokens per second. By default it is the elements of the inputs'
            first tensor if that is 2-D and of integers, else the samples.
        memory_limit: the share of a device's memory that a layout may take.
        roles: tensor-parallel roles of layers, by name.
        keep_in: a folder for what rehearsals find. A later plan of the same model, code and samples, on any cluster,
            finds it there.
        look_further: whether a search that finds no layout that fits also looks at more devices and shorter sequences,
            for the plans' ``ways_out``.

    Raises: LayoutError: ``layout`` or an anchor's is no layout line, is for another number of ranks than the cluster,
        or does not fit the model or the batch; the batch has no tensor or no sample; or a search finds no layout.
        PlanError: the batch is neither a pair nor such a mapping; the cluster's text or file is wrong, or gives no
        nodes without a ``layout``; ``without`` has an unknown word; ``fix`` or ``without`` is given beside ``layout``;
        an argument is of another kind, a number is out of its range, or two anchors are of one layout; or the model
        does not run on the meta device under ``layout`` or an anchor's layout.

    >>> import torch
    >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    >>> batch = torch.ones(16, 64), torch.zeros(16, dtype=torch.int64)
    >>> plans = plan_layouts(model, "a100-80gb:1x2", batch, layout="dp2 bf16")
    >>> sum(plans.best.waterfall.values()) == plans.best.step_s, plans.best.traffic_by_axis
    (True, {'dp': 49920})
    """
    check_kinds(model, cluster, fix, without)
    check_numbers(memory_limit, tokens, most_priced, top)
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    check_words(layout, fix, without)
    anchors = seconds_by_layout(anchors.items())
    cluster = Cluster.parse(cluster, layout.num_ranks if layout else None) if isinstance(cluster, str) else cluster
    loss = loss_for(loss, model)
    batch = _pair(batch, loss)
    num_samples = check_batch(batch)
    began = process_time()
    record = _ModelRecords(model, loss, batch, cluster.device.type, roles, keep_in)
    pricing = Pricing(cluster, record.plans.kind)
    priced_anchors = [(_priced_anchor(line, s, pricing, num_samples, record), s) for line, s in anchors.items()]
    scale, limit = scale_of(priced_anchors), cluster.device.memory_bytes * memory_limit
    ways = tuple[str, ...]()
    if layout is not None:
        check_ranks(layout, cluster)
        check_samples(layout, num_samples)
        records = record(layout, num_samples)
        prices, result = [pricing.price(records.layout, records)], SearchResult()
    else:
        precision = next((word for word in get_args(Precision) if word in fix.split()), precision_of(cluster))
        most_stages = record.short.most_stages
        constraints = SearchConstraints(fix, tuple(without), precision, limit, most_priced, most_stages)
        result = record.searched(pricing, num_samples, constraints)
        prices = [*result.fit, *result.misfits]
        if not prices:
            raise result.failure or _none_found(cluster, result, fix, without)
        if look_further and not result.fit:
            ways = _ways_out(result, pricing, record, num_samples, constraints)
    record.kept.save()
    seconds = {"records": record.spent_s, "search": process_time() - began - record.spent_s}
    priced = sorted((scale.of(price) for price in prices), key=lambda price: _rank(price, limit, cluster))
    fit = [price for price in priced if not _rank(price, limit, cluster)[0]]
    if fit:
        priced = [*simplest_first(fit), *priced[len(fit) :]]
    num_parameters, narrow = _parameters_of(model)
    return Plans(
        cluster, tuple(priced), num_samples, tokens or _num_tokens(batch[0]), memory_limit, seconds, result, scale, top,
        ways, num_parameters, narrow,
    )  # fmt: skip


class _ModelRecords:
    """The records of a model's layouts: each is rehearsed, or read from the folder ``keep_in`` if it is there.

    Calling it, as a :data:`~shardwright.planner.search.LayoutRecorder`, records a layout for so many samples.
    """

    def __init__(
        self, model: nn.Module, loss: nn.Module, batch: tuple[Any, Any], device_type: str, roles: Mapping[str, str],
        keep_in: Path | str | None,
    ) -> None:  # fmt: skip
        self.model, self.loss, self.batch, self.device_type, self.roles = model, loss, batch, device_type, roles
        rows_of = [mark.shapes for mark in packed_in(batch)]  # packed samples may have other shapes than the first one
        self.kept = RecordsFile.of(keep_in, model, loss, first_rows(batch, 1), rows_of, device_type, dict(roles))
        self.plans = ModelPlans(model, few_inputs(batch), self.kept)
        self.spent_s = 0.0
        """The CPU seconds spent on records of layouts that are priced, not on those for estimates."""

    @cached_property
    def short(self) -> ShortModel:
        """The model with few blocks, from which layouts are estimated."""
        return ShortModel(self.model, self.loss, self.batch, self.device_type, self.roles, self.plans, self.kept)

    def __call__(self, layout: Layout, samples: int, most_whole: int | None = None) -> LayoutRecords:
        key = "layout", str(layout), samples, most_whole
        rows = first_rows(self.batch, samples)
        return self._timed(lambda: self.kept.find(key, lambda: self._rehearsed(layout, rows, most_whole)))

    def of_batch(self, layout: Layout, samples: int, batch: tuple[Any, Any]) -> LayoutRecords:
        """Returns the records of a layout for samples like those of another ``batch``; they are not kept."""
        return self._timed(lambda: self._rehearsed(layout, first_rows(batch, samples), None))

    def searched(self, pricing: Pricing, samples: int, wanted: SearchConstraints) -> SearchResult:
        """Returns the result of a search that rehearses at most ``MOST_WHOLE`` stages of a layout one by one.

        For a model of few blocks, they are at most ``MOST_WHOLE_OF_FEW``.
        """
        num_blocks = self.short.blocks.number if self.short.blocks is not None else 0
        most_whole = MOST_WHOLE_OF_FEW if 0 < num_blocks <= FEW_BLOCKS else MOST_WHOLE
        return search(pricing, samples, partial(self, most_whole=most_whole), wanted, self.short)

    def _timed(self, record: Callable[[], LayoutRecords]) -> LayoutRecords:
        start = process_time()
        records = record()
        self.spent_s += process_time() - start
        return records

    def _rehearsed(self, layout: Layout, rows: tuple[Any, Any], most_whole: int | None) -> LayoutRecords:
        job = job_for(
            self.model, self.loss, layout, rows[0], tokens_of(rows[0], layout), self.roles, self.plans.known.runs
        )
        if job.graph is not None and (job.graph.reads_values or job.graph.selects_by_values):
            self.kept.forget()  # a file is found by shapes alone, and these records depend on values
        return record_layout(job, layout, rows, self.device_type, most_whole=most_whole, model_plans=self.plans)


def _ways_out(
    found: SearchResult, pricing: Pricing, record: _ModelRecords, samples: int, wanted: SearchConstraints
) -> tuple[str, ...]:
    """Returns sentences on what to change so that a layout fits, after a search that found none (:func:`ways_out`)."""
    one = replace(wanted, most=1, most_to_fit=3)
    return tuple(ways_out(
        min(found.misfits, key=lambda price: price.memory_bytes), pricing.cluster, record.batch, wanted.limit_bytes,
        lambda more: record.searched(Pricing(more, record.plans.kind), samples, one),
        lambda layout, batch: pricing.price(layout, record.of_batch(layout, samples, batch)),
    ))  # fmt: skip


def _parameters_of(model: nn.Module) -> tuple[int, str]:
    """Returns the number of a model's parameters, and the dtype of most of them if it is narrower than float32."""
    sizes = Counter[torch.dtype]()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    (dtype, _), *_ = sizes.most_common(1) or [(torch.float32, 0)]
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4
    return sizes.total(), str(dtype).removeprefix("torch.") if is_narrow else ""


def _pair(batch: Any, loss: nn.Module) -> tuple[Any, Any]:
    """Returns the inputs and targets of a batch; for a :class:`ModelLoss`, the whole batch and its labels."""
    return next(pairs([batch], loss.pair if isinstance(loss, ModelLoss) else None))


def _num_tokens(inputs: Any) -> int:
    """Returns the tokens of a batch if its first input is a 2-D tensor of integers, and else its samples."""
    first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return first.numel() if first.dim() == 2 and not first.is_floating_point() else len(first)


def _rank(price: Price, limit: float, cluster: Cluster) -> tuple[bool, float]:
    """Returns the sort key of a price: those that fit come first, by their seconds, then others by :func:`misfit_s`."""
    fits = price.memory_bytes <= limit and host_fits(price, cluster) is not False
    return not fits, price.step_s if fits else misfit_s(price, limit)


def _priced_anchor(line: str, measured_s: float, pricing: Pricing, batch: int, record: LayoutRecorder) -> Price:
    """Returns the price of an anchor's layout, whose step took ``measured_s`` seconds.

    Raises: LayoutError: it cannot be on this cluster with this batch. PlanError: its step takes fewer seconds than the
        model's FLOPs do at the device's peak.
    """
    layout = Layout.parse(line)
    check_ranks(layout, pricing.cluster)
    check_samples(layout, batch)
    price = pricing.price(layout, record(layout, batch))
    least_s = price.flops / pricing.cluster.device.peak(layout.precision)
    if measured_s < least_s:
        raise PlanError(
            "no step can take as few seconds as the anchor says",
            given=f"{line}={measured_s:g}",
            allowed=f"{least_s:.3g} s or more: the model's FLOPs at the peak of {pricing.cluster.device.name}",
            fix="write the seconds of one whole step with this batch, on the accelerator that the cluster names",
        )
    return price


def _none_found(cluster: Cluster, found: SearchResult, fix: str, without: Sequence[str]) -> LayoutError:
    reasons = "; ".join(f"{n:,}: {why}" for why, n in found.rejected.most_common(3))
    return LayoutError(
        f"no layout can be on {cluster}",
        given=f"fix '{fix}', without '{','.join(without)}'" if fix or without else f"{cluster.num_ranks} ranks",
        allowed=f"layouts of the axes that strategies declare; left out were {reasons}"
        if reasons
        else "layouts of the axes that strategies declare",
        fix=_remedy(found, fix, without, cluster.num_ranks),
    )


def _remedy(found: SearchResult, fix: str, without: Sequence[str], num_ranks: int) -> str:
    """Returns what to change so that a search finds layouts, such as the part of ``fix`` that left out the most."""
    if fix and any(OWN in why for why in found.rejected):
        parts = [f"{part}/{OWN}" if part.startswith("mb") and OWN not in part else part for part in fix.split()]
        parts += [f"mb/{OWN}"] * (not any(part.startswith("mb") for part in parts))
        return f"write --fix '{' '.join(parts)}', which gives each microbatch statistics of its own"
    fixed = Counter({why: n for why, n in found.rejected.items() if why.startswith("--fix")})
    if fixed:
        ((why, _),) = fixed.most_common(1)
        part = why.removeprefix("--fix: not ").removeprefix("--fix ").partition(":")[0]
        head = part.partition("/")[0]
        axis = head.rstrip("0123456789x")
        sizes = head.removeprefix(axis).split("x")
        number = prod(map(int, sizes)) if axis in layout_axes() and all(map(str.isdecimal, sizes)) else 1
        uneven = f"{number} does not divide {num_ranks} ranks, and " if not number or num_ranks % number else ""
        return f"leave out '{part}' of --fix: {uneven}{found.nearest[why]} can be looked at without it"
    refused = {why: found.remedies[why] for why, _ in found.rejected.most_common() if why in found.remedies}
    if len(refused) == len(found.rejected) > 0:  # the model refuses each layout: the fix of the most frequent error
        return next(iter(refused.values()))
    return "leave out less" if without else "take a larger batch" if not fix else "fix less"
