"""Attentions that are not as they were built, or share what they have: whole, with a reason, and right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from shardwright import verify, without_values
from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job

TOKENS = torch.randint(19, (5, 7), generator=torch.Generator().manual_seed(1))


class Soft(nn.Linear):
    def forward(self, input):
        return super().forward(input).softmax(-1)


def other_attend(one, two):
    attend = one.attend
    one.attend = lambda q, k, v: attend(q, k, v) + q.mean(1, keepdim=True)


def copied_after_that(one, two):
    other_attend(one, two)
    two.__dict__.update(copy.deepcopy(one).__dict__)


def other_kind_of_projection(one, two):
    (one.qkv if one.fused else one.q).__class__ = Soft


def other_kind_of_output(one, two):
    one.o.__class__ = Soft


def more_after_the_output(one, two):
    one.o = nn.Sequential(one.o, nn.Softmax(-1))


def weight_norm(one, two):
    parametrizations.weight_norm(one.o)


def hook(one, two):
    (one.qkv if one.fused else one.q).register_forward_hook(lambda module, args, output: output.softmax(-1))


def shared_output(one, two):
    one.o.weight = two.o.weight


def shared_projection(one, two):
    (one.qkv if one.fused else one.k).weight = (two.qkv if two.fused else two.k).weight


CHANGED = [
    other_attend, copied_after_that, other_kind_of_projection, other_kind_of_output, more_after_the_output, weight_norm,
    hook, shared_output, shared_projection,
]  # fmt: skip


@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d", "tp2x2x2/3d"])
@pytest.mark.parametrize("style", ["gpt2", "llama"])
@pytest.mark.parametrize("change", CHANGED, ids=lambda change: change.__name__)
@pytest.mark.sampled(100)
def test_an_attention_that_was_changed_stays_whole_and_show_says_so(change, style, line):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(GPTConfig(style=style, num_layers=3, width=24, num_heads=4, vocabulary=19))
    change(model.blocks[1].attention, model.blocks[2].attention)
    plan, _ = make_plan(Job(model, CrossEntropy()), Layout.parse(line))
    own = {name: layout.axes for name, layout in plan.compute.items() if "attention" in name}
    assert not any(axes for name, axes in own.items() if name.startswith("blocks.1"))
    assert all(axes for name, axes in own.items() if name.startswith("blocks.0") and name.endswith("weight"))
    reasons = {role.why for path, role in plan.roles.items() if path.startswith("blocks.1.attention.")}
    why = "its parameters are used elsewhere too" if "shared" in change.__name__ else "changed since it was built"
    assert reasons == {f"attention 'blocks.1.attention': {why}"}
    verdict = verify(model, line, [(TOKENS[:, :-1], TOKENS[:, 1:])])
    assert verdict.equal, str(verdict)


def test_a_copy_of_an_attention_as_it_was_built_is_cut():
    with without_values():
        model = GPT(GPTConfig(num_layers=2, width=24, num_heads=4, vocabulary=19))
    model.blocks[1].attention = copy.deepcopy(model.blocks[0].attention)
    plan, _ = make_plan(Job(model, CrossEntropy()), Layout.parse("tp2"))
    assert all(plan.compute[f"blocks.{n}.attention.qkv.weight"].axes for n in range(2))
