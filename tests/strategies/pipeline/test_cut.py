"""Where a model is cut: the slowest chunk first, then the largest."""

import sys
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, sampled_from, tuples
from torch import nn

from shardwright.analysis.chunks.costs import total
from shardwright.errors import LayoutError
from shardwright.strategies.pipeline.cut import cut


def layers(sizes):
    """Layers that hold so many rows of four numbers each."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(4, size, bias=False) for size in sizes))


def held(cost):
    """Parameters with their gradients and two moments, and what one microbatch keeps."""
    return 4 * cost.parameter_bytes + cost.activation_bytes


SECONDS = sampled_from([0.25, 0.5, 1.0])  # their sums are exact, so that cuts tie


@settings(max_examples=25, deadline=None)
@given(lists(tuples(integers(1, 4000), SECONDS), min_size=3, max_size=6), integers(2, 5))
def test_of_the_fastest_cuts_the_one_with_the_smallest_chunks_is_taken(each, num_chunks):
    model, calls = layers([size for size, _ in each]), len(each)
    num_chunks = min(num_chunks, calls)
    seconds = {str(number): taken for number, (_, taken) in enumerate(each)}
    alone = cut(model, calls, names=list(seconds), seconds=seconds).costs
    every = [
        [total(alone[a:b]) for a, b in pairwise((0, *where, calls))]
        for where in combinations(range(1, calls), num_chunks - 1)
    ]
    fastest = min(max(cost.work for cost in chunks) for chunks in every)
    good = [chunks for chunks in every if max(cost.work for cost in chunks) == fastest]
    found = cut(model, num_chunks, seconds=seconds).costs
    assert max(cost.work for cost in found) == fastest
    assert max(map(held, found)) == min(max(map(held, chunks)) for chunks in good)


def test_a_large_head_has_a_stage_of_its_own_where_time_does_not_care():
    seconds = {"0": 1.0, "1": 0.25, "2": 1.0}
    stages = cut(layers([4, 4, 4000]), 2, seconds=seconds)
    assert [stages.chunked.calls_of(chunk) for chunk in range(2)] == [("0", "1"), ("2",)]


class CallsOneTwice(nn.Module):
    """The calls are large, middle, large again and last."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.large, self.middle, self.last = nn.Linear(64, 64, bias=False), nn.RMSNorm(64), nn.RMSNorm(64)

    def forward(self, x):
        return self.last(self.large(self.middle(self.large(x))))


def test_weights_of_a_module_that_is_called_twice_count_once():
    large, small = 4 * 64 * 64, 4 * 64
    assert [cost.parameter_bytes for cost in cut(CallsOneTwice(), 4).costs] == [large, small, 0, small]
    # After the first call and after the second, both cuts are equally fast. Only if the second call's weights counted
    # again would the first cut's chunks be more uneven than the second's.
    found = cut(CallsOneTwice(), 2, seconds={"large": 1.0, "middle": 0.5, "last": 0.0})
    assert [cost.parameter_bytes for cost in found.costs] == [large, 2 * small]


class AsksValues(nn.Linear):
    def forward(self, x):
        if x.sum() > 0:
            return super().forward(x)
        return x


def test_the_line_that_cannot_be_followed_is_named():
    with pytest.raises(LayoutError, match=r"test_cut\.py:\d+: if x\.sum\(\) > 0:"):
        cut(AsksValues(4, 4), 2)


def test_thirty_equal_layers_on_four_stages_are_thirty_layers():
    with torch.device("meta"):
        stages = cut(nn.Sequential(*(nn.Linear(8, 8) for _ in range(30))), 4)
    held = [len(stages.chunked.calls_of(chunk)) for chunk in range(4)]
    assert sorted(held) == [7, 7, 8, 8]


class Deep(nn.Module):
    """Eight unlike blocks, each of which holds blocks, so that each of them has to be opened to be cut evenly."""

    def __init__(self, unreadable=()):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4)) for _ in range(3)))
            for width in range(64, 72)
        )
        for number in unreadable:
            self.blocks[number] = DecidesByValues(self.blocks[number])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class DecidesByValues(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return self.block(x) if x.sum() > 0 else self.block(-x)


@pytest.mark.parametrize("unreadable", [(), (3,), (2, 5)])
def test_modules_that_are_too_large_are_opened_at_once_and_each_alone_if_one_cannot_be_followed(
    unreadable, monkeypatch
):
    reads, module = [], sys.modules[cut.__module__]
    read_graph = module.read_graph

    def counted(model, opened, *args):
        reads.append(set(opened))
        return read_graph(model, opened, *args)

    monkeypatch.setattr(module, "read_graph", counted)
    stages = cut(Deep(unreadable), 2)
    closed = {f"blocks.{number}" for number in unreadable}
    assert len(reads) <= 6 + 9 * len(unreadable)
    calls = {call for chunk in range(2) for call in stages.chunked.calls_of(chunk)}
    assert closed <= calls
    assert all(not any(call.startswith(f"{block}.") for call in calls) for block in closed)
    assert sum(call.count(".") >= 2 for call in calls) >= 3 * (8 - len(unreadable))


class Distilled(nn.Module):
    """A frozen teacher, which is called without gradients, and a student."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)))
        self.student = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))

    def forward(self, x):
        with torch.no_grad():
            goal = self.teacher(x[:, :4].flatten(1))
        return self.student(x + goal.unflatten(1, (4, 32)).mean(1, keepdim=True))


def test_modules_that_are_called_without_gradients_have_their_parameters():
    model = Distilled().to("meta")
    stages = cut(model, 2, example=torch.empty(8, 64, 32, device="meta"), num_tokens=1)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert sum(cost.parameter_bytes for cost in stages.costs) == whole
