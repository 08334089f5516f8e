"""One page about a run: a single HTML file with all that it shows inside it."""

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

_HEADINGS = {"loss": "Loss", "layout": "Layout", "speed": "Speed", "schedule": "Schedule"}
"""The headings of pictures; any other has its own name."""


def write_page(
    out: Path,
    *,
    title: str,
    run: Mapping[str, Any],
    rows: Rows,
    description: Description | None,
    pictures: Mapping[str, Path],
    samples: Sequence[str] = (),
) -> Path:
    """Writes ``report.html`` about a run: figures, curves, layers, memory and samples. Returns its path.

    Everything is in the one file: it opens without a network, and follows the reader's light or dark setting.
    ``out`` is a folder, or the file itself when it ends in ``.html``. What is missing in ``run`` or in a row is
    left out. ``pictures`` are PNGs by name; ``loss`` comes before the tables.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = write_page(
    ...         Path(folder), title="A run", run={"layout": "dp2"}, rows=[], description=None, pictures={},
    ...         samples=["a < b"])
    ...     page.name, "a &lt; b" in page.read_text()
    ('report.html', True)
    """
    sections = [_summary(run, rows), *_figures(pictures)]
    if description is not None:
        sections += [_memory(description, rows), _layers(description)]
    sections += [_samples(samples), _about(run)]
    under = " &middot; ".join(
        [f"<code>{escape(str(run[key]))}</code>" for key in ("model", "layout", "data") if run.get(key)]
        + ([escape(str(run["started"]))] if run.get("started") else [])
    )
    page = fill_template(
        "page.html",
        title=escape(title),
        style=read_asset("page.css"),
        under=under,
        sections="\n".join(filter(None, sections)),
    )
    path = Path(out) if Path(out).suffix == ".html" else Path(out) / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def _section(heading: str, body: str, note: str = "") -> str:
    remark = f'<p class="note">{escape(note)}</p>\n' if note else ""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{remark}{body}\n</section>"


def _values(rows: Rows, key: str) -> list[float]:
    return [float(row[key]) for row in rows if row.get(key) is not None]


def _peaks(rows: Rows) -> list[int]:
    """The most that was measured on each rank; empty where nothing was."""
    found = [row["memory_bytes"] for row in rows if row.get("memory_bytes")]
    return [max(of_rank) for of_rank in zip(*found, strict=False)]


def _summary(run: Mapping[str, Any], rows: Rows) -> str:
    losses, evaluated, peaks = _values(rows, "loss"), _values(rows, "eval_loss"), _peaks(rows)
    speeds, times, seconds = _values(rows, "tokens_per_s"), _values(rows, "step_ms"), _values(rows, "time_s")
    asked = run.get("steps", len(rows))
    steps = f"{len(rows):,}" if len(rows) == asked else f"{len(rows):,} of {asked:,}"
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
    for name in sorted(pictures, key=lambda name: (name != "loss", name != "layout")):
        path = Path(pictures[name])
        if path.is_file():
            data = base64.b64encode(path.read_bytes()).decode()
            heading = _HEADINGS.get(name, name)
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
    note = "State is parameters, gradients and the two moments of AdamW, as the layout places them."
    if "offloaded_bytes" in description["ranks"][0]:
        note += " State that is offloaded to host memory or disk is not counted."
    if measured:
        heads.append("peak, measured")
        note += " The measured peak also counts activations, buffers and all else in the rank's process or device."
    return _section("Memory of each rank", _table(heads, body, numbers_from=1), note)


def _measured(group: RankGroup, peaks: Sequence[int]) -> str:
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
    return _section("Layers", _table(heads, body))


def _table(heads: Sequence[str], body: Iterable[Sequence[str]], numbers_from: int | None = None) -> str:
    """A table of cells that are HTML already; from one column on they are numbers."""
    classes = [' class="number"' if numbers_from is not None and n >= numbers_from else "" for n in range(len(heads))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(heads, classes, strict=True))
    lines = (
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(cells, classes, strict=True)) + "</tr>"
        for cells in body
    )
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + ("\n</tbody>\n</table></div>")
    )


def _samples(samples: Sequence[str]) -> str:
    return _section("Samples", "\n".join(f"<pre>{escape(sample)}</pre>" for sample in samples)) if samples else ""


def _about(run: Mapping[str, Any]) -> str:
    """What is needed to repeat the run: each of its keys, nested ones as name=value."""

    def spelled(value: Any) -> str:
        if isinstance(value, Mapping):
            return " ".join(f"{name}={spelled(inner)}" for name, inner in value.items())
        return str(value)

    body = [[escape(str(key)), f"<code>{escape(spelled(value))}</code>"] for key, value in run.items() if value != ""]
    return _section("The run", _table(["", ""], body).replace("<thead><tr><th></th><th></th></tr></thead>\n", ""))
