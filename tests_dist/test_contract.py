"""The contract over processes: the same promises as on threads, over shared memory and over torch's groups."""

from collections import Counter

import pytest

from contract.cases import (
    CASES,
    CONVNET,
    GPT2,
    LLAMA_ONE_KV,
    MLP,
    STRATEGIES,
    known_once,
    lays_out,
    line_of,
    pairs,
    spelling,
)
from shardwright.layout import Layout
from shardwright.parallelize import parallelize
from shardwright.parallelize.planning import StepTraffic, make_plan
from shardwright.plan.plan import Job
from shardwright.verify import verify


def on_pool(pool):
    return lambda work, *args: pool.run(work, *args)


def check(pool, line, case):
    with known_once(line, case):
        verdict = verify(case.model, line, case.batches, loss=case.loss, launcher=on_pool(pool))
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_equals_one_device(pools, name, size):
    fitting = [case for case in CASES if lays_out(line_of(case, spelling(STRATEGIES[name], size)), case)]
    assert fitting
    most = {2: len(CASES), 8: 2}.get(size, 4)  # every model on every size: on threads, tests/contract
    for case in fitting[:most]:
        check(pools(size), line_of(case, spelling(STRATEGIES[name], size)), case)


@pytest.mark.parametrize("links", ["auto", "sockets"])
@pytest.mark.parametrize(("one", "other"), pairs(), ids=lambda s: s.name)
def test_every_pair_equals_one_device(pools, one, other, links):
    lines = [(case, line_of(case, spelling(one, 2), spelling(other, 2))) for case in (MLP, GPT2, LLAMA_ONE_KV, CONVNET)]
    fitting = [(case, line) for case, line in lines if lays_out(line, case)]
    assert fitting
    for case, line in fitting[:2] if links == "auto" else fitting[-1:]:  # between the two, up to three models
        check(pools(4, links), line, case)


@pytest.mark.parametrize("links", ["auto", "sockets"])
def test_stages_that_send_parts_equal_one_device(pools, links):
    check(pools(4, links), "pp2/1f1b/scatter mb3 tp2", LLAMA_ONE_KV)


def step_and_count(world, line, case, model, inputs_and_targets):
    run = parallelize(model, line, world, loss=case.loss)
    batch = next(run.shard([inputs_and_targets]))
    with world.recorder.recording() as records:
        run.step(batch)
    plan, chosen = make_plan(Job(model, case.loss), Layout.parse(line))
    said = Counter()
    for source, calls in (
        StepTraffic(Job(model, case.loss), plan, chosen, inputs_and_targets[0]).at(run.coord, checked=True).items()
    ):
        for call in calls:
            said[source, call.kind, call.axis, call.num_bytes] += call.times
    made = Counter((r.source, r.kind, r.axis, r.num_bytes) for r in records if r.source != "loss")
    return dict(said), dict(made)


@pytest.mark.parametrize("links", ["auto", "sockets"])
def test_the_calls_that_are_made_are_those_that_were_stated(pools, links):
    for case in (MLP, GPT2, LLAMA_ONE_KV):
        for said, made in pools(4, links).run(step_and_count, "dp2 tp2", case, case.model, case.batches[0]):
            assert said == made
