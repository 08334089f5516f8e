"""The page that compares training runs: their curves on top of each other, and tables of what differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.formatting import format_bytes, format_count, format_duration
from shardwright.report.charts import NUM_COLOURS, Chart, Unit, chart_section
from shardwright.report.curves import Curve, curve_of, highest_peaks, number, peaks_of, points_of
from shardwright.report.page import html_table, section, write_html
from shardwright.report.run_page import spelled_option
from shardwright.report.training_runs import TrainingRun

_SAME_MODEL = ("model", "settings")
_SAME_STEPS = ("data", "batch", "seq")
_OF_A_PLACE = ("offload_folder",)


def compare_runs(runs: Sequence[TrainingRun]) -> dict[str, Any]:
    """Compares training runs: returns their figures, the options in which they differ, and remarks, ready for JSON.

    ``runs`` has, for each run, its name, layouts, number of ranks and of steps, first and last loss, last evaluation
    loss, the medians of step time and throughput and the highest peak of memory, of the last part of the run; what was
    not measured is None. ``losses`` says by how much the losses differ at the steps that all have. ``differences`` has
    each option that is not equal in all, with the value of each run, and ``remarks`` are sentences on what keeps the
    runs from being compared.
    """
    return {
        "runs": [_figures(run) for run in runs],
        "losses": _losses_apart(runs),
        "differences": option_differences(runs),
        "remarks": remarks_on(runs),
    }


def write_comparison_page(path: Path, runs: Sequence[TrainingRun]) -> Path:
    """Writes a page that compares two or more training runs to ``path``, and returns the path.

    Curves of all runs share each chart, and tables show their figures and the options in which they differ. The file
    opens without a network and follows the reader's light or dark setting.
    """
    comparison = compare_runs(runs)
    warnings = "\n".join(f'<p class="warning">{escape(remark)}</p>' for remark in comparison["remarks"])
    sections = [
        f"<section>\n{warnings}\n</section>" if warnings else "",
        _figure_table(runs, comparison["runs"]),
        _charts(runs, comparison["losses"]),
        _differences(runs, comparison["differences"]),
        _commands(runs),
    ]
    names = [run.name for run in runs]
    title = f"{', '.join(names[:-1])} beside {names[-1]}" if len(runs) < 4 else f"{len(runs)} runs compared"
    under = f"{len(runs)} runs compared; differences are those from {escape(runs[0].name)}."
    return write_html(path, title=title, under=under, sections=sections, parts=("chart",))


# ---- figures


def _figures(run: TrainingRun) -> dict[str, Any]:
    def values(rows: Any, key: str) -> list[float]:
        return [value for _, value in points_of(rows, key)]

    losses, evaluated = values(run.rows, "loss"), values(run.rows, "eval_loss")
    times = values(run.last.rows, "step_ms")
    speeds = {unit: values(run.last.rows, f"{unit}_per_s") for unit in ("samples", "tokens")}
    peaks = peaks_of(run.last.rows)
    return {
        "name": run.name,
        "layouts": run.layouts,
        "world_size": run.last.facts.get("world_size"),
        "steps": run.rows[-1]["step"] if run.rows else 0,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "last_eval_loss": evaluated[-1] if evaluated else None,
        "step_ms_median": median(times) if times else None,
        **{f"{unit}_per_s_median": median(rates) if rates else None for unit, rates in speeds.items()},
        "peak_memory_bytes": max(peaks) if peaks else None,
    }


_COLUMNS: tuple[tuple[str, str, Any], ...] = (
    ("last_loss", "last loss", number),
    ("last_eval_loss", "last evaluation", number),
    ("step_ms_median", "step, median", lambda value: format_duration(value / 1000)),
    ("samples_per_s_median", "samples/s", format_count),
    ("tokens_per_s_median", "tokens/s", format_count),
    ("peak_memory_bytes", "peak memory", format_bytes),
)
"""The figures of a run's line: key, head of the column, and how the number is written."""


