"""The promises that every strategy makes, beside every strategy on another axis."""

from __future__ import annotations

import pytest

from contract.cases import (
    CHECKS,
    DEEP,
    OPTION_CASES,
    PAIR_CASES,
    SUPPLIED,
    check_refused,
    lays_out,
    line_of,
    of_one_model,
    pairs,
    spelling,
    spellings,
    whole_size,
)


def lines(one, other):
    """Even and uneven sizes, with and without microbatches; either axis larger."""
    return [
        f"{spelling(one, 2)} {spelling(other, whole_size(other))}",
        f"{spelling(one, 3)} {spelling(other, 2)}",
        f"{spelling(one, 2)} {spelling(other, 3)} mb2",
    ]


EVERY_PAIR = pytest.mark.parametrize(("one", "other"), pairs(), ids=[f"{a.name} beside {b.name}" for a, b in pairs()])


@pytest.mark.sampled(100)
@pytest.mark.parametrize(
    ("one", "other", "case"),
    [
        # `make test` takes one of them, with a pipeline
        pytest.param(a, b, c, marks=[pytest.mark.sampled(1)] if (c, {a.axis, b.axis}) == (DEEP, {"pp", "dp"}) else [])
        for c in PAIR_CASES
        for a, b in pairs()
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_strategy_keeps_its_promises_beside_every_other(one, other, case):
    left_out = PAIR_CASES.index(case) % 3  # two lines a case, and each line for two cases or more
    for line in [line for number, line in enumerate(lines(one, other)) if number != left_out]:
        if not lays_out(line, case):
            check_refused(line, case.model, loss=case.loss)
            continue
        for check in CHECKS:
            check(line, case)


def stands_alone(factor):
    named = any(f"/{name}:" in factor for name in (*of_one_model(), *SUPPLIED))
    return named or any(lays_out(line_of(case, factor), case) for case in OPTION_CASES)


@pytest.mark.timeout(600)
@EVERY_PAIR
def test_every_option_keeps_the_promises_beside_every_other_strategy(one, other):
    # each option of one beside the plainest of the other: all products would take minutes and say no more
    first, second = spellings(one, 2), spellings(other, 2)
    # two options that exclude each other are refused without the other strategy too
    first, second = (each[:1] + [factor for factor in each[1:] if stands_alone(factor)] for each in (first, second))
    lines = [f"{a} {second[0]}" for a in first] + [f"{first[0]} {b}" for b in second[1:]]
    # three microbatches where it must be so many: a file says for how many its schedule is
    ways = {line: [(each, case) for each in (line, f"{line} mb3") for case in OPTION_CASES] for line in lines}
    fitting = {line: next(((each, case) for each, case in ways[line] if lays_out(each, case)), None) for line in lines}
    for line in lines:
        named = next((name for name in of_one_model() if f"/{name}:" in line), None)
        alike = [line] if named is None else [other for other in lines if f"/{named}:" in other]
        assert any(fitting[other] for other in alike), line
        if fitting[line] is not None:
            for check in CHECKS:
                check(*fitting[line])


@EVERY_PAIR
def test_some_model_is_laid_out_by_every_pair(one, other):
    for line in lines(one, other):
        assert any(lays_out(line, case) for case in PAIR_CASES), line
