"""Ranks that plan for themselves, at once, train together: ``verify`` of other tests lets ranks share a plan."""

from __future__ import annotations

import pytest
import torch

from contract.cases import CONVNET, DEEP, GPT2, lays_out, line_of, spelling, whole_size
from shardwright import launch, parallelize
from shardwright.layout import Layout
from shardwright.strategies import STRATEGIES
from shardwright.verify import verify


def losses(case, line):
    """Of two steps, on every rank."""

    def work(world):
        run = parallelize(case.model, line, world, loss=case.loss, example=case.batches[0][0])
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        found = []
        for batch in run.shard(case.batches):
            found.append(run.step(batch).item())
            optimizer.step()
        return found

    return launch(work, Layout.parse(line), ranks="threads")


@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_that_plan_for_themselves_train_to_the_losses_of_one_device(name):
    strategy = STRATEGIES[name]
    factor = spelling(strategy, whole_size(strategy))
    case = next(case for case in (GPT2, DEEP, CONVNET) if lays_out(line_of(case, factor), case))
    (expected,) = losses(case, "single")
    for found in losses(case, line_of(case, factor)):
        assert found == pytest.approx(expected, rel=1e-10)


def test_under_verify_ranks_of_these_tests_share_one_plan(monkeypatch):
    planned = []
    monkeypatch.setattr("one_plan.for_one_rank", lambda plan: planned.append(plan) or plan)
    assert verify(DEEP.model, "dp3", DEEP.batches).equal
    assert len(planned) == 3
    assert len({id(plan) for plan in planned}) == 1
