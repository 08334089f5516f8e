from copy import deepcopy
from math import sqrt

import pytest
import torch
import torch.fx
from torch import nn

from shardwright.analysis.traced.structure import trace
from shardwright.errors import PlanError
from shardwright.models.gpt import GPT, MLP, GatedMLP, GPTConfig, generate

STYLES = ("gpt2", "llama")


def small(style="gpt2", **changes):
    return GPTConfig(**{"style": style, "width": 16, "num_layers": 2, "max_tokens": 12, "vocabulary": 20, **changes})


@pytest.mark.parametrize("style", STYLES)
def test_tied_head_and_embedding_are_one_parameter(style):
    tied, apart = GPT(small(style)), GPT(small(style, tied=False))
    assert tied.head.weight is tied.token.weight
    assert apart.head.weight is not apart.token.weight
    assert sum(p.numel() for p in apart.parameters()) == sum(p.numel() for p in tied.parameters()) + 20 * 16


def test_gpt2_has_as_many_parameters_as_its_closed_form():
    config = GPTConfig(vocabulary=50257, max_tokens=1024, num_layers=12, num_heads=12, width=768)
    with torch.device("meta"):
        model = GPT(config)
    width = 768
    per_block = 12 * width**2 + 13 * width
    expected = 50257 * width + 1024 * width + 12 * per_block + 2 * width
    assert sum(p.numel() for p in model.parameters()) == expected == 124_439_808


def test_llama_has_as_many_parameters_as_its_closed_form():
    config = small("llama", num_heads=4, num_kv_heads=2, hidden=40, num_layers=3)
    width, per_block = 16, 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 40 + 2 * 16
    assert sum(p.numel() for p in GPT(config).parameters()) == 20 * width + 3 * per_block + width


@pytest.mark.parametrize("style", STYLES)
def test_a_model_built_on_meta_loses_nothing_but_the_values_of_its_parameters(style):
    with torch.device("meta"):
        model = GPT(small(style))
    assert not list(model.buffers())
    assert all(p.is_meta for p in model.parameters())
    assert model(torch.zeros(2, 5, dtype=torch.int64, device="meta")).shape == (2, 5, 20)
    values = GPT(small(style)).state_dict()
    model = model.to_empty(device="cpu")
    model.load_state_dict(values)
    plain = GPT(small(style))
    plain.load_state_dict(values)
    tokens = torch.randint(20, (2, 5))
    assert torch.equal(model(tokens), plain(tokens))


@pytest.mark.parametrize("style", STYLES)
def test_one_leaf_at_a_time_is_drawn_with_the_scale_of_gpt2(style):
    config = small(style, width=256, num_layers=8, max_tokens=64)
    with torch.device("meta"):
        model = GPT(config)
    torch.manual_seed(0)
    for name, module in model.named_modules():
        if not list(module.parameters(recurse=False)):
            continue
        leaf = deepcopy(module).to_empty(device="cpu")  # as the library does: a copy, apart from its root
        for parameter in leaf.parameters():
            nn.init.constant_(parameter, torch.nan)
        model._init_weights(leaf)
        if "norm" in name:
            assert torch.equal(leaf.weight, torch.ones(256))
        else:
            ends_branch = name.endswith(("attention.o", "mlp.down"))
            expected = 0.02 / sqrt(16) if ends_branch else 0.02
            assert abs(leaf.weight.std().item() / expected - 1) < 0.05, name
        if getattr(leaf, "bias", None) is not None:
            assert not leaf.bias.any(), name


@pytest.mark.parametrize("style", STYLES)
def test_a_new_model_guesses_every_token_alike(style):
    torch.manual_seed(0)
    model = GPT(small(style, vocabulary=256, width=64))
    logits = model(torch.randint(256, (2, 12)))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(256, (24,)))
    assert abs(loss.item() - 5.545) < 0.1  # ln 256


@pytest.mark.parametrize("style", STYLES)
def test_no_token_sees_a_later_one(style):
    torch.manual_seed(0)
    model = GPT(small(style)).double()
    tokens = torch.randint(20, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 20
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("style", STYLES)
def test_the_root_can_be_traced_with_blocks_as_leaves(style):
    model = GPT(small(style))
    graph = trace(model)
    called = [node.target for node in graph.nodes if node.op == "call_module"]
    first = ["token", "positions", "position", "dropout"] if style == "gpt2" else ["token", "dropout"]
    assert called == [*first, "blocks.0", "blocks.1", "norm", "head"]
    traced = torch.fx.GraphModule(model, graph)
    for shape in ((2, 5), (3, 12), (0, 4)):
        tokens = torch.randint(20, shape)
        assert torch.equal(traced(tokens), model(tokens))


@pytest.mark.parametrize("mlp", [MLP(4, 8), GatedMLP(4, 8)])
def test_feed_forward_modules_can_be_traced(mlp):
    x = torch.randn(2, 3, 4)
    assert torch.equal(torch.fx.symbolic_trace(mlp)(x), mlp(x))


@pytest.mark.parametrize("style", STYLES)
def test_every_module_with_parameters_is_called_so_that_hooks_fire(style):
    model = GPT(small(style))
    called = []
    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    model(torch.zeros(1, 3, dtype=torch.int64))
    expected = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
    assert sorted(called) == sorted(expected)


def test_a_sequence_longer_than_the_learned_positions_is_refused():
    with pytest.raises(PlanError, match="longer than the learned positions"):
        GPT(small())(torch.zeros(1, 13, dtype=torch.int64))
    assert GPT(small("llama"))(torch.zeros(1, 13, dtype=torch.int64)).shape == (1, 13, 20)


@pytest.mark.parametrize(
    "settings",
    [
        {"style": "bert"},
        {"num_layers": 0},
        {"width": 10},
        {"num_heads": 4, "num_kv_heads": 3},
        {"dropout": -0.1},
    ],
)
def test_a_config_that_makes_no_model_is_refused(settings):
    with pytest.raises(PlanError, match="fix:"):
        GPTConfig(**settings)


@pytest.mark.parametrize("style", STYLES)
def test_greedy_text_takes_the_likeliest_token_each_time_and_slides_past_the_longest_sequence(style):
    torch.manual_seed(0)
    model = GPT(small(style, dropout=0.5))
    tokens = torch.randint(20, (2, 3))
    text = generate(model, tokens, 12, 0.0, torch.Generator())
    assert model.training
    model.eval()
    expected = tokens
    for _ in range(12):
        expected = torch.cat((expected, model(expected[:, -12:])[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(text, expected)


def test_drawn_text_depends_on_the_generator_only():
    torch.manual_seed(0)
    model, tokens = GPT(small()), torch.zeros(1, 1, dtype=torch.int64)
    texts = [generate(model, tokens, 30, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
