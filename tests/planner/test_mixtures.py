"""Plans of mixtures of experts: a rehearsal has no values, so each expert gets as many tokens as every other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.analysis.on_meta.meta_values import MetaValues
from shardwright.cost.operators import OperatorRecord
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.ledger.account import JobPlan
from shardwright.models.losses import CrossEntropy
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.planner.plans import plan_layouts
from shardwright.planner.rehearse import rehearse

WIDTH, INNER, WORDS, TOKENS = 16, 24, 40, 8
BATCH = tuple(torch.zeros(8, TOKENS, dtype=torch.long) for _ in range(2))


class Mixture(nn.Module):
    """Runs each expert on the tokens that have it among their best two."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, num, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)) for _ in range(num)
        )

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.route(tokens)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out.index_add_(0, rows, (expert(tokens[rows]) * weights[rows, place, None]).to(out.dtype))
        return out.view_as(x)

    def route(self, tokens):
        return self.router(tokens).softmax(-1).topk(2, dim=-1)


class Counting(Mixture):
    """Moves the tokens of each expert together, and asks how many there are of each."""

    def forward(self, x):
        tokens = x.flatten(0, 1)
        best = self.router(tokens).argmax(-1)
        order = best.argsort()
        counts = torch.bincount(best, minlength=len(self.experts)).tolist()
        parts = [expert(rows) for expert, rows in zip(self.experts, tokens[order].split(counts), strict=True)]
        return torch.zeros_like(tokens).index_copy(0, order, torch.cat(parts).to(tokens.dtype)).view_as(x)


class Sampling(Mixture):
    def route(self, tokens):
        weights = self.router(tokens).softmax(-1)
        chosen = torch.multinomial(weights, 2)
        return weights.gather(1, chosen), chosen


def model(kind=Mixture, num=4, blocks=4):
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), kind(num)) for _ in range(blocks)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))


def expert_flops(kind, num):
    layout = Layout.parse("single")
    job = job_for(model(kind, num), CrossEntropy(), layout, BATCH[0])
    found = rehearse(job, JobPlan(*make_plan(job, layout)), 0, BATCH, "cuda", torch.optim.AdamW)
    records = (each for action in found.by_action.values() for each in action.records)
    return sum(each.flops for each in records if isinstance(each, OperatorRecord) and INNER in each.dims[1:])


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("kind", "chosen"), [(Mixture, 2), (Counting, 1), (Sampling, 2)])
def test_experts_are_rehearsed_with_as_many_tokens_each(kind, chosen):
    forward = 4 * chosen * BATCH[0].numel() * 2 * 2 * WIDTH * INNER  # blocks, experts of a token, two products
    for num in (4, 8):
        assert expert_flops(kind, num) == 3 * forward


@pytest.mark.sampled(100)
@pytest.mark.parametrize(
    "line", ["dp2/zero3 bf16", "tp2 dp2", "tp2/sp", "tp2x2/2d", "pp2/1f1b mb4 dp2", "pp2/zb-v mb4 tp2"]
)
def test_a_mixture_of_ones_own_is_planned_under_every_kind_of_layout(line):
    layout = Layout.parse(line)
    plans = plan_layouts(model(), f"a100-80gb:1x{layout.num_ranks}", BATCH, loss=CrossEntropy(), layout=layout)
    assert plans.best.step_s > 0
    assert sum(plans.best.waterfall.values()) == pytest.approx(plans.best.step_s)


@pytest.mark.sampled(0)
def test_a_search_takes_a_mixture_of_ones_own():
    plans = plan_layouts(model(num=3, blocks=3), "a100-80gb:1x2", BATCH, loss=CrossEntropy(), most_priced=2)
    assert plans.best.fits
    assert len(plans.layouts) > 1


class Converts(nn.Module):
    """Converts its router to float32 in each forward, as Switch does."""

    def __init__(self):
        super().__init__()
        self.words, self.router, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.words(tokens)
        return self.head(x * self.router.to(torch.float32)(x.float()).to(x.dtype))


@pytest.mark.sampled(0)
def test_a_search_that_the_model_refuses_says_what_the_error_says():
    with pytest.raises(LayoutError) as refusal:
        plan_layouts(Converts(), "a100-80gb:1x2", BATCH, loss=CrossEntropy())
    assert "--fix fp32" in str(refusal.value.fix)
    assert plan_layouts(Converts(), "a100-80gb:1x2", BATCH, loss=CrossEntropy(), fix="fp32").best.fits


class SaysItsValues(nn.Module):
    """Writes values that a rehearsal does not have into text, and counts with and without weights."""

    def __init__(self):
        super().__init__()
        self.words, self.scores = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.scores(self.words(tokens)).softmax(-1)
        assert torch.arange(3).sum().item() == 3, f"a mean of {x.mean()}"
        text = f"a mean of {x.mean()}"
        best = x.argmax(-1).flatten()
        counts = torch.bincount(best, minlength=WORDS) + torch.bincount(best, x.amax(-1).flatten().detach(), WORDS)
        return x * (1 + counts / len(text))


def test_text_of_values_and_counts_are_rehearsed():
    plans = plan_layouts(SaysItsValues(), "a100-80gb:1x1", BATCH, loss=CrossEntropy(), layout="single")
    assert plans.best.step_s > 0


@pytest.mark.parametrize(("call", "indices"), [
    (lambda x: x.topk(2).indices, [[0, 1], [2, 3], [4, 0]]),
    (lambda x: x.long().topk(1, dim=0).indices, [[0, 1, 2, 0, 1]]),
    (lambda x: x.argmax(1), [0, 1, 2]),
    (lambda x: x.max(1, keepdim=True).indices, [[0], [1], [2]]),
    (lambda x: x.long().sort(dim=1, descending=True).indices, [[0, 1, 2, 3, 4]] * 3),
    (lambda x: x.long().max(1).values, None),
    (lambda x: x.argmax(), None),
    (lambda x: x[0, 0].topk(1).indices, None),
])  # fmt: skip
def test_choices_are_spread_over_what_they_choose_from(call, indices):
    x = torch.empty(3, 5, device="meta")
    with MetaValues(spread=True) as values:
        found = values.values(call(x))
    assert found is None if indices is None else found.tolist() == indices
