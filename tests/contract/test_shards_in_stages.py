"""Models that no pattern knows run in pipeline stages on shards of their tensors, as one device would."""

from __future__ import annotations

import pytest
import torch
from tests.contract.cases import check_traffic
from tests.contract.test_on_shards import CASES as LANGUAGE
from tests.contract.test_pipeline_of_events import CASES as OF_EVENTS
from tests.contract.test_pipeline_of_events import check_of_events
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.strategies.tensor_parallel.shards_plan import ShardsNote

CASES = {"GroupedBlock": LANGUAGE["GroupedBlock"], "Paired": OF_EVENTS["Paired"]}

LINES = (
    "pp2/1f1b dp2/zero1 tp2 mb2", "pp2/zb-v tp2 mb2 recompute:full", "pp2/interleaved:v2 dp2/zero2 tp2 mb2",
    "pp2 tp2x2/2d", "pp2/1f1b tp2/sp mb2", "pp2/1f1b dp2/zero3 tp2 mb2",
    "pp2/interleaved:v2 dp2/zero3/bucket:0 tp2 mb2",
)  # fmt: skip


@pytest.mark.sampled(0)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", CASES)
def test_a_model_on_parts_in_stages_keeps_every_promise(name, line):
    plan = check_of_events(line, CASES[name])
    assert isinstance(plan.notes.get(""), ShardsNote), "the model runs on shards"


@pytest.mark.sampled(0)
@pytest.mark.parametrize("line", ["pp2/interleaved:v2 tp2 mb2", "pp2/interleaved:v2 dp2/zero3/bucket:0 tp2 mb2"])
def test_traffic_finds_a_value_that_dropout_made_under_the_name_that_it_has_in_training(line):
    check_traffic(line, OF_EVENTS["Repeated"])


class OwnWeights(nn.Module):
    """A layer whose weights are its own, beside a child without any."""

    def __init__(self, num_inputs, num_outputs):
        super().__init__()
        self.base, self.waves = (nn.Parameter(torch.randn(num_outputs, num_inputs) / 4) for _ in range(2))
        self.activation = nn.SiLU()

    def forward(self, x):
        return functional.linear(self.activation(x), self.base) + functional.linear(torch.sin(x), self.waves)


@pytest.mark.parametrize("line", ["pp2 tp2", "pp2/1f1b mb2 dp2/zero1 tp2"])
def test_stages_begin_at_layers_that_call_no_module_with_weights(line):
    torch.manual_seed(0)
    model = nn.Sequential(OwnWeights(6, 16), OwnWeights(16, 16), OwnWeights(16, 3))
    batches = [(torch.rand(4, 6), torch.randint(3, (4,))) for _ in range(2)]
    verdict = sw.verify(model, line, batches, loss=functional.cross_entropy)
    assert verdict.equal, str(verdict)
