"""Stages, schedules and modes are chosen by the price of a cluster, where one is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardwright.cost.cluster import Cluster
from shardwright.layout import Layout
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.planner.layer_seconds import predicted_layer_seconds
from shardwright.planner.predicted import by_price
from shardwright.report.description import describe

A100 = Cluster.parse("a100-80gb:1x2")


def changed(**constants):
    """The cluster with other constants, on which the host starts operators in no time."""
    return replace(A100, constants=A100.constants.with_values("guess", **{"launch_s": 1e-7, **constants}))


def job_of(model, line, inputs):
    layout = Layout.parse(line)
    return job_for(model, nn.Identity(), layout, inputs), layout


class Elementwise(nn.Module):
    """Reads and writes its input many times: memory traffic, and no FLOPs."""

    def forward(self, x):
        for _ in range(20):
            x = x + 1.0
        return x


def blocks():
    """Two products, then as many elementwise passes: equal by counted work, unequal on an accelerator."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 256, bias=False), Elementwise()) for _ in range(4)))


def test_faster_products_take_less_and_the_parts_of_a_module_are_in_it():
    job, layout = job_of(blocks(), "pp2 mb2", torch.zeros(4096, 256))
    usual, slow = (predicted_layer_seconds(job, layout, each) for each in (changed(), changed(memory_efficiency=0.2)))
    assert slow["0.1"] > 2 * usual["0.1"]
    assert usual["0"] >= max(usual["0.0"], usual["0.1"])
    assert set(usual) == {name for name, _ in blocks().named_modules() if name}


def test_fused_attention_has_a_price():
    attention = nn.MultiheadAttention(64, 4, batch_first=True)

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = attention

        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(*(x[:, None] for _ in range(3)))

    few, many = (
        predicted_layer_seconds(*job_of(nn.Sequential(Own()), "pp1", torch.zeros(2, tokens, 64)), changed())
        for tokens in (512, 2048)
    )
    assert many["0"] > 8 * few["0"]  # it grows with the square of the tokens


def test_stages_are_cut_by_seconds_of_the_cluster_and_without_one_as_they_were():
    layers = [nn.Linear(1024, 1024) for _ in range(6)]
    model = nn.Sequential(layers[0], Elementwise(), *layers[1:])
    job, layout = job_of(model, "pp2 mb2 bf16", torch.zeros(4096, 1024))

    def second_stage(job):
        return make_plan(job, layout)[0].stages.chunked.calls_of(1)

    # by counted work the passes over memory are a sixth of a product, in bf16 on this card they are six of them
    assert second_stage(job) == ("4", "5", "6")
    assert second_stage(by_price(job, layout, "a100-80gb:1x2")) == ("2", "3", "4", "5", "6")


def test_a_timeline_says_that_its_seconds_are_those_of_the_cluster():
    job, layout = job_of(blocks(), "pp2 mb2", torch.zeros(64, 256))
    assert describe(job, layout)["seconds_from"] == "50 GFLOP/s, a guess"
    found = describe(by_price(job, layout, "a100-80gb:1x2"), layout)
    assert found["seconds_from"] == "layers predicted for a100-80gb"
    assert 0 < max(end for stage in found["timeline"]["spans"] for _, _, end in stage) < 0.1


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("hop_s", "is_other"), [(0.0, False), (1e-3, True)])
def test_tp_auto_weighs_hops_on_a_cluster_and_bytes_without_one(hop_s, is_other):
    from shardwright.models import GPT, GPTConfig

    model = GPT(GPTConfig(num_layers=1, width=64, num_heads=4, vocabulary=64))
    job, layout = job_of(model, "tp4/auto", torch.zeros(64, 16, dtype=torch.long))
    by_bytes = make_plan(job, layout)[0].layout
    cluster = replace(changed(in_node_hop_s=hop_s), nodes=Cluster.parse("a100-80gb:1x4").nodes)
    assert (make_plan(job._replace(cluster=cluster), layout)[0].layout != by_bytes) == is_other
