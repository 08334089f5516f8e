"""The report page of a training run: one HTML file that contains its pictures and style."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.formatting import format_bytes, format_count, format_duration
from shardwright.report.assets import fill_template, read_asset
from shardwright.report.description import STATES, Description
from shardwright.report.outline import RankGroup, layer_rows, rank_groups
from shardwright.report.pictures import Rows


def write_page(
    out: Path, *, title: str, run: Mapping[str, Any], rows: Rows, description: Description, pictures: Mapping[str, Path]
) -> Path:
    """Writes ``report.html``, the report of a training run, into the folder ``out``; returns the file's path.

    It has the run's key figures, its ``pictures`` (PNGs by heading; missing files are left out), memory, layers, and
    all entries of ``run``, the run's options. ``rows`` are the lines of ``metrics.jsonl``. The file opens without a
    network and follows the reader's light or dark setting. Figures that are missing in ``run`` or in a row are left
    out. The folder is created if it does not exist.
    """
    sections = [_summary(run, rows), *_figures(pictures), _memory(description, rows), _layers(description), _about(run)]
    under = " &middot; ".join(
        [f"<code>{escape(str(run[key]))}</code>" for key in ("model", "layout", "data") if run.get(key)]
        + ([escape(str(run["started"]))] if run.get("started") else [])
    )
    page = fill_template(
        "page.html",
        title=escape(title),
        style=read_asset("page.css"),
        under=under,
        sections="\n".join(sections),
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def section(heading: str, body: str, note: str = "") -> str:
    """Returns a section of an HTML page: a heading, the remark ``note`` below it, and ``body``.

    ``body`` is HTML already; ``heading`` and ``note`` are plain text.
    """
    remark = f'<p class="note">{escape(note)}</p>\n' if note else ""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{remark}{body}\n</section>"


def _values(rows: Rows, key: str) -> list[float]:
    return [float(row[key]) for row in rows if row.get(key) is not None]


def _peaks(rows: Rows) -> list[int]:
    """Returns the peak bytes measured on each rank; empty if no row has any."""
    found = [row["memory_bytes"] for row in rows if row.get("memory_bytes")]
    return [max(of_rank) for of_rank in zip(*found, strict=False)]


def _summary(run: Mapping[str, Any], rows: Rows) -> str:
    """Returns the key figures of a run, without those that were not measured."""
    losses, evaluated, peaks = _values(rows, "loss"), _values(rows, "eval_loss"), _peaks(rows)
    speeds, times, seconds = _values(rows, "tokens_per_s"), _values(rows, "step_ms"), _values(rows, "time_s")
    wanted = run.get("steps", len(rows))
    steps = f"{len(rows):,}" if len(rows) == wanted else f"{len(rows):,} of {wanted:,}"
    facts: list[tuple[str, str, str]] = [
        ("layout", str(run.get("layout", "")), ""),
        ("ranks", str(run.get("world_size", "")), ""),
        ("steps", steps, format_duration(seconds[-1]) if seconds else ""),
        ("loss", _arrow(losses), "of training, first and last"),
        ("evaluation loss", _arrow(evaluated), "first and last"),
        ("tokens/s", format_count(median(speeds)) if speeds else "", "median"),
        ("step time", format_duration(median(times) / 1000) if times else "", "median"),
        ("peak memory", format_bytes(max(peaks)) if peaks else "", "on the rank that holds most"),
    ]
    cells = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f'<small>{escape(words)}</small>' * bool(words)}</dd></div>"
        for name, value, words in facts
        if value
    )
    return f"<section>\n<dl>\n{cells}\n</dl>\n</section>"


def _arrow(losses: Sequence[float]) -> str:
    if not losses:
        return ""
    first, last = (f"{loss:.3f}" if math.isfinite(loss) else str(loss) for loss in (losses[0], losses[-1]))
    return first if len(losses) == 1 else f"{first} \N{RIGHTWARDS ARROW} {last}"


def _figures(pictures: Mapping[str, Path]) -> Iterable[str]:
    for heading, path in pictures.items():
        if path.is_file():
            data = base64.b64encode(path.read_bytes()).decode()
            image = f'<img alt="{escape(heading)}" src="data:image/png;base64,{data}">'
            yield f'<section class="picture">\n<figure>{image}</figure>\n</section>'


def _memory(description: Description, rows: Rows) -> str:
    peaks = _peaks(rows)
    measured = len(peaks) == description["world_size"]
    heads = ["ranks", "parameters", "gradients", "optimizer", "state, predicted"]
    body = []
    for group in rank_groups(description):
        states = [group.ranks[0][state] for state in STATES]
        cells = [escape(group.name), *map(format_bytes, (*states, sum(states)))]
        body.append([*cells, *([_measured(group, peaks)] if measured else [])])
    note = "State is parameters, gradients and the two moments of AdamW, as the layout shards them."
    if "offloaded_bytes" in description["ranks"][0]:
        note += " State that is offloaded to host memory or disk is not counted."
    if measured:
        heads.append("peak, measured")
        note += " The measured peak also counts activations, buffers and all else in the rank's process or device."
    return section("Memory of each rank", html_table(heads, body, numbers_from=1), note)


def _measured(group: RankGroup, peaks: Sequence[int]) -> str:
    """Returns the range of measured peaks in a group of ranks."""
    found = [peaks[rank["rank"]] for rank in group.ranks]
    low, high = format_bytes(min(found)), format_bytes(max(found))
    return high if low == high else f"{low} to {high}"


def _layers(description: Description) -> str:
    body = []
    for row in layer_rows(description):
        times = f' <span class="times">&times;{row.num_layers}</span>' if row.num_layers > 1 else ""
        role = f'<span class="nowrap {"copied" * (row.role == "copied")}">{escape(row.role)}</span>'
        shapes = "<br>".join(f"<code>{escape(shape)}</code>" for shape in row.shapes)
        shapes = shapes.replace("-&gt;", "\N{RIGHTWARDS ARROW}")
        body.append(
            [f'<span class="nowrap"><code>{escape(row.module)}</code>{times}</span>', role, escape(row.why), shapes]
        )
    heads = ["layer", "what was done", "why", "parameters, whole \N{RIGHTWARDS ARROW} on each rank"]
    return section("Layers", html_table(heads, body))


def html_table(heads: Sequence[str], body: Iterable[Sequence[str]], numbers_from: int | None = None) -> str:
    """Returns an HTML table with the plain-text heads ``heads`` and the rows ``body``, whose cells are HTML already.

    Columns from index ``numbers_from`` on align right.
    """
    classes = [' class="number"' if numbers_from is not None and n >= numbers_from else "" for n in range(len(heads))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(heads, classes, strict=True))
    lines = (
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(cells, classes, strict=True)) + "</tr>"
        for cells in body
    )
    rows = "\n".join(lines)
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>'


def _about(run: Mapping[str, Any]) -> str:
    """Returns a table of all options needed to repeat the run; nested values are spelled name=value."""

    def spelled(value: Any) -> str:
        if isinstance(value, Mapping):
            return " ".join(f"{name}={spelled(inner)}" for name, inner in value.items())
        return str(value)

    body = [[escape(str(key)), f"<code>{escape(spelled(value))}</code>"] for key, value in run.items() if value != ""]
    return section("The run", html_table(["", ""], body).replace("<thead><tr><th></th><th></th></tr></thead>\n", ""))
