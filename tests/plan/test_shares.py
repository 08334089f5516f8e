"""What share of parameters and FLOPs each factor of a layout cuts, and what is said of small ones."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.layout import Layout
from shardwright.models import CrossEntropy
from shardwright.parallelize.planning import job_for, make_plan, shares_of


class Attends(nn.Module):
    """Words, an attention whose heads are found by its operators, and a head."""

    def __init__(self):
        super().__init__()
        self.words, self.qkv, self.out = nn.Embedding(6, 16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, tokens):
        x = self.words(tokens)
        q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in self.qkv(x).split(16, dim=-1))
        return self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def of(model, line, inputs):
    layout = Layout.parse(line)
    job = job_for(model, CrossEntropy(), layout, inputs)
    return {each.factor: each for each in shares_of(job, make_plan(job, layout)[0])}


TOKENS = torch.zeros(4, 10, dtype=torch.int64)


@pytest.mark.parametrize("line", ["tp2", "tp4", "tp2x2/2d"])
def test_the_scores_of_heads_that_are_cut_are_divided_though_they_have_no_weight(line):
    (share,) = of(Attends(), line, TOKENS).values()
    assert share.flops == 1.0
    assert f"{line} cuts {100 * share.share:.3g} % of the parameters and 100 % of the FLOPs" == str(share)


def test_axes_that_cut_samples_or_layers_divide_all_flops():
    found = of(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), "pp2 mb2 dp2/zero1", torch.zeros(8, 4))
    assert {factor: share.flops for factor, share in found.items()} == {"pp2": 1.0, "dp2/zero1": 1.0}


def test_a_layout_that_cuts_many_parameters_and_few_flops_names_what_every_rank_computes():
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Softmax(-1), nn.Linear(8, 8), nn.Softmax(-1))
    share = of(model, "tp2", TOKENS)["tp2"]
    assert share.share > 0.9
    assert (share.flops, share.is_low) == (0.0, True)
    assert "whole are 2 (100 % of the FLOPs: Linear: every rank computes it whole)" in str(share)


def test_without_an_example_nothing_is_said_of_flops():
    share = of(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), "tp2", None)["tp2"]
    assert share.flops is None
    assert "FLOPs" not in str(share)


def test_parallelize_warns_of_a_layout_that_cuts_little(caplog):
    def work(world):
        sw.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).to("meta"), "tp2", world)
        large = nn.Sequential(small, nn.Softmax(-1), nn.Linear(4, 90), nn.Tanh())
        large[2].register_forward_hook(lambda *_: None)  # it stays whole
        sw.parallelize(large.to("meta"), "tp2", world)

    small = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    with caplog.at_level(logging.INFO, "shardwright"):
        sw.launch(work, 2, ranks="threads")
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["INFO", "WARNING"]
    assert "whole are 2 (" in said[1][1], said


class TwoLayers(nn.Module):
    """Two layers, of which the second has ``width`` outputs; with a condition that no trace follows, if asked for."""

    def __init__(self, width, has_condition):
        super().__init__()
        self.first, self.second, self.has_condition = nn.Linear(8, 8), nn.Linear(8, width), has_condition

    def forward(self, x):
        x = self.first(x)
        if self.has_condition and len(x) > 1000:
            x = x + 1
        return self.second(x)


@pytest.mark.parametrize("has_condition", [False, True], ids=["traced", "recorded"])
@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "pp2/1f1b mb2 dp2/zero1"])
def test_large_stages_are_named_and_those_that_leave_little_to_the_others_are_low(line, has_condition):
    even, large, low = (
        of(TwoLayers(width, has_condition), line, torch.zeros(8, 8))["pp2/1f1b"] for width in (8, 16, 64)
    )
    assert (even.is_low, large.is_low, low.is_low) == (False, False, True)
    assert str(even) == "pp2/1f1b cuts 100 % of the parameters and 100 % of the FLOPs"
    assert str(large).startswith(f"{even}; stage 1 has 66.7 % of the parameters and 6")
    assert str(low).startswith(f"{even}; stage 1 has 88.9 % of the parameters and 8")
    assert "'second' holds 89% of the parameters" in str(low)


def test_verify_warns_of_a_stage_that_has_nearly_all():
    verdict = sw.verify(TwoLayers(64, False), "pp2/1f1b mb2", [(torch.randn(8, 8), torch.randint(64, (8,)))])
    assert verdict.equal
    assert "; warning: pp2/1f1b cuts 100 % of the parameters" in str(verdict)
    assert "stage 1 has 88.9 %" in verdict.left_whole
