"""Models built without values start as their constructors would have filled them."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
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
    torch.manual_seed(0)
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


class Rated(nn.Module):
    """Its constructor reads values that it computes: rates of stochastic depth, as vision models have them."""

    def __init__(self, num_blocks=4):
        super().__init__()
        rates = torch.linspace(0, 0.3, num_blocks).tolist()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)) for rate in rates)
        steps = torch.arange(num_blocks) ** 2
        self.first, self.last = float(steps[1] / 3), int(steps.max())
        self.has_steps, self.sizes = bool((steps > 0).any()), [each.item() for each in steps.numpy()]

    def read(self):
        return [block[1].p for block in self.blocks], self.first, self.last, self.has_steps, self.sizes


def test_a_constructor_may_read_the_values_that_it_computes():
    with without_values():
        model = Rated()
    assert model.read() == Rated().read()
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3).weight.std(), lambda: torch.empty(())])
def test_reading_random_or_missing_values_in_a_constructor_is_refused(make):
    with without_values(), pytest.raises(PlanError, match="reads values that it has not got without values"):
        make().item()


class Older(nn.Module):
    """As older code makes tensors: ``torch.Tensor`` and numpy give tensors with values under any device."""

    def __init__(self):
        super().__init__()
        self.gain, self.weight = nn.Parameter(torch.ones(8)), nn.Parameter(torch.Tensor(8, 8))
        self.shift = nn.Parameter(torch.empty(8))
        self.register_buffer("table", torch.from_numpy(np.arange(64, dtype="f").reshape(8, 8)))
        self.reset_parameters()
        with torch.no_grad():
            self.weight.mul_(2)

    def reset_parameters(self):
        nn.init.normal_(self.shift)
        nn.init.normal_(self.weight, 0.0, 0.5)

    def forward(self, x):
        return (x @ self.weight + self.table[0] + self.shift) * self.gain


def test_tensors_that_have_values_keep_them_beside_tensors_that_are_drawn():
    model = without(Older)
    assert model.gain.is_meta
    assert not model.weight.is_meta
    assert not model.table.is_meta
    weight, state = model.weight.detach().clone(), torch.get_rng_state()
    one, again = placed(model), placed(model)
    assert torch.equal(torch.get_rng_state(), state)
    for found in (one, again, model):
        assert torch.equal(found.weight, weight)
        assert torch.equal(found.table, torch.arange(64.0).view(8, 8))
    assert torch.equal(one.gain, torch.ones(8))
    assert torch.equal(one.shift, again.shift)
    assert one.shift.std() > 0
    assert not torch.equal(one.shift, placed(model, seed=1).shift)
    assert verify(model, "dp2", [(torch.randn(4, 8), torch.randint(8, (4,)))])


def test_initialize_weights_draws_tensors_with_values_from_the_seed():
    class Later(Late):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.Tensor(64).fill_(7.0))

        def initialize_weights(self):
            super().initialize_weights()
            nn.init.normal_(self.scale)

    state, drawn = torch.get_rng_state(), []
    for seed in (0, 0, 1):
        plain = without(Later)
        drawn.append(placed(plain, seed).scale)
        assert torch.equal(plain.scale, torch.full((64,), 7.0)), "the user's own model is left alone"
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def in_place(write):
    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.arange(24.0).view(6, 4)), nn.Parameter(torch.ones(4))
            with torch.no_grad():
                write(self)

    return Written


WRITES = {
    "a list": lambda m: m.weight.__setitem__([1, 3, 5], 7.0),
    "lists": lambda m: m.weight.__setitem__(([0, 1], [2, 3]), torch.tensor([5.0, 6.0])),
    "a list in a tuple": lambda m: m.weight.__setitem__((slice(None), [1, 2]), 7.0),
    "numpy's in a tuple": lambda m: m.weight.__setitem__((np.array([0, 1]), np.array([2, 3])), 7.0),
    "a range": lambda m: m.weight.__setitem__(range(3), 7.0),
    "truth values": lambda m: m.weight.__setitem__([True, False, False, True, True, False], 7.0),
    "nothing": lambda m: m.weight.__setitem__([], 7.0),
    "tensors in a list": lambda m: m.weight.__setitem__([1, torch.tensor(1)], 7.0),
    "read": lambda m: m.weight.copy_(m.weight[[5, 4, 3, 2, 1, 0]] * 3),
    "read by truth values": lambda m: m.weight[:2].copy_(m.weight[[False, True, False, False, True, False]]),
    "new_tensor": lambda m: m.weight[0].copy_(m.weight.new_tensor([5, 6, 7, 8])),
    "new_tensor of a number": lambda m: m.bias.copy_(m.weight.new_tensor(5)),
    "new_tensor by name": lambda m: m.weight[0].copy_(m.weight.new_tensor(data=[5, 6, 7, 8])),
    "tensor by name": lambda m: m.bias.copy_(torch.tensor(data=[5, 6, 7, 8])),
    "asarray by name": lambda m: m.bias.copy_(torch.asarray(obj=np.arange(4))),
    "new": lambda m: m.weight[0].copy_(m.weight.new([5, 6, 7, 8])),
    "new of sizes": lambda m: m.weight.copy_(m.weight.new(m.weight.shape).fill_(3.0)),
    "dirac_, then read": lambda m: m.bias.fill_(nn.init.dirac_(m.weight.view(6, 2, 2)).sum().item()),
    "foreach": lambda m: torch._foreach_mul_([m.weight, m.bias], 3.0),
    "foreach by lists": lambda m: torch._foreach_add_([m.weight, m.bias], [m.bias, m.weight[2]]),
    "data": lambda m: setattr(m.weight, "data", torch.from_numpy(np.ones((6, 4), "f")) * 5),
    "data, then written": lambda m: (
        setattr(m.weight, "data", torch.from_numpy(np.ones((6, 4), "f"))) or m.weight.mul_(2)
    ),
    "answers": lambda m: m.bias.fill_(torch.equal(m.bias, torch.ones(4)) + torch.allclose(m.bias, m.weight[1])),
    "randn": lambda m: m.weight.copy_(torch.randn(6, 4, generator=torch.Generator().manual_seed(3))),
    "rand": lambda m: m.weight.copy_(torch.rand(6, 4, generator=torch.Generator().manual_seed(3))),
    "randperm": lambda m: m.bias.copy_(torch.randperm(4, generator=torch.Generator().manual_seed(3))),
    "normal_": lambda m: m.weight.normal_(0, 0.4, generator=torch.Generator().manual_seed(3)),
    "nn.init": lambda m: nn.init.trunc_normal_(m.weight, generator=torch.Generator().manual_seed(3)),
    "nn.init, then read": lambda m: m.weight.mul_(
        nn.init.normal_(m.bias, generator=torch.Generator().manual_seed(3))[0].item()
    ),
    "bernoulli": lambda m: m.bias.copy_(torch.bernoulli(m.bias / 2, generator=torch.Generator().manual_seed(3))),
    "bernoulli_ of itself": lambda m: m.bias.div_(2).bernoulli_(m.bias, generator=torch.Generator().manual_seed(3)),
}


def two_draws(model):
    generator = torch.Generator().manual_seed(3)
    model.weight.copy_(torch.randn(6, 4, generator=generator))
    nn.init.xavier_uniform_(model.weight[1:], generator=generator)
    model.bias.uniform_(generator=generator)
    if model.bias[0].item() > 0:  # drawn from a generator whose seed is known
        model.bias.mul_(torch.rand(4, generator=generator))


@pytest.mark.parametrize("name", [*WRITES, "two draws"])
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_writes_have_the_values_of_the_plain_constructor(name):
    make = in_place(WRITES.get(name, two_draws))
    model = without(make)
    assert model.weight.is_meta
    found, plain = placed(model), make()
    assert torch.equal(found.weight, plain.weight)
    assert torch.equal(found.bias, plain.bias)


def written_after(model):
    values = np.ones((6, 4), "f")
    model.weight.data = torch.from_numpy(values)
    values *= 2


def written_array(model):
    model.weight.numpy()[0] = 7.0


REFUSED = {
    "writes to the array of a tensor": written_array,
    "indexes a tensor by lists inside a list": lambda m: m.weight.__setitem__([[0, 1], [2, 3]], 7.0),
    "writes to a tensor after it has become the data": written_after,
    "a tensor of shape .* filled at random": lambda m: torch.allclose(torch.randn(2), torch.zeros(2)),
    "a call of cpu, which ends in: Cannot copy out of meta tensor": lambda m: torch.randn(2).cpu(),
    "a call of __getitem__": lambda m: m.weight[torch.randn(6) > 0],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_has_no_values_in_a_constructor_is_refused_by_name(message):
    with pytest.raises(PlanError, match=f"(?s){message}.*fix:"):
        without(in_place(REFUSED[message]))


def test_a_lazy_module_can_be_built_and_is_refused_when_it_runs():
    model = without(lambda: nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(PlanError, match="has no shape yet"):
        launch(lambda world: parallelize(model, "single", world), 1, ranks="threads")


def test_a_buffer_that_repeats_its_memory_has_its_values():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("mask", torch.tril(torch.ones(3, 3)).expand(2, 3, 3))

    assert torch.equal(placed(without(Masked)).mask, Masked().mask)
