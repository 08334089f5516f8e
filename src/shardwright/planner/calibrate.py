"""``calibrate``: measures this machine through the library's own code, and returns a cluster file with the results.

Measured constants replace guesses. The file also has what the formulas cannot know: a factor for each operator and for
the class of the model's blocks, and the seconds of messages by size. Nothing is fitted to the step of a whole layout.
"""

from __future__ import annotations

import os
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import psutil
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright import devices
from shardwright.comm.launch import launch
from shardwright.comm.limits import Ranks
from shardwright.comm.recorder import ring_factor
from shardwright.cost.calibration import MOST_SPREAD, num_hops
from shardwright.cost.cluster import Cluster
from shardwright.cost.constants import Constants
from shardwright.cost.device import Device, figures_of, profile, profiles
from shardwright.cost.operators import TILE, OperatorRecord, operator_s
from shardwright.errors import PlanError
from shardwright.initial_values import without_values
from shardwright.layout import Layout, Precision
from shardwright.nodes import Nodes
from shardwright.parallelize.auto import num_shares, tokens_of
from shardwright.parallelize.planning import job_for, num_rows, rows
from shardwright.planner.measuring import (
    TINY,
    CalibrationJob,
    Measurements,
    measure_rank,
    shortened,
    tiny_batch,
    tiny_model,
)
from shardwright.planner.outline import ModelPlans
from shardwright.planner.price import Pricing
from shardwright.planner.records import record_layout
from shardwright.planner.stopwatch import Timing

LIMIT_S = 70.0
"""The seconds after which ranks begin no further measurement; with their start, a calibration takes 90 s."""

GUESSED_GB_PER_S = 1.0
"""The bandwidth of a link that neither was measured nor is in a profile."""

LEAST_OPERATOR_S = 2e-6
"""An operator that takes fewer seconds a call gets no factor, since most of its time is that of its launch."""


@dataclass(frozen=True)
class CalibratedCluster:
    """A calibrated cluster: the table of its TOML file, and what was measured."""

    table: Mapping[str, Any]
    measurements: Measurements

    @property
    def spread(self) -> Mapping[str, float]:
        """By kind of measurement, such as "messages", the median of the :class:`Timing` spreads of that kind."""
        spread: Mapping[str, float] = self.table["spread"]
        return spread

    @property
    def cluster(self) -> Cluster:
        """The cluster that ``plan --cluster`` reads from the file."""
        return Cluster.of_table("calibrated.toml", tomllib.loads(self.text()))

    def check_spread(self) -> None:
        """Raises PlanError if a kind of measurement spreads by more than :data:`MOST_SPREAD`."""
        wide = {name: spread for name, spread in self.spread.items() if spread > MOST_SPREAD}
        if wide:
            raise PlanError(
                "what was measured spreads too far to be relied on",
                given=", ".join(f"{name} {spread:.0%}" for name, spread in wide.items()),
                allowed=f"a spread (of the middle half of ten runs) up to {MOST_SPREAD:.0%}",
                fix="end other programs on the machine and measure again, or save it all the same with --force",
            )

    def text(self) -> str:
        """Returns the cluster file as TOML."""
        return toml_text(self.table)

    def summary(self) -> str:
        """Returns the measured figures, factors and messages as text for a terminal."""
        cluster, constants = self.cluster, self.cluster.constants
        lines = [
            f"{cluster}, {self.table['source']}",
            f"  products          {cluster.device.peak('fp32') / 1e9:.4g} GFLOP/s in fp32 at most; efficiency "
            f"{constants.matmul_efficiency:.2f}, half of it at {constants.half_depth:.0f} summed elements",
            f"  memory            {cluster.device.memory_bytes_per_s / 1e9:.3g} GB/s, of which operators reach "
            f"{constants.memory_efficiency:.0%}",
            f"  an operator       starts in {_time(constants.launch_s)}; beside them a step takes "
            f"{_time(constants.step_s)}",
        ]
        blocks = ", ".join(f"{name} {factor:.2f}" for name, factor in cluster.calibration.blocks.items())
        lines.append(f"  together          {blocks or 'not measured'} times as long as operators alone")
        for link in cluster.calibration.links:
            pairs = [*zip(link.num_bytes, link.seconds, strict=True)]
            ends = ", ".join(
                f"{size / 2**20:.3g} MiB in {_time(seconds)}" for size, seconds in pairs[:: max(1, len(pairs) - 1)]
            )
            lines.append(f"  {link.kind:17} {link.ranks} ranks: {ends}")
        lines.append("  spread            " + ", ".join(f"{name} {value:.0%}" for name, value in self.spread.items()))
        return "\n".join([*lines, *(f"  note: {note}" for note in cluster.calibration.notes)])


