"""What is found in a plain model: who uses which parameter, chains, heads, the calls of one forward."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright.analysis.on_meta.module_calls import call_model, record_module_calls
from shardwright.analysis.traced.structure import find_chains, find_head, owners, trace
from shardwright.models import GPT, Attention, ConvNetConfig, GPTConfig, MLPConfig, build_convnet, build_mlp
from shardwright.models.gpt import MLP, GatedMLP


class Written(nn.Module):
    """Two layers, joined by a forward of one's own; ``body(module, x)``."""

    def __init__(self, body, hidden=8, **layers):
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden), nn.Linear(hidden, 4)
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def only(chains):
    (chain,) = chains
    return chain


# ---- chains


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.down(m.up(x).relu()),
        lambda m, x: m.down(torch.tanh(m.up(x))),
        lambda m, x: m.down(functional.gelu(m.up(x), approximate="tanh")),
        lambda m, x: m.down(m.up(x).square() * 2),
        lambda m, x: m.down(m.up(x) * torch.tensor(2.0)),
        lambda m, x: m.down(input=m.up(input=x).relu()),
        lambda m, x: m.down(m.up(x)),
        lambda m, x: x + m.down(functional.silu(m.up(x))),
        lambda m, x: m.down((lambda y: y * y.sigmoid())(m.up(x))),
    ],
)
def test_two_layers_with_only_elementwise_work_between_are_a_chain(body):
    assert only(find_chains(Written(body)))[:3:2] == (("up",), "down")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (lambda m, x: m.down(functional.softmax(m.up(x), -1)), "a softmax looks at all features"),
        (lambda m, x: m.down(m.norm(m.up(x))), "so does a norm"),
        (lambda m, x: m.down(m.up(x).relu()) + m.up(x)[..., :4], "the layer is used twice"),
        (lambda m, x: (lambda y: m.down(y.relu()) + y.sum())(m.up(x)), "the features are seen from outside"),
        (lambda m, x: m.down(m.up(x).flip(-1)), "the features change places"),
        (lambda m, x: m.down(m.up(x) + 1), "a sum is not among what is known to be elementwise"),
        (lambda m, x: m.down(torch.cat([x, m.up(x)[..., :4]], -1)), "the features are joined with others"),
        (lambda m, x: m.down(m.up(x) * x.repeat(1, 2)), "a factor that is not cut"),
        (lambda m, x: m.down(m.up(x) * m.scale), "a factor for each feature"),
        (lambda m, x: m.down(m.up(x).mul(torch.ones(8))), "a constant for each feature"),
        (lambda m, x: m.down(torch.mul(m.up(x), other=torch.ones(8))), "the same, by name"),
        (lambda m, x: m.down(m.up(x) * m.one), "one trained factor for all features"),
        (lambda m, x: m.down(m.up(x)) + functional.linear(x, m.up.weight)[..., :4], "the weight is used by itself"),
        (lambda m, x: m.down(m.up(x)) * m.up.bias.sum(), "so is the bias"),
        (lambda m, x: m.down(m.down(m.up(x)).repeat(1, 2)), "the last layer is used twice"),
    ],
)
def test_what_looks_at_all_features_is_no_chain(body, why):
    scale, one = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(()))
    model = Written(body, norm=nn.LayerNorm(8), scale=scale, one=one)
    assert model(torch.ones(2, 4)).shape[-1] == 4, why
    assert find_chains(model) == (), why


def test_a_residual_around_a_chain_leaves_it_one_and_a_residual_inside_does_not():
    around = Written(lambda m, x: x + m.down(m.up(x).relu()))
    inside = Written(lambda m, x: (lambda y: m.down(y * (y + x.repeat(1, 2))))(m.up(x)))
    assert len(find_chains(around)) == 1
    assert find_chains(inside) == ()


