"""docs/architecture.md has a row for every room of the package, and lists the rungs of a forward in their order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardwright.forward_stack import Rung

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwright"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("| room | holds | begin with |\n|---|---|---|\n")[2].partition("\n\n")[0]
ROWS = [row.strip("| ").split(" | ") for row in TABLE.splitlines()]


def rooms():
    """The top-level names of the package: a folder of modules ends in a slash."""
    for path in PACKAGE.iterdir():
        if path.suffix == ".py":
            yield path.name
        elif (path / "__init__.py").exists():
            yield f"{path.name}/"


def names_of(cell):
    return re.findall(r"`([^`]+)`", cell)


def test_every_room_stands_in_the_table_once():
    listed = [name for room, _, _ in ROWS for name in names_of(room)]
    assert sorted(listed) == sorted(rooms())


@pytest.mark.parametrize(("room", "begin"), [(room, begin) for room, _, begin in ROWS])
def test_a_reader_begins_with_a_file_of_the_room(room, begin):
    (file,) = names_of(begin)
    assert (PACKAGE / file).is_file()
    assert any(file == name or (name.endswith("/") and file.startswith(name)) for name in names_of(room))


def test_the_page_lists_every_rung_in_the_order_of_the_stack():
    section = PAGE.partition("## The forward stack")[2].partition("\n## ")[0]
    listed = re.findall(r"[A-Z_]{4,}", " ".join(re.findall(r"^- [^:]+:([^.]+?)[.;]", section, flags=re.M)))
    assert listed == [rung.name for rung in Rung]
