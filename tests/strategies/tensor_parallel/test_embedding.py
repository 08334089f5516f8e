"""Tables that do more than look rows up: what they do is kept, or they are whole, or refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import verify
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.models import CrossEntropy
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job

TOKENS = torch.randint(19, (5, 7), generator=torch.Generator().manual_seed(1))
BATCH = (TOKENS[:, :-1], TOKENS[:, 1:])


class Writer(nn.Module):
    def __init__(self, tied=True, **options):
        super().__init__()
        self.table = nn.Embedding(19, 12, **options)
        self.block = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 19, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        return self.head(self.norm(x + self.block(x)))


def model(**options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Writer(**options).double()


def plan_of(line, **options):
    return make_plan(Job(model(**options), CrossEntropy()), Layout.parse(line))[0]


@pytest.mark.parametrize("line", ["tp2", "tp3/sp", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d"])
@pytest.mark.parametrize("padding", [0, 3, 17, -1])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sampled(7)
def test_the_row_of_padding_learns_nothing_from_being_looked_up_also_where_the_table_is_cut(line, padding, tied):
    assert set(plan_of(line, tied=tied, padding_idx=padding).compute["table.weight"].axes)
    verdict = verify(model(tied=tied, padding_idx=padding), line, [BATCH, BATCH])
    assert verdict.equal, str(verdict)


WHOLE = {"max_norm": 0.5, "scale_grad_by_freq": True}


@pytest.mark.parametrize("option", WHOLE)
def test_a_table_that_a_part_could_not_be_stays_whole_with_its_head_and_show_says_why(option):
    plan = plan_of("tp2", **{option: WHOLE[option]})
    assert not plan.compute["table.weight"].axes
    assert set(plan.compute["block.0.weight"].axes)
    assert option in plan.roles["table"].why
    assert plan.roles["head"].why.startswith("shares the table 'table': ")
    verdict = verify(model(**{option: WHOLE[option]}), "tp2", [BATCH, BATCH])
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("option", WHOLE)
@pytest.mark.parametrize("line", ["dp2", "dp2 tp2", "tp2/sp", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d"])
def test_a_table_that_would_go_wrong_is_refused_by_name_where_samples_are_cut(line, option):
    for tied in (False, True):
        with pytest.raises(LayoutError, match=rf"the table 'table' would not(.|\n)*Embedding with {option}="):
            plan_of(line, tied=tied, **{option: WHOLE[option]})


def test_one_that_two_stages_share_is_refused_and_one_of_a_single_stage_comes_out_right():
    with pytest.raises(LayoutError, match="the table 'table' would not be that of one device on 'pp2'"):
        plan_of("pp2", max_norm=0.5)
    verdict = verify(model(tied=False, max_norm=0.5), "pp2 mb2", [BATCH, BATCH])
    assert verdict.equal, str(verdict)


def test_microbatches_are_refused_to_a_table_that_counts_its_tokens_and_to_no_other():
    with pytest.raises(LayoutError, match="on 'mb2'"):
        plan_of("mb2", scale_grad_by_freq=True)
    verdict = verify(model(tied=False, max_norm=0.5), "mb2", [BATCH, BATCH])
    assert verdict.equal, str(verdict)