def _figure_table(runs: Sequence[TrainingRun], figures: Sequence[Mapping[str, Any]]) -> str:
    body = []
    other = "samples" if any(run_figures["tokens_per_s_median"] for run_figures in figures) else "tokens"
    columns = [column for column in _COLUMNS if column[0] != f"{other}_per_s_median"]
    for place, (run, run_figures) in enumerate(zip(runs, figures, strict=True)):
        cells = [
            f'<span class="swatch c{place % NUM_COLOURS}"></span> {escape(run.name)}',
            f"<code>{escape(str(run.last.options.get('model', '')))}</code>",
            f"<code>{escape(run.layouts)}</code>", f"{run_figures['world_size'] or ''}", f"{run_figures['steps']:,}",
        ]  # fmt: skip
        for key, _, written in columns:
            value, first = run_figures[key], figures[0][key]
            text = "" if value is None else written(value)
            if place and value is not None and first:
                text += f' <span class="times">{escape(_change(value / first - 1))}</span>'
            cells.append(text)
        body.append(cells)
    heads = ["run", "model", "layout", "ranks", "steps", *(head for _, head, _ in columns)]
    indices = [n for n in range(len(heads)) if any(cells[n] for cells in body)]
    rows = [[cells[n] for n in indices] for cells in body]
    note = "Step time, throughput and memory are those of the last part of a run that was resumed."
    note = note if any(len(run.shown) > 1 for run in runs) else ""
    return section("The runs", html_table([heads[n] for n in indices], rows, stacked=True), note, name="runs")


def _change(share: float) -> str:
    return "equal" if share == 0 else f"{share:+.2%}" if abs(share) < 0.1 else f"{share:+.0%}"


def _losses_apart(runs: Sequence[TrainingRun]) -> dict[str, Any]:
    """Returns at how many steps all runs have a loss, by how much these differ at most, and at which step they do."""
    curves = [dict(points_of(run.rows, "loss")) for run in runs]
    shared = sorted(set(curves[0]).intersection(*curves[1:])) if curves else []
    apart = {step: max(losses[step] for losses in curves) - min(losses[step] for losses in curves) for step in shared}
    if not apart:
        return {"steps": 0, "most_apart": None, "at_step": None, "last_apart": None}
    worst = max(apart, key=lambda step: apart[step])
    return {"steps": len(shared), "most_apart": apart[worst], "at_step": worst, "last_apart": apart[shared[-1]]}


# ---- charts


def _charts(runs: Sequence[TrainingRun], apart: Mapping[str, Any]) -> str:
    if not any(run.rows for run in runs):
        return ""

    def curves(key: str, style: str = "line") -> list[Curve]:
        return [curve_of(run.name, points_of(run.rows, key), style) for run in runs]

    evaluated = [
        curve_of(f"{run.name}, evaluation", points_of(run.rows, "eval_loss"), "points") for run in runs
    ]  # fmt: skip
    memory = [curve_of(run.name, highest_peaks(run.rows)) for run in runs]
    unit = "tokens" if any(points_of(run.rows, "tokens_per_s") for run in runs) else "samples"
    wanted: list[tuple[str, str, str, Unit, list[Curve], bool, bool]] = [
        ("loss", "Training loss", _loss_words(runs, apart), "plain", curves("loss"), False, True),
        ("evaluation", "Evaluation loss", _last_words(evaluated, number), "plain", evaluated, False, False),
        ("throughput", f"Throughput, {unit}/s", _last_words(curves(f"{unit}_per_s"), format_count), "count",
         curves(f"{unit}_per_s"), True, False),
        ("memory", "Highest peak of memory so far", _last_words(memory, format_bytes), "bytes", memory, True, False),
        ("rate", "Learning rate", _last_words(curves("lr"), number), "plain", curves("lr"), True, False),
        ("norm", "Gradient norm", _last_words(curves("grad_norm"), number), "plain", curves("grad_norm"), False, False),
    ]  # fmt: skip
    sections = [
        chart_section(Chart(name, head, seen, unit, drawn, is_zero_based=zero, is_compared=True, is_wide=wide))
        for name, head, seen, unit, drawn, zero, wide in wanted
        if any(curve.steps for curve in drawn)
    ]
    return '<div class="charts">\n' + "\n".join(sections) + "\n</div>"


def _loss_words(runs: Sequence[TrainingRun], apart: Mapping[str, Any]) -> str:
    ends = []
    for run in runs:
        losses = points_of(run.rows, "loss")
        resumed = f", resumed after {' and '.join(f'{step:,}' for step, _ in run.resumes[:4])}" if run.resumes else ""
        if losses:
            start, (step, loss) = number(losses[0][1]), losses[-1]
            ends.append(f"{run.name} goes from {start} to {number(loss)} at step {step:,}{resumed}")
    text = f"{'; '.join(ends)}."
    if apart["steps"] and len(ends) > 1:
        most = apart["most_apart"]
        if most == 0:
            return f"{text} At the {apart['steps']:,} steps that all have, the losses are equal."
        text += f" At the {apart['steps']:,} steps that all have, they differ by {most:.2g} at most, at step "
        text += f"{apart['at_step']:,}, and by {apart['last_apart']:.2g} at the last of them."
    return text


