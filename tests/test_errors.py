"""Errors say what was given, what is allowed and how to fix it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwright
from shardwright.errors import (
    CheckpointError,
    CommunicationError,
    LayoutError,
    PlanError,
    RankFailedError,
    check_at_least,
    explain,
    nearest,
)


def test_wrong_input_is_a_value_error_and_a_failed_run_is_not():
    assert all(issubclass(error, ValueError) for error in (LayoutError, PlanError, CheckpointError))
    assert not any(issubclass(error, ValueError) for error in (CommunicationError, RankFailedError))


def test_an_explanation_has_four_lines():
    lines = explain("what", given=1, allowed=2, fix=3).splitlines()
    assert lines == ["what", "  given:   1", "  allowed: 2", "  fix:     3"]


@given(st.lists(st.text(min_size=1), min_size=1), st.text())
def test_the_nearest_word_is_one_that_is_known_or_none(known, word):
    assert nearest(word, known) in {*known, ""}


@given(st.lists(st.text(min_size=1), min_size=1))
def test_a_known_word_is_nearest_to_itself(known):
    assert nearest(known[0], known) == known[0]


@given(st.integers(-5, 5), st.integers(-5, 5))
def test_a_number_is_refused_exactly_where_it_is_too_small(value, least):
    if value >= least:
        check_at_least("n", value, least, fix="more")
        return
    with pytest.raises(LayoutError, match=f"allowed: {least} or more\n  fix:     more"):
        check_at_least("n", value, least, fix="more")


# ---- every error that is written in the package has its four parts

SOURCE = Path(shardwright.__file__).parent
PARTS = {"given", "allowed", "fix"}

TRACEBACK = "another rank's traceback is its text, and says more than parts could"
RELAYED = "its text is that of another rank's error, which has the parts"
WHOLE = {
    ("checkpoint/manifest.py", "CheckpointError(rank_problem[1])"): RELAYED,
    ("parallelize/filling.py", "CheckpointError(rank_problem[1])"): RELAYED,
    ("weights/saving.py", "CheckpointError(rank_problem[1])"): RELAYED,
    ("train/out_folder.py", "PlanError(first_failure[1])"): RELAYED,
    ("train/loop.py", "PlanError(wrong[1])"): RELAYED,
    ("comm/backends/threads.py", "CommunicationError(str(self.failure))"): RELAYED,
    ("comm/backends/threads.py", "StoppedError(f'rank {self.failed_rank} failed: {self.failure!r}')"): "never shown: "
    "it ends a rank's thread, and the launcher raises the other rank's failure",
    ("comm/failures.py", "RankFailedError(f'rank {first.rank} failed\\n\\n{first.text.rstrip()}')"): TRACEBACK,
    ("comm/failures.py", "RankFailedError(f'rank {first.rank} failed{text}')"): TRACEBACK,
    ("comm/failures.py", "RankFailedError(f'{waits}{text}')"): "explain() made its text, and a traceback follows",
    ("comm/failures.py", "RankFailedError(_how_it_ended(rank, exits[rank]))"): "explain() made its text",
    (
        "comm/launch.py",
        "RankFailedError(f'rank {hub.failed_rank} failed\\n\\n{texts[hub.failed_rank]}')",
    ): TRACEBACK,
}
"""Errors that are made of one text, by file and code, each with the reason."""


def test_no_text_proposes_the_nearest_word_where_none_may_be_alike():
    """A call of ``nearest`` stands in no text itself: ``fix_for``, or a variable that is looked at, does."""
    texts = (
        (path, ast.unparse(text))
        for path in SOURCE.rglob("*.py")
        if "nearest(" in path.read_text(encoding="utf-8")
        for text in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(text, ast.JoinedStr)
    )
    assert [(path.name, text) for path, text in texts if "nearest(" in text] == []


def bases_of(node):
    return {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}


def errors_without_parts(trees):
    """By file and code, the errors that are made without given, allowed and fix, of classes that take these parts."""
    classes = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    known = {"ExplainedError"}
    while more := {node.name for node in classes if bases_of(node) & known} - known:
        known |= more
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name) and node.exc.id in known:
                yield file, ast.unparse(node.exc)
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in known:
                given = {each.arg for each in node.keywords}
                if not (given >= PARTS or None in given):
                    yield file, ast.unparse(node)


def test_every_error_is_made_of_its_parts_or_has_a_reason_not_to_be():
    trees = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text("utf-8")) for path in SOURCE.rglob("*.py")}
    assert set(errors_without_parts(trees)) == set(WHOLE)


@pytest.mark.parametrize(
    "code", ["raise LayoutError('no')", "raise LayoutError", "error = errors.LateError('no', given=1, fix=2)"]
)
def test_an_error_without_parts_is_found(code):
    classes = "class LayoutError(ExplainedError, ValueError): ...\nclass LateError(errors.LayoutError): ...\n"
    assert list(errors_without_parts({"one.py": ast.parse(classes + code)}))
    assert not list(errors_without_parts({"one.py": ast.parse(classes + "LateError('no', given=1, allowed=2, fix=3)")}))


def test_a_value_of_70_000_characters_is_shown_by_its_beginning_and_length():
    text = str(PlanError("no such model", given=70_000 * "x", allowed="gpt", fix=f"write gpt, not {2000 * 'y'}"))
    assert len(text) < 500
    assert "given:   xxxx" in text
    assert "x... (70,000 characters)" in text
    assert "y... (2,000 characters)" in text
