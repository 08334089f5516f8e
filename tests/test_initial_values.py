"""Models built without values start as their constructors would have filled them."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize, verify, without_values
from shardwright.errors import PlanError
from shardwright.initial_values import WriteRecorder, recorded_values
from shardwright.layout import Layout
from shardwright.parallelize.initialization import place_parameters
from shardwright.parallelize.planning import structural_copy

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.c_proj = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.register_buffer("mask", torch.tril(torch.ones(width, width)))
        self.register_buffer("rates", 1 / (100 ** (torch.arange(0, width, 2).float() / width)), persistent=False)

    def forward(self, x):
        return x + self.c_proj((self.up(x) @ self.mask).relu()) * self.scale + self.rates.sum()


class Whole(nn.Module):
    """Initialised by rules that look at the whole model, in its constructor, as GPTs often are."""

    def __init__(self, width=64, num_blocks=3):
        super().__init__()
        self.table = nn.Embedding(50, width, padding_idx=2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.last = nn.Linear(width, width)
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * num_blocks))
        with torch.no_grad():
            self.last.weight[0].zero_()
            self.last.weight[1:].mul_(3.0)
            self.blocks[1].up.weight.copy_(self.blocks[0].up.weight)
        nn.init.orthogonal_(self.blocks[2].up.weight)
        nn.init.trunc_normal_(self.blocks[0].up.weight, std=0.1, a=-0.1, b=0.1)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def without(make=Whole):
    with without_values():
        return make()


def placed(model, seed=0):
    model = structural_copy(model)
    place_parameters(model, {}, {}, seed, CPU)
    return model


def test_values_have_the_deviations_and_the_zeros_of_the_plain_constructor():
    torch.manual_seed(0)
    plain, found = Whole(), placed(without())
    tensors = dict(found.named_parameters())
    for name, parameter in plain.named_parameters():
        wide = 0.1 if "weight" in name else 0.4  # biases have few elements
        assert tensors[name].std().item() == pytest.approx(parameter.std().item(), rel=wide, abs=1e-9), name
        assert tensors[name].mean().item() == pytest.approx(parameter.mean().item(), abs=0.03), name
    for name, buffer in plain.named_buffers():
        assert torch.equal(found.get_buffer(name), buffer), name
    assert not found.last.weight[0].any()
    first, second, third = (block.up.weight for block in found.blocks)
    assert torch.allclose(third.T @ third, torch.eye(64), atol=1e-5)
    assert first.abs().max() <= 0.1 + 1e-6
    assert second.std().item() == pytest.approx(0.02, rel=0.1)  # of the first's values before it was filled anew


def test_values_follow_the_seed_and_what_a_module_fills_by_itself_is_drawn_by_its_name():
    one, again, other = placed(without()), placed(without()), placed(without(), seed=1)
    with torch.device("meta"):
        unrecorded = nn.ModuleDict({"up": nn.Linear(3, 3)})
    recorded = without(lambda: nn.ModuleDict({"up": nn.Linear(3, 3)}))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        if "weight" in name:
            assert not torch.equal(parameter, other.get_parameter(name))
    assert torch.equal(placed(unrecorded)["up"].weight, placed(recorded)["up"].weight)


@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2/zero3", "pp2 mb2", "tp2x2/2d"])
def test_a_rank_holds_its_part_of_the_values_of_one_device(line):
    model = without()
    expected = placed(model).state_dict()

    def work(world):
        return parallelize(model, line, world).state_dict()

    for state in launch(work, Layout.parse(line), ranks="threads"):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], value) for name, value in expected.items())


class Late(nn.Module):
    """Leaves its values to ``initialize_weights`` on the meta device, as models of the transformers library do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        if torch.empty(0).device.type != "meta":
            self.initialize_weights()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        if module is self:
            nn.init.normal_(self.layers[1].weight, std=0.02 / 4)

    def initialize_weights(self):
        self.apply(self._init_weights)


@pytest.mark.parametrize("build", [without, lambda make: make().to("meta")])
def test_a_model_that_is_initialised_by_a_method_of_its_own_is_asked_to(build):
    found = placed(build(Late))
    assert [layer.weight.std().item() for layer in found.layers] == [
        pytest.approx(0.02, rel=0.1), pytest.approx(0.005, rel=0.1)
    ]  # fmt: skip


def test_a_constructor_that_leaves_modules_as_they_are_leaves_them_to_init_weights():
    class Left(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def _init_weights(self, module):
            nn.init.normal_(module.weight, std=0.02)

    assert placed(without(Left)).layer.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_such_a_model_is_equal_to_one_device_in_double_precision():
    tokens = torch.randint(50, (4, 3))
    assert verify(without(lambda: Whole(8)), "dp2 tp2", [(tokens, torch.randint(8, (4, 3)))])


def test_modules_that_cannot_draw_themselves_are_filled_as_their_constructor_did():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.empty = nn.Parameter(torch.randn(50, 50) * 0.1), nn.Parameter(torch.empty(0))

        def forward(self, x):
            return x @ self.weight

    assert placed(without(Silent)).weight.std().item() == pytest.approx(0.1, rel=0.05)
    with torch.device("meta"):
        model = Silent()
    with pytest.raises(PlanError, match=r"one built under sw\.without_values\(\)"):
        placed(model)


def test_a_tensor_that_no_code_has_filled_is_refused():
    class Unfilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with pytest.raises(PlanError, match="with 'weight'"):
        placed(without(Unfilled))


def test_layers_that_begin_as_copies_of_one_begin_alike():
    encoder = without(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2))
    torch.manual_seed(0)
    plain, found = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 2), placed(encoder)
    for model in (plain, found):
        assert torch.equal(model.layers[0].linear1.weight, model.layers[1].linear1.weight)


def test_pickled_models_and_structural_copies_keep_how_they_are_filled():
    model = without()
    expected = placed(model).state_dict()
    for other in (pickle.loads(pickle.dumps(model)), structural_copy(model, torch.clone)):
        assert all(torch.equal(value, expected[name]) for name, value in placed(other).state_dict().items())


def test_every_random_fill_and_constant_of_a_constructor_is_recorded():
    makers = {
        "randn": lambda: torch.randn(20000),
        "rand": lambda: torch.rand(20000),
        "randint": lambda: torch.randint(7, (20000,)).float(),
        "randperm": lambda: torch.randperm(20000).float(),
        "normal": lambda: torch.empty(20000).normal_(1.0, 2.0).exp_().log_(),
        "bernoulli": lambda: torch.bernoulli(torch.full((20000,), 0.3)),
        "rand_like": lambda: torch.rand_like(torch.ones(20000)),
        "of a list": lambda: torch.tensor([1.0, 2.0, 4.0]),
        "of the host": lambda: torch.arange(5.0, device="cpu").to("meta") * 2,
    }
    for name, make in makers.items():
        with torch.device("meta"), WriteRecorder() as recorder:
            value = recorder.of(make()).values(seed=0)
        expected = make() if name != "of the host" else torch.arange(5.0) * 2
        assert value.shape == expected.shape
        assert value.float().mean().item() == pytest.approx(expected.mean().item(), rel=0.05, abs=0.05), name
        assert value.float().std().item() == pytest.approx(expected.std().item(), rel=0.05), name


def test_records_are_of_the_thread_and_the_context_that_built_the_model():
    with without_values():
        inside = nn.Linear(2, 2)
    with torch.device("meta"):
        outside = nn.Linear(2, 2)
    assert recorded_values(inside.weight) is not None
    assert recorded_values(outside.weight) is None
    assert recorded_values(copy.copy(inside).weight) is not None
