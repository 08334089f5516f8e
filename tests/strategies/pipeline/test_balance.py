"""Stages hold even shares where a cut can give them."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists
from torch import nn

from shardwright.plan.event_stages import UNEVEN
from shardwright.strategies.pipeline.balance import StageShares, evened
from shardwright.strategies.pipeline.event_cut import cut_events
from shardwright.strategies.pipeline.schedules.common import v_shape


@settings(max_examples=40, deadline=None)
@given(lists(integers(1, 9), min_size=5, max_size=9), lists(integers(1, 9), min_size=9, max_size=9))
def test_stages_of_a_v_are_even_if_any_cut_makes_them_so(works, sizes):
    names = [f"w{number}" for number in range(len(works))]
    shares = StageShares(works, [{name} for name in names], dict(zip(names, sizes, strict=False)), v_shape(2))
    every = [(0, *inner, len(works)) for inner in combinations(range(1, len(works)), 3)]
    least = min(map(shares.unevenness, every))
    found = shares.unevenness((*evened([[0, 1, 2, 3]], shares, [0] * (len(works) + 1)), len(works)))
    assert least > UNEVEN or found <= UNEVEN + 1e-6


class Scaled(nn.Module):
    """A layer with a number of times 64 parameters, which is one call."""

    def __init__(self, times):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8 * times, 8))

    def forward(self, x):
        return (x @ self.weight.T).unflatten(-1, (-1, 8)).sum(-2)


def test_the_two_chunks_of_a_stage_are_even_together_though_each_alone_is_not():
    with torch.device("meta"):
        model = nn.Sequential(*map(Scaled, (1, 4, 4, 1, 1, 1)))
    stage_of = v_shape(2)
    stages = cut_events(model, 4, torch.empty(1, 8, device="meta"), stage_of=stage_of)
    held = [0, 0]  # the evenest chunks are 1, 4, 4 and 3: stages of 4 and 8
    for stage, cost in zip(stage_of, stages.costs, strict=True):
        held[stage] += cost.parameter_bytes // (64 * 4)
    assert held == [6, 6]


def test_a_table_counts_on_each_of_two_stages_that_hold_it_and_once_on_one_stage():
    uses, sizes = [{"table"}, {"a"}, {"b"}, {"table"}], {"table": 8, "a": 1, "b": 1}
    apart, folded = (StageShares([1] * 4, uses, sizes, stage_of) for stage_of in ((0, 1), (0, 1, 1, 0)))
    assert [apart.of_run(*run)[1] for run in ((0, 2), (2, 4))] == pytest.approx([1.8, 1.8])
    assert [folded.of_run(*run)[1] for run in ((0, 2), (2, 4))] == pytest.approx([1.8, 0.2])
    assert [held for _, held in apart.of((0, 2, 4))] == pytest.approx([1.8, 1.8])
    assert [held for _, held in folded.of((0, 1, 2, 3, 4))] == pytest.approx([1.6, 0.4])


class Loop(nn.Module):
    """A recurrent cell that a loop calls for each step: every stage that runs a part of it holds its weights."""

    def __init__(self):
        super().__init__()
        self.cell, self.leave = nn.GRUCell(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        state, found = x.new_zeros(len(x), 16), []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            found.append(self.leave(state))
        return torch.stack(found, 1)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_that_all_hold_the_weights_of_a_loop_have_even_work(num_stages):
    with torch.device("meta"):
        model = Loop()
    stages = cut_events(model, num_stages, torch.empty(2, 12, 8, device="meta"))
    works = [cost.work for cost in stages.costs]
    assert max(works) * num_stages <= UNEVEN * sum(works), works


def test_two_chunks_are_found_by_looking_at_each_place_and_not_at_each_pair_of_places(monkeypatch):
    looked_at, of_run = [], StageShares.of_run
    monkeypatch.setattr(StageShares, "of_run", lambda self, *run: looked_at.append(run) or of_run(self, *run))
    with torch.device("meta"):
        model = Loop()
    cut_events(model, 2, torch.empty(2, 30, 8, device="meta"))
    assert len(looked_at) <= 3 * 2 * 61, "60 calls begin a chunk, and three times a cut is looked for"
