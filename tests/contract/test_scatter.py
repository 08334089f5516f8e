"""``scatter``: tensor-parallel ranks each send a part of what they hold alike to the next stage, which gathers it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.contract.test_shards_in_stages import CASES as ON_SHARDS
from torch import nn

import shardwright as sw
from contract.cases import (
    CHECKS,
    CONVNET,
    DEEP,
    GPT2,
    LLAMA_ONE_KV,
    check_equal,
    check_refused,
    check_traffic,
    job_of,
    planned,
)
from contract.test_every_schedule import NAMES, WRITTEN
from nccl_rules import Variant
from pretend_nccl import over_nccl
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.plan.event_stages import EventStages
from shardwright.plan.stages import Stages
from shardwright.report.description import describe
from shardwright.report.show import show_text
from shardwright.strategies.pipeline.p2p import P2P

LINES = (
    ("pp2/1f1b/scatter tp3 mb2", GPT2), ("pp3/scatter tp2 mb3", DEEP), ("pp2/1f1b/scatter tp2x2/2d mb2", GPT2),
    ("pp2/scatter tp2/sp mb2", GPT2), ("pp2/scatter tp2", CONVNET), ("pp2/scatter dp2/zero3 tp2 mb2", LLAMA_ONE_KV),
    ("pp2/1f1b/scatter dp2/zero1 tp2 mb2", ON_SHARDS["GroupedBlock"]), ("pp2/scatter tp3", ON_SHARDS["Paired"]),
    ("pp2/zb-v/scatter tp2 mb2 recompute:full", ON_SHARDS["Paired"]),
    ("pp2/scatter tp2x2/2d", ON_SHARDS["GroupedBlock"]),
)  # fmt: skip


@pytest.mark.parametrize(("line", "case"), LINES, ids=lambda each: str(each))
@pytest.mark.sampled(100)
def test_stages_that_send_parts_keep_every_promise(line, case):
    for check in CHECKS:
        check(line, case)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(0)
def test_parts_are_sent_under_every_schedule(name):
    line = f"pp2/{WRITTEN[name]}/scatter tp2 mb3"
    check_equal(line, GPT2)
    check_traffic(line, GPT2)


@pytest.mark.of_threads
@pytest.mark.parametrize("variant", [Variant(), Variant(eager_bytes=4096)], ids=["strictest", "small sends alone"])
@pytest.mark.parametrize("line", ["pp3/1f1b/scatter tp2 mb4", "pp2/zb-v/scatter tp3 mb3"])
@pytest.mark.sampled(0)
def test_no_rank_waits_in_a_circle_over_nccl(line, variant):
    with over_nccl(variant):
        verdict = sw.verify(GPT2.model, line, GPT2.batches, loss=GPT2.loss)
    assert verdict.equal, str(verdict)


@pytest.mark.of_threads
@pytest.mark.sampled(1)
def test_ranks_that_gather_in_another_order_are_found_over_nccl(monkeypatch):
    gather = P2P._gather

    def late(self, received):
        if received.is_part and self.axis.index == 1 and self.scatter.index == 1:
            self.scatter.all_gather(torch.zeros(1, dtype=received.whole.dtype))  # a call that the other does not make
        return gather(self, received)

    monkeypatch.setattr(P2P, "_gather", late)
    with pytest.raises(Exception, match="different calls"), over_nccl(Variant()):
        sw.verify(DEEP.model, "pp2/scatter tp2 mb3", DEEP.batches, loss=DEEP.loss)


# ---- what is sent in parts


def sent_by(line, case):
    """The payload bytes of a step's messages and gathers between stages, over all ranks, by kind."""
    plan, _ = planned(line, case)

    def work(world):
        run = sw.parallelize(case.model, line, world, loss=case.loss, check_every=0)
        (batch,) = run.shard([case.batches[0]])
        run.step(batch)
        with world.recorder.recording() as records:
            run.step(batch)
        return Counter({kind: sum(r.num_bytes for r in records if (r.source, r.kind) == ("pipeline", kind))
                        for kind in ("send", "receive", "all_gather")})  # fmt: skip

    return sum(sw.launch(work, plan.mesh.size, ranks="threads"), Counter())