def _last_words(curves: Sequence[Curve], written: Any) -> str:
    """Returns a sentence on the median and the last value of each curve."""
    phrases = []
    for curve in curves:
        points = [(step, value) for step, value in zip(curve.steps, curve.values, strict=True) if value is not None]
        if points:
            middle, (step, last) = median(value for _, value in points), points[-1]
            phrases.append(f"{curve.name} {written(last)} at step {step:,} (median {written(middle)})")
    return f"{'; '.join(phrases)}."


# ---- options


def flat_options(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options of a run as text by name, those of a table as ``settings.width``.

    >>> flat_options({"seed": 0, "settings": {"width": "64"}})
    {'seed': '0', 'settings.width': '64'}
    """
    texts: dict[str, str] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            texts |= {f"{key}.{name}": spelled_option(inner) for name, inner in value.items()}
        else:
            texts[key] = spelled_option(value)
    return texts


def option_differences(runs: Sequence[TrainingRun]) -> list[dict[str, Any]]:
    """Returns the options, versions and kinds of machine in which runs differ: each with its value in each run.

    An option that a run does not have is None there. Options are those of a run's last part.
    """
    all_options = []
    for run in runs:
        options = flat_options({key: value for key, value in run.last.options.items() if key not in _OF_A_PLACE})
        for key in ("versions", "machine"):
            facts = run.last.facts.get(key)
            options |= flat_options({key: facts}) if isinstance(facts, Mapping) else {}
        all_options.append(options)
    names = dict.fromkeys(name for run_options in all_options for name in run_options)
    values = {name: [run_options.get(name) for run_options in all_options] for name in names}
    return [{"option": name, "values": texts} for name, texts in values.items() if len(set(texts)) > 1]


def remarks_on(runs: Sequence[TrainingRun]) -> list[str]:
    """Returns sentences on what keeps runs from being compared: other models or data, no steps, damaged metrics."""
    notes = []
    if differ := _differing(runs, _SAME_MODEL):
        notes.append(f"These are runs of different models ({differ}): their losses do not say which is better trained.")
    if differ := _differing(runs, _SAME_STEPS):
        notes.append(f"A step is not the same work in each ({differ}): compare throughput, not step time.")
    for run in runs:
        if not run.rows:
            notes.append(f"{run.name} has taken no step, so it has no curve.")
        if run.num_damaged:
            lines = "1 line" if run.num_damaged == 1 else f"{run.num_damaged:,} lines"
            notes.append(f"{lines} of the metrics of {run.name} could not be read and were left out.")
    return notes


def _differing(runs: Sequence[TrainingRun], keys: Sequence[str]) -> str:
    """Returns which of the options ``keys`` are not equal in all runs, with their values; "" if none."""
    differences = []
    for key in keys:
        values = list(dict.fromkeys(spelled_option(run.last.options.get(key)) or "defaults" for run in runs))
        if len(values) > 1:
            differences.append(f"{key}: {', '.join(values)}")
    return "; ".join(differences)


def _differences(runs: Sequence[TrainingRun], differences: Sequence[Mapping[str, Any]]) -> str:
    if not differences:
        return section("Options", "", "All options, versions and machines are equal.", name="options")
    body = [
        [f"<code>{escape(difference['option'])}</code>",
         *("<i>none</i>" if value is None else f"<code>{escape(value)}</code>" for value in difference["values"])]
        for difference in differences
    ]  # fmt: skip
    heads = ["option", *(run.name for run in runs)]
    note = "Options that are equal in all runs are left out; a resumed run has those of its last part."
    return section("What differs", html_table(heads, body, stacked=True), note, name="options")


def _commands(runs: Sequence[TrainingRun]) -> str:
    blocks = []
    for run in runs:
        lines = [str(part.facts["command"]) for part in run.shown if part.facts.get("command")]
        blocks.append(f"<h3>{escape(run.name)}</h3>\n<pre>{escape(chr(10).join(lines) or 'not recorded')}</pre>")
    return section("Command lines", "\n".join(blocks), name="commands")
