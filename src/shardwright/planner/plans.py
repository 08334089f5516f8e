"""``plan_layouts``: predicts what layouts of a model cost on a cluster, and which is best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from time import process_time
from types import MappingProxyType
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.kept_traces import traces_kept
from shardwright.analysis.marked_inputs import packed_in
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
from shardwright.planner.search import Recorder, host_fits, misfit_s, precision_of, search
from shardwright.planner.search_constraints import MOST_PRICED, SearchConstraints
from shardwright.planner.search_result import SearchResult
from shardwright.planner.short import ShortModel
from shardwright.planner.ways_out import ways_out

MOST_WHOLE, MOST_WHOLE_OF_FEW, FEW_BLOCKS = 4, 8, 32
"""The most stages that a search rehearses one by one, where they are not alike; of a model with few blocks; and how
many blocks are few.

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
    fewer axes and options.

    ``cluster`` may be text such as "a100-80gb:128x8". The global ``batch`` is (inputs, targets), or with
    ``loss=sw.ModelLoss()`` a mapping; only shapes and dtypes matter, and a condition on values, such as whether a mask
    is all ones, counts as true. ``loss`` is as in ``parallelize``, by default the cross entropy, and ``roles`` gives
    tensor-parallel roles to layers by name. A layout must have the parts of a line in ``fix`` ("tp8 dp/zero1") and no
    axis or option in ``without``. At most ``most_priced`` layouts are priced: more find better ones, and take longer. A
    search skips layouts with more than four pipeline stages that are not alike (eight in a model of 32 blocks or
    fewer), since each stage would have to be rehearsed.
    ``memory_limit`` is the share of a device's memory that a layout may take; layouts above it come last.
    ``anchors`` are runs on this cluster with this batch, as seconds of a step by layout line: they correct all prices.
    ``top`` is how many layouts tables list, and ``tokens`` is the number of tokens of the batch, for tokens per second:
    by default the elements of the inputs' first tensor if that is 2-D and of integers, else the samples. ``keep_in`` is
    a folder for what rehearsals find: a later plan of the same model, code and samples, on any cluster, finds it there.
    A search that finds no layout that fits also looks at more devices and shorter sequences, for the plans'
    ``ways_out``, unless ``look_further`` is false.

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
    began, spent = process_time(), [0.0]
    rows_of = [mark.shapes for mark in packed_in(batch)]  # samples differ in nothing else
    kept = RecordsFile.of(keep_in, model, loss, first_rows(batch, 1), rows_of, cluster.device.type, dict(roles))
    model_plans = ModelPlans(model, few_inputs(batch), kept)

    def record(each: Layout, samples: int, most_whole: int | None = None, given: Any = None) -> LayoutRecords:
        start = process_time()
        rows = first_rows(batch if given is None else given, samples)

        def rehearsed() -> LayoutRecords:
            job = job_for(model, loss, each, rows[0], tokens_of(rows[0], each), roles)
            if job.graph is not None and (job.graph.reads_values or job.graph.selects_by_values):
                kept.forget()  # a file is that of shapes
            return record_layout(job, each, rows, cluster.device.type, most_whole=most_whole, model_plans=model_plans)

        # of other samples than those of the batch nothing is kept
        records = rehearsed() if given is not None else kept.find(("layout", str(each), samples, most_whole), rehearsed)
        spent[0] += process_time() - start
        return records

    pricing, ways = Pricing(cluster, model_plans.kind), tuple[str, ...]()
    known = [(_priced_anchor(line, s, pricing, num_samples, record), s) for line, s in anchors.items()]
    scale, limit = scale_of(known), cluster.device.memory_bytes * memory_limit
    if layout is not None:
        check_ranks(layout, cluster)
        check_samples(layout, num_samples)
        records = record(layout, num_samples)
        layouts, found = [pricing.price(records.layout, records)], SearchResult()
    else:
        short = ShortModel(model, loss, batch, cluster.device.type, roles, model_plans, kept)
        precision = next((each for each in get_args(Precision) if each in fix.split()), precision_of(cluster))
        wanted = SearchConstraints(fix, tuple(without), precision, limit, most_priced, short.most_stages)
        num_blocks = short.blocks.number if short.blocks is not None else 0
        most_whole = MOST_WHOLE_OF_FEW if 0 < num_blocks <= FEW_BLOCKS else MOST_WHOLE
        rehearsed = partial(record, most_whole=most_whole)
        found = search(pricing, num_samples, rehearsed, wanted, short)
        layouts = [*found.fit, *found.misfits]
        if not layouts:
            raise found.failure or _none_found(cluster, found, fix, without)
        one = replace(wanted, most=1, most_to_fit=3)
        ways = () if found.fit or not look_further else tuple(ways_out(
            min(found.misfits, key=lambda each: each.memory_bytes), cluster, batch, limit,
            lambda more: search(Pricing(more, model_plans.kind), num_samples, rehearsed, one, short),
            lambda each, given: pricing.price(each, record(each, num_samples, given=given)),
        ))  # fmt: skip
    kept.save()
    seconds = {"records": spent[0], "search": process_time() - began - spent[0]}
    priced = sorted((scale.of(each) for each in layouts), key=lambda each: _rank(each, limit, cluster))
    fit = [each for each in priced if not _rank(each, limit, cluster)[0]]
    if fit:
        priced = [*simplest_first(fit), *priced[len(fit) :]]
    num_tokens = tokens or _num_tokens(batch[0])
    sizes = Counter[torch.dtype]()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    (dtype, _), *_ = sizes.most_common(1) or [(torch.float32, 0)]
    narrow = str(dtype).removeprefix("torch.") if dtype.is_floating_point and dtype.itemsize < 4 else ""
    return Plans(
        cluster, tuple(priced), num_samples, num_tokens, memory_limit, seconds, found, scale, top, ways, sizes.total(),
        narrow,
    )  # fmt: skip


def _pair(batch: Any, loss: nn.Module) -> tuple[Any, Any]:
    """Returns the inputs and targets of a batch; of one whose labels the model reads, all of it and the labels."""
    return next(pairs([batch], loss.pair if isinstance(loss, ModelLoss) else None))


def _num_tokens(inputs: Any) -> int:
    """Returns the tokens of a batch if its first input is a 2-D tensor of integers, and else its samples."""
    first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return first.numel() if first.dim() == 2 and not first.is_floating_point() else len(first)


def _rank(price: Price, limit: float, cluster: Cluster) -> tuple[bool, float]:
    """Returns what prices are sorted by: those that fit by their seconds, then the others by :func:`misfit_s`."""
    fits = price.memory_bytes <= limit and host_fits(price, cluster) is not False
    return not fits, price.step_s if fits else misfit_s(price, limit)


def _priced_anchor(line: str, measured_s: float, pricing: Pricing, batch: int, record: Recorder) -> Price:
    """Returns the price of a layout that has run.

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
    """Returns what to change so that there are layouts: the fixed part that left out most, with the nearest layout."""
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
    if len(refused) == len(found.rejected) > 0:  # the model refuses each: what most of the errors say
        return next(iter(refused.values()))
    return "leave out less" if without else "take a larger batch" if not fix else "fix less"