@pytest.mark.sampled(0)
def test_what_crosses_is_one_copy_in_place_of_one_for_each_rank():
    whole, parts = (sent_by(f"pp2/1f1b{option} tp3 mb2", GPT2) for option in ("", "/scatter"))
    assert whole["send"] == 3 * parts["send"] == whole["receive"]
    assert "all_gather" not in +whole
    assert parts["all_gather"] == 3 * parts["send"]  # the payload of a gather is the whole tensor, on each rank


@pytest.mark.sampled(0)
def test_what_is_cut_already_moves_as_it_lies():
    for line, case in (("pp2/1f1b{} tp2/sp mb2", GPT2), ("pp2{} tp2x2/2d", GPT2), ("pp2{}", GPT2)):
        whole, parts = (sent_by(line.format(option), case) for option in ("", "/scatter"))
        assert whole == parts


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_value_of_fewer_elements_than_ranks_is_sent_whole(num_samples):
    model = nn.Sequential(
        nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 4)
    )
    inputs = torch.arange(3.0 * num_samples).view(num_samples, 3)

    def work(world):
        run = sw.parallelize(model, "pp2/scatter/cut:0,4 tp3", world, check_every=0)
        with world.recorder.recording() as records:
            run.step(next(run.shard([(inputs, torch.zeros(num_samples, dtype=torch.int64))])))
        return [(r.kind, r.num_bytes) for r in records if r.source == "pipeline"]

    sent = sw.launch(work, 6, ranks="threads")[1]
    assert sent == ([("send", 8), ("receive", 8)] if num_samples == 1 else
                    [("send", 4), ("receive", 4), ("all_gather", 16)])  # fmt: skip


@pytest.mark.sampled(0)
def test_bf16_and_evaluation_and_prediction_give_the_same_bits_with_parts_as_with_wholes():
    tokens = GPT2.batches[0]

    def work(world, line):
        run = sw.parallelize(GPT2.model.float(), line, world, loss=GPT2.loss, seed=3)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        losses = []
        for batch in run.shard([tokens, GPT2.batches[1]]):
            losses.append((run.step(batch).item(), run.evaluate(batch)))
            optimizer.step()
        return losses, run.predict(tokens[0]).tolist()

    found = [sw.launch(work, 4, f"pp2/1f1b{option} tp2 mb2 bf16", ranks="threads") for option in ("", "/scatter")]
    assert found[0] == found[1]


@pytest.mark.sampled(1)
def test_show_says_that_parts_are_sent_where_they_are():
    for line, is_said in (("pp2/scatter tp2 mb3", True), ("pp2 tp2 mb3", False), ("pp2/scatter dp2 mb3", False)):
        description = describe(job_of(line, DEEP), Layout.parse(line))
        assert ("scattered_over" in description) == is_said
        assert ("ranks of tp send a part each" in " ".join(show_text(description, 200).split())) == is_said


# ---- what cannot be


@pytest.mark.sampled(1)
def test_a_value_is_refused_on_every_rank():
    assert "'scatter' on axis 'pp' takes no value" in check_refused("pp2/scatter:4 tp2", DEEP.model, loss=DEEP.loss)


class ReadsValues(nn.Linear):
    """A layer whose code reads a value, so that it does not run without values."""

    def forward(self, x):
        return super().forward(x) * (1 if float(x.detach().sum()) < 1e9 else 2)


@pytest.mark.sampled(1)
def test_a_model_that_needs_values_is_refused_before_anything_is_sent():
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3), ReadsValues(3, 3), nn.Linear(3, 3))
    batch = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)

    def work(world):
        run = sw.parallelize(model, "pp2/scatter/cut:0,4 tp2", world, example=None)
        with world.recorder.recording() as records, pytest.raises(PlanError, match="leave out scatter"):
            run.step(next(run.shard([batch])))
        return [record for record in records if record.source != "core"]  # stages have compared their code

    assert sw.launch(work, 4, ranks="threads") == [[]] * 4


@pytest.mark.sampled(0)
def test_both_kinds_of_stages_are_tried_here():
    assert {type(planned(line, case)[0].stages) for line, case in LINES} == {Stages, EventStages}
