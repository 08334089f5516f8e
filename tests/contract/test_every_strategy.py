"""The promises that every strategy makes, on 1, 2, 3, 4 and 8 ranks: a file in ``strategies/`` is held to all."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from contract.cases import (
    CASES,
    CHECKS,
    CONVNET,
    DEEP,
    GPT2,
    LLAMA_ONE_KV,
    OPTION_CASES,
    SIZES,
    check_equal,
    check_refused,
    further_sizes,
    lays_out,
    line_of,
    spelling,
    spellings,
    whole_size,
)
from shardwright.axes import layout_axes
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.models import Attention, CrossEntropy, MeanSquaredError, MLPConfig, build_mlp
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job
from shardwright.strategies import STRATEGIES
from shardwright.verify import verify


def is_worth_it(strategy, size, case):
    """Every case where all axes of a strategy are longer than one rank; two cases on fewer ranks."""
    return strategy.default or size >= whole_size(strategy) or case in (DEEP, GPT2)


EVERY = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
EVERY_SIZE = pytest.mark.parametrize("size", SIZES)


def marks(strategy, size, case):
    """`make test` takes one size of each strategy and one model, with every option of the strategy."""
    fitting = {"spatial": CONVNET, "tensor_1d": GPT2}.get(strategy.name, DEEP)
    return [pytest.mark.sampled(1)] if (size, case) == (whole_size(strategy), fitting) else []


EVERY_CASE = pytest.mark.parametrize(
    ("strategy", "size", "case"),
    [
        pytest.param(s, n, c, marks=marks(s, n, c))
        for s in STRATEGIES.values()
        for n in SIZES
        for c in CASES
        if is_worth_it(s, n, c)
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
LAID_OUT_WHOLLY = ("data_parallel", "tensor_1d")
"""Strategies that lay out every case on every number of ranks: none of it may be refused one day."""


def lines_of(strategy, size, case):
    """The plainest line for the case; with every option where all axes are there and the case has several blocks."""
    every = case in (DEEP, *OPTION_CASES) and size == whole_size(strategy)
    factors = spellings(strategy, size) if every else [spelling(strategy, size)]
    if case in (DEEP, GPT2):
        factors += further_sizes(strategy, size)
    factors = [factor for factor in factors if case.has_sequences or "/seq" not in factor]
    return [line_of(case, factor) for factor in factors]


def laid_out(strategy, size, case):
    """The lines that fit the case; those that do not are refused on every rank."""
    fitting = []
    for line in lines_of(strategy, size, case):
        if lays_out(line, case):
            fitting.append(line)
        else:
            assert strategy.name not in LAID_OUT_WHOLLY, f"{line} was laid out once"
            check_refused(line, case.model, loss=case.loss)
    return fitting


# ---- promises 1 to 4


@EVERY_CASE
def test_a_strategy_keeps_its_promises(strategy, size, case):
    for line in laid_out(strategy, size, case):
        for check in CHECKS:
            check(line, case)


@EVERY
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.sampled(16)
def test_the_number_of_microbatches_changes_nothing(strategy, size):
    for num_microbatches in (1, 2, 4):
        line = f"{spelling(strategy, size)} mb{num_microbatches}"
        fitting = [case for case in OPTION_CASES if lays_out(line, case)]
        assert fitting, line
        check_equal(line, fitting[0])


@EVERY
@EVERY_SIZE
def test_some_model_is_laid_out_on_any_number_of_ranks(strategy, size):
    assert any(lays_out(line, case) for case in CASES for line in lines_of(strategy, size, case))


@EVERY
def test_every_option_is_laid_out_for_some_model(strategy):
    factors = [factor for size in (2, 4) for factor in spellings(strategy, size)]
    fitting = [factor for factor in factors if any(lays_out(line_of(case, factor), case) for case in CASES)]
    for option in strategy.options:  # with one of its values, on one of the sizes: names and files fit one size alone
        given = [factor for factor in factors if option in (each.partition(":")[0] for each in factor.split("/"))]
        assert not given or set(given) & set(fitting), given
    written = {option.partition(":")[0] for factor in factors for option in factor.split("/")}
    assert written >= set(strategy.options), "an option is not among its own examples"


# ---- promise 5


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.scale


class HeadFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 9, bias=False)
        self.token = nn.Embedding(9, 3)
        self.token.weight = self.head.weight

    def forward(self, tokens):
        return self.head(self.token(tokens))


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Embedding(9, 3), nn.Embedding(9, 3)
        self.two.weight = self.one.weight

    def forward(self, tokens):
        return self.one(tokens) + self.two((tokens + 1) % 9) ** 2


class Written(nn.Module):
    """Two layers, joined as ``body(module, x)`` says."""

    def __init__(self, body, **extra):
        super().__init__()
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 3)
        for name, value in extra.items():
            setattr(self, name, value)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def scaled(m, x):
    return m.down(m.up(x).relu() * m.scale)


def masked(m, x):
    return m.down(m.up(x).relu() * torch.linspace(0.1, 1, 8, dtype=x.dtype, device=x.device))


def looked_at(m, x):
    return m.down(m.up(x).relu()) + nn.functional.linear(x, m.up.weight)[..., :3]


def weighed(m, x):
    return m.down(m.up(x).relu()) * m.up.weight.sum()


def seen_from_outside(m, x):
    hidden = m.up(x)
    return m.down(hidden.relu()) + hidden[..., :3]


def branching(m, x):
    return m.down(m.up(x).relu()) if x.sum() < 1e9 else x


def named(m, x):
    return m.down(input=m.up(input=x).relu())


HOSTILE = {  # each with whether it takes tokens
    "one small Linear": (lambda: nn.Linear(3, 3), False),
    "no Linear": (lambda: nn.Sequential(Scale(3), nn.LayerNorm(3)), False),
    "a chain of width 1": (lambda: nn.Sequential(nn.Linear(3, 1), nn.ReLU(), nn.Linear(1, 3)), False),
    "the same layer twice": (lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2, nn.ReLU(), nn.Linear(3, 3)), False),
    "a chain twice": (lambda: nn.Sequential(*[nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))] * 2), False),
    "a batch norm": (lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), False),
    "not to be traced": (lambda: Written(branching), False),
    "a chain seen from outside": (lambda: Written(seen_from_outside), False),
    "a weight for each feature of a chain": (lambda: Written(scaled, scale=nn.Parameter(torch.rand(8))), False),
    "one weight for all features of a chain": (lambda: Written(scaled, scale=nn.Parameter(torch.rand(()))), False),
    "a constant for each feature of a chain": (lambda: Written(masked), False),
    "a weight that is used by itself": (lambda: Written(looked_at), False),
    "a weight that is summed": (lambda: Written(weighed), False),
    "named arguments": (lambda: Written(named), False),
    "a table": (lambda: nn.Embedding(9, 3), True),
    "a table with padding": (lambda: nn.Sequential(nn.Embedding(9, 3, padding_idx=2), nn.Linear(3, 9)), True),
    "a tied head before its table": (HeadFirst, True),
    "two tied tables": (TwoTables, True),
}


@EVERY
@EVERY_SIZE
@pytest.mark.filterwarnings("ignore:.*a decision by a sum")  # one of them has one, and is right all the same
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.sampled(19)
def test_a_model_that_is_hard_to_lay_out_is_refused_everywhere_or_comes_out_right(strategy, size, name):
    torch.manual_seed(0)
    make, takes_tokens = HOSTILE[name]
    model = make().double()
    tokens = torch.tensor([0, 2, 1, 1, 0])
    inputs = tokens if takes_tokens else torch.randn(5, 3, dtype=torch.float64)
    line = spelling(strategy, size)
    try:
        make_plan(Job(model, CrossEntropy()), Layout.parse(line))
    except LayoutError:
        check_refused(line, model)
        return
    verdict = verify(model, line, [(inputs, tokens)])
    assert verdict.equal, str(verdict)


@EVERY
def test_a_world_of_another_size_is_refused_on_every_rank(strategy):
    for size, num_ranks in [(2, 3), (4, 2), (3, 1)]:
        line = spelling(strategy, size)
        model = next(case for case in (DEEP, *OPTION_CASES) if lays_out(line, case)).model
        assert "does not fit the ranks" in check_refused(line, model, num_ranks=num_ranks)


@EVERY
@pytest.mark.sampled(1)
def test_an_option_that_nobody_declares_is_refused_on_every_rank(strategy):
    text = check_refused(f"{spelling(strategy, 2)}/no-such-option", DEEP.model)
    assert "no-such-option" in text
    assert re.search(rf"write {strategy.axis}[12]", text)


@pytest.mark.sampled(1)
def test_an_axis_without_a_strategy_is_refused_on_every_rank():
    known = {strategy.axis for strategy in STRATEGIES.values()}
    for axis in sorted(layout_axes().keys() - known):
        assert f"no strategy for '{axis}2'" in check_refused(f"{axis}2", DEEP.model)
        assert f"fix:     leave out {axis}2: dp2" in check_refused(f"dp2 {axis}2", DEEP.model)


def heads(num_heads, head_dim, *, rotary=False):
    return lambda: Attention(7, num_heads, head_dim=head_dim, rotary=rotary)


def normed():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


REFUSED = {
    "tp5 of layers no wider than 4": ("tp5", lambda: build_mlp(MLPConfig(widths=(3, 4, 4)))),
    "tp2 of a single Linear": ("tp2", lambda: nn.Linear(64, 3)),
    "tp2 without any layer to cut": ("tp2", lambda: nn.Sequential(Scale(3), nn.LayerNorm(3))),
    "tp9 of convolutions of 8 channels": (
        "tp9",
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)),
    ),
    "pictures cut in space without a convolution": ("tp2/spatial", lambda: DEEP.model),
    "tp7 of 2 heads of 3 elements": ("tp7", heads(2, 3)),
    "tp5 of 2 heads of 2 pairs": ("tp5", heads(2, 4, rotary=True)),
    "tp10 of a llama with 3 heads of 3 pairs": ("tp10", lambda: LLAMA_ONE_KV.model),
    "microbatches of a batch norm": ("tp2 mb2", normed),
    "a bucket without a size": ("dp2/bucket", lambda: DEEP.model),
    "a bucket of no size": ("dp2/bucket:large", lambda: DEEP.model),
    "dp2x2 without slices": ("dp2x2", lambda: DEEP.model),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sampled(3)
def test_what_cannot_be_laid_out_is_refused_on_every_rank_before_anything_is_sent(name):
    line, model = REFUSED[name]
    with torch.device("meta"):
        check_refused(line, model())


FITTING = {
    "tp4 of layers of 4": ("tp4", lambda: build_mlp(MLPConfig(widths=(3, 4, 4))), (5, 3)),
    "tp6 of 2 heads of 3 elements": ("tp6", heads(2, 3), (5, 4, 7)),
    "tp4 of 2 heads of 2 pairs": ("tp4", heads(2, 4, rotary=True), (5, 4, 7)),
    "tp5 of 3 heads, shared by 2, 2 and 1": ("tp5", heads(3, 5), (5, 4, 7)),
    "tp5 of 7 features, and one sample": ("tp5", lambda: build_mlp(MLPConfig(widths=(3, 7, 2))), (1, 3)),
    "dp8 of one sample": ("dp8", lambda: build_mlp(MLPConfig(widths=(3, 7, 2))), (1, 3)),
    "dp1 of a batch norm": ("dp1", normed, (5, 3)),
    "dp8 of a batch norm": ("dp8", normed, (5, 3)),
    "tp2 of a batch norm": (
        "tp2",
        lambda: nn.Sequential(normed(), nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 2)),
        (5, 3),
    ),
}


@pytest.mark.parametrize("name", FITTING)
def test_what_can_just_be_laid_out_comes_out_right(name):
    line, model, shape = FITTING[name]
    torch.manual_seed(0)
    inputs = torch.randn(shape, dtype=torch.float64)
    targets = torch.randn_like(inputs) if len(shape) == 3 else torch.arange(shape[0]) % 2
    loss = MeanSquaredError() if len(shape) == 3 else CrossEntropy()
    verdict = verify(model(), line, [(inputs, targets)] * 2, loss=loss)
    assert verdict.equal, str(verdict)
