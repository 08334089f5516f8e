"""The curves of a run's metrics by step, thinned to what a page can show, and sentences that say what is seen in them.

A curve has at most ``MOST_POINTS`` points. Of more rows, a point stands for several neighboring steps: their mean, with
their lowest and highest value, so that a single high step is still seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import isfinite
from statistics import fmean, median
from typing import Any, NamedTuple

from shardwright.formatting import format_bytes, format_count
from shardwright.report.pictures import MetricRows
from shardwright.report.training_runs import TrainingRun

MOST_POINTS = 500
"""The most points of a curve; a wide page has about two pixels for each."""

MOST_RANK_CURVES = 8
"""The number of ranks up to which the memory of each is a curve of its own."""

MOST_COLUMNS, MOST_LINES = 160, 256
"""The most columns (of steps) and lines (of ranks) of a map of memory."""

LEVELS = 64
"""The number of shades of a map of memory."""

_LOG_FROM = 200.0
"""The ratio of the highest and the median value from which an axis is logarithmic."""


class Curve(NamedTuple):
    """A line of a chart: a value for each step, and the lowest and highest of the steps that a point stands for.

    The line has a gap where a value is None. ``low`` and ``high`` are empty if a point is one step. ``style``
    is "line", "points" for values that few steps have, or "limit" for a line that bounds the others.
    """

    name: str
    steps: list[int]
    values: list[float | None]
    low: list[float]
    high: list[float]
    style: str = "line"


def points_of(rows: MetricRows, key: str) -> list[tuple[int, float]]:
    """Returns (step, value) of the rows in which ``key`` was measured and is finite."""
    points = ((row["step"], row.get(key)) for row in rows)
    return [(step, float(value)) for step, value in points if value is not None and isfinite(value)]


def curve_of(
    name: str, points: Sequence[tuple[int, float | None]], style: str = "line", most: int = MOST_POINTS
) -> Curve:
    """Returns the curve of (step, value) pairs in order of their steps, thinned to ``most`` points.

    A value may be None: there the line has a gap.

    >>> curve_of("loss", [(1, 4.0), (2, 2.0), (3, 3.0), (4, 1.0)], most=2)
    Curve(name='loss', steps=[2, 4], values=[3.0, 2.0], low=[2.0, 1.0], high=[4.0, 3.0], style='line')
    """
    if len(points) <= most:
        values = [None if value is None else short(value) for _, value in points]
        return Curve(name, [step for step, _ in points], values, [], [], style)
    ends = [points[end - 1][0] for _, end in thinned(len(points), most)]
    groups = [
        [value for _, value in points[first:end] if value is not None] for first, end in thinned(len(points), most)
    ]
    means = [short(fmean(group)) if group else None for group in groups]
    if not all(groups):
        return Curve(name, ends, means, [], [], style)
    lowest, highest = ([short(way(group)) for group in groups] for way in (min, max))
    return Curve(name, ends, means, lowest, highest, style)


def thinned(count: int, most: int) -> list[tuple[int, int]]:
    """Returns at most ``most`` ranges (first, end) of about equal length that cover ``count`` entries in order.

    >>> thinned(5, 2), thinned(2, 8)
    ([(0, 2), (2, 5)], [(0, 1), (1, 2)])
    """
    few = min(count, most)
    return [(n * count // few, (n + 1) * count // few) for n in range(few)]


def short(value: float) -> float:
    """Returns a number rounded to six significant digits, which are more than a page shows."""
    return float(f"{value:.6g}")


def is_log(values: Sequence[float]) -> bool:
    """Returns whether an axis of these values is better logarithmic: all are positive, and few are far above the rest.

    >>> is_log([1.0, 2.0, 3.0]), is_log([1.0, 2.0, 1e6])
    (False, True)
    """
    return bool(values) and min(values) > 0 and max(values) > _LOG_FROM * median(values)


# ---- memory of ranks


class MemoryMap(NamedTuple):
    """Memory by rank and step, as shades: ``cells`` has a line of text for each rank, with a letter for each column.

    A letter stands for a shade from "0" (``least_bytes``) on to the 64th (``most_bytes``); a blank for no such rank.
    ``steps`` are the last steps of the columns. Of more than 256 ranks, each line stands for ``ranks_in_line``.
    """

    steps: list[int]
    cells: list[str]
    least_bytes: int
    most_bytes: int
    num_ranks: int
    ranks_in_line: int


def memory_rows(rows: MetricRows) -> tuple[str, list[tuple[int, list[int]]]]:
    """Returns which memory the rows have, "held" or else "peak", and (step, bytes of each rank) of the rows with it."""
    for word, key in (("held", "held_bytes"), ("peak", "memory_bytes")):
        memory = [(row["step"], row[key]) for row in rows if row.get(key)]
        if memory:
            return word, memory
    return "peak", []


def peaks_of(rows: MetricRows) -> list[int]:
    """Returns the peak bytes of each rank in rows of one layout; empty if no row has them all."""
    peaks = [row["memory_bytes"] for row in rows if row.get("memory_bytes")]
    size = max(map(len, peaks), default=0)
    return [max(of_rank) for of_rank in zip(*(sizes for sizes in peaks if len(sizes) == size), strict=True)]


def memory_curves(rows: MetricRows) -> list[Curve]:
    """Returns the memory by step: of up to eight ranks a curve each, else of the most, the median and the least.

    A further curve has the highest peak of all ranks so far.
    """
    word, memory = memory_rows(rows)
    num_ranks = max((len(sizes) for _, sizes in memory), default=0)
    if not num_ranks:
        return []
    if num_ranks <= MOST_RANK_CURVES:
        named: list[tuple[str, list[tuple[int, float | None]]]] = [
            (f"rank {rank}", [(step, float(sizes[rank]) if rank < len(sizes) else None) for step, sizes in memory])
            for rank in range(num_ranks)
        ]
    else:
        ways: list[tuple[str, Any]] = [
            ("the rank with most", max), ("the median", median), ("the rank with least", min)
        ]  # fmt: skip
        named = [(name, [(step, float(way(sizes))) for step, sizes in memory]) for name, way in ways]
    curves = [curve_of(name, points) for name, points in named]
    if word == "held":
        curves.append(curve_of("highest peak so far", highest_peaks(rows), "limit"))
    return curves


def highest_peaks(rows: MetricRows) -> list[tuple[int, float]]:
    """Returns (step, highest peak bytes of any rank so far) of the rows that have peaks."""
    return [(row["step"], float(max(row["memory_bytes"]))) for row in rows if row.get("memory_bytes")]


def memory_map(rows: MetricRows) -> MemoryMap | None:
    """Returns the memory by rank and step as shades; None for up to eight ranks, whose curves show it."""
    _, memory = memory_rows(rows)
    num_ranks = max((len(sizes) for _, sizes in memory), default=0)
    if num_ranks <= MOST_RANK_CURVES:
        return None
    in_line = -(-num_ranks // MOST_LINES)
    columns = [[sizes for _, sizes in memory[first:end]] for first, end in thinned(len(memory), MOST_COLUMNS)]
    tops = [list(map(max, zip_longest(*column, fillvalue=-1))) for column in columns]  # -1: there is no such rank
    lines = []
    for first in range(0, num_ranks, in_line):
        line_tops = [max(top[first : first + in_line], default=-1) for top in tops]
        lines.append([value if value >= 0 else None for value in line_tops])
    values = [value for line in lines for value in line if value is not None]
    least, most = min(values), max(values)
    scale = (LEVELS - 1) / max(most - least, 1)
    cells = [
        "".join(" " if value is None else chr(48 + round((value - least) * scale)) for value in line) for line in lines
    ]
    ends = [memory[end - 1][0] for _, end in thinned(len(memory), MOST_COLUMNS)]
    return MemoryMap(ends, cells, least, most, num_ranks, in_line)


# ---- what is seen


def loss_seen(run: TrainingRun) -> str:
    """Returns sentences on the losses of a run: from where to where they go, and where the run was resumed."""
    losses = points_of(run.rows, "loss")
    if not losses:
        return "No step has a loss that is finite."
    text = f"Training loss {_moved(losses)}."
    lowest = min(losses, key=lambda point: point[1])
    if len(losses) > 2 and lowest not in (losses[0], losses[-1]):
        text = f"{text[:-1]}; the lowest is {number(lowest[1])} at step {lowest[0]:,}."
    evaluated = points_of(run.rows, "eval_loss")
    text += f" Evaluation loss{of_averages(run)} {_moved(evaluated)}." if evaluated else ""
    missing = [row["step"] for row in run.rows if row.get("loss") is None or not isfinite(row["loss"])]
    text += f" The loss of step {missing[0]:,} is not finite." if missing else ""
    return f"{text}{resumed_words(run)}"


def of_averages(run: TrainingRun) -> str:
    """Returns " of averages" if all parts of a run evaluated the averages (EMA) of its parameters, else ""."""
    return " of averages" if run.shown and all(part.options.get("ema") for part in run.shown) else ""


def resumed_words(run: TrainingRun) -> str:
    """Returns a sentence on where a run was resumed, and under which layouts; "" if it never was."""
    if not run.resumes:
        return ""
    few = [f"after step {step:,} under {layout}" for step, layout in run.resumes[:6]]
    if len(run.resumes) > len(few):
        few.append(f"{len(run.resumes) - len(few):,} times more")
    return f" Resumed {' and '.join([', '.join(few[:-1]), few[-1]] if few[1:] else few)}."


def throughput_unit(rows: MetricRows) -> str:
    """Returns what a run's throughput counts: "tokens", or "samples" if its targets are not one for each token."""
    return "tokens" if points_of(rows, "tokens_per_s") or not points_of(rows, "samples_per_s") else "samples"


