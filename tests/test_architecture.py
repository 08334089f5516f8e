"""docs/architecture.md and CONTRIBUTING.md name only files and symbols that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwright"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def names_in(path):
    """Every class, function, method and module-level name of a file or of the files of a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE))))
def test_every_file_that_the_page_names_exists(path):
    here = [ROOT / path, PACKAGE / path, *PACKAGE.rglob(f"*/{path}" if path != "__init__.py" else path)]
    assert any(each.exists() for each in here), path


@pytest.mark.parametrize(
    ("symbols", "path"), re.findall(r"((?:`[\w.()]+`(?:, | and )?)+) (?:in|of) `([\w/]+\.py)`", PAGE)
)
def test_every_symbol_stands_in_the_file_that_the_page_names(symbols, path):
    known = names_in(PACKAGE / path) if (PACKAGE / path).exists() else names_in(PACKAGE)
    for symbol in re.findall(r"`([\w.]+)(?:\(\))?`", symbols):
        assert all(part in known for part in symbol.split(".")), f"{symbol} in {path}"


def test_a_journey_has_twelve_hops():
    journey = PAGE.partition("## One batch's journey")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\d+\. ", journey, flags=re.M)) == 12
