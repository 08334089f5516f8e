"""The plan for tensor parallelism that a model brings along is a hint: its operators decide, and roles say so."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright.layout import Layout
from shardwright.models import CrossEntropy
from shardwright.parallelize.planning import job_for, make_plan


class Gated(nn.Module):
    """Gated MLPs with a plan of their own, which is right about all but one layer of each."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.ModuleDict({"gate": nn.Linear(8, 12), "up": nn.Linear(8, 12)}) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(12, 8) for _ in range(2))
        self.tp_plan = {"layers.*.gate": "colwise", "layers.*.up": "rowwise", "downs.*": "rowwise", "words": "unheard"}

    def forward(self, tokens):
        x = self.words(tokens)
        for layer, down in zip(self.layers, self.downs, strict=True):
            x = x + down(functional.silu(layer["gate"](x)) * layer["up"](x))
        return x


def roles_of(model):
    layout = Layout.parse("tp2")
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    return make_plan(job_for(model, CrossEntropy(), layout, tokens), layout)[0].roles


def test_a_layer_whose_operators_are_cut_otherwise_than_its_own_plan_says_is_named():
    roles = roles_of(Gated())
    assert {path for path, role in roles.items() if "tp_plan" in role.why} == {"layers.0.up", "layers.1.up"}
    assert roles["layers.1.up"].name == "tp:h", "its rows are cut all the same"
    assert roles["layers.1.up"].why.endswith("; its tp_plan says rowwise, and its operators decide")


def test_a_model_of_transformers_is_cut_as_its_own_plan_says_but_for_its_table():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 11}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    found = {path: role.why for path, role in roles_of(model).items() if "tp_plan" in role.why}
    assert list(found) == ["model.embed_tokens"]
    assert found["model.embed_tokens"].endswith("its tp_plan says embedding_rowwise, and its operators decide")
