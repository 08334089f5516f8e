"""The files that are put into pages are part of the package that is installed."""

from __future__ import annotations

import tomllib
from pathlib import Path

import shardwright

SOURCE = Path(shardwright.__file__).parent
PROJECT = SOURCE.parents[1] / "pyproject.toml"


def test_every_file_of_the_source_that_is_no_code_is_declared_as_package_data():
    declared = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    found = [path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {"chart.css", "chart.js", "page.css", "page.html", "shared.js", "timeline.css", "timeline.js"} <= {
        path.name for path in found
    }
    for path in found:
        folders = [folder for folder in path.parents if folder == SOURCE or SOURCE in folder.parents]
        patterns = {
            folder / pattern
            for folder in folders
            for pattern in declared.get(".".join(folder.relative_to(SOURCE.parent).parts), ())
        }
        assert any(path.match(str(pattern)) for pattern in patterns), f"{path} is not installed"
