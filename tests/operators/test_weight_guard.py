"""Calls of sharded layers: from the code that the plan was made for, and from other code."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.analysis.traced.callers import AllowedCallers, plain_containers
from shardwright.errors import PlanError
from shardwright.operators.weight_guard import CallGuard

X = torch.ones(2, 3)


class Model(nn.Module):
    """``body(model, x)``; the layers' home is the block, and its code calls those in the sequence."""

    def __init__(self, body):
        super().__init__()
        self.block, self.body = Block(), body

    def forward(self, x):
        return self.body(self, x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x):
        return self.layers(x)


def kept(body, apart=()):
    model = Model(body)
    running = CallGuard(plain_containers(model), apart)
    for path in ("", "block", "block.layers"):
        running.follow(model.get_submodule(path), path)
    running.restrict(model.get_submodule("block.layers.0"), "block.layers.0", AllowedCallers.of("block"))
    return model


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.block(x),
        lambda m, x: m.block.forward(x),
        lambda m, x: m.block(m.block(x)),
        lambda m, x: checkpoint(m.block, x, use_reentrant=False),
    ],
)
def test_calls_from_home_pass_and_so_does_computing_them_again(body):
    kept(body)(X).sum().backward()


def test_a_backward_that_computes_a_container_alone_again_passes():
    model = kept(lambda m, x: m.block(x))
    model.block.forward = lambda x: checkpoint(model.block.layers, x, use_reentrant=False)
    running = CallGuard(plain_containers(model))
    running.follow(model.block, "block")
    again = model.block.layers[0]
    del again.forward
    running.restrict(again, "block.layers.0", AllowedCallers.of("block"))
    model(X).sum().backward()


@pytest.mark.parametrize(
    ("body", "who"),
    [
        (lambda m, x: m.block.layers(x), "a call from 'block.layers'"),
        (lambda m, x: m.block.layers[0](x), "a call from the model"),
        (lambda m, x: m.block(x) + m.block.layers[0](x), "a call from the model"),
    ],
)
def test_calls_from_elsewhere_are_refused_by_name(body, who):
    with pytest.raises(PlanError, match=f"layers.0' is sharded(.|\n)*{who}(.|\n)*forward of 'block'(.|\n)*copied"):
        kept(body)(X)


def test_a_forward_that_failed_is_under_way_no_more():
    model = kept(lambda m, x: m.block(x))
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 4))
    with pytest.raises(PlanError, match="from outside the model's forward"):
        model.block.layers[0](X)


def test_a_pipeline_calls_what_is_in_the_modules_that_it_looked_into():
    with pytest.raises(PlanError):
        kept(lambda m, x: x, apart=[""]).block.layers[0](X)
    kept(lambda m, x: x, apart=["", "block"]).block.layers[0](X)
