"""Makes a notebook of each script in examples/tutorials, with what its cells print; the script is what one edits.

A line ``# %% [markdown]`` begins a cell of text, whose lines are comments, and ``# %%`` one of code. ``--check`` fails
where a notebook has other cells than its script. Names of scripts as arguments: these alone.
"""

import contextlib
import io
import json
import linecache
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "tutorials"

Cell = tuple[str, str]
"""The kind of a cell, "markdown" or "code", and its text."""


def cells_of(text: str) -> list[Cell]:
    """Returns the cells of a script; what stands above the first is left out.

    >>> cells_of("# %% [markdown]\\n# # Sums\\n\\n# %%\\nprint(1 + 1)\\n")
    [('markdown', '# Sums'), ('code', 'print(1 + 1)')]
    """
    cells = []
    for part in f"\n{text}".split("\n# %%")[1:]:
        head, _, body = part.partition("\n")
        if head.strip() == "[markdown]":
            lines = [line[2:] for line in body.strip("\n").split("\n")]
            cells.append(("markdown", "\n".join(lines).strip()))
        else:
            cells.append(("code", body.strip("\n")))
    return cells


def printed(cells: list[Cell], name: str) -> list[str]:
    """Runs the cells of code in order, in a folder of their own; returns what each printed, "" for cells of text."""
    names: dict[str, Any] = {"__name__": "__main__"}
    outputs, before = [], Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            for number, (kind, text) in enumerate(cells):
                out = io.StringIO()
                if kind == "code":
                    file = f"<{name}, cell {number}>"
                    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
                    with contextlib.redirect_stdout(out):
                        exec(compile(text, file, "exec"), names)
                outputs.append(out.getvalue().replace(folder, "..."))
        finally:
            os.chdir(before)
    return outputs


def notebook(cells: list[Cell], outputs: list[str]) -> str:
    """Returns the notebook's JSON, of nbformat 4.5."""
    found = []
    for number, ((kind, text), output) in enumerate(zip(cells, outputs, strict=True)):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        if kind == "code":
            stream = {"name": "stdout", "output_type": "stream", "text": output.splitlines(keepends=True)}
            cell |= {"execution_count": None, "outputs": [stream] if output else []}
        found.append(cell | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": found, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1) + "\n"


def cells_in(path: Path) -> list[Cell]:
    """Returns the cells of a notebook."""
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]


def main() -> None:
    chosen = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    stale = []
    for script in sorted(FOLDER.glob("*.py")):
        if chosen and script.stem not in chosen:
            continue
        cells, path = cells_of(script.read_text()), script.with_suffix(".ipynb")
        if "--check" not in sys.argv:
            path.write_text(notebook(cells, printed(cells, script.stem)))
            print(f"made {path.name}")
        elif not path.exists() or cells_in(path) != cells:
            stale.append(path.name)
    if stale:
        sys.exit(f"out of date: {', '.join(stale)}\n  fix: make notebooks")


if __name__ == "__main__":
    main()
