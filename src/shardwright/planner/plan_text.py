"""Says in text what ``plan`` has found: the best layout's seconds and memory, a table of others, notes and warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shardwright.cost.calibration import MOST_SPREAD
from shardwright.cost.constants import SLOW_START_S, Constants
from shardwright.devices import HOST
from shardwright.formatting import format_decimal_bytes, format_duration
from shardwright.layout import Layout
from shardwright.planner.anchors import FITTED, INTERVAL, MOST_ANCHORED
from shardwright.planner.estimate import TOO_LONG
from shardwright.planner.explain import TIED, how_much_slower, name_of_part, waterfall_lines, where_it_loses
from shardwright.planner.memory import host_bytes, offloaded_bytes
from shardwright.planner.price import UTILISATION, Price

if TYPE_CHECKING:
    from shardwright.planner.plan_results import Plans

GUESSED = ("matmul_efficiency", "memory_efficiency", "overlap_cost")
"""The constants that text names if they are guesses; data have all constants with their sources."""

MEMORY_ON_CPUS, MEMORY_ON_CARD = 0.001, 0.003
"""The largest relative errors of predicted memory in the newest rows of the benchmarks ``ledger`` and ``gpu``."""

NATURAL_BOUNDS = ("overlap_cost", "in_node_efficiency", "between_efficiency", "step_s")
"""Constants whose least and largest values are as likely as others, so that no warning is given of these values."""


def warnings_of(plans: Plans) -> list[str]:
    """Returns what to know before trusting the prices, as sentences.

    The warnings are about unlikely figures of the device, layouts priced without extrapolation from few blocks, stages
    with several chunks, offloaded activations, whose copies are not priced, constants at their bounds, precisions
    without a peak, anchors far from the prediction, and measurements with a large spread.
    """
    whole: dict[str, list[Layout]] = {}
    for price in plans.layouts:
        if price.records.note:
            whole.setdefault(price.records.note, []).append(price.layout)
    notes = [f"{', '.join(map(str, layouts))}: {said}" for said, layouts in whole.items()]
    chunked = [price.layout for price in plans.layouts if _has_several_chunks(price)]
    offloading = [e.layout for e in plans.layouts if (e.layout.recompute or "").startswith("offload")]
    for layouts, said in (
        (chunked, "memory of several chunks on a stage is 3 % off at most where it was compared"),
        (offloading, "copies of offloaded activations are not priced; the step may take longer"),
    ):
        notes += [f"{', '.join(map(str, layouts))}: {said}"] * bool(layouts)
    usual = {row["name"]: row["value"] for row in Constants().rows()}
    notes += [
        f"the constant {row['name']} is at its bound of {row['value']:g} {row['unit']}: what was measured, "
        "fitted or given is not what it stands for"
        for row in plans.cluster.constants.rows()
        if (row["source"] in ("measured", "fitted") or row["value"] != usual[row["name"]])
        and row["value"] in row["bounds"]
        and row["name"] not in NATURAL_BOUNDS
    ]
    lacking = {price.layout.precision for price in plans.layouts} - {name for name, _ in plans.cluster.device.peaks}
    notes += [f"{plans.cluster.device.name} has no peak in {name}: such layouts are priced at that in fp32"
              for name in sorted(lacking)]  # fmt: skip
    most = max(plans.scale.factors)
    if most > MOST_ANCHORED:
        notes.append(
            f"runs given as anchors took {most:.3g} times as long as predicted: give the seconds of one step, of this "
            "model and batch, on this cluster"
        )
    notes += [f"{name} of the cluster file were measured with a spread of {spread:.0%}: measure again at rest"
              for name, spread in plans.cluster.calibration.spread.items() if spread > MOST_SPREAD]  # fmt: skip
    return [*plans.cluster.device.warnings, *plans.cluster.calibration.notes, *dict.fromkeys(notes)]


def text_of(plans: Plans) -> str:
    """Returns the prices as text for a terminal.

    The text has a sentence about the best layout, a table of the listed ones, the best one's seconds by part, memory,
    traffic and baseline, notes, the runner-up, what was left out, and warnings.
    """
    best = plans.best
    nearest = f"nothing that was priced fits {100 * plans.memory_limit:.3g} % of the memory; the nearest is"
    lines = [
        *([] if plans.fits(best) else [nearest]),
        *plans.why(best).replace("; ", ";\n  ", 1).splitlines(),
        f"model             {plans.num_parameters:,} parameters; a step has {plans.batch:,} samples"
        + f", {plans.tokens:,} tokens" * (plans.tokens > plans.batch),
        *(f"what would fit    {way}" for way in _ways_out(plans)),
        *_table(plans),
        "",
        *waterfall_lines(best.waterfall, best.step_s),
    ]
    if plans.published is not None:
        expected, times = plans.expected_s(best.step_s), plans.published.median
        lines.append(f"  {'expected':20} {expected:>7.3g} s  {times:.2f} times that, the median of published runs")
    lines.append("")
    stages = ", ".join(f"{memory.num_bytes / 1e9:.3g}" for memory in best.memory)
    limit = plans.cluster.device.memory_bytes * plans.memory_limit / 1e9
    lines.append(f"memory by stage   {stages} GB; limit {limit:.3g}")
    heaviest = max(best.memory, key=lambda memory: memory.num_bytes)
    kinds = ", ".join(f"{kind} {format_decimal_bytes(size)}" for kind, size in heaviest.by_kind.items() if size)
    lines.append(f"  the most        {kinds}, beside tensors {format_decimal_bytes(heaviest.beside)}")
    sent = ", ".join(f"{axis} {format_decimal_bytes(size)}" for axis, size in best.traffic_by_axis.items())
    lines.append(f"traffic by axis   {sent or 'nothing'}")
    lines.append(f"baseline          {plans.baseline_s(best):.3g} s at {UTILISATION:.0%} of peak")
    lines += [*(f"{name:17} {said}" for name, said in notes_of(plans)), *_rest(plans)]
    lines += [f"warning: {warning}" for warning in warnings_of(plans)]
    return "\n".join(lines)


def _has_several_chunks(price: Price) -> bool:
    """Returns whether stages of a layout have several chunks; a warning says how far their memory was off."""
    return price.records.schedule.num_chunks > price.records.schedule.num_stages


def _ways_out(plans: Plans) -> tuple[str, ...]:
    alone = not plans.found.searched and not plans.fits(plans.best)
    return plans.ways_out or ("without --layout a search looks for a layout that fits",) * alone


def _table(plans: Plans) -> list[str]:
    if len(plans.listed) < 2:
        return []
    width = max(len(str(price.layout)) for price in plans.listed)
    rows = [f"  {'layout':{width}}  {'expected':>8}    {'memory':>9}  peak"]
    for price in plans.listed:
        said = f"mostly {name_of_part(plans.limit(price))}" if plans.fits(price) else "does not fit"
        rows.append(
            f"  {price.layout!s:{width}}  {plans.expected_s(price.step_s):>8.3g} s  "
            f"{price.memory_bytes / 1e9:>6.3g} GB  {plans.utilisation(price):>4.0%}  {said}"
        )
    return ["", *rows]


def _offloaded(plans: Plans) -> Iterator[str]:
    """Yields what the best layout offloads, and whether a node's host has the memory for it."""
    each_rank, in_node = offloaded_bytes(plans.best.records), plans.cluster.nodes.ranks_per_node
    of_node = host_bytes(plans.best.records, in_node)
    if each_rank and not of_node:
        yield f"{format_decimal_bytes(each_rank)} on disk for each rank"
    if not of_node:
        return
    has = plans.cluster.device.host_memory_bytes
    known = "whether it has as much is not known: host_memory_GB of a cluster file says it"
    if has is not None:
        known = f"{'not ' * bool(plans.host_fits(plans.best))}more than the {format_decimal_bytes(has)} that it has"
    held, of_all = format_decimal_bytes(each_rank), format_decimal_bytes(of_node)
    yield f"{held} of host memory for each rank, {of_all} on a node of {in_node}; {known}"


