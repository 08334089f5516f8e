"""Initial values: the same under any layout, and never the caller's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shardwright.comm.launch import launch
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.models import AttentionConfig, ConvNetConfig, GPTConfig, MLPConfig, entry_of
from shardwright.parallelize import parallelize
from shardwright.parallelize.initialization import place_parameters
from shardwright.parallelize.planning import structural_copy
from shardwright.sharding.box import balanced_ranges, cut
from shardwright.sharding.tensor_layout import TensorLayout

CPU = torch.device("cpu")
CONFIGS = {
    "mlp": MLPConfig(widths=(7, 11, 13, 5)),
    "attention": AttentionConfig(width=12, num_heads=3, num_kv_heads=1),
    "convnet": ConvNetConfig(image_size=10, channels=(3, 4), kernel=3, hidden=(9, 11)),
    "gpt2": GPTConfig(vocabulary=19, max_tokens=6, num_layers=2, num_heads=3, width=12),
    "llama": GPTConfig(style="llama", vocabulary=19, num_layers=2, num_heads=3, num_kv_heads=1, width=12),
}
LINES = ("single", "dp2", "tp2", "tp3", "dp2 tp3", "tp5")


def plain(config, device="meta"):
    entry = entry_of(config)
    with torch.device(device):
        return entry.factory(config)


def placed(config, seed=0):
    """The whole model's values, drawn in one process."""
    model = plain(config)
    place_parameters(model, {}, {}, seed, CPU)
    return {name: p.detach() for name, p in model.named_parameters()}


def held(model, line, seed=0):
    """What each rank holds, with the plan."""

    def work(world):
        run = parallelize(model, line, world, seed=seed)
        return run.plan, {name: p.detach() for name, p in run.model.named_parameters()}

    return launch(work, Layout.parse(line), ranks="threads")


def check_cut(line, found, whole):
    for rank, (plan, parameters) in enumerate(found):
        coord = plan.mesh.coord(rank)
        assert parameters.keys() == whole.keys()
        for name, part in parameters.items():
            layout = plan.compute[name]
            expected = cut(whole[name], layout.pieces(coord), layout.local_shape(coord))
            assert torch.equal(part, expected), f"{name} on rank {rank} of {line}"


@pytest.mark.parametrize("name", CONFIGS)
def test_initial_values_are_the_same_under_any_layout(name):
    model, whole = plain(CONFIGS[name]), placed(CONFIGS[name])
    for line in LINES:
        check_cut(line, held(model, line), whole)


@given(st.integers(0, 2**31))
@settings(max_examples=10)
def test_initial_values_depend_on_the_seed_alone(seed):
    one, again, other = (placed(CONFIGS["gpt2"], s) for s in (seed, seed, seed + 1))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["token.weight"], other["token.weight"])


@pytest.mark.parametrize("name", CONFIGS)
def test_no_two_parameters_start_from_the_same_numbers(name):
    random = [p for p in placed(CONFIGS[name]).values() if p.unique().numel() > 2]
    for index, one in enumerate(random):
        for other in random[:index]:
            size = min(one.numel(), other.numel())
            assert not torch.allclose(one.flatten()[:size], other.flatten()[:size], rtol=1e-3)