def calibrate(
    build: Callable[[], Any], batch: tuple[Any, Any], layout: Layout | str, *, ranks: Ranks = "processes",
    base: str = "", limit_s: float = LIMIT_S,
) -> CalibratedCluster:  # fmt: skip
    """Measures this machine as the ranks of ``layout`` use it, and returns a cluster that ``plan`` takes.

    ``build`` returns a model and its loss, and maybe more; with ranks as processes it is pickled. A few of the model's
    repeated blocks are trained, on as many samples of the global ``batch`` (inputs, targets) as a microbatch has.
    ``base`` names the profile of the accelerator, from which figures that are not measured are taken; by default it is
    the profile that matches the accelerator's name and memory, and none on CPUs. What does not fit into ``limit_s``
    seconds is not measured, and the cluster's notes say so.

    Raises: LayoutError, PlanError: as of ``launch``; there is no profile ``base``; or the model cannot be rehearsed.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    samples = max(1, num_rows(batch) // num_shares(layout))
    few: tuple[Any, Any] = rows(batch[0], 0, samples), rows(batch[1], 0, samples)
    on_accelerator = devices.accelerator() != "cpu" and ranks == "processes"
    device_type = devices.wanted() if on_accelerator else "cpu"
    known = _profile_of_this(base) if on_accelerator or base else None
    precision: Precision = "fp32"
    if known is not None and device_type != "cpu":
        precision = "bf16" if dict(known.peaks).get("bf16") else "fp16"
    job = CalibrationJob(build, few, layout, precision, limit_s)
    measurements: Measurements = launch(measure_rank, layout, job, ranks=ranks)[0]
    return CalibratedCluster(_table(job, measurements, known, device_type, ranks), measurements)


def _table(
    job: CalibrationJob, found: Measurements, known: Device | None, device_type: str, ranks: Ranks
) -> dict[str, Any]:
    """Returns the table of the cluster file: figures and constants, then the factors, which are computed with them."""
    nodes = _nodes(job.layout)
    figures, sources, constants = _figures(job, found, known, device_type)
    table: dict[str, Any] = {
        "type": device_type, "source": f"measured by shardwright calibrate, {job.layout.num_ranks} ranks as {ranks}",
        "nodes": str(nodes), "ranks": ranks, **figures, "sources": sources,
        "constants": {"source": "measured", **constants},
    }  # fmt: skip
    links, link_constants, notes = _links(found, nodes, known, table)
    table["constants"].update(link_constants)
    table["links"] = links
    table["operators"] = _operator_factors(found, _cluster(table))
    step_constants, table["blocks"] = _step_constants(job, found, _cluster(table))
    table["constants"].update(step_constants)
    if any(call.timing is None for call in found.calls) or not found.products or not found.steps:
        notes.append("the time limit left out some measurements; factors that are missing are 1")
    table["notes"] = notes
    table["spread"] = _spread(found)
    return table


def _cluster(table: Mapping[str, Any]) -> Cluster:
    return Cluster.of_table("calibrated.toml", table)


def _nodes(layout: Layout) -> Nodes:
    return Nodes.of_environment(os.environ, layout.num_ranks) or Nodes(1, layout.num_ranks)


def _profile_of_this(base: str) -> Device | None:
    """Returns the profile called ``base``, or that of this machine's accelerator; None if none matches its name."""
    if base:
        return profile(base)
    (name,) = devices.names()[:1] or [""]
    total = devices.total_bytes() / max(1, devices.count())
    matches = [profile(profile_name) for profile_name in profiles() if profile_name.partition("-")[0] in name.lower()]
    return min(matches, key=lambda device: abs(device.memory_bytes - total), default=None)


# ---- figures and constants


def _within(constants: Mapping[str, float]) -> dict[str, float]:
    """Returns the constants, limited to their bounds; ``plan`` warns of most constants that are at a bound."""
    bounds = {row["name"]: row["bounds"] for row in Constants().rows()}
    return {name: min(max(value, bounds[name][0]), bounds[name][1]) for name, value in constants.items()}


