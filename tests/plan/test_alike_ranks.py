"""Ranks that are taken to send alike do: their messages, computed for one of them, equal those computed for each."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis.strategies import integers, sampled_from

from shardwright.errors import LayoutError, PlanError
from shardwright.initial_values import without_values
from shardwright.layout import Layout
from shardwright.models import MODELS
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan
from shardwright.plan.alike_ranks import AlikeRanks

STAGES = ("", "pp2 mb2", "pp3/1f1b mb3", "pp2/1f1b/scatter mb2", "mb3")
COPIES = ("", "dp2", "dp3", "dp3/zero1", "dp2/zero3", "dp2x2")
GRIDS = ("", "tp3", "tp4", "tp4/sp", "tp4/seq", "tp2x2/2d", "tp2x3/2d", "tp2x2x2/3d", "tp2/spatial")
SIZES = [
    ("gpt", {"num_layers": 3, "width": 32, "vocabulary": 50}),
    ("gpt", {"num_layers": 2, "width": 30, "num_heads": 5, "vocabulary": 53, "tied": False}),
    ("gpt", {"num_layers": 2, "width": 48, "num_heads": 3, "num_kv_heads": 1, "style": "llama", "hidden": 50}),
    ("convnet", {}),
    ("mlp", {}),
]
EVEN = ("gpt", {"num_layers": 2, "width": 32, "vocabulary": 64})
HEADS = ("gpt", {"num_layers": 2, "width": 32, "num_heads": 4, "hidden": 132, "vocabulary": 64})


def traffic_of(line, model, samples, seq=9):
    name, sizes = model
    entry = MODELS[name]
    config = entry.config(**sizes)
    with without_values():
        plain = entry.factory(config)
    layout = Layout.parse(line)
    inputs = entry.example_batch(config, samples, seq, torch.Generator().manual_seed(0))[0]
    job = job_for(plain, entry.loss(), layout, inputs)
    plan, strategies = make_plan(job, layout)
    return StepTraffic(job, plan, strategies, inputs)


def messages(traffic, coord):
    """The messages of a rank's step, counted, as no order of them is stated."""
    found = Counter()
    for strategy, sent in traffic.at(coord).items():
        for each in sent:
            found[strategy, each.kind, each.axis, each.num_bytes, each.num_ranks] += each.times
    return found


@pytest.mark.sampled(0)
@settings(max_examples=12)
@given(sampled_from(STAGES), sampled_from(COPIES), sampled_from(GRIDS), sampled_from(SIZES), integers(5, 13))
def test_messages_of_classes_of_alike_ranks_equal_those_computed_for_each_rank(stages, copies, grid, model, samples):
    line = " ".join(filter(None, (stages, copies, grid))) or "single"
    try:
        by_class, by_rank = (traffic_of(line, model, samples) for _ in range(2))
    except (LayoutError, PlanError):
        assume(False)
    coords = by_class.plan.mesh.coords()
    found = [messages(by_class, coord) for coord in coords]
    with mock.patch.object(AlikeRanks, "like", lambda self, coord: coord):
        assert found == [messages(by_rank, coord) for coord in coords]


@pytest.mark.parametrize(
    ("line", "model", "samples", "number"),
    [
        ("tp4", SIZES[0], 6, 2),  # 50 words: 13, 13, 12, 12
        ("dp3 tp4", ("gpt", {"num_layers": 2, "width": 32, "vocabulary": 64}), 6, 1),
        ("dp3 tp4", ("gpt", {"num_layers": 2, "width": 32, "vocabulary": 64}), 7, 2),  # 3 samples, 2, 2
        ("pp2/1f1b mb2 dp2 tp4", EVEN, 8, 2),  # by stage
        ("pp2/1f1b/scatter mb2 dp2 tp4", EVEN, 8, 2),  # parts of one size
        ("pp2/1f1b/scatter mb1 tp3", HEADS, 1, 4),  # 288 elements in three parts; two heads, one, one
        ("pp2/1f1b mb2 dp2/zero1 tp4", EVEN, 8, 2),  # both stages sum a tied table, of which a rank has 256 of 512
        ("pp2/1f1b mb3 dp3/zero1 tp4", EVEN, 9, 4),  # 171 elements, 171, 170
        ("tp2/spatial", ("convnet", {}), 4, 2),  # the first rank has a neighbour below, the last one above
        ("tp4", SIZES[2], 6, 4),  # three heads on four ranks: some elements are on several
    ],
)
def test_ranks_fall_into_as_few_classes_as_their_sizes_allow(line, model, samples, number):
    traffic = traffic_of(line, model, samples)
    assert len({tuple(traffic.like(coord).values()) for coord in traffic.plan.mesh.coords()}) == number


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("pp2/1f1b/scatter mb3 tp3", HEADS),  # 224 elements a sample: 75, 75, 74
        ("pp2/1f1b/scatter mb2 dp3/zero1 tp4/sp", EVEN),
        ("pp2/1f1b mb4 dp2x2/zero3 tp2", SIZES[0]),
    ],
)
def test_ranks_with_parts_of_values_or_of_gradients_send_what_each_computes_for_itself(line, model):
    by_class, by_rank = (traffic_of(line, model, 10, seq=7) for _ in range(2))
    found = [messages(by_class, coord) for coord in by_class.plan.mesh.coords()]
    with mock.patch.object(AlikeRanks, "like", lambda self, coord: coord):
        assert found == [messages(by_rank, coord) for coord in by_class.plan.mesh.coords()]


def test_traffic_of_many_equal_microbatches_is_stated_once_with_their_number():
    few, many = (traffic_of(f"pp2/1f1b mb{number} tp2", EVEN, number) for number in (2, 32))
    for coord in few.plan.mesh.coords():
        some, more = few.at(coord), many.at(coord)
        assert {name: len(sent) for name, sent in some.items()} == {name: len(sent) for name, sent in more.items()}
        sends = [[each.times for each in found["pipeline"] if each.kind == "send"] for found in (some, more)]
        assert ([16 * times for times in sends[0]]) == sends[1]


def test_a_strategy_that_does_not_say_what_it_reads_is_asked_for_every_rank():
    traffic = traffic_of("dp3 tp4", ("gpt", {"num_layers": 2, "width": 32, "vocabulary": 64}), 6)
    alike = AlikeRanks(traffic.plan, [None], 6)
    assert all(alike.like(coord) == coord for coord in traffic.plan.mesh.coords())