def throughput_of(rows: MetricRows) -> tuple[str, list[float]]:
    """Returns what throughput counts ("tokens" or "samples"), and each step's throughput per second."""
    unit = throughput_unit(rows)
    return unit, [value for _, value in points_of(rows, f"{unit}_per_s")]


def throughput_seen(run: TrainingRun) -> str:
    """Returns a sentence on the median throughput of each part of a run."""
    phrases = []
    for part in run.shown:
        unit, speeds = throughput_of(part.rows)
        times = [value for _, value in points_of(part.rows, "step_ms")]
        if speeds:
            took = f", {number(median(times))} ms a step" if times else ""
            phrases.append(f"{format_count(median(speeds))} {unit}/s{took} under {part.layout} ({part.steps})")
    return f"Median: {'; '.join(phrases)}." if phrases else "Throughput was not measured."


def rate_seen(rows: MetricRows) -> str:
    """Returns a sentence on the learning rates of a run: from where to where they go, over the highest."""
    rates = points_of(rows, "lr")
    if not rates:
        return "The learning rate was not recorded."
    highest = max(rates, key=lambda point: point[1])
    first, last = rates[0], rates[-1]
    if first[1] == highest[1] == last[1]:
        return f"The learning rate is {number(first[1])} at each step."
    up = f"rises to {number(highest[1])} at step {highest[0]:,}" if highest[1] > first[1] else "is highest at first"
    return f"The learning rate {up}, and is {number(last[1])} at step {last[0]:,}."