def _figures(
    job: CalibrationJob, found: Measurements, known: Device | None, device_type: str
) -> tuple[dict[str, Any], dict[str, str], dict[str, float]]:
    """Returns the device's figures, their sources, and the constants of products, of memory and of overlap."""
    rates = [2 * m * n * k / timing.seconds for (m, n, k), timing in found.products]
    copied = [2 * size / timing.seconds for size, timing in found.copies]
    if known is not None:
        figures = figures_of(known)
        sources: dict[str, str] = {}
    else:
        memory = devices.total_bytes() / max(1, devices.count()) if device_type != "cpu" else _memory_of_rank(job)
        figures = {
            "memory_GB": memory / 1e9, "memory_GB_per_s": max(copied, default=GUESSED_GB_PER_S * 1e9) / 1e9,
            "num_multiprocessors": devices.num_multiprocessors() if device_type != "cpu" else 1,
            "in_node_GB_per_s": GUESSED_GB_PER_S, "between_nodes_GB_per_s": GUESSED_GB_PER_S,
            "peak_TFLOP_per_s": {"fp32": max(rates, default=5e10) / 1e12},
        }  # fmt: skip
        if job.precision != "fp32":
            figures["peak_TFLOP_per_s"][job.precision] = figures["peak_TFLOP_per_s"]["fp32"]
        sources = {"peak_fp32": "measured" if rates else "guess", "memory": "measured",
                   "memory_bandwidth": "measured" if copied else "guess", "in_node": "guess",
                   "between_nodes": "guess"}  # fmt: skip
    constants: dict[str, float] = {}
    peaks = figures["peak_TFLOP_per_s"]
    peak = peaks.get(job.precision, peaks["fp32"]) * 1e12
    if rates:
        efficiency, depth = _fitted_products(found.products, peak, figures["num_multiprocessors"])
        constants |= {"matmul_efficiency": efficiency, "half_depth": depth}
    if copied:
        constants["memory_efficiency"] = copied[-1] / (figures["memory_GB_per_s"] * 1e9)
        constants["traffic_share"] = 1.0
    if found.overlap is not None:
        constants["overlap_cost"] = found.overlap
    return figures, sources, _within(constants)


def _memory_of_rank(job: CalibrationJob) -> float:
    return float(psutil.virtual_memory().total) / _nodes(job.layout).ranks_per_node


def _fitted_products(
    products: Sequence[tuple[tuple[int, int, int], Timing]], peak: float, num_multiprocessors: int
) -> tuple[float, float]:
    """Returns the efficiency e of products and the summed dim k0 at which they reach half of it.

    A product of summed dim k is taken to need y = 1/e + (k0/e) / k times as long as at the peak of the multiprocessors
    that its tiles fill. The fit minimizes the sum of the squared relative errors of y.

    >>> timing = lambda m, n, k: Timing(2 * m * n * k / (1e9 * 0.8 * k / (k + 50)), 0.0, 10)
    >>> e, k0 = _fitted_products([((m, 64, k), timing(m, 64, k)) for m, k in ((64, 32), (128, 64), (64, 512))], 1e9, 1)
    >>> round(e, 6), round(k0, 3)
    (0.8, 50.0)
    """
    aa = ab = bb = ra = rb = 0.0
    for (m, n, k), timing in products:
        tiles = ceil(m / TILE) * ceil(n / TILE)
        filled = tiles / (num_multiprocessors * ceil(tiles / num_multiprocessors))
        y = peak * filled * timing.seconds / (2 * m * n * k)
        a, b = 1 / y, 1 / k / y
        aa, ab, bb, ra, rb = aa + a * a, ab + a * b, bb + b * b, ra + a, rb + b
    det = aa * bb - ab * ab
    first, second = ((ra * bb - rb * ab) / det, (rb * aa - ra * ab) / det) if det > 1e-12 * aa * bb else (ra / aa, 0.0)
    if second < 0 or first <= 0:
        first, second = ra / aa, 0.0
    return 1 / first, second / first


