"""The page of a training run: one HTML file with charts of its metrics, the layout of each part, and its options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.formatting import format_bytes, format_count, format_duration, format_seconds
from shardwright.report.charts import Bar, Chart, bar_list, chart_section, map_section, shared_names
from shardwright.report.curves import (
    curve_of,
    loss_seen,
    memory_curves,
    memory_map,
    memory_rows,
    memory_seen,
    norm_seen,
    number,
    of_averages,
    peaks_of,
    points_of,
    rate_seen,
    throughput_of,
    throughput_seen,
    throughput_unit,
)
from shardwright.report.layout_sections import layout_html, layout_words
from shardwright.report.page import details, fact_list, html_table, section, write_html
from shardwright.report.training_runs import TrainingPart, TrainingRun


def write_run_page(path: Path, run: TrainingRun) -> Path:
    """Writes the page of a training run to ``path`` and returns the path.

    It has the run's key figures, charts of its metrics by step, predicted figures beside measured ones where the run
    has them, the layout of each of its parts, and all of its options. The file opens without a network and follows the
    reader's light or dark setting. What the run has not measured is left out, or said to be missing.
    """
    sections = [
        _problems(run), _summary(run), *_parts(run), *_charts(run), *_predicted(run), *_layouts(run), _about(run),
    ]  # fmt: skip
    last = run.last
    under = " &middot; ".join(
        [f"<code>{escape(str(last.options[key]))}</code>" for key in ("model", "data") if last.options.get(key)]
        + [_started(part) for part in run.parts[:1] if part.facts.get("started")]
    )
    title = f"{last.options.get('model', 'A run')} under {run.layouts}" if run.layouts else run.name
    return write_html(path, title=title, under=under, sections=sections, parts=("chart", "timeline"))


MOST_OPEN = 2
"""The number of layouts up to which all of them are shown at once; of more, the last one, and the others on a click."""


# ---- key figures


def _problems(run: TrainingRun) -> str:
    """Returns a section on files or lines of the run that could not be read or are missing; "" if there are none."""
    problems = []
    if not run.rows:
        problems.append("This run has taken no step, so there are no curves yet.")
    if run.num_damaged:
        lines = "1 line" if run.num_damaged == 1 else f"{run.num_damaged:,} lines"
        problems.append(f"{lines} of metrics.jsonl could not be read and were left out.")
    missing = _missing_steps(run)
    if missing:
        problems.append(missing)
    body = "\n".join(f'<p class="warning">{escape(problem)}</p>' for problem in problems)
    return f"<section>\n{body}\n</section>" if problems else ""


def _missing_steps(run: TrainingRun) -> str:
    """Returns a sentence on steps whose metrics are not there, between the first and the last; "" if none is."""
    if not run.rows:
        return ""
    first, last = run.rows[0]["step"], run.rows[-1]["step"]
    missing = last - first + 1 - len(run.rows)
    return f"{missing:,} of the steps from {first:,} to {last:,} have no metrics." if missing else ""


def _summary(run: TrainingRun) -> str:
    """Returns the key figures of a run, without those that were not measured."""
    last, rows = run.last, run.rows
    losses, evaluated = ([value for _, value in points_of(rows, key)] for key in ("loss", "eval_loss"))
    unit, speeds = throughput_of(last.rows)
    times = [value for _, value in points_of(last.rows, "step_ms")]
    peaks = [max(peaks_of(part.rows)) for part in run.shown if peaks_of(part.rows)]
    several = len(run.shown) > 1
    median_of = f"median of {last.steps}" if several else "median"
    wanted = last.options.get("steps")
    done = rows[-1]["step"] if rows else 0
    of = f" of {wanted:,}" if isinstance(wanted, int) and wanted != done else ""
    facts = [
        ("layout", run.layouts, f"{len(run.shown)} parts" if several else ""),
        ("ranks", _ranks(run), ""),
        ("steps", f"{done:,}{of}", format_duration(run.seconds) if run.seconds else ""),
        ("loss", _arrow(losses), "of training, first and last"),
        ("evaluation loss", _arrow(evaluated), "first and last"),
        (f"{unit}/s", format_count(median(speeds)) if speeds else "", median_of),
        ("step time", format_duration(median(times) / 1000) if times else "", median_of),
        ("peak memory", format_bytes(max(peaks)) if peaks else "", "on the rank that holds most"),
    ]
    return f"<section>\n{fact_list(facts)}\n</section>"


def _ranks(run: TrainingRun) -> str:
    sizes = [str(part.facts["world_size"]) for part in run.shown if part.facts.get("world_size")]
    return ", then ".join(size for n, size in enumerate(sizes) if n == 0 or size != sizes[n - 1])


def _started(part: TrainingPart) -> str:
    """Returns when a part was started, such as "2026-11-25 22:22:15 UTC", as text of HTML; "" if it does not say."""
    return escape(str(part.facts.get("started", "")).replace("T", " ").replace("+00:00", " UTC"))


def _arrow(losses: Sequence[float]) -> str:
    if not losses:
        return ""
    first, last = (f"{loss:.3f}" for loss in (losses[0], losses[-1]))
    return first if len(losses) == 1 else f"{first} \N{RIGHTWARDS ARROW} {last}"


def _parts(run: TrainingRun) -> Iterator[str]:
    """Yields a table of the parts of a resumed run, a row for each of its starts."""
    if len(run.shown) < 2:
        return
    body = []
    for part in run.shown:
        losses = [value for _, value in points_of(part.rows, "loss")]
        _, speeds = throughput_of(part.rows)
        times = [value for _, value in points_of(part.rows, "step_ms")]
        peaks = peaks_of(part.rows)
        body.append([
            escape(part.steps), f"<code>{escape(part.layout)}</code>",
            escape(str(part.facts.get("world_size", ""))), _arrow(losses),
            format_duration(median(times) / 1000) if times else "", format_count(median(speeds)) if speeds else "",
            format_bytes(max(peaks)) if peaks else "", _started(part),
        ])  # fmt: skip
    rate = f"{throughput_unit(run.rows)}/s"
    heads = ["part", "layout", "ranks", "loss", "step, median", rate, "peak memory", "started"]
    yield section("The parts of this run", html_table(heads, body, stacked=True), name="parts")


# ---- charts


def _charts(run: TrainingRun) -> Iterator[str]:
    """Yields the charts of a run as one grid."""
    if not run.rows:
        return
    rows, marks, unit = run.rows, run.resumes, throughput_unit(run.rows)
    word, _ = memory_rows(rows)
    losses = [
        curve_of("training", points_of(rows, "loss")),
        curve_of(f"evaluation{of_averages(run)}", points_of(rows, "eval_loss"), "points"),
    ]  # fmt: skip
    clip = run.last.options.get("clip")
    limit = float(clip) if isinstance(clip, int | float) and clip else 0.0
    charts = [
        Chart("loss", "Loss", loss_seen(run), "plain", losses, marks, is_wide=True),
        Chart("throughput", f"Throughput, {unit}/s", throughput_seen(run), "count",
              [curve_of(f"{unit}/s", points_of(rows, f"{unit}_per_s"))], marks, is_zero_based=True),
        Chart("memory", f"Memory {'held after each step' if word == 'held' else 'at the peak so far'}, by rank",
              memory_seen(run), "bytes", memory_curves(rows), marks, is_zero_based=True),
        Chart("rate", "Learning rate", rate_seen(rows), "plain", [curve_of("learning rate", points_of(rows, "lr"))],
              marks, is_zero_based=True),
        Chart("norm", "Gradient norm", norm_seen(rows, limit), "plain",
              [curve_of("gradient norm", points_of(rows, "grad_norm"))], marks,
              level=(limit, f"clipped to {number(limit)}") if limit else None),
    ]  # fmt: skip
    shades = memory_map(rows)
    sections = [*map(chart_section, charts), *([map_section(shades, word)] if shades is not None else [])]
    yield '<div class="charts">\n' + "\n".join(sections) + "\n</div>"


# ---- predicted beside measured


_FORMATS = {
    "waterfall": ("parts of a step", format_seconds),
    "memory_by_kind": ("memory", format_bytes),
    "traffic_by_axis": ("sent in a step", format_bytes),
}
"""For each table of ``predicted`` and ``measured`` in ``run.json``: its heading, and how its numbers are written."""


def _predicted(run: TrainingRun) -> Iterator[str]:
    """Yields the section of predicted figures beside measured ones, for the parts of a run that have any."""
    blocks = []
    for part in run.shown:
        predicted, measured = (_figures(part.facts.get(key)) for key in ("predicted", "measured"))
        if not predicted:
            continue
        body = [
            [
                f'{escape(what)} <span class="times">{escape(heading)}</span>' if heading else escape(what),
                written(value),
                written(seen) if (seen := measured.get((heading, what))) is not None else "",
                _off(value, seen),
            ]
            for (heading, what), value in predicted.items()
            for written in [_written(heading)]
        ]
        heads = ["", "predicted", "measured", "prediction"]
        table = html_table(heads, body, numbers_from=1)
        blocks.append(f"<h3>{escape(_named(part))}</h3>\n{_waterfalls(predicted, measured)}{table}")
    if blocks:
        yield section("Predicted beside measured", "\n".join(blocks), name="predicted")


def _figures(entry: Any) -> dict[tuple[str, str], float]:
    """Returns the finite numbers of an entry of ``run.json``, ``predicted`` or ``measured``, by (table, name)."""
    if not isinstance(entry, Mapping):
        return {}
    numbers: dict[tuple[str, str], Any] = {("", "step"): entry.get("step_s")}
    for key, (heading, _) in _FORMATS.items():
        table = entry.get(key)
        if isinstance(table, Mapping):
            numbers |= {(heading, str(name)): value for name, value in table.items()}
    return {key: float(value) for key, value in numbers.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _written(heading: str) -> Any:
    return dict(_FORMATS.values()).get(heading, format_seconds)


def _off(predicted: float, measured: float | None) -> str:
    if not measured:
        return ""
    off = predicted / measured - 1
    return "equal" if abs(off) < 5e-5 else f"{off:+.1%}"


def _waterfalls(predicted: Mapping[tuple[str, str], float], measured: Mapping[tuple[str, str], float]) -> str:
    """Returns two bars of the parts of a step, predicted and measured, on one scale; "" where there are none."""
    heading = _FORMATS["waterfall"][0]
    bars = []
    for name, figures in (("predicted", predicted), ("measured", measured)):
        parts = {what: value for (of, what), value in figures.items() if of == heading and value > 0}
        if parts:
            bars.append(Bar(name, parts, format_seconds(sum(parts.values()))))
    return bar_list(bars, shared_names(bar.parts for bar in bars)) if bars else ""


# ---- layouts and options


def _named(part: TrainingPart) -> str:
    return f"{part.steps[:1].upper()}{part.steps[1:]}: {part.layout}"


def _layouts(run: TrainingRun) -> Iterator[str]:
    """Yields the HTML sections on layouts; parts of a run with the same layout share one."""
    alike: dict[object, list[TrainingPart]] = {}
    for number_of_part, part in enumerate(run.shown):  # parts of one layout share the description
        alike.setdefault(number_of_part if part.description is None else id(part.description), []).append(part)
    for place, group in enumerate(alike.values(), 1):
        steps = " and ".join(part.steps.removeprefix("steps ") if n else part.steps for n, part in enumerate(group))
        heading = f"Layout: {group[0].layout}" if len(alike) == 1 else f"Layout of {steps}: {group[0].layout}"
        description = group[0].description
        if description is None:
            why = f"Its map cannot be drawn: {group[0].problem}"
            yield section(heading, f'<p class="warning">{escape(why)}</p>', name=f"layout-{place}")
            continue
        peaks = [max(of_rank) for of_rank in zip(*(peaks_of(part.rows) for part in group if part.rows), strict=False)]
        body, words = layout_html(description, peaks), layout_words(description)
        if len(alike) == 1:
            yield section(heading, body, f"{words}.", name=f"layout-{place}")
            continue
        is_open = " open" * (place == len(alike) or len(alike) <= MOST_OPEN)
        yield (
            f'<section id="layout-{place}">\n<details{is_open}>\n<summary><h2>{escape(heading)}</h2>'
            f'<span class="note">{escape(words)}</span></summary>\n{body}\n</details>\n</section>'
        )


def _about(run: TrainingRun) -> str:
    """Returns a section with all that is needed to repeat the run: command lines, versions, machines and options."""
    commands = [
        f'<p class="note">{escape(_named(part))}</p>\n' * (len(run.shown) > 1)
        + f"<pre>{escape(str(part.facts['command']))}</pre>"
        for part in run.shown
        if part.facts.get("command")
    ]
    if not commands:
        commands = ['<p class="note">The command line was not recorded.</p>']
    names = dict.fromkeys(key for part in run.shown for key in part.options)
    body = []
    for key in names:
        values = list(dict.fromkeys(spelled_option(part.options.get(key)) for part in run.shown))
        body.append([escape(key), ", then ".join(f"<code>{escape(value)}</code>" for value in values)])
    for key in ("versions", "machine"):
        values = list(dict.fromkeys(spelled_option(part.facts.get(key, "")) for part in run.shown))
        body.append([key, ", then ".join(f"<code>{escape(value)}</code>" for value in values if value)])
    kept = [cells for cells in body if cells[1] not in ("", "<code></code>")]
    rest = details("All options, versions and the machine", html_table(["", ""], kept), is_open=True)
    return section("The run", "\n".join([*commands, rest]), name="about")


def spelled_option(value: Any) -> str:
    """Returns the value of an option as text; nested values are spelled name=value.

    >>> spelled_option({"torch": "2.13", "sizes": [1, 2]}), spelled_option(None)
    ('torch=2.13 sizes=[1, 2]', '')
    """
    if isinstance(value, Mapping):
        return " ".join(f"{name}={spelled_option(inner)}" for name, inner in value.items())
    return "" if value is None else str(value)