def test_a_gated_chain_has_two_columns_that_share_one_input():
    chain = only(find_chains(GatedMLP(4, 8)))
    assert (set(chain.columns), chain.row, chain.entry) == ({"gate", "up"}, "down", "")
    assert chain.between == ("activation",)
    inner = only(find_chains(nn.Sequential(nn.Linear(4, 4), GatedMLP(4, 8))))
    assert (set(inner.columns), inner.row, inner.entry) == ({"1.gate", "1.up"}, "1.down", "1")


def test_columns_with_inputs_of_their_own_share_none():
    model = Written(lambda m, x: m.down(m.up(x) * m.gate(x.relu()).sigmoid()), gate=nn.Linear(4, 8))
    assert only(find_chains(model)).entry is None


def test_columns_of_different_widths_are_no_chain():
    model = Written(lambda m, x: m.down(m.up(x) * m.gate(x)), gate=nn.Linear(4, 1))
    assert model(torch.ones(2, 4)).shape == (2, 4)
    assert find_chains(model) == ()


def test_a_layer_is_in_one_chain_at_most():
    model = build_mlp(MLPConfig(widths=(3, 4, 5, 6, 7, 8)))
    chains = find_chains(model)
    assert [(chain.columns, chain.row) for chain in chains] == [
        (("linear1",), "linear2"),
        (("linear3",), "linear4"),
    ]


def test_dropout_between_the_layers_belongs_to_the_chain():
    chain = only(find_chains(build_mlp(MLPConfig(widths=(3, 4, 5), dropout=0.1))))
    assert chain.between == ("activation1", "dropout1")


def test_chains_inside_blocks_are_named_by_their_whole_path():
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=2, width=8))
    assert [(chain.columns, chain.row) for chain in find_chains(model)] == [
        ((f"blocks.{i}.mlp.up",), f"blocks.{i}.mlp.down") for i in range(2)
    ]


def test_a_chain_of_the_fully_connected_part_is_found_across_its_sequence():
    chains = find_chains(build_convnet(ConvNetConfig()))
    assert ("fc.linear1",) in [chain.columns for chain in chains]


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(*[nn.Linear(4, 4)] * 2),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), *[nn.Linear(4, 4)] * 2, nn.ReLU()),
        Written(lambda m, x: m.down(m.down(m.up(x)).relu()), hidden=4),
    ],
)
def test_a_layer_that_is_called_twice_ends_no_chain(model):
    assert find_chains(model) == ()


def test_a_module_that_is_shared_is_found_once():
    shared = MLP(4, 8)
    assert len(find_chains(nn.Sequential(shared, nn.ReLU(), shared))) == 1


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.up, self.down = MLP(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        if x.sum() > 0:
            return self.mlp(x)
        return self.down(self.up(x).relu())


class Failing(nn.Module):
    def forward(self, x):
        raise KeyError("nothing to see here")


def test_a_module_that_depends_on_values_is_not_taken_apart_but_its_children_are():
    model = Branching()
    assert trace(model) is None
    assert [chain.row for chain in find_chains(model)] == ["mlp.down"]
    assert find_head(model) is None


def test_a_module_that_fails_when_it_is_traced_is_not_taken_apart():
    assert trace(Failing()) is None
    assert find_chains(nn.Sequential(nn.Linear(2, 2), Failing())) == ()


# ---- tracing


def test_tracing_leaves_the_module_alone():
    model = GatedMLP(4, 8)
    before = [(id(m), set(m.__dict__), id(m.forward.__func__)) for m in model.modules()]
    x = torch.randn(2, 4)
    expected = model(x)
    trace(model)
    assert [(id(m), set(m.__dict__), id(m.forward.__func__)) for m in model.modules()] == before
    assert torch.equal(model(x), expected)


def test_tracing_copies_no_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**20, 2**20), nn.ReLU(), nn.Linear(2**20, 4))
    assert only(find_chains(model)).row == "2"