def _links(
    found: Measurements, nodes: Nodes, known: Device | None, table: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, float], list[str]]:
    """Returns rows of measured messages, the constants of links, and notes.

    Without a profile, it also writes the measured bandwidth of each link into ``table``.
    """
    rows_of: dict[tuple[str, str], dict[str, Any]] = {}
    for link in found.links:
        crosses = (link.ranks - 1) * link.stride >= nodes.ranks_per_node
        row = rows_of.setdefault((link.axis, link.kind), {
            "kind": link.kind, "tier": "between" if crosses else "in_node", "ranks": link.ranks, "stride": link.stride,
            "bytes": [], "seconds": [],
        })  # fmt: skip
        row["bytes"].append(link.num_bytes)
        row["seconds"].append(link.timing.seconds)
    constants: dict[str, float] = {}
    for tier, prefix, figure in (("in_node", "in_node", "in_node"), ("between", "between", "between_nodes")):
        sums = [message for message in rows_of.values() if message["tier"] == tier and message["kind"] == "all_reduce"]
        if not sums:
            continue
        row = sums[0]
        # between nodes, a ring has one rank of each node; the other ranks of a node have rings of their own, which run
        # at the same time, each with its part of the sum
        size, in_node = row["ranks"], 1
        by_node = Counter(rank * row["stride"] // nodes.ranks_per_node for rank in range(row["ranks"]))
        if tier == "between" and min(by_node.values()) > 1:
            size, in_node = len(by_node), min(by_node.values())
        inside_s = num_hops("all_reduce", in_node) * constants.get("in_node_hop_s", Constants().in_node_hop_s)
        constants[f"{prefix}_hop_s"] = max(0.0, row["seconds"][0] - inside_s) / num_hops("all_reduce", size)
        sent = float(ring_factor("all_reduce", size)) * row["bytes"][-1] / in_node
        bandwidth = sent / max(1e-9, row["seconds"][-1] - row["seconds"][0])
        if known is None:
            table[f"{figure}_GB_per_s"] = bandwidth / 1e9
            table["sources"][figure] = "measured"
            constants[f"{prefix}_efficiency"] = 1.0
        else:
            constants[f"{prefix}_efficiency"] = bandwidth / (table[f"{figure}_GB_per_s"] * 1e9)
    notes = []
    if not found.links:
        why = (
            "the time limit left them out" if nodes.num_nodes * nodes.ranks_per_node > 1 else "there was no second rank"
        )
        notes.append(f"links are those of the profile, and were not measured: {why}")
    return list(rows_of.values()), _within(constants), notes


# ---- steps


class StepParts(NamedTuple):
    """A step by the formulas: seconds and launches of operators in the forward and backward, and in the update."""

    passes_s: float
    starts: int
    update_s: float
    update_starts: int


def _by_formula(
    cluster: Cluster, model: nn.Module, loss: nn.Module, batch: tuple[Any, Any], precision: Precision
) -> StepParts:
    """Returns what a model's step on one rank takes by the formulas and by the factors that ``cluster`` has already."""
    layout = Layout((), 1, precision)
    few: tuple[Any, Any] = tree_map_only(Tensor, lambda t: t.to("meta"), batch)
    job = job_for(model, loss, layout, few[0], tokens_of(few[0], layout))
    records = record_layout(job, layout, few, cluster.device.type, whole=True)
    pricing, stage = Pricing(cluster), records.stages[0].fewer
    passes, update = (
        [record for shape in shapes for record in shape.records if isinstance(record, OperatorRecord)]
        for shapes in (stage.actions.values(), [stage.update])
    )
    return StepParts(
        sum(map(pricing.operator_s, passes)), sum(record.launches for record in passes),
        sum(map(pricing.operator_s, update)), sum(record.launches for record in update),
    )  # fmt: skip


def _step_constants(
    job: CalibrationJob, found: Measurements, cluster: Cluster
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the constants of a step, and how many times as long its operators take together as alone.

    The second result has a factor for the class of the model's blocks and one for "optimizer". Steps of two tiny models
    with different numbers of blocks give the seconds to launch an operator, and those of a step beside its operators.
    Launches take longer in the model itself, since kernels of other operators run between them. So where the host
    computes, its steps on one sample and on more are compared too: the part that does not grow is that of launches.
    """
    constants: dict[str, float] = {}
    with without_values():
        model, loss = job.build()[:2]
    if len(found.tiny) == len(TINY):
        with without_values():
            models = [tiny_model(number) for number in TINY]
        tiny = [_by_formula(cluster, small_model, loss, tiny_batch(), "fp32") for small_model in models]
        few, more = tiny
        passes = [step.passes.seconds - parts.passes_s for step, parts in zip(found.tiny, tiny, strict=True)]
        update = [step.update.seconds - parts.update_s for step, parts in zip(found.tiny, tiny, strict=True)]
        constants["launch_s"] = (passes[1] - passes[0]) / (more.starts - few.starts)
        constants["update_launch_s"] = (update[1] - update[0]) / (more.update_starts - few.update_starts)
        constants["step_s"] = passes[0] - few.starts * constants["launch_s"]
    once_s = _within(constants).get("step_s", Constants().step_s)
    if not found.steps:
        return _within(constants), {}
    with without_values():
        short = shortened(model, found.steps[-1].blocks)
    batches = [(rows(job.batch[0], 0, step.samples), rows(job.batch[1], 0, step.samples)) for step in found.steps]
    parts = [_by_formula(cluster, short, loss, batch, job.precision) for batch in batches]
    passes = [step.passes.seconds - once_s for step in found.steps]
    on_host = cluster.device.type in devices.HOST
    if len(parts) > 1 and on_host:
        factor = (passes[1] - passes[0]) / (parts[1].passes_s - parts[0].passes_s)
        started = [s - factor * part.passes_s for s, part in zip(passes, parts, strict=True)]
        constants["launch_s"] = max(started[0] / parts[0].starts, constants.get("launch_s", 0.0))
    bounded = Constants().with_values("measured", **_within(constants))

    def left(seconds: float, started_s: float) -> float:
        """Returns the seconds of a step's operators, without those of their launches."""
        if on_host:
            return max(0.0, seconds - started_s)
        return float(max(0.0, seconds**4 - started_s**4) ** 0.25)  # the inverse of smooth_max

    last, update_s = parts[-1], found.steps[-1].update.seconds
    together = {
        ModelPlans(model).kind: left(passes[-1], last.starts * bounded.launch_s) / last.passes_s,
        "optimizer": left(update_s, last.update_starts * bounded.update_launch_s) / last.update_s,
    }
    return _within(constants), together


def _operator_factors(found: Measurements, cluster: Cluster) -> dict[str, float]:
    """Returns by operator name the measured seconds divided by those of the formulas, both without launches.

    Operators that take less than :data:`LEAST_OPERATOR_S` a call are left out.
    """
    start_s = found.start.seconds if found.start is not None else 0.0
    measured: dict[str, list[tuple[float, float]]] = {}
    for call in found.calls:
        if call.timing is not None:
            alone_s = max(0.0, call.timing.seconds - start_s)
            formula_s = operator_s(call.operator, cluster.device, cluster.constants)
            measured.setdefault(call.operator.name, []).append((call.times * alone_s, call.times * formula_s))
    factors = {}
    for name, pairs in measured.items():
        alone, formula = (sum(column) for column in zip(*pairs, strict=True))
        times = sum(call.times for call in found.calls if call.operator.name == name)
        if max(alone, formula) / times > LEAST_OPERATOR_S and formula > 0:
            factors[name] = alone / formula
    return factors


def _time(seconds: float) -> str:
    """Returns seconds as text, with a unit that suits them.

    >>> _time(2.5e-6), _time(0.0312)
    ('2.5 us', '31.2 ms')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _spread(found: Measurements) -> dict[str, float]:
    kinds: dict[str, list[Timing | None]] = {
        "products": [timing for _, timing in found.products], "memory": [timing for _, timing in found.copies],
        "starts": [found.start, *(step.passes for step in found.tiny)],
        "operators": [call.timing for call in found.calls],
        "block": [timing for step in found.steps for timing in (step.passes, step.update)],
        "messages": [link.timing for link in found.links],
    }  # fmt: skip
    spreads = {name: [timing.spread for timing in timings if timing is not None] for name, timings in kinds.items()}
    return {name: statistics.median(values) for name, values in spreads.items() if values}


# ---- TOML


def toml_text(table: Mapping[str, Any]) -> str:
    """Returns a table as TOML: plain values first, then tables, then lists of tables.

    >>> print(toml_text({"links": [{"kind": "send"}], "nodes": "1x2", "blocks": {"a::b": 1.5}}))
    nodes = "1x2"
    <BLANKLINE>
    [blocks]
    "a::b" = 1.5
    <BLANKLINE>
    [[links]]
    kind = "send"
    <BLANKLINE>
    """
    plain, tables, lists = list[str](), list[str](), list[str]()
    for key, value in table.items():
        if isinstance(value, Mapping):
            tables += ["", f"[{key}]", *(f"{_key(name)} = {_value(entry)}" for name, entry in value.items())]
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for row in value:
                lists += ["", f"[[{key}]]", *(f"{_key(name)} = {_value(entry)}" for name, entry in row.items())]
        else:
            plain.append(f"{_key(key)} = {_value(value)}")
    return "\n".join([*plain, *tables, *lists, ""])


def _key(name: str) -> str:
    return name if name.replace("_", "").isalnum() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
