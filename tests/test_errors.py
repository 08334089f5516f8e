"""Errors say what was given, what is allowed and how to fix it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
def test_the_nearest_word_is_one_that_is_known(known, word):
    assert nearest(word, known) in known


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
