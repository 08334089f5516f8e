"""Ranks that were given different models are told so, each of them, before anything is cut."""

from __future__ import annotations

import pytest
from torch import nn

from shardwright import launch, layer_alone, parallelize, without_values
from shardwright.errors import PlanError
from shardwright.layout import Layout


def build():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.BatchNorm1d(3))


def hollow():
    with without_values():
        return build()


def refused(line, of_rank):
    """What each rank is told that is given ``of_rank(rank)``, a model and a seed."""

    def work(world):
        model, seed = of_rank(world.rank)
        with pytest.raises(PlanError, match="ranks were given different models") as refusal:
            parallelize(model, line, world, seed=seed)
        return str(refusal.value)

    (text,) = set(launch(work, Layout.parse(line).num_ranks, ranks="threads"))
    return text


@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2/zero3", "pp2 mb2/own-statistics"])
def test_a_model_with_values_that_each_rank_builds_by_itself_is_refused_on_every_rank(line):
    text = refused(line, lambda rank: (build(), 0))
    assert "rank 0 has '0.weight: torch.float32 (8, 6), values " in text
    assert "build the model under sw.without_values()" in text


def test_one_element_of_a_buffer_is_enough():
    models = [hollow(), hollow()]
    for model in models:
        model.to_empty(device="cpu")
        for tensor in model.state_dict().values():
            tensor.zero_()
    models[1][3].running_mean[2] = -0.0
    assert "rank 0 has '3.running_mean: " in refused("dp2", lambda rank: (models[rank], 0))


def test_a_rank_without_values_or_with_another_seed_is_refused_too():
    one, other = build(), hollow()
    assert "rank 1 '0.weight: torch.float32 (8, 6), without values'" in refused("tp2", lambda r: ((one, other)[r], 0))
    assert "rank 0 has 'seed 0', rank 1 'seed 1'" in refused("dp2", lambda rank: (hollow(), rank))
    assert "rank 0 has 'seed 0', rank 1 'seed 1'" in refused("dp2", lambda rank: (one, rank))


def test_a_layer_alone_is_the_same_on_every_rank():
    def work(world):
        with pytest.raises(PlanError, match=r"rank 0 has 'weight: .*, rank 1 'weight: "):
            layer_alone(nn.Linear(4, 4), "tp2", world)

    launch(work, 2, ranks="threads")


def test_copies_with_the_same_values_are_taken():
    state = build().state_dict()

    def work(world):
        model = build()
        model.load_state_dict(state)
        model[2].weight = nn.Parameter(model[2].weight.T.contiguous().T)  # the same numbers, in another order in memory
        return sum(p.sum().item() for p in parallelize(model, "dp2", world).parameters.values())

    first, second = launch(work, 2, ranks="threads")
    assert first == second


@pytest.mark.parametrize("other", ["dp2 mb2", "dp2 bf16", "dp2/zero1", "dp2 recompute:full"])
def test_ranks_with_different_layouts_are_told_so(other):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def work(world):
        line = other if world.rank else "dp2"
        with pytest.raises(PlanError, match="ranks were given different layouts") as refusal:
            parallelize(model, line, world)
        return str(refusal.value)

    (text,) = set(launch(work, 2, ranks="threads"))
    assert f"rank 0 has 'layout dp2', rank 1 'layout {Layout.parse(other)}'" in text


def test_an_option_that_launch_does_not_know_is_named():
    with pytest.raises(PlanError, match="launch takes a function") as refusal:
        launch(lambda world: None, 2, ranks="threads", timeout=3)
    assert refusal.value.given == "timeout=..."
    assert "timeout_s" in refusal.value.allowed
