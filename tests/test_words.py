"""Every class name is made of words that docs/words.md lists, and names one thing only."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")


@cache
def classes():
    """Each class of the package and its file."""
    files = sorted((ROOT / "src").rglob("*.py"))
    nodes = ((path, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return [(node.name, path.relative_to(ROOT).as_posix()) for path, node in nodes if isinstance(node, ast.ClassDef)]


@cache
def aliases():
    """Each name that a module gives to a type, such as ``Ranges``, and its file; type variables aside."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if "TypeVar" not in ast.unparse(node):
                found += [
                    (each.id, path.relative_to(ROOT).as_posix()) for each in targets if isinstance(each, ast.Name)
                ]
    return [(name, path) for name, path in found if re.match(r"_?[A-Z]\w*[a-z]", name)]


def words_of(name):
    """The words of a CamelCase name: an acronym or a number is a word of its own."""
    return re.findall(r"[A-Z]{2,}(?=[A-Z][a-z]|\d|$)|[A-Z]?[a-z]+|[A-Z]|\d+[a-zA-Z]*", name.lstrip("_"))


def plain_words():
    """The words of the page's list, and those of its table."""
    table, plain = PAGE.split("## Words that class names may use")
    terms = " ".join(re.findall(r"^\| ([^|]+) \|", table, flags=re.M))
    return [[w.lower() for w in re.findall(r"[\w.]+", text)] for text in (plain.strip().rpartition("\n\n")[2], terms)]


def test_every_class_name_is_made_of_listed_words():
    known = set().union(*plain_words())
    strange = {
        f"{name} ({path}): {word}" for name, path in classes() for word in words_of(name) if word.lower() not in known
    }
    assert not strange, "\n".join(sorted(strange))


def test_every_word_of_the_list_is_part_of_a_class_name_and_stands_there_once():
    plain, table = plain_words()
    assert not set(plain) - {word.lower() for name, _ in classes() for word in words_of(name)}
    assert not set(plain) & set(table)
    assert len(set(plain)) == len(plain)


def test_no_two_classes_or_types_share_a_name_even_if_one_is_private():
    assert len(aliases()) > 50
    paths = {}
    for name, path in classes() + aliases():
        paths.setdefault(name.lstrip("_"), []).append(path)
    assert not {name: where for name, where in paths.items() if len(where) > 1}


def test_the_page_lists_forty_words_or_more_and_each_once():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|", PAGE, flags=re.M)[1:]
    assert len(rows) - 1 >= 40
    assert len(set(rows)) == len(rows)
