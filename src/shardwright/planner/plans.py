"""``plan_layouts``: predicts what layouts of a model cost on a cluster, and reports the prices as data and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from time import process_time
from types import MappingProxyType
from typing import Any, get_args

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.kept_traces import traces_kept
from shardwright.analysis.marked_inputs import packed_in
from shardwright.axes import layout_axes, mesh_axes
from shardwright.cost.calibration import MOST_SPREAD
from shardwright.cost.cluster import Cluster
from shardwright.cost.constants import SLOW_START_S
from shardwright.devices import HOST
from shardwright.errors import LayoutError, PlanError, fix_for
from shardwright.formatting import format_decimal_bytes, format_duration
from shardwright.garbage_collection import collection_paused
from shardwright.layout import Layout, Precision
from shardwright.models.given_loss import loss_for
from shardwright.models.model_loss import ModelLoss
from shardwright.parallelize.auto import num_shares, tokens_of
from shardwright.parallelize.batches import pairs
from shardwright.parallelize.planning import job_for, num_rows
from shardwright.planner.anchors import MOST_ANCHORED, UNKNOWN, UNMEASURED, StepTimes, TimeScale, scale_of
from shardwright.planner.explain import (
    PriceDifference,
    how_much_slower,
    name_of_part,
    simplest_first,
    waterfall_lines,
    where_it_loses,
)
from shardwright.planner.memory import host_bytes, offloaded_bytes
from shardwright.planner.outline import ModelPlans
from shardwright.planner.price import LEFT, Price, Pricing
from shardwright.planner.records import LayoutRecords, first_rows, record_layout
from shardwright.planner.records_file import RecordsFile
from shardwright.planner.search import (
    MOST_PRICED,
    TOO_LONG,
    Recorder,
    SearchConstraints,
    SearchResult,
    host_fits,
    nearness,
    precision_of,
    search,
)
from shardwright.planner.short import ShortModel
from shardwright.planner.ways_out import ways_out
from shardwright.strategies import STRATEGIES

GUESSED = ("matmul_efficiency", "memory_efficiency", "overlap_cost")
"""Constants that text names where they are guesses; data have all."""

NATURAL_BOUNDS = ("overlap_cost", "in_node_efficiency", "between_efficiency", "step_s")
"""Constants of which the least and the largest value are as likely as others, so that they are not warned of."""

MOST_WHOLE = 4
"""The most stages that a search rehearses one by one, where they are not alike."""

UTILISATION = 0.4
"""The share of the peak that the baseline takes every layout to reach."""


@dataclass(frozen=True, repr=False)
class Plans:
    """The predicted prices of layouts on a cluster, the best layout first; ``print`` shows them as the command does.

    ``batch`` is the number of samples and ``tokens`` that of tokens in a global batch. ``memory_limit`` is the share of
    a device's memory that a layout may take. ``seconds`` has the CPU seconds that the prediction took: "records" for
    rehearsals, and "search" for the rest.
    """

    cluster: Cluster
    layouts: tuple[Price, ...]
    batch: int
    tokens: int
    memory_limit: float = LEFT
    seconds: Mapping[str, float] = field(default_factory=dict)
    found: SearchResult = field(default_factory=SearchResult)
    """What the search looked at and left out; empty for one layout alone."""
    scale: TimeScale = field(default_factory=TimeScale)
    """The factors by which the user's measured runs (anchors) have corrected the prices; 1 without any."""
    top: int | None = None
    """The most layouts that tables list; ``layouts`` has all."""
    ways_out: tuple[str, ...] = ()
    """What to change so that a layout fits, where none of a search does, as sentences."""
    num_parameters: int = 0
    """The elements of all parameters of the model; one that several modules share counts once."""

    def __repr__(self) -> str:
        return f"Plans({self.cluster}, {len(self.layouts)} layouts, best '{self.best.layout}')"

    def __str__(self) -> str:
        return self.text()

    def interval(self, step_s: float) -> tuple[float, float]:
        """Returns the seconds between which nine in ten measured steps lie, for the predicted ``step_s``.

        Where nothing was measured on the machine, they are those of published runs of another library, all longer than
        predicted: then even the lower end is above ``step_s``.
        """
        if not self.is_measured:
            return step_s * self._published.low, step_s * self._published.high
        return step_s / (1 + self.scale.error), step_s / (1 - self.scale.error)

    def expected_s(self, step_s: float) -> float:
        """Returns the seconds to reckon with for a step of which the parts add up to ``step_s``; see :meth:`interval`.

        Where nothing was measured on the machine, half of the published runs took longer and half less, as multiples of
        what is predicted; else they are ``step_s``.
        """
        return step_s if self.is_measured else step_s * self._published.median

    @property
    def _published(self) -> StepTimes:
        return UNMEASURED.get(self.cluster.device.name, UNKNOWN)

    @property
    def is_measured(self) -> bool:
        """Whether some constants were measured on the cluster, or fitted to runs there that were given as anchors."""
        return self.scale != TimeScale() or bool({row["source"] for row in self.constants()} & {"measured", "fitted"})

    @property
    def _knows_starts(self) -> bool:
        """Whether the seconds to start an operator are known, or do not matter, since the host itself computes."""
        return self.cluster.device.type in HOST or "launch_s" in self.cluster.constants.sources

    @property
    def listed(self) -> tuple[Price, ...]:
        """The best layouts, at most ``top`` of them; all if ``top`` is None."""
        return self.layouts[: self.top]

    @property
    def best(self) -> Price:
        """The price of the best layout, whose ``layout`` can be passed to ``parallelize``.

        If none that was priced fits the memory limit, it is the nearest: of the least memory, and not much slower.
        """
        return self.layouts[0]

    def to_dict(self) -> dict[str, Any]:
        """Returns the listed prices and the summary of the search as plain data for JSON."""
        rest = self.layouts[1:]
        return {
            "cluster": str(self.cluster), "num_parameters": self.num_parameters,
            "layouts": [self.row(each) for each in self.listed],
            "runner_up": str(rest[0].layout) if rest and self.fits(rest[0]) else None,
            "searched": self.found.searched or len(self.layouts), "priced": self.found.priced or len(self.layouts),
            "simulated": self.found.priced or len(self.layouts),
            "unpriced": self.found.unpriced,
            "fit": len(self.found.fit) if self.found.searched else sum(map(self.fits, self.layouts)),
            "rejected": self.rejected(), "ways_out": list(self.ways_out),
            "seconds": dict(self.seconds), "baseline_step_s": self.baseline_s(self.best),
            "constants": self.constants(), "warnings": self.warnings(),
            "notes": [f"{name}: {said}" for name, said in self.notes()],
        }  # fmt: skip

    def rejected(self) -> list[dict[str, Any]]:
        """Returns why layouts were left out, the most frequent reason first.

        Each entry has the ``reason``, the ``count`` of layouts and, as ``nearest``, the first layout left out for it;
        ``detail`` says what the constraint is for that layout, or is "".
        """
        found = self.found
        return [
            {"reason": why, "count": n, "nearest": found.nearest[why], "detail": found.details.get(why, "")}
            for why, n in found.rejected.most_common()
        ]

    def fits(self, price: Price) -> bool:
        """Returns whether a layout fits the memory of a device, and what it offloads the memory of a node's host.

        What it offloads fits a host whose memory is not known.
        """
        return price.fits(self.cluster.device.memory_bytes, self.memory_limit) and self.host_fits(price) is not False

    def host_fits(self, price: Price) -> bool | None:
        """Returns whether a node's host has the memory for what its ranks offload to it; None if that is not known."""
        return host_fits(price, self.cluster)

    def baseline_s(self, price: Price) -> float:
        """Returns the seconds of a step at 40 % of the device's peak FLOP/s, as a baseline."""
        return price.flops / (self.cluster.device.peak(price.layout.precision) * UTILISATION)

    def utilisation(self, price: Price) -> float:
        """Returns the model FLOPs utilization: the share of the device's peak FLOP/s that the expected step reaches.

        Recomputed FLOPs are not counted.
        """
        return price.flops / (self.cluster.device.peak(price.layout.precision) * self.expected_s(price.step_s))

    def row(self, price: Price) -> dict[str, Any]:
        """Returns one layout's price as plain data for JSON: seconds by part, memory, traffic, and whether it fits."""
        heaviest = max(price.memory, key=lambda each: each.num_bytes)
        stage = price.memory.index(heaviest)
        axes = [axis for axis in layout_axes() if axis in price.waterfall]
        low, high = self.interval(price.step_s)
        expected_s = self.expected_s(price.step_s)
        return {
            "layout": str(price.layout), "step_s": price.step_s, "step_s_expected": expected_s, "step_s_low": low,
            "step_s_high": high, "tokens_per_s": self.tokens / expected_s,
            "utilisation": self.utilisation(price), "memory_bytes": price.memory_bytes,
            "memory_rank": price.layout.mesh.first_rank(mesh_axes("stages"), stage),
            "memory_by_kind": {**heaviest.by_kind, "beside tensors": heaviest.beside},
            "memory_by_stage": [each.num_bytes for each in price.memory],
            "offloaded_bytes": offloaded_bytes(price.records),
            "host_bytes": host_bytes(price.records, self.cluster.nodes.ranks_per_node),
            "traffic_bytes": sum(price.traffic_by_axis.values()), "traffic_by_axis": dict(price.traffic_by_axis),
            "exposed_s_by_axis": {axis: price.waterfall[axis] for axis in axes}, "bubble": price.bubble,
            "waterfall": dict(price.waterfall), "limit": self.limit(price), "fits": self.fits(price),
            "why": self.why(price), "rehearsals": price.records.num_rehearsals,
        }  # fmt: skip

    def compare(self, price: Price) -> PriceDifference:
        """Returns the comparison of a layout with the best one, which says why it is slower or does not fit.

        ``price`` may come from another call, such as ``plan_layouts(..., layout=LINE).best``.
        """
        return PriceDifference(self.best, price, self.cluster.device.memory_bytes * self.memory_limit)

    def limit(self, price: Price) -> str:
        """Returns the name of the longest part of a layout's step, such as "matmul", or "memory" if it does not fit.

        "memory" is also the name of a part: the operators limited by memory bandwidth.
        """
        if not self.fits(price):
            return "memory"
        return max(price.waterfall, key=lambda name: price.waterfall[name])

    def why(self, price: Price) -> str:
        """Returns one sentence about a layout: the expected step with its range, memory, and share of the peak FLOP/s.

        The sentence ends with where the constants come from, and begins with "does not fit" if the layout does not.
        """
        low, high = self.interval(price.step_s)
        known = (
            "some constants measured or from your runs"
            if self.is_measured
            else f"its parts add up to {price.step_s:.3g} s, by the datasheet and guesses, which published runs on "
            f"{self._published.runs_on} exceeded; never measured on {self.cluster.device.name} with this library"
        )
        nothing = "" if self.fits(price) else "does not fit: "
        return (
            f"{nothing}{price.layout}: expect {self.expected_s(price.step_s):.3g} s a step ({low:.3g} to {high:.3g}), "
            f"{price.memory_bytes / 1e9:.3g} of {self.cluster.device.memory_bytes / 1e9:.3g} GB, "
            f"{self.utilisation(price):.0%} of peak; {known}"
        )

    def constants(self) -> list[dict[str, Any]]:
        """Returns every constant behind the prices as a row: its name, value, unit, meaning and source.

        The peaks, memory and bandwidths of the device's profile come first, with the datasheet as their meaning.
        Factors from anchors other than 1 come last.
        """
        device = self.cluster.device
        figures = [(f"peak_{name}", peak, "FLOP/s") for name, peak in device.peaks]
        figures += [("memory", device.memory_bytes, "B"), ("memory_bandwidth", device.memory_bytes_per_s, "B/s"),
                    ("in_node", device.in_node_bytes_per_s, "B/s"),
                    ("between_nodes", device.between_nodes_bytes_per_s, "B/s"),
                    ("host", device.host_bytes_per_s, "B/s")]  # fmt: skip
        sources = self.cluster.calibration.sources
        rows = [{"name": n, "value": v, "unit": u, "meaning": device.source, "source": sources.get(n, "datasheet")}
                for n, v, u in figures]  # fmt: skip
        scale = [{"name": f"anchored_{name}", "value": value, "unit": "times", "meaning": "from runs given as anchors",
                  "source": "fitted"}
                 for name, value in (("operators", self.scale.operators), ("messages", self.scale.messages))
                 if value != 1.0]  # fmt: skip
        return [*rows, *self.cluster.constants.rows(), *scale]

    def warnings(self) -> list[str]:
        """Returns what to know before trusting the prices, as sentences.

        The warnings are about unlikely figures of the device, layouts priced without extrapolation from few blocks,
        stages with several chunks, and activations that are offloaded, of which the time is not priced.
        """
        whole: dict[str, list[Layout]] = {}
        for each in self.layouts:
            if each.records.note:
                whole.setdefault(each.records.note, []).append(each.layout)
        notes = [f"{', '.join(map(str, layouts))}: {said}" for said, layouts in whole.items()]
        chunked = [e.layout for e in self.layouts if e.records.schedule.num_chunks > e.records.schedule.num_stages]
        offloading = [e.layout for e in self.layouts if (e.layout.recompute or "").startswith("offload")]
        for layouts, said in (
            (chunked, "memory of several chunks on a stage is 3 % off at most where it was compared"),
            (offloading, "copies of offloaded activations are not priced; the step may take longer"),
        ):
            notes += [f"{', '.join(map(str, layouts))}: {said}"] * bool(layouts)
        notes += [
            f"the constant {row['name']} is at its bound of {row['value']:g} {row['unit']}: what was measured or "
            "fitted is not what it stands for"
            for row in self.cluster.constants.rows()
            if row["source"] in ("measured", "fitted")
            and row["value"] in row["bounds"]
            and row["name"] not in NATURAL_BOUNDS
        ]
        if max(self.scale.operators, self.scale.messages) > MOST_ANCHORED:
            notes.append(
                f"runs given as anchors took {max(self.scale.operators, self.scale.messages):.3g} times as long as "
                "predicted: give the seconds "
                "of one step, of this model and batch, on this cluster"
            )
        notes += [f"{name} of the cluster file were measured with a spread of {spread:.0%}: measure again at rest"
                  for name, spread in self.cluster.calibration.spread.items() if spread > MOST_SPREAD]  # fmt: skip
        return [*self.cluster.device.warnings, *self.cluster.calibration.notes, *dict.fromkeys(notes)]

    def text(self) -> str:
        """Returns the prices as text for a terminal.

        The text has a sentence about the best layout, a table of the listed ones, the best one's seconds by part,
        memory, traffic and baseline, the runner-up, what was left out, and warnings.
        """
        best = self.best
        nearest = f"nothing that was priced fits {self.memory_limit:.0%} of the memory; the nearest is"
        lines = [
            *([] if self.fits(best) else [nearest]),
            *self.why(best).replace("; ", ";\n  ", 1).splitlines(),
            f"model             {self.num_parameters:,} parameters; a step has {self.batch:,} samples"
            + f", {self.tokens:,} tokens" * (self.tokens > self.batch),
            *(f"what would fit    {each}" for each in self._ways_out()),
            *self._table(),
            "",
            *waterfall_lines(best.waterfall, best.step_s),
        ]
        if not self.is_measured:
            expected, times = self.expected_s(best.step_s), self._published.median
            lines.append(f"  {'expected':20} {expected:>7.3g} s  {times:.2f} times that, the median of published runs")
        lines.append("")
        stages = ", ".join(f"{each.num_bytes / 1e9:.3g}" for each in best.memory)
        limit = self.cluster.device.memory_bytes * self.memory_limit / 1e9
        lines.append(f"memory by stage   {stages} GB; limit {limit:.3g}")
        heaviest = max(best.memory, key=lambda each: each.num_bytes)
        kinds = ", ".join(f"{kind} {format_decimal_bytes(size)}" for kind, size in heaviest.by_kind.items() if size)
        lines.append(f"  the most        {kinds}, beside tensors {format_decimal_bytes(heaviest.beside)}")
        sent = ", ".join(f"{axis} {format_decimal_bytes(size)}" for axis, size in best.traffic_by_axis.items())
        lines.append(f"traffic by axis   {sent or 'nothing'}")
        lines.append(f"baseline          {format_duration(self.baseline_s(best))} at {UTILISATION:.0%} of peak")
        lines += [*(f"{name:17} {said}" for name, said in self.notes()), *self._rest()]
        lines += [f"warning: {each}" for each in self.warnings()]
        return "\n".join(lines)

    def _ways_out(self) -> tuple[str, ...]:
        alone = not self.found.searched and not self.fits(self.best)
        return ("without --layout a search looks for a layout that fits",) if alone else self.ways_out

    def _table(self) -> list[str]:
        if len(self.listed) < 2:
            return []
        width = max(len(str(each.layout)) for each in self.listed)
        rows = [f"  {'layout':{width}}  {'expected':>8}    {'memory':>9}  peak"]
        for each in self.listed:
            said = f"mostly {name_of_part(self.limit(each))}" if self.fits(each) else "does not fit"
            rows.append(
                f"  {each.layout!s:{width}}  {self.expected_s(each.step_s):>8.3g} s  "
                f"{each.memory_bytes / 1e9:>6.3g} GB  {self.utilisation(each):>4.0%}  {said}"
            )
        return ["", *rows]

    def _offloaded(self) -> Iterator[str]:
        """Yields what the best layout offloads, and whether a node's host has the memory for it."""
        each_rank, in_node = offloaded_bytes(self.best.records), self.cluster.nodes.ranks_per_node
        of_node = host_bytes(self.best.records, in_node)
        if each_rank and not of_node:
            yield f"{format_decimal_bytes(each_rank)} on disk for each rank"
        if not of_node:
            return
        has = self.cluster.device.host_memory_bytes
        known = "whether it has as much is not known: host_memory_GB of a cluster file says it"
        if has is not None:
            known = f"{'not ' * bool(self.host_fits(self.best))}more than the {format_decimal_bytes(has)} that it has"
        held, of_all = format_decimal_bytes(each_rank), format_decimal_bytes(of_node)
        yield f"{held} of host memory for each rank, {of_all} on a node of {in_node}; {known}"

    def notes(self) -> list[tuple[str, str]]:
        """Returns what to know of the prices, each as a word and a text.

        They say what the best layout offloads and where to, where the interval comes from, which constants are guesses,
        how long a slow host would take, and under which layouts gradients are summed in other dtypes.
        """
        found = [("offloaded", each) for each in self._offloaded()]
        if self.found.unpriced:
            found.append((
                "not priced", f"{self.found.unpriced:,} that might be better: if their estimates were "
                f"{TOO_LONG - 1:.0%} too long, as those of a GPT of 13 B were at most, they would be faster than the "
                f"best price; --most-priced {2 * self.found.priced} prices more of them",
            ))  # fmt: skip
        if not self.is_measured:
            times = self._published
            found.append((
                "interval", f"published runs of another library on {times.runs_on} took longer than predicted: "
                f"nine in ten {times.low:.2f} to {times.high:.2f} times as long, half over {times.median:.2f} times",
            ))  # fmt: skip
            guessed = [row for row in self.cluster.constants.rows() if row["name"] in GUESSED]
            said = ", ".join(f"{row['name']} {row['value']:g}" for row in guessed)
            found.append(("guesses", f"{said}, the same for every accelerator"))
        host_s = SLOW_START_S * self.best.starts
        if host_s > self.best.step_s and not self._knows_starts:
            found.append((
                "host", f"it starts {self.best.starts:,.0f} operators a step: {format_duration(host_s)} where Python "
                f"starts one in {SLOW_START_S * 1e6:.0f} us, as beside an H100 that was measured, and the step is no "
                "shorter there; larger microbatches start fewer, and calibrate measures the host",
            ))  # fmt: skip
        narrow = [each.layout for each in self.listed if each.records.has_narrow_sums]
        if narrow:
            dtypes = " or ".join(sorted({layout.precision for layout in narrow}))
            others = ", in fp32 or not at all under the others listed" * (len(narrow) < len(self.listed))
            found.append((
                "gradients", f"of microbatches are summed in {dtypes} under {', '.join(map(str, narrow))}{others}; "
                "with the option fp32-sums, as dp2/zero1/fp32-sums, in fp32 too",
            ))  # fmt: skip
        return found

    def _rest(self) -> list[str]:
        """Returns lines about the runner-up, and what was left out and why."""
        lines = []
        if len(self.layouts) > 1 and self.fits(self.layouts[1]):
            second = self.layouts[1]
            lines.append(f"runner-up         {second.layout}: {how_much_slower(self.best, second)}, "
                         f"{where_it_loses(self.best, second)}")  # fmt: skip
        for each in self.rejected():
            detail = f" ({each['detail']})" * bool(each["detail"])
            lines.append(f"left out          {each['count']:,}: {each['reason']}, such as {each['nearest']}{detail}")
        return lines


