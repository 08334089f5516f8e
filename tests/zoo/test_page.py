"""What the table of models says of rows."""

import pytest

from shardwright.errors import LayoutError
from zoo.__main__ import is_due
from zoo.models import MODELS
from zoo.page import Reasons, cell, divides, page_of
from zoo.trying import LAYOUTS, Row, reason_of


def row(result, layout="tp2", mode="train", **more):
    return Row(model="m", package="p", family="f", layout=layout, mode=mode, result=result, **more).to_dict()


def test_the_zoo_has_at_least_sixty_models_and_each_is_built_by_a_package_of_pypi():
    assert len(MODELS) >= 60
    assert {model.package for model in MODELS.values()} >= {"transformers", "peft", "x-transformers", "vit-pytorch"}


def test_refusals_that_differ_in_names_are_one_reason_and_the_most_frequent_comes_first():
    rows = [row("refused", why="no"), row("refused", why="'a.0' is cut"), row("refused", why="'b.1' is cut")]
    reasons = Reasons(rows)
    assert [reasons.of(each) for each in rows] == [2, 1, 1]
    assert "1. refused, 2 times: 'a.0' is cut" in reasons.text()


@pytest.mark.parametrize(
    ("found", "divided"),
    [
        (row("equal", cut_in_blocks=0.5), True),
        (row("equal", cut_in_blocks=0.49), False),
        (row("NOT equal", cut_in_blocks=1.0), False),
        (row("equal", "pp2 mb2", largest=0.625), True),
        (row("equal", "pp4 mb2", largest=0.32), False),
        (row("equal", "pp2 dp2 tp2", largest=0.5, cut_in_blocks=0.1), False),
    ],
)
def test_equal_alone_does_not_say_that_a_layout_divides_the_model(found, divided):
    assert divides(found) is divided


def test_a_cell_hides_neither_a_wrong_result_nor_what_dropout_prevents():
    wrong, refused, without = (
        row("NOT equal", off=2e-7),
        row("refused", why="x"),
        row("equal", mode="eval", largest=0.5),
    )
    reasons = Reasons([refused])
    assert cell([wrong, None], reasons) == "**NOT equal** 2e-07"
    assert cell([refused, without], reasons) == "refused [1]; eval: equal 50 %"
    assert cell([refused, {**refused, "mode": "eval"}], reasons) == "refused [1]"
    assert cell([None, without], reasons) == "not measured; eval: equal 50 %"


def test_a_page_has_a_row_for_each_model_and_a_column_for_each_layout():
    data = {"versions": {"p": "1"}, "layouts": LAYOUTS, "rows": [row("equal", "dp2"), row("refused", why="no")]}
    text = page_of(data)
    assert "| model | `dp2` | `tp2` |" in text
    assert "| m | equal | refused [1] |" in text
    assert "| `dp2` | 1 | 1 (100 %) |" in text


def test_the_page_counts_the_models_that_no_cut_divides_evenly():
    each = {"tied": 0.8, "apart": 0.5, "missed": 0.5}
    rows = [
        {
            **row("equal", "pp2 mb2", largest=0.9, least=least, least_even=max(least, 0.7 * (name == "apart"))),
            "model": name,
        }
        for name, least in each.items()
    ]
    text = page_of({"versions": {}, "layouts": ["pp2 mb2"], "rows": rows})
    assert "Of the 3 equal results whose largest stage holds more, 1 cannot do better" in " ".join(text.split())
    assert "In another 1 the stages could be" in " ".join(text.split())
    assert "| tied | equal 90 % (least 80 %) |" in text


def test_the_reason_of_a_failed_rank_is_that_of_the_error_beneath():
    beneath = LayoutError("no such axis", given="xp", allowed="pp", fix="write pp")
    failure = RuntimeError("rank 1 failed")
    failure.__cause__ = beneath
    assert reason_of(failure) == {"result": "refused", "why": "no such axis"}
    assert reason_of(RuntimeError("a\nb")) == {"result": "error", "why": "RuntimeError: a"}


def test_rows_of_the_same_source_are_kept_and_dropout_is_left_out_only_where_it_matters():
    kept = {("m", "tp2", "train"): row("equal", library="x"), ("m", "dp2", "train"): row("refused", library="x")}
    assert not is_due(kept, ("m", "tp2", "train"), "x")
    assert is_due(kept, ("m", "tp2", "train"), "y")
    assert [is_due(kept, ("m", layout, "eval"), "x") for layout in ("tp2", "dp2")] == [False, True]
