"""Models whose samples choose the code that runs, as experts do: ranks use different param groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize, verify
from shardwright.errors import PlanError
from shardwright.layout import Layout


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        wanted, hidden = x[:, 0].long(), self.inner(x)
        out = torch.zeros_like(hidden)
        for number in sorted(set(wanted.tolist())):
            out = out + (wanted == number)[:, None] * torch.tanh(self.experts[number](hidden))
        return self.head(out)


def samples(wanted):
    inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    inputs[:, 0] = torch.tensor(wanted) + 0.5
    return inputs, torch.arange(8) % 5


APART = samples([0, 0, 1, 1, 2, 2, 3, 3])


@pytest.mark.parametrize("wanted", [[0, 0, 1, 1, 2, 2, 3, 3], [0, 0, 1, 1, 1, 2, 2, 3]])
@pytest.mark.parametrize("line", ["dp2/zero1/bucket:0", "dp2/zero2/bucket:0/ahead:0 mb2", "dp2x2/zero1/bucket:0"])
def test_ranks_may_use_different_param_groups_in_stages_1_and_2(line, wanted):
    torch.manual_seed(0)
    assert verify(Experts(), line, [samples(wanted)] * 2).equal


@pytest.mark.parametrize("line", ["dp2/zero3/bucket:0", "dp2x2/zero3/bucket:0"])
@pytest.mark.parametrize("trains", [True, False])
def test_in_stage_3_every_rank_raises_where_ranks_use_different_param_groups(line, trains):
    torch.manual_seed(0)
    model, inputs = Experts(), samples([0, 0, 0, 0, 1, 1, 2, 2])  # replica 0 agrees with itself

    def work(world):
        run = parallelize(model, line, world)
        (batch,) = run.shard([inputs if "x" in line else APART])
        if not trains:
            run.evaluate(batch)
        with pytest.raises(PlanError, match="ranks use the model's param groups in different orders") as refusal:
            (run.step if trains else run.evaluate)(batch)
        return str(refusal.value)

    (text,) = set(launch(work, Layout.parse(line), ranks="threads"))
    assert "is a gather of 'experts.0'" in text or "is a gather of 'experts.1'" in text
    assert "fix:     write zero2 in place of zero3" in text