def test_initial_values_spread_as_the_model_says():
    config = GPTConfig(vocabulary=300, width=64, num_layers=4)
    values = placed(config)
    assert values["token.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert values["blocks.3.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert values["blocks.3.mlp.down.weight"].std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert values["norm.weight"].eq(1).all()
    assert values["blocks.0.mlp.up.bias"].eq(0).all()


def test_drawing_leaves_the_random_numbers_of_the_process_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    placed(CONFIGS["gpt2"])
    assert torch.equal(torch.rand(3), expected)


# ---- ties


@pytest.mark.parametrize("line", LINES)
def test_ties_are_kept(line):
    def work(world):
        model = parallelize(plain(CONFIGS["gpt2"]), line, world).model
        return model.head.weight is model.token.weight, "head.weight" in dict(model.named_parameters())

    assert set(launch(work, Layout.parse(line), ranks="threads")) == {(True, False)}


def test_ties_between_real_values_are_kept():
    model = plain(CONFIGS["gpt2"], "cpu")
    found = held(model, "tp2")
    assert torch.equal(torch.cat([found[rank][1]["token.weight"] for rank in range(2)]), model.token.weight)


# ---- models that have values


@pytest.mark.parametrize("name", CONFIGS)
def test_values_of_a_real_model_are_cut_as_they_are(name):
    model = plain(CONFIGS[name], "cpu").double()
    whole = {key: p.detach().clone() for key, p in model.named_parameters()}
    for line in LINES:
        check_cut(line, held(model, line), whole)


def test_the_seed_does_not_change_values_that_are_there():
    model = plain(CONFIGS["mlp"], "cpu")
    one, other = held(model, "dp2", 0), held(model, "dp2", 1)
    assert all(torch.equal(one[0][1][name], other[0][1][name]) for name in one[0][1])


def test_a_model_half_on_the_meta_device_is_drawn_where_it_has_no_values():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    model[2] = nn.Linear(8, 2)
    found = held(model, "dp2")
    for _, parameters in found:
        assert torch.equal(parameters["2.weight"], model[2].weight)
        assert torch.equal(parameters["0.weight"], found[0][1]["0.weight"])


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2 tp2"])
def test_the_given_model_is_left_alone(device, line):
    config = CONFIGS["gpt2"]
    model = plain(config, device)
    before = {name: (id(p), p.shape, p.device) for name, p in model.named_parameters()}
    values = {} if device == "meta" else {name: p.detach().clone() for name, p in model.named_parameters()}
    modules = {name: (id(m), m.__dict__.get("forward")) for name, m in model.named_modules()}
    hooks = {name: (len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in model.named_modules()}
    generator = torch.Generator().manual_seed(0)
    batch = entry_of(config).example_batch(config, 4, 5, generator)

    def work(world):
        run = parallelize(model, line, world)
        optimizer = run.optimizer(torch.optim.SGD, lr=1.0)
        for _ in range(2):
            run.step(next(run.shard([batch])))
            run.clip_grad_norm_(0.1)
            optimizer.step()

    launch(work, Layout.parse(line), ranks="threads")
    if device == "cpu":
        for name, value in values.items():
            assert torch.equal(model.get_parameter(name), value), name
    assert {name: (id(p), p.shape, p.device) for name, p in model.named_parameters()} == before
    assert {name: (id(m), m.__dict__.get("forward")) for name, m in model.named_modules()} == modules
    assert {name: (len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in model.named_modules()} == hooks
    assert all(p.grad is None for p in model.parameters())
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


# ---- modules that cannot say how they start


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x * self.scale)


@pytest.mark.parametrize("line", ["dp2", "dp3"])
def test_a_module_that_cannot_initialise_itself_is_refused_before_anything_is_sent(line):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Silent())

    def work(world):
        with world.recorder.recording() as records, pytest.raises(PlanError) as caught:
            parallelize(model, line, world)
        return str(caught.value), records

    for text, records in launch(work, Layout.parse(line), ranks="threads"):
        assert "'1' does not define its initial parameters" in text
        assert "Silent on the meta device" in text
        assert records == []


def test_such_a_module_is_taken_as_it_is_when_it_has_values():
    for _, parameters in held(nn.Sequential(nn.Linear(4, 4), Silent()), "dp2"):
        assert parameters["1.scale"].eq(1).all()


def test_a_buffer_on_the_meta_device_is_drawn_with_its_module():
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm1d(3))
    place_parameters(model, {}, {}, 0, CPU)
    assert model[0].running_var.tolist() == [1.0] * 3
    assert model[0].num_batches_tracked.item() == 0


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.booleans())
@settings(max_examples=30)
def test_a_rank_holds_its_pieces_of_what_would_have_been_drawn(rows, columns, parts, along_rows):
    size, dim = (rows, 0) if along_rows else (columns, 1)
    parts = min(parts, size)
    layouts = {"weight": TensorLayout.whole((rows, columns)).cut("tp", dim, balanced_ranges(size, parts))}

    def drawn(layouts, index):
        with torch.device("meta"):
            model = nn.Linear(columns, rows)
        place_parameters(model, layouts, {"tp": index}, 3, CPU)
        return model.weight.detach()

    assert torch.equal(torch.cat([drawn(layouts, i) for i in range(parts)], dim), drawn({}, 0))


def test_a_twin_is_not_placed_with_the_original():
    model = plain(CONFIGS["mlp"])
    other = structural_copy(model)
    place_parameters(other, {}, {}, 0, CPU)
    assert all(p.is_meta for p in model.parameters())
    assert not any(p.is_meta for p in other.parameters())


class Shares(nn.Module):
    """Two modules with one buffer, which the first writes or, on the meta device, draws."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.Module()
        self.second.register_buffer("mean", self.first.running_mean)

    def forward(self, x):
        return self.first(x) - self.second.mean


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("line", ["single", "dp2"])
def test_a_buffer_that_two_modules_share_stays_one(line, device):
    with torch.device(device):
        model = Shares()

    def work(world):
        run = parallelize(model, line, world)
        run.step(next(run.shard([(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))])))
        assert run.model.second.mean is run.model.first.running_mean
        return run.model.second.mean.tolist()

    num_ranks = Layout.parse(line).num_ranks
    assert launch(work, num_ranks, ranks="threads") == [pytest.approx([0.1] * 3)] * num_ranks


def test_drawing_initial_values_leaves_the_generators_of_gpus_alone(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    found = launch(lambda world: parallelize(model, "dp2", world).parameters, 2, ranks="threads")
    assert all(not p.is_meta for named in found for p in named.values())
    assert not seeded
