"""``tpN/auto``: of every mode that fits, the one that sends least, by what really is sent."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch

from contract.cases import ASIDE, CONVNET, GPT2, LLAMA_GROUPED, MLP
from shardwright import launch, parallelize, verify
from shardwright.comm.recorder import ring_factor
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.parallelize.auto import candidates, tokens_of
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.plan.plan import Job
from shardwright.strategies.tensor_parallel.place import sent

MODELS = {"mlp": MLP, "convnet": CONVNET, "gpt": GPT2, "llama": LLAMA_GROUPED}


def sent_bytes(line, case, batch):
    """What the first rank sends in a step, ranks forming a ring."""

    def work(world):
        run = parallelize(
            case.model, line, world, loss=case.loss, num_tokens=tokens_of(batch[0], Layout.parse(line)),
            example=batch[0],
        )  # fmt: skip
        (mine,) = run.shard([batch])
        with world.recorder.recording() as records:
            run.step(mine)
        mesh = run.plan.mesh
        return float(
            sum(
                ring_factor(each.kind, prod(mesh[axis] for axis in each.axis.split("+"))) * each.num_bytes
                for each in records
                if each.source not in ASIDE
            )
        )

    return launch(work, Layout.parse(line), ranks="threads")[0]


def chosen(line, case, batch):
    layout = Layout.parse(line)
    job = job_for(case.model, case.loss, layout, batch[0], tokens_of(batch[0], layout))
    return make_plan(job, layout)[0].layout


def test_auto_is_written_into_no_plan():
    assert chosen("dp2 tp4/auto mb2", MLP, MLP.batches[0]).factor("tp").option("auto") is None


def test_an_example_weighs_activations_against_weights_as_verify_and_plan_do():
    """Eight samples are far less than the weights; a run without an example takes 4096 tokens, which are far more."""
    line, batch = "tp2/sp", torch.zeros(8, 64)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    layout = Layout.parse(line)
    job = job_for(model, MLP.loss, layout, batch, tokens_of(batch, layout))

    def cuts(**options):
        return launch(lambda world: dict(parallelize(model, line, world, **options).plan.roles), 2, ranks="threads")[0]

    few = dict(make_plan(job, layout)[0].roles)
    assert cuts(example=batch) == few
    assert cuts() == cuts(example=batch, num_tokens=4096) != few


@pytest.mark.parametrize(("name", "size"), [("mlp", 4), ("convnet", 2), ("gpt", 2), ("llama", 4)])
@pytest.mark.sampled(0)
def test_what_is_chosen_sends_least_of_all_that_fits(name, size):
    case = MODELS[name]
    batch = case.batches[0]
    auto = Layout.parse(f"tp{size}/auto")
    found = {}
    for candidate in candidates(auto.factor("tp")):
        line = str(replace(auto, factors=(candidate,)))
        try:
            found[line] = sent_bytes(line, case, batch)
        except LayoutError:
            continue
    assert len(found) > 2, "something to choose from"
    assert len(set(found.values())) > 1
    assert found[str(chosen(str(auto), case, batch))] == min(found.values())


@pytest.mark.parametrize("line", ["tp2/auto", "tp4/auto", "dp2 tp3/auto", "pp2 tp2/auto mb2", "tp4/auto/regather"])
def test_what_is_chosen_equals_one_device(line):
    name = "gpt" if "dp" in line else "mlp"
    verdict = verify(MODELS[name].model, line, MODELS[name].batches, loss=MODELS[name].loss)
    assert verdict.equal, str(verdict)


def test_without_an_example_linear_layers_decide():
    job = Job(MLP.model, MLP.loss, num_tokens=1)
    auto = Layout.parse("tp4/auto")
    plans = [make_plan(job, replace(auto, factors=(each,)))[0] for each in candidates(auto.factor("tp"))]
    assert sent(make_plan(job, auto)[0]) == min(sent(plan) for plan in plans)


@pytest.mark.parametrize("line", ["tp2x2/2d/auto", "tp4/sp/auto", "tp4/auto:7"])
def test_a_mode_of_ones_own_beside_auto_is_refused(line):
    with pytest.raises(LayoutError, match="chooses the mode and the grid itself"):
        chosen(line, MLP, MLP.batches[0])


def test_a_model_that_fits_no_mode_is_refused_as_the_plainest_mode_does():
    with pytest.raises(LayoutError, match="no layer of the model can be cut"):
        make_plan(Job(torch.nn.Linear(2, 2), MLP.loss), Layout.parse("tp4/auto"))