def _assumed_network(plans: Plans) -> Iterator[str]:
    """Yields a note that the bandwidth between nodes is assumed, if there are several nodes and no file gives it."""
    device, sources = plans.cluster.device, plans.cluster.calibration.sources
    if plans.cluster.nodes.num_nodes > 1 and device.assumes_network and sources.get("between_nodes") != "measured":
        yield (
            f"{device.between_nodes_bytes_per_s / 1e9:g} GB/s of each accelerator to other nodes are assumed: no "
            "datasheet has it; between_nodes_GB_per_s of a cluster file gives that of yours, and calibrate measures it"
        )


def _of_published_runs(plans: Plans) -> Iterator[tuple[str, str]]:
    """Yields notes, as a word and a text, on the interval of published runs, and on fitted and guessed constants."""
    if plans.is_measured:
        return
    times, constants, usual = plans.published, plans.cluster.constants, Constants()
    is_fitted = times is not None and times.is_fitted
    if times is not None:
        runs = f"published runs of another library on {times.runs_on}, all of eight ranks in one node under dp8/zero3"
        took = f"{times.low:.2f} to {times.high:.2f} times as long"
        fitted = f"{runs}: nine in ten took {took} as predicted; {INTERVAL:.0%} either way at least"
        yield "interval", fitted if is_fitted else f"{runs}, took longer than predicted: nine in ten {took}"

    def named(names: Iterable[str]) -> str:
        return ", ".join(f"{name} {getattr(constants, name):g}" for name in names)

    if is_fitted:
        yield "fitted", f"{named(FITTED)}, to those runs; kernels of other versions are faster or slower"
    guessed = [
        name for name in GUESSED
        if not (is_fitted and name in FITTED) and getattr(constants, name) == getattr(usual, name)
    ]  # fmt: skip
    if guessed:
        yield "guesses", f"{named(guessed)}, the same for every accelerator"