def test_tracing_does_not_disturb_models_that_run_in_other_threads():
    model, stop, wrong = MLP(4, 8), threading.Event(), []
    x = torch.randn(3, 4)
    expected = model(x).detach()
    call = nn.Module.__call__

    def running():
        while not stop.is_set():
            if not torch.equal(model(x), expected):
                wrong.append(1)

    threads = [threading.Thread(target=running) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        assert len(find_chains(nn.Sequential(MLP(4, 8), model, GatedMLP(4, 8)))) == 3
        assert nn.Module.__call__ is call
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- the head


def test_the_head_is_the_layer_whose_output_is_the_models():
    with torch.device("meta"):
        for style in ("gpt2", "llama"):
            assert find_head(GPT(GPTConfig(style=style, num_layers=1, width=8))) == "head"
    assert find_head(build_mlp(MLPConfig(widths=(3, 4, 5)))) == "linear2"
    assert find_head(build_convnet(ConvNetConfig())) == "out.linear"


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.down(m.up(x)) * 2,
        lambda m, x: (m.down(m.up(x)), x),
        lambda m, x: {"logits": m.down(m.up(x))},
        lambda m, x: m.down(m.down(m.up(x)).repeat(1, 2)),
        lambda m, x: (lambda y: y * y)(m.down(m.up(x))),
        lambda m, x: m.up(x).relu(),
    ],
)
def test_a_layer_with_anything_after_it_or_beside_it_is_no_head(body):
    model = Written(body)
    model(torch.ones(2, 4))
    assert find_head(model) is None


def test_a_model_that_ends_in_a_softmax_has_no_head():
    assert find_head(build_convnet(ConvNetConfig(softmax=True))) is None


# ---- owners


def test_every_use_of_every_parameter_is_listed_under_one_name():
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=1, width=8))
    found = list(owners(model))
    assert {name for _, _, _, name in found} == {name for name, _ in model.named_parameters()}
    assert [path for path, _, _, name in found if name == "token.weight"] == ["token", "head"]
    for path, module, own, name in found:
        assert model.get_submodule(path) is module
        assert getattr(module, own) is model.get_parameter(name)


def test_a_shared_module_owns_its_parameters_once():
    shared = nn.Linear(2, 2)
    assert len(list(owners(nn.Sequential(shared, nn.ReLU(), shared)))) == 2


# ---- visits


def test_every_call_is_observed_with_its_shapes():
    model = nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.Linear(4, 2)).to("meta")
    module_calls = record_module_calls(model, torch.empty(3, 4, device="meta"))
    assert [(visit.x_shape, visit.y_shape, visit.needs_gradient) for visit in module_calls["0"]] == [
        ((3, 4), (3, 4), False),
        ((3, 4), (3, 4), True),
    ]
    assert [visit.y_shape for visit in module_calls["2"]] == [(3, 2)]
    assert [visit.y_shape for visit in module_calls[""]] == [(3, 2)]


def test_inputs_given_by_name_are_observed():
    module_calls = record_module_calls(nn.Linear(2, 4), {"input": torch.ones(3, 2)})
    assert module_calls[""][0].x_shape == (3, 2)


def test_observing_leaves_no_hooks_even_where_the_model_fails():
    model = nn.Sequential(nn.Linear(2, 2), Failing())
    with pytest.raises(KeyError):
        record_module_calls(model, torch.ones(1, 2))
    assert not any(m._forward_hooks for m in model.modules())


def test_observed_elements_have_the_bytes_of_their_dtype():
    model = nn.Linear(2, 2, dtype=torch.float64)
    assert record_module_calls(model, torch.ones(1, 2, dtype=torch.float64))[""][0].element_bytes == 8


def test_inputs_may_be_a_value_a_tuple_or_named():
    attention, x = Attention(4, 2), torch.randn(1, 3, 4)
    expected = attention(x)
    for inputs in (x, (x,), [x], {"x_BTH": x}):
        assert torch.equal(call_model(attention, inputs), expected)
