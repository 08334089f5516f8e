"""The plan: param groups, uses, what is summed over which axes; and traffic."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwright import verify
from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.plan.param_groups import split_into_param_groups
from shardwright.plan.plan import Job, ParameterUse, Partial, Plan, Replicate, Shard
from shardwright.plan.traffic import Traffic, gradient_shares, partial_axes
from shardwright.sharding.box import balanced_ranges

# ---- param groups


@st.composite
def models(draw):
    """Sequences of sequences of layers, some without parameters, some of them shared."""
    layers = [nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 9), nn.Linear(9, 9, bias=False), nn.LayerNorm(2)]
    shared = draw(st.booleans())

    def layer():
        kind = draw(st.integers(0, len(layers) - 1))
        return layers[kind] if shared else [nn.ReLU, lambda: nn.Linear(2, 9), lambda: nn.LayerNorm(3)][kind % 3]()

    def sequence(depth):
        entries = draw(st.integers(1, 4))
        return nn.Sequential(
            *[sequence(depth - 1) if depth and draw(st.booleans()) else layer() for _ in range(entries)]
        )

    return sequence(2)


@given(models(), st.sampled_from([0, 1, 50, 100, 300, 1000]))
def test_param_groups_hold_every_parameter_once_in_forward_order(model, least_bytes):
    groups = split_into_param_groups(model, least_bytes=least_bytes)
    assert [name for group in groups for name in group.parameters] == [name for name, _ in model.named_parameters()]
    assert len({group.name for group in groups}) == len(groups)


@given(models(), st.sampled_from([0, 1, 50, 100, 300, 1000]))
def test_param_groups_are_as_large_as_asked_and_one_block_less_would_not_be(model, least_bytes):
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    groups = split_into_param_groups(model, least_bytes=least_bytes)
    totals = [sum(sizes[name] for name in group.parameters) for group in groups]
    assert len(groups) <= 1 or min(totals) >= least_bytes


def test_the_blocks_of_a_language_model_travel_alone_and_its_tied_head_with_the_table():
    with torch.device("meta"):
        model = GPT(GPTConfig(num_layers=2, width=8))
    groups = split_into_param_groups(model, least_bytes=0)
    assert [group.name for group in groups][:2] == ["token", "position"]
    assert groups[0].parameters == ("token.weight",)
    assert {"blocks.0", "blocks.1"} <= {group.name for group in groups}


class Inner(nn.Module):
    """Blocks, and beside them a parameter and a norm."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU())) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x * self.scale)
        return self.norm(x)


class Wrapped(nn.Module):
    """A head on a body, whose blocks lie below a plain module; as libraries of language models have it."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Inner(), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.body(x))


def test_blocks_below_a_plain_module_are_param_groups_too():
    groups = {group.name: group.parameters for group in split_into_param_groups(Wrapped(), least_bytes=0)}
    assert list(groups) == ["body", "body.layers.0.0", "body.layers.1.0", "body.norm", "head"]
    assert groups["body"] == ("body.scale",)


@pytest.mark.parametrize(
    "line", ["dp2/zero3/bucket:0 mb2", "dp2/zero1/bucket:0 tp2", "pp2/zb-h1 mb2 dp2/zero3/bucket:0"]
)
def test_a_model_whose_blocks_lie_below_a_plain_module_is_that_of_one_device_in_slices(line):
    verdict = verify(Wrapped(), line, [(torch.randn(6, 4), torch.randint(5, (6,)))] * 2)
    assert verdict.equal, str(verdict)


# ---- uses


def plan(line, shape=(4, 6)):
    return Plan.of(Job(nn.Linear(shape[1], shape[0]), CrossEntropy()), Layout.parse(line))


def test_a_gradient_is_partial_where_the_contraction_is_cut():
    for x, dy, expected in [
        ({}, {}, set()),
        ({"dp": Shard(0)}, {"dp": Shard(0)}, {"dp"}),
        ({"cp": Shard(1)}, {"cp": Shard(1)}, {"cp"}),
        ({"tp": Shard(-1)}, {}, set()),  # a row: its in-features are cut, and with them the weight
        ({}, {"tp": Shard(-1)}, set()),  # a column
        ({}, {"tp": Partial()}, {"tp"}),
        ({"tp": Replicate()}, {"tp": Replicate()}, set()),
        ({"dp": Shard(0), "tp": Shard(-1)}, {"dp": Shard(0)}, {"dp"}),
    ]:
        assert ParameterUse("w", "m", x, dy).partial_axes() == expected


def test_an_axis_of_one_rank_sums_nothing():
    assert partial_axes(plan("dp1 tp2").cut_inputs("dp", 0), "weight") == ()
    assert partial_axes(plan("dp2 tp2").cut_inputs("dp", 0), "weight") == ("dp",)


def test_copies_are_summed_whole_and_parts_by_those_who_hold_them():
    whole = plan("dp2 tp3").cut_inputs("dp", 0)
    (share,) = gradient_shares(whole, "weight", {"dp": 1, "tp": 2})
    assert (str(share.box), share.axes, share.ranks) == ("[0:4, 0:6]", ("dp",), (2, 5))
    cut = whole.cut("weight", "tp", 0, balanced_ranges(4, 3))
    (share,) = gradient_shares(cut, "weight", {"dp": 0, "tp": 1})
    assert (str(share.box), share.ranks) == ("[2:3, 0:6]", (1, 4))


def test_overlapping_parts_are_summed_box_by_box():
    shared = plan("tp3").cut("weight", "tp", 0, (((0, 2),), ((1, 3),), ((3, 4),))).use("", dy={"tp": Partial()})
    found = [[(str(s.box), s.ranks) for s in gradient_shares(shared, "weight", {"tp": tp})] for tp in range(3)]
    assert found == [[("[1:2, 0:6]", (0, 1))], [("[1:2, 0:6]", (0, 1))], []]


def test_traffic_sends_its_share_of_a_ring_as_often_as_it_says():
    assert Traffic("all_reduce", "dp", 100, 4).sent_bytes == 150.0
    assert Traffic("all_gather", "tp", 90, 3, times=2).sent_bytes == 120.0
    assert Traffic("send", "pp", 8, 2).sent_bytes == 8.0
