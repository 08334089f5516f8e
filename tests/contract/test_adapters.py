"""Adapters of low rank on a frozen model, as LoRA has them: equal to one device, and nothing is sent for the base."""

from __future__ import annotations

import pytest
import torch
from tests.contract.cases import CHECKS, job_of, planned
from tests.contract.test_on_shards import TOKENS, GroupedBlock, Language, OwnCase
from torch import nn

from shardwright.ledger.account import predict_memory
from shardwright.ledger.tracking import KINDS
from shardwright.models.losses import CrossEntropy
from shardwright.parallelize.planning import StepTraffic

LINES = ("dp2", "dp2/zero3", "tp2", "tp2/sp", "tp2x2/2d", "pp2/1f1b mb4", "pp2/1f1b mb2 dp2/zero1")
SAMPLES = 8


class Adapted(nn.Module):
    """A frozen layer, and two narrow ones beside it that learn."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.adapters = nn.ModuleDict(
            {"down": nn.Linear(base.in_features, 3, bias=False), "up": nn.Linear(3, base.out_features, bias=False)}
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x, *args, **named):
        found = self.base(x, *args, **named)
        return found + self.adapters["up"](self.adapters["down"](self.drop(x))) * 2.0


class Wrapped(nn.Module):
    """The adapted model as one that names none of its arguments holds it."""

    def __init__(self):
        super().__init__()
        self.model = Language(GroupedBlock).requires_grad_(False)
        for block in self.model.blocks:
            block.q, block.v = Adapted(block.q), Adapted(block.v)

    def forward(self, *args, **named):
        return self.model(*args, **named)


def case() -> OwnCase:
    torch.manual_seed(1)
    return OwnCase("adapted", Wrapped(), CrossEntropy(), num_tokens=TOKENS, num_samples=(SAMPLES, SAMPLES))


CASE = case()
TRAINED = {name for name, p in CASE.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("line", LINES)
def test_adapters_on_a_frozen_model_keep_every_promise(line):
    for check in CHECKS:
        check(line, CASE)


@pytest.mark.parametrize("line", LINES)
def test_a_frozen_base_has_no_gradients_no_optimizer_state_and_no_gradient_traffic(line):
    plan, strategies = planned(line, CASE)
    assert set(plan.compute) - plan.frozen == TRAINED
    inputs, targets = CASE.batches[0]
    at = dict.fromkeys(plan.mesh.axes, 0)
    account = predict_memory(job_of(line, CASE), line, 0, (inputs, targets), ranks="threads")
    before = dict(zip(KINDS, account.moments[0].held, strict=True))
    kept = [plan.state[name] for name in TRAINED]
    at_rest = 8 * sum(state.gradient.num_elements(at) for state in kept)
    whole = 8 * sum(plan.compute[name].num_elements(at) for name in TRAINED)
    assert at_rest <= account.most()["gradients"] <= at_rest + whole
    moments = 2 * 8 * sum(state.optimizer.num_elements(at) for state in kept)
    assert moments <= before["optimizer"] <= moments + 8 * len(kept), "two moments, and a count of steps"
    traffic = StepTraffic(job_of(line, CASE), plan, strategies, inputs).at(at)
    summed = [each for calls in traffic.values() for each in calls if each.kind in ("all_reduce", "reduce_scatter")]
    gradients = [each for each in summed if each.axis == "dp" or each.kind == "reduce_scatter"]
    every = 8 * sum(p.numel() for name, p in CASE.model.named_parameters() if name in TRAINED)
    assert sum(each.num_bytes * each.times for each in gradients) <= every, "the gradients of adapters alone"
    assert gradients or plan.mesh.axes in (("tp",), ("pp",)), "adapters that ranks share are summed"
