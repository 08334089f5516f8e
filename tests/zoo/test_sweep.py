"""Classes of transformers without a rule of their own, made small by the names of their config's settings."""

import json

import pytest

from zoo.page import PAGE, SWEEP, swept

ROW = {"family": "the next token", "mode": "train", "library": "x"}


def test_the_page_counts_what_was_tried_and_names_what_was_not_equal():
    rows = [
        {"model": "A", "layout": "tp2", "result": "equal", "cut_in_blocks": 0.9, **ROW},
        {"model": "B", "layout": "tp2", "result": "equal", "cut_in_blocks": 0.25, **ROW},
        {"model": "C", "layout": "tp2", "result": "refused", "why": "no *reason*", **ROW},
        {"model": "D", "layout": "tp2", "result": "left out", "why": "TypeError", **ROW},
    ]
    text = swept({"transformers": "1.0", "layouts": ["tp2"], "rows": rows})
    assert "All 4 classes of transformers 1.0" in text
    assert "1 are left out" in text
    assert "| `tp2` | the next token | 3 | 2 (67 %) | 1 (33 %) | 0 | 1 | 0 | 0 |" in text
    assert "- B under `tp2`: equal, cuts 25% of its blocks" in text
    assert r"- C under `tp2`: refused, no \*reason\*" in text
    assert "- A under" not in text


def test_the_committed_rows_are_on_the_page():
    assert swept(json.loads(SWEEP.read_text())) in PAGE.read_text()


@pytest.mark.parametrize(
    ("name", "task"),
    [("LlamaForCausalLM", "the next token"), ("BertForMaskedLM", "a token"),
     ("T5ForConditionalGeneration", "to another sequence"), ("ResNetForImageClassification", "picture")],
)  # fmt: skip
def test_a_class_is_made_small_by_the_names_of_its_settings(name, task):
    pytest.importorskip("transformers", reason="make zoo-contract has it")
    from zoo.building import LeftOutError
    from zoo.shrinking import MOST_ELEMENTS, built

    model, (inputs, targets) = built(name, task)
    assert sum(parameter.numel() for parameter in model.parameters()) <= MOST_ELEMENTS
    assert targets is inputs["labels"]
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(LeftOutError, match="Error"):
        built(name, "picture" if task != "picture" else "a token")
