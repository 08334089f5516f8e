"""Every class name is made of words that docs/words.md lists, and names one thing only."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")


def classes():
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield node.name, path.relative_to(ROOT).as_posix()


def words_of(name):
    """The words of a CamelCase name: an acronym or a number is a word of its own."""
    return re.findall(r"[A-Z]{2,}(?=[A-Z][a-z]|\d|$)|[A-Z]?[a-z]+|[A-Z]|\d+[a-zA-Z]*", name.lstrip("_"))


def listed():
    table, plain = PAGE.split("## Words that class names may use")
    terms = " ".join(re.findall(r"^\| ([^|]+) \|", table, flags=re.M))
    return {word.lower() for word in re.findall(r"[\w.]+", terms + " " + plain.strip().rpartition("\n\n")[2])}


def test_every_class_name_is_made_of_listed_words():
    known = listed()
    strange = {
        f"{name} ({path}): {word}" for name, path in classes() for word in words_of(name) if word.lower() not in known
    }
    assert not strange, "\n".join(sorted(strange))


def test_no_two_public_classes_share_a_name():
    found = Counter(name for name, _ in set(classes()) if not name.startswith("_"))
    paths = {name: [path for other, path in classes() if other == name] for name, count in found.items() if count > 1}
    assert not paths


def test_the_page_lists_forty_words_or_more_and_each_once():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|", PAGE, flags=re.M)[1:]
    assert len(rows) - 1 >= 40
    assert len(set(rows)) == len(rows)
