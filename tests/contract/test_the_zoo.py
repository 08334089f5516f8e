"""A dozen models that others wrote: what equals one device in docs/models.md does so. Needs their packages.

``make zoo-contract`` runs it in an environment that has them; elsewhere each model is skipped with the reason.
"""

from __future__ import annotations

import json

import pytest

from zoo.models import MODELS
from zoo.page import ROWS
from zoo.trying import EQUAL, tried

SOME = (
    "gpt2", "llama", "mixtral", "bert", "t5", "bart", "vit", "resnet", "wav2vec2", "llama with lora", "x decoder",
    "vit-pytorch vit",
)  # fmt: skip
ROW_LIST = json.loads(ROWS.read_text())["rows"]
MEASURED = {(row["model"], row["layout"]): row["result"] for row in ROW_LIST if row["mode"] == "train"}


@pytest.mark.filterwarnings("ignore")  # of packages that we do not choose the versions of
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2/1f1b mb4", "dp2/zero3"])
@pytest.mark.parametrize("name", SOME)
def test_a_model_of_others_that_equalled_one_device_does_so_still(name, layout):
    try:
        row = tried(MODELS[name], layout)
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing}; make zoo-contract has it")
    if MEASURED.get((name, layout)) == EQUAL:
        assert row.result == EQUAL, row.why
    else:
        assert row.why or row.result == EQUAL, "a refusal says why"
