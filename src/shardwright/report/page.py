"""What all HTML pages of the report are made of: sections, tables, and one file with its style and its scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shardwright.report.assets import fill_template, read_asset
from shardwright.text_files import write_text


def write_html(
    path: Path,
    *,
    title: str,
    under: str,
    sections: Iterable[str],
    parts: Sequence[str] = (),
    wide: bool = False,
) -> Path:
    """Writes an HTML page to ``path`` and returns the path. The file opens without a network, in light and dark.

    ``title`` is plain text; ``under``, a line below it, and the ``sections`` are HTML already. ``parts`` are the names
    of the style sheets and scripts that the sections need beside ``page.css``: "chart", "timeline". Missing folders
    are created.
    """
    style = "".join(read_asset(f"{name}.css") for name in ("page", *parts))
    page = fill_template(
        "page.html",
        title=escape(title),
        style=style,
        wide=' class="wide"' if wide else "",
        under=under,
        sections="\n".join(filter(None, sections)),
        script=_script(parts) if parts else "",
    )
    write_text(path, page)
    return path


def _script(parts: Sequence[str]) -> str:
    """Returns the HTML elements that the scripts write into, and the scripts as one that leaves no global names."""
    scripts = "".join(read_asset(f"{name}.js") for name in ("shared", *parts))
    return (
        '<div id="tip"></div>\n<div id="live" aria-live="polite"></div>\n'
        f'<script>\n(() => {{\n"use strict";\n{scripts}}})();\n</script>\n'
    )


def data_element(data: Any) -> str:
    """Returns a script element with ``data`` as JSON, which runs nothing, and from which no text can break out."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


def section(heading: str, body: str, note: str = "", *, name: str = "", kind: str = "") -> str:
    """Returns a section of an HTML page: a heading, the remark ``note`` below it, and ``body``.

    ``body`` is HTML already; ``heading`` and ``note`` are plain text. ``name`` is the section's id, to which links
    lead, and ``kind`` its class.
    """
    remark = f'<p class="note">{escape(note)}</p>\n' if note else ""
    attributes = f' id="{escape(name)}"' * bool(name) + f' class="{escape(kind)}"' * bool(kind)
    return f"<section{attributes}>\n<h2>{escape(heading)}</h2>\n{remark}{body}\n</section>"


def fact_list(facts: Iterable[tuple[str, str, str]]) -> str:
    """Returns a list of key figures, each a name, a value and words on it; those without a value are left out."""
    cells = []
    for name, value, words in facts:
        kind, more = ' class="long"' * (len(value) > 16), f"<small>{escape(words)}</small>" * bool(words)
        cells += [f"<div><dt>{escape(name)}</dt><dd{kind}>{escape(value)}{more}</dd></div>"] * bool(value)
    return "<dl>\n" + "\n".join(cells) + "\n</dl>"


def html_table(
    heads: Sequence[str], body: Iterable[Sequence[str]], numbers_from: int | None = None, *, stacked: bool = False
) -> str:
    """Returns an HTML table with the plain-text heads ``heads`` and the rows ``body``, whose cells are HTML already.

    Columns from index ``numbers_from`` on align right. The first cell of a row is its head. On a narrow screen the
    table scrolls sideways or, if it is ``stacked``, the cells of a row stand below each other.
    """
    classes = [' class="number"' if numbers_from is not None and n >= numbers_from else "" for n in range(len(heads))]
    named = [f' data-head="{escape(name)}"' if stacked else "" for name in heads]
    roles = [' role="columnheader"', ' role="rowheader"', ' role="cell"', ' role="row"'] if stacked else [""] * 4
    head = "".join(
        f'<th scope="col"{roles[0]}{kind}>{escape(name)}</th>' if name else f"<td{roles[2]}{kind}></td>"
        for name, kind in zip(heads, classes, strict=True)
    )
    lines = []
    for cells in body:
        first, *more_cells = [
            f"{kind}{name}>{cell}" for cell, kind, name in zip(cells, classes, named, strict=True)
        ]  # fmt: skip
        line = f'<th scope="row"{roles[1]}{first}</th>' + "".join(f"<td{roles[2]}{cell}</td>" for cell in more_cells)
        lines.append(f"<tr{roles[3]}>{line}</tr>")
    rows, top = "\n".join(lines), f"<thead><tr{roles[3]}>{head}</tr></thead>\n" if any(heads) else ""
    kind = ' class="stacked" role="table"' if stacked else ""
    table = f"<table{kind}>\n{top}<tbody>\n{rows}\n</tbody>\n</table>"
    return table if stacked else f'<div class="scroll" tabindex="0" role="region" aria-label="table">{table}</div>'


def details(summary: str, body: str, *, is_open: bool = False, kind: str = "") -> str:
    """Returns HTML that is shown when its ``summary``, plain text, is clicked; ``body`` is HTML already."""
    attributes = f' class="{kind}"' * bool(kind) + " open" * is_open
    return f"<details{attributes}>\n<summary>{escape(summary)}</summary>\n{body}\n</details>"
