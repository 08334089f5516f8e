"""The example that fine-tunes a Llama of transformers; skipped where transformers is not installed."""

from __future__ import annotations

import re
import sys
from functools import partial
from importlib import import_module

import pytest
import torch

import shardwright as sw


@pytest.mark.filterwarnings("ignore")  # of a package that we do not choose the version of
def test_a_llama_that_is_trained_on_parts_or_in_stages_is_saved_for_transformers_as_one_device_saves_it(
    tmp_path, monkeypatch, capsys
):
    transformers = pytest.importorskip("transformers", reason="make zoo-contract has it")
    example = import_module("examples.transformers_llama")
    saved = {}
    monkeypatch.setattr(sw, "launch", partial(sw.launch, ranks="threads"))
    for line in ("single", "tp2", "pp2/1f1b mb2"):
        out = tmp_path / line.partition("/")[0]
        monkeypatch.setattr(sys, "argv", ["", "--layout", line, "--out", str(out), "--steps", "8"])
        example.main()
        first, last = map(float, re.search(r"loss (\S+) -> (\S+)", capsys.readouterr().out).groups())
        assert last < first - 0.5
        saved[line] = transformers.LlamaForCausalLM.from_pretrained(out).state_dict()
    for line in ("tp2", "pp2/1f1b mb2"):
        torch.testing.assert_close(saved[line], saved["single"], rtol=1e-3, atol=1e-4)
