"""Modules with two names, or called in two ways: each grid finds them by one name, and never a part for a whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify, without_values
from shardwright.analysis.traced.structure import find_chains, find_head
from shardwright.layout import Layout
from shardwright.models import GPT, CrossEntropy, GPTConfig, MeanSquaredError
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job
from shardwright.strategies.tensor_parallel.feature_flow import follow

WIDTH = 12
X = torch.randn(5, 3, WIDTH, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(19, (5, 7), generator=torch.Generator().manual_seed(1))
LINES = ["tp2", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d", "pp2 mb2"]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.pair, self.last = nn.Linear(WIDTH, WIDTH), Pair(), nn.Linear(WIDTH, WIDTH)
        self.name_twice()

    def name_twice(self):
        self.again = self.pair


class PairTwice(Around):
    def forward(self, x):
        return self.again(self.pair(self.first(x)))


class PairTwiceAndLast(Around):
    def forward(self, x):
        return self.last(self.again(self.pair(self.first(x))))


class ByItsSecondName(Around):
    def name_twice(self):
        self.box = nn.ModuleDict({"pair": self.pair, "first": self.first})

    def forward(self, x):
        return self.last(self.box["pair"](self.box["first"](x)))


class ResidualAroundOne(Around):
    """The norm, and the pair, come on a part of the features first and then on the whole."""

    def name_twice(self):
        self.norm, self.again = nn.LayerNorm(WIDTH), self.pair
        self.other = self.norm

    def forward(self, x):
        return self.last(self.other(x + self.again(self.norm(self.pair(self.first(x))))))


class ConvolutionsOfABox(nn.Module):
    def __init__(self):
        super().__init__()
        self.chain = nn.Sequential(nn.Conv1d(3, 8, 1), nn.ReLU(), nn.Conv1d(8, 3, 1))
        self.box, self.pair = nn.ModuleDict({"chain": self.chain}), Pair()

    def forward(self, x):
        return self.pair(self.box["chain"](x))


TWICE = [PairTwice, PairTwiceAndLast, ByItsSecondName, ResidualAroundOne, ConvolutionsOfABox]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("kind", TWICE, ids=lambda kind: kind.__name__)
@pytest.mark.sampled(100)
def test_a_module_with_two_names_comes_out_right(kind, line):
    with without_values():
        model = kind()
    verdict = verify(model, line, [(X, X.roll(1))], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class HeadInside(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.table = nn.Embedding(19, WIDTH)
        self.inside = nn.ModuleDict({"pair": Pair(), "out": nn.Linear(WIDTH, 19, bias=False)})
        self.head = self.inside["out"]
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.inside["pair"](self.table(tokens)))


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_with_two_names_is_a_layer_like_any_other(line, tied):
    with without_values():
        model = HeadInside(tied)
    assert find_head(model) is None
    verdict = verify(model, line, [(TOKENS[:, :-1], TOKENS[:, 1:])])
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.sampled(100)
def test_blocks_in_two_places_come_out_right(line):
    with without_values():
        model = GPT(GPTConfig(num_layers=3, width=24, num_heads=3, vocabulary=19))
        model.blocks[2] = model.blocks[0]
    plan, _ = make_plan(Job(model, CrossEntropy()), Layout.parse(line))
    assert line.startswith("pp") or set(plan.compute["blocks.0.mlp.up.weight"].axes)
    verdict = verify(model, line, [(TOKENS[:, :-1], TOKENS[:, 1:])])
    assert verdict.equal, str(verdict)


def test_what_is_called_on_a_part_and_on_the_whole_is_only_called_on_the_whole():
    with without_values():
        model = ResidualAroundOne()
    places = follow(model, 2, find_chains(model), frozenset(), None).uses
    assert not places["norm"].takes_cut
    assert not places["pair.down"].takes_cut
    assert not any(place.kind == "gate" for place in places.values())


class Applies(nn.Module):
    """A module that applies an operation to its input, and then a layer."""

    def __init__(self, operation):
        super().__init__()
        self.operation, self.layer = operation, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(self.operation(x))


def uses_around(operation):
    """How features go through a layer, a module that applies the operation to its output, and a layer."""
    with without_values():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Applies(operation), nn.Linear(WIDTH, WIDTH))
    return follow(model, 2, [], frozenset(), None).uses


NEEDS_WHOLE = {
    "softmax": lambda x: functional.softmax(x, -1),
    "layer_norm": lambda x: functional.layer_norm(x, (WIDTH,)),
    "a mean of features": lambda x: x - x.mean(-1, keepdim=True),
    "some of the features": lambda x: torch.cat([x[..., :6], x[..., 6:]], -1),
    "another order": lambda x: x.flip(-1),
    "a vector of all features": lambda x: x + torch.ones(WIDTH),
    "heads": lambda x: x.unflatten(-1, (3, 4)).flatten(-2),
}
TAKES_CUT = {
    "a factor": lambda x: 2 * x,
    "a sum of alike": lambda x: x + x.tanh(),
    "an activation function": functional.gelu,
}


@pytest.mark.parametrize("name", NEEDS_WHOLE)
@pytest.mark.sampled(1)
def test_what_needs_all_features_gets_them_whole_and_so_does_every_layer_beside_it(name):
    uses = uses_around(NEEDS_WHOLE[name])
    assert uses["0"].gives_cut
    assert (uses["1"].kind, uses["1"].sizes) == ("gate", (WIDTH,))
    assert "1.layer" not in uses, "nothing inside of the module takes or gives a part"
    assert "2" not in uses, "the last layer takes what the module gives, which is whole, and gives the model's output"


@pytest.mark.parametrize("name", TAKES_CUT)
def test_what_treats_each_feature_alone_takes_a_part(name):
    uses = uses_around(TAKES_CUT[name])
    assert "1" not in uses, "the module is no gate"
    assert uses["1.layer"].takes_cut
    assert uses["1.layer"].gives_cut
    assert uses["2"].takes_cut


class AsksItsOutputTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        self.second(x)
        return x


def test_an_output_that_another_layer_reads_too_stays_cut_until_the_end():
    with without_values():
        flow = follow(AsksItsOutputTwice(), 2, [], frozenset(), None)
    assert flow.output_size == WIDTH
    assert flow.uses["first"].gives_cut
    assert flow.uses["second"].takes_cut
