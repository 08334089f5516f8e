"""What is known of torch's own blocks, and what a trace sees of code that makes tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.analysis.on_meta.module_calls import record_module_calls
from shardwright.analysis.traced.known_modules import known_chains
from shardwright.analysis.traced.structure import find_chains, find_head, trace


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("activation", ["relu", "gelu", nn.SiLU()])
def test_the_pair_of_a_transformer_layer_is_known_by_its_type(kind, activation):
    model = nn.Sequential(nn.Linear(8, 8), kind(8, 2, 16, activation=activation, batch_first=True))
    ((chain, samples_first),) = known_chains(model)
    assert (chain.columns, chain.row, samples_first) == (("1.linear1",), "1.linear2", True)
    assert chain.between == (("1.activation", "1.dropout") if isinstance(activation, nn.Module) else ("1.dropout",))
    assert not find_chains(model)  # a trace sees nothing there


def _gated(x):
    return nn.functional.glu(torch.cat((x, x), dim=-1))


class OwnLayer(nn.TransformerEncoderLayer):
    def _ff_block(self, x):
        return self.linear2(self.linear1(x).softmax(dim=-1))


def _replaced() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    layer.linear1 = nn.Sequential(nn.Linear(8, 16))
    return layer


@pytest.mark.parametrize(
    "layer",
    [nn.TransformerEncoderLayer(8, 2, 16, activation=_gated), OwnLayer(8, 2, 16), _replaced()],
    ids=["an activation that mixes", "a subclass", "a layer replaced"],
)
def test_a_transformer_layer_that_does_something_else_is_not_known(layer):
    assert not list(known_chains(layer))


class MakesTensors(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(7, 8), nn.Embedding(9, 8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 7)

    def forward(self, tokens):
        num_tokens = tokens.shape[1]
        x = self.token(tokens) + self.position(torch.arange(num_tokens, device=tokens.device))
        hidden = torch.ones(num_tokens, num_tokens, device=tokens.device).triu(1) * -1e9
        x = (x @ x.mT + hidden).softmax(-1) @ x
        return self.head(self.down(torch.relu(self.up(x))))


def test_a_trace_goes_past_tensors_made_of_sizes():
    model = MakesTensors()
    assert find_head(model) == "head"
    assert [chain.row for chain in find_chains(model)] == ["down"]
    targets = {node.target for node in trace(model).nodes}
    assert {torch.arange, torch.ones} <= targets


def test_a_trace_leaves_torch_and_the_modules_code_alone():
    code, known = MakesTensors.forward.__code__, MakesTensors.forward.__globals__["torch"]
    trace(MakesTensors())
    assert MakesTensors.forward.__code__ is code
    assert known is torch
    assert MakesTensors()(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 7)


class Attends(nn.Module):
    def __init__(self, batch_first: bool):
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=batch_first)

    def forward(self, x, memory):
        return self.attn(x, memory, value=memory, need_weights=False)[0]


def test_a_call_of_an_attention_and_of_the_layer_in_it_are_observed():
    x, memory = torch.zeros(3, 5, 8, device="meta"), torch.zeros(3, 4, 8, device="meta", requires_grad=True)
    for batch_first in (True, False):
        given = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
        module_calls = record_module_calls(Attends(batch_first).to("meta"), given)
        (visit,), (inner,) = module_calls["attn"], module_calls["attn.out_proj"]
        assert visit.x_shape == visit.y_shape == inner.x_shape == (3, 5, 8)
        assert visit.call.inputs == ((5, 8, False), (4, 8, True))
        assert (visit.call.num_samples, visit.call.weights) == (3, 0)


class Masked(nn.Module):
    """torch's encoder and decoder, which look whether a mask is causal where nobody says so."""

    def __init__(self):
        super().__init__()
        kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        first, second = (kind(8, 2, 12, batch_first=True) for kind in kinds)
        self.encoder = nn.TransformerEncoder(first, 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(second, 1)

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.decoder(x, self.encoder(x, mask=mask), tgt_mask=mask)


def test_transformers_that_look_at_their_masks_are_observed_without_values():
    model = Masked().to("meta")
    module_calls = record_module_calls(model, torch.zeros(3, 5, 8, device="meta"))
    assert len([path for path in module_calls if path.endswith("attn")]) == 3
    assert not [module for module in model.modules() if "forward" in vars(module)]