@collection_paused()
@traces_kept()
def plan_layouts(
    model: nn.Module, cluster: Cluster | str, batch: Any, *, loss: Any = None,
    layout: Layout | str | None = None, fix: str = "", without: Sequence[str] = (), top: int = 10,
    most_priced: int = MOST_PRICED, anchors: Mapping[str, float] = MappingProxyType({}), tokens: int = 0,
    memory_limit: float = LEFT,
    roles: Mapping[str, str] = MappingProxyType({}), keep_in: Path | str | None = None,
) -> Plans:  # fmt: skip
    """Returns the predicted cost of layouts of a model on a cluster, the best first, or of ``layout`` alone.

    Of layouts that fit and are within one percent of the fastest, the simplest comes first: it does not offload, or has
    fewer axes and options.

    ``cluster`` may be text such as "a100-80gb:128x8". The global ``batch`` is (inputs, targets), or with
    ``loss=sw.ModelLoss()`` a mapping; only shapes and dtypes matter, and a condition on values, such as whether a mask
    is all ones, counts as true. ``loss`` is as in ``parallelize``, by default the cross entropy, and ``roles`` gives
    tensor-parallel roles to layers by name. A layout must have the parts of a line in ``fix`` ("tp8 dp/zero1") and no
    axis or option in ``without``. At most ``most_priced`` layouts are priced: more find better ones, and take longer. A
    search skips layouts with more than four pipeline stages that are not alike, since each stage would have to be
    rehearsed. ``memory_limit`` is the share of a device's memory that a layout may take; layouts above it come last.
    ``anchors`` are runs on this cluster with this batch, as seconds of a step by layout line: they correct all prices.
    ``top`` is how many layouts tables list, and ``tokens`` is the number of tokens of the batch, for tokens per second:
    by default the elements of the inputs' first tensor if that is 2-D and of integers, else the samples. ``keep_in`` is
    a folder for what rehearsals find: a later plan of the same model, code and samples, on any cluster, finds it there.

    Raises: LayoutError: ``layout`` or an anchor's is no layout line, is for another number of ranks than the cluster,
        or does not fit the model or the batch; or a search finds no layout. PlanError: the batch is neither a pair nor
        such a mapping; the cluster's text or file is wrong, or gives no nodes without a ``layout``; ``without`` has an
        unknown word; ``fix`` or ``without`` is given beside ``layout``; or the model does not run on the meta device
        under ``layout`` or an anchor's layout.

    >>> import torch
    >>> model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    >>> batch = torch.ones(16, 64), torch.zeros(16, dtype=torch.int64)
    >>> plans = plan_layouts(model, "a100-80gb:1x2", batch, layout="dp2 bf16")
    >>> sum(plans.best.waterfall.values()) == plans.best.step_s, plans.best.traffic_by_axis
    (True, {'dp': 49920})
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    _check_words(layout, fix, without)
    cluster = Cluster.parse(cluster, layout.num_ranks if layout else None) if isinstance(cluster, str) else cluster
    loss = loss_for(loss, model)
    batch = _pair(batch, loss)
    began, spent, model_plans = process_time(), [0.0], ModelPlans(model)
    rows_of = [mark.shapes for mark in packed_in(batch)]  # samples differ in nothing else
    kept = RecordsFile.of(keep_in, model, loss, first_rows(batch, 1), rows_of, cluster.device.type, dict(roles))

    def record(each: Layout, samples: int, most_whole: int | None = None, given: Any = None) -> LayoutRecords:
        start = process_time()
        rows = first_rows(batch if given is None else given, samples)

        def rehearsed() -> LayoutRecords:
            job = job_for(model, loss, each, rows[0], tokens_of(rows[0], each), roles)
            if job.graph is not None and job.graph.reads_values:
                kept.forget()  # a file is that of shapes
            return record_layout(job, each, rows, cluster.device.type, most_whole=most_whole, model_plans=model_plans)

        # of other samples than those of the batch nothing is kept
        records = rehearsed() if given is not None else kept.find(("layout", str(each), samples, most_whole), rehearsed)
        spent[0] += process_time() - start
        return records

    num_samples, pricing, ways = num_rows(batch), Pricing(cluster, model_plans.kind), tuple[str, ...]()
    known = [(_priced_anchor(line, s, pricing, num_samples, record), s) for line, s in anchors.items()]
    scale, limit = scale_of(known), cluster.device.memory_bytes * memory_limit
    if layout is not None:
        _check_ranks(layout, cluster)
        check_samples(layout, num_samples)
        records = record(layout, num_samples)
        layouts, found = [pricing.price(records.layout, records)], SearchResult()
    else:
        short = ShortModel(model, loss, batch, cluster.device.type, roles, model_plans, kept)
        precision = next((each for each in get_args(Precision) if each in fix.split()), precision_of(cluster))
        wanted = SearchConstraints(fix, tuple(without), precision, limit, most_priced, short.most_stages)
        found = search(pricing, num_samples, partial(record, most_whole=MOST_WHOLE), wanted, short)
        layouts = [*found.fit, *found.misfits]
        if not layouts:
            raise found.failure or _none_found(cluster, found, fix, without)
        rehearsed, one = partial(record, most_whole=MOST_WHOLE), replace(wanted, most=1, most_to_fit=3)
        ways = () if found.fit else tuple(ways_out(
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
    size = sum(parameter.numel() for parameter in model.parameters())
    return Plans(cluster, tuple(priced), num_samples, num_tokens, memory_limit, seconds, found, scale, top, ways, size)


def _pair(batch: Any, loss: nn.Module) -> tuple[Any, Any]:
    """Returns the inputs and targets of a batch; of one whose labels the model reads, all of it and the labels."""
    return next(pairs([batch], loss.pair if isinstance(loss, ModelLoss) else None))


def _num_tokens(inputs: Any) -> int:
    """Returns the tokens of a batch if its first input is a 2-D tensor of integers, and else its samples."""
    first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return first.numel() if first.dim() == 2 and not first.is_floating_point() else len(first)


def _rank(price: Price, limit: float, cluster: Cluster) -> tuple[bool, float]:
    """Returns what prices are sorted by: those that fit by their seconds, then the others by :func:`nearness`."""
    fits = price.memory_bytes <= limit and host_fits(price, cluster) is not False
    return not fits, price.step_s if fits else nearness(price, limit)


def _priced_anchor(line: str, measured_s: float, pricing: Pricing, batch: int, record: Recorder) -> Price:
    """Returns the price of a layout that has run.

    Raises: LayoutError: it cannot be on this cluster with this batch. PlanError: its step takes fewer seconds than the
        model's FLOPs do at the device's peak.
    """
    layout = Layout.parse(line)
    _check_ranks(layout, pricing.cluster)
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


def _check_ranks(layout: Layout, cluster: Cluster) -> None:
    if layout.num_ranks != cluster.num_ranks:
        raise LayoutError(
            "the cluster has another number of ranks than the layout",
            given=f"{layout}: {layout.num_ranks} ranks on {cluster}: {cluster.num_ranks}",
            allowed=f"layouts for {cluster.num_ranks} ranks",
            fix=f"write --cluster {cluster.with_ranks(layout.num_ranks)}",
        )


def _check_words(layout: Layout | None, fix: str, without: Sequence[str]) -> None:
    """Raises PlanError for words to leave out that name nothing, and for what a search alone reads."""
    if layout is not None and (fix or without):
        raise PlanError(
            "a layout that is given is not searched",
            given=f"{layout}, fix '{fix}', without '{','.join(without)}'",
            allowed="a layout, or parts that must hold and words to leave out",
            fix="leave out --fix and --without",
        )
    known = {*layout_axes(), *(name for each in STRATEGIES.values() for name in each.options), "recompute", "mb"}
    for word in without:
        head = word.partition(":")[0]
        if head not in known and head.rstrip("0123456789x") not in known:
            raise PlanError(
                "no axis and no option has this name",
                given=word,
                allowed=", ".join(sorted(known)),
                fix=fix_for(head, sorted(known)),
            )


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
    fixed = Counter({why: n for why, n in found.rejected.items() if why.startswith("--fix")})
    if fixed:
        ((why, _),) = fixed.most_common(1)
        part = why.removeprefix("--fix: not ").removeprefix("--fix ").partition(":")[0]
        sizes = part.partition("/")[0].lstrip("abcdefghijklmnopqrstuvwxyz").split("x")
        number = prod(map(int, sizes)) if all(map(str.isdecimal, sizes)) and not part.startswith("mb") else 1
        uneven = f"{number} does not divide {num_ranks} ranks, and " if not number or num_ranks % number else ""
        return f"leave out '{part}' of --fix: {uneven}{found.nearest[why]} can be looked at without it"
    return "leave out less" if without else "take a larger batch" if not fix else "fix less"


def check_samples(layout: Layout, batch: int) -> None:
    """Raises LayoutError for a batch with fewer samples than model copies times microbatches."""
    shares = num_shares(layout)
    if batch < shares:
        raise LayoutError(
            "the batch is smaller than the parts that it is cut into",
            given=f"{batch} samples under {layout}: {shares // layout.num_microbatches} model copies, "
            f"{layout.num_microbatches} microbatches each",
            allowed=f"{shares} samples or more, or fewer copies and microbatches",
            fix=f"write --batch {shares}",
        )
