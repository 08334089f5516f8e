"""Every strategy is priced, explained and compared, and what a search lists can be run and is equal to one device."""

import pytest
import torch
from tests.contract.cases import spelling, whole_size

from shardwright import verify
from shardwright.layout import Layout
from shardwright.models import GPT, GPTConfig
from shardwright.planner.plans import plan_layouts
from shardwright.strategies import STRATEGIES

SAMPLES = 8
BATCH = torch.zeros(SAMPLES, 8, dtype=torch.int64), torch.ones(SAMPLES, 8, dtype=torch.int64)


def model():
    return GPT(GPTConfig(num_layers=2, width=16, num_heads=4, vocabulary=32, max_tokens=8, dropout=0.0))


LINES = [spelling(each, whole_size(each)) for each in STRATEGIES.values() if each.name != "spatial"]  # of pictures


@pytest.mark.sampled(5)
@pytest.mark.parametrize("line", LINES)
def test_every_strategy_is_priced_and_says_where_its_seconds_go(line):
    layout = Layout.parse(line)
    plans = plan_layouts(model(), f"a100-80gb:1x{layout.num_ranks}", BATCH, layout=layout)
    best = plans.best
    assert sum(best.waterfall.values()) == pytest.approx(best.step_s, rel=1e-12)
    assert str(best.layout) in plans.text()


@pytest.mark.sampled(0)
def test_verify_accepts_every_layout_that_a_search_lists():
    plans = plan_layouts(model(), "a100-80gb:1x4", BATCH, most_priced=6)
    assert len(plans.layouts) > 3
    for each in plans.layouts:
        verdict = verify(model(), str(each.layout), [BATCH])
        assert verdict, f"{each.layout}: {verdict}"