def norm_seen(rows: MetricRows, clip: float) -> str:
    """Returns sentences on the gradient norms of a run, and on how many steps they were clipped."""
    norms = points_of(rows, "grad_norm")
    if not norms:
        return "The gradient norm was not measured: it is known where gradients are clipped (--clip)."
    highest, values = max(norms, key=lambda point: point[1]), [value for _, value in norms]
    text = f"The gradient norm is {number(median(values))} in the median, and {number(highest[1])} at most"
    text += f", at step {highest[0]:,}."
    clipped = sum(value > clip for value in values)
    return f"{text} {clipped:,} of {len(values):,} steps were clipped to {number(clip)}." if clip else text


def memory_seen(run: TrainingRun) -> str:
    """Returns sentences on the memory that ranks hold after the last step, and on the highest peak."""
    word, memory = memory_rows(run.rows)
    if not memory:
        return "Memory was not measured."
    step, last = memory[-1]
    peaks = [(max(peaks_of(part.rows)), part) for part in run.shown if peaks_of(part.rows)]
    text = f"After step {step:,}, {_ranks_hold(last)}." if word == "held" else ""
    if peaks:
        peak, part = max(peaks, key=lambda entry: entry[0])
        rank = peaks_of(part.rows).index(peak)
        text += f" The highest peak is {format_bytes(peak)}, on rank {rank} under {part.layout}."
    return text.strip()


def _ranks_hold(held: Sequence[int]) -> str:
    low, high = format_bytes(min(held)), format_bytes(max(held))
    if len(held) == 1:
        return f"the one rank holds {high}"
    if low == high:
        return f"each of {len(held):,} ranks holds {high}"
    return f"{len(held):,} ranks hold {low} (rank {held.index(min(held))}) to {high} (rank {held.index(max(held))})"


def _moved(points: Sequence[tuple[int, float]]) -> str:
    """Returns in words how a value moves from its first to its last step."""
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return f"is {number(first)} at step {first_step:,}"
    if number(first) == number(last):
        return f"is {number(first)} at step {first_step:,} and at step {last_step:,}"
    verb = "falls" if last < first else "rises"
    return f"{verb} from {number(first)} at step {first_step:,} to {number(last)} at step {last_step:,}"


def number(value: float) -> str:
    """Returns a number as text with four significant digits.

    >>> number(3.28055), number(0.00010088), number(41.0), number(123456.0)
    ('3.281', '0.0001009', '41', '123,500')
    """
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.4g}"
    rounded = float(f"{value:.4g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.4g}"


def samples_of(curves: Sequence[Curve], most: int = 10) -> tuple[list[int], list[Mapping[int, float]]]:
    """Returns a few steps, evenly spaced, and for each curve its values at or before them, by step.

    A chart's table shows them.
    """
    steps = sorted({step for curve in curves if curve.style == "line" for step in curve.steps})
    if not steps:
        return [], []
    few = [steps[round(n * (len(steps) - 1) / max(min(most, len(steps)) - 1, 1))] for n in range(min(most, len(steps)))]
    values = list[Mapping[int, float]]()
    for curve in curves:
        at: dict[int, float] = {}
        for low, step in zip([0, *few], few, strict=False):
            pairs = zip(curve.steps, curve.values, strict=True)
            inside = [value for s, value in pairs if (low < s <= step or s == step) and value is not None]
            if inside:
                at[step] = inside[-1]
        values.append(at)
    return few, values