def notes_of(plans: Plans) -> list[tuple[str, str]]:
    """Returns what to know of the prices, each as a word and a text.

    They say what the best layout offloads and where to, how many likely layouts were not priced, where the interval
    comes from, which constants are guesses, that the network is assumed, how far predictions of memory were off, how
    long a slow host would take, that the model's weights are in a narrow dtype, and under which layouts gradients are
    summed in one.
    """
    notes = [("offloaded", text) for text in _offloaded(plans)]
    if plans.found.unpriced:
        notes.append((
            "not priced", f"{plans.found.unpriced:,} layouts whose estimates are less than {TOO_LONG - 1:.0%} above "
            "the best price: one of them may be faster, since estimates of a GPT of 13 B were off by as much; "
            f"--most-priced {2 * max(plans.found.priced, plans.found.most)} prices more of them",
        ))  # fmt: skip
    notes += _of_published_runs(plans)
    notes += [("network", text) for text in _assumed_network(plans)]
    if plans.cluster.device.type not in HOST and not _has_several_chunks(plans.best):
        notes.append((
            "memory", f"of tensors is counted in a rehearsed step, and was within {MEMORY_ON_CPUS:.1%} of what a small "
            f"GPT held on CPUs under dp and ZeRO, and {MEMORY_ON_CARD:.1%} in one run on an H100; what lies beside "
            "tensors is an estimate, and several cards were never compared",
        ))  # fmt: skip
    host_s = plans.host_s(plans.best)
    if host_s:
        notes.append((
            "host", f"it starts {plans.best.starts:,.0f} operators a step: {format_duration(host_s)} where Python "
            f"starts one in {SLOW_START_S * 1e6:.0f} us, as beside an H100 that was measured, and the step is no "
            "shorter there; larger microbatches start fewer, and calibrate measures the host",
        ))  # fmt: skip
    if plans.narrow:
        notes.append((
            "weights", f"the parameters of the model that was given are {plans.narrow}, so AdamW updates them in it, "
            "without master weights in float32; of a model built in float32 the layout's precision makes both",
        ))  # fmt: skip
    narrow = [price.layout for price in plans.listed if price.records.has_narrow_sums]
    if narrow:
        dtypes = " or ".join(sorted({layout.precision for layout in narrow}))
        others = ", in fp32 or not at all under the others listed" * (len(narrow) < len(plans.listed))
        notes.append((
            "gradients", f"of microbatches are summed in {dtypes} under {', '.join(map(str, narrow))}{others}; "
            "with the option fp32-sums, as dp2/zero1/fp32-sums, in fp32 too",
        ))  # fmt: skip
    return notes


def _rest(plans: Plans) -> list[str]:
    """Returns lines about the runner-up, and what was left out and why."""
    lines = []
    if len(plans.layouts) > 1 and plans.fits(plans.layouts[1]):
        second = plans.layouts[1]
        off = second.step_s / plans.best.step_s - 1
        tie = f"; a difference under {TIED:.0%} says nothing about which is faster" if 0 < abs(off) < TIED else ""
        lines.append(f"runner-up         {second.layout}: {how_much_slower(plans.best, second)}, "
                     f"{where_it_loses(plans.best, second)}{tie}")  # fmt: skip
    for entry in plans.rejected():
        detail = f" ({entry['detail']})" * bool(entry["detail"])
        lines.append(f"left out          {entry['count']:,}: {entry['reason']}, such as {entry['nearest']}{detail}")
    return lines
