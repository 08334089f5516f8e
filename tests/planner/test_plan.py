"""Prices of layouts: equal to the ledger's memory, to the traffic that is stated, and to full rehearsals."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.cost.cluster import Cluster
from shardwright.cost.operators import MESSAGE_STARTS, OperatorRecord
from shardwright.errors import LayoutError, PlanError
from shardwright.initial_values import without_values
from shardwright.layout import Layout
from shardwright.ledger import predict_memory
from shardwright.models import MODELS
from shardwright.models.model_loss import ModelLoss
from shardwright.parallelize.auto import num_shares
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan
from shardwright.planner import records as recording
from shardwright.planner.blocks import alike_blocks
from shardwright.planner.memory import memory_by_stage, offloaded_bytes
from shardwright.planner.outline import ModelPlans
from shardwright.planner.plan_results import Plans
from shardwright.planner.plan_text import MEMORY_ON_CARD, MEMORY_ON_CPUS
from shardwright.planner.plans import plan_layouts
from shardwright.planner.price import Pricing, traffic_by_stage
from shardwright.planner.records import record_layout
from shardwright.planner.rehearse import MessageRecord, operator_record

CLUSTER = {1: "a100-80gb:1x1", 2: "a100-80gb:1x2", 4: "a100-80gb:1x4", 8: "a100-80gb:2x4"}


@cache
def recorded(line, num_layers, *, whole=False):
    layout = Layout.parse(line)
    job, batch = gpt(layout, num_layers=num_layers)
    return layout, job, batch, record_layout(job, layout, batch, "cuda", whole=whole)


def priced(line, num_layers, **given):
    layout, _, _, records = recorded(line, num_layers, **given)
    return Pricing(plan_cluster(layout)).price(layout, records)


def gpt(layout, samples=2, **settings):
    entry = MODELS["gpt"]
    with without_values():
        model = entry.factory(entry.config(width=32, max_tokens=16, vocabulary=40, **settings))
    rows = num_shares(layout) * samples
    tokens, targets = (torch.empty(rows, 16, dtype=torch.long, device="meta") for _ in range(2))
    return job_for(model, entry.loss(), layout, tokens), (tokens, targets)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("line", ["dp2 bf16", "dp2 bf16 recompute:full"])
def test_operators_that_the_host_starts_are_counted_and_named_where_they_may_bound_the_step(line):
    layout, job, batch, records = recorded(line, 6)
    found = Pricing(plan_cluster(layout)).price(layout, records)
    (whole,) = recorded(line, 6, whole=True)[-1].stages
    shapes = [*whole.fewer.actions.values(), whole.fewer.update]
    every = [each for shape in shapes for each in shape.records]
    launches = sum(each.launches for each in every if isinstance(each, OperatorRecord))
    messages = sum(isinstance(each, MessageRecord) for each in every)
    assert messages > 0
    assert found.starts == launches + MESSAGE_STARTS * messages

    def notes(**constants):
        cluster = plan_cluster(layout)
        known = (
            replace(cluster, constants=cluster.constants.with_values("measured", **constants)) if constants else cluster
        )
        return dict(plan_layouts(job.model, known, batch, loss=job.loss, layout=layout).notes())

    assert notes()["host"].startswith(f"it starts {found.starts:,.0f} operators a step: ")
    assert "host" not in notes(launch_s=1e-5), "it was measured"
    slow = replace(plan_layouts(job.model, plan_cluster(layout), batch, loss=job.loss, layout=layout))
    assert "host" not in dict(replace(slow, layouts=(found._replace(step_s=1.0),)).notes()), "the device takes longer"


def stage_coord(plan, stage):
    return {axis: stage if axis == "pp" else 0 for axis in plan.mesh.axes}


def ledger_bytes(job, layout, batch, stage):
    rank = layout.mesh.rank(stage_coord(make_plan(job, layout)[0], stage))
    return predict_memory(job, layout, rank, batch, device="cuda").peak_bytes


LINES = ["dp2 bf16", "dp2 bf16 recompute:full", "pp2/1f1b mb5 dp2 bf16", "pp2/1f1b/scatter mb5 tp2 bf16"]
LINES += ["pp2/1f1b mb5 tp2x2/2d recompute:full"]  # a block's messages are under way while the next is recomputed


@pytest.mark.sampled(0)
@pytest.mark.parametrize("line", LINES)
def test_bytes_and_memory_of_many_blocks_equal_the_stated_traffic_and_the_ledger(line):
    layout, job, batch, records = recorded(line, 6 if "2d" not in line else 8)
    price = Pricing(plan_cluster(layout)).price(layout, records)
    assert not records.note, "extended from few blocks"
    plan, strategies = make_plan(job, layout)
    stated = StepTraffic(job, plan, strategies, batch[0])
    for stage in range(records.schedule.num_stages):
        by_axis: dict[str, int] = {}
        for traffic in stated.at(stage_coord(plan, stage)).values():
            for each in traffic:
                by_axis[each.axis] = by_axis.get(each.axis, 0) + each.num_bytes * each.times
        assert dict(traffic_by_stage(records)[stage]) == by_axis
        memory = sum(price.memory[stage].by_kind.values())
        assert memory == pytest.approx(ledger_bytes(job, layout, batch, stage), rel=1e-3)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("line", ["mb5 dp2/zero2", "pp2/zb-h1 mb5 dp2/zero2 recompute:full"])
def test_sums_that_are_under_way_after_a_backward_are_in_the_memory_of_every_later_one(line):
    layout, job, batch, records = recorded(line, 4)
    for stage, memory in enumerate(memory_by_stage(records)):
        assert sum(memory.by_kind.values()) == ledger_bytes(job, layout, batch, stage)


def plan_cluster(layout):
    return Cluster.parse(CLUSTER[layout.num_ranks])


@pytest.mark.sampled(0)
def test_a_price_from_few_blocks_equals_the_price_by_full_rehearsal():
    a, b = (priced("pp2/1f1b mb5 dp2 bf16", 6, whole=whole) for whole in (False, True))
    assert a.step_s == pytest.approx(b.step_s, rel=1e-9)
    assert a.waterfall == pytest.approx(b.waterfall, rel=1e-9, abs=1e-12)
    assert a.traffic_by_axis == b.traffic_by_axis


@pytest.mark.sampled(0)
def test_rehearsals_do_not_grow_with_layers_or_ranks(monkeypatch):
    counted = []
    rehearse = recording.rehearse

    def counting(*given):
        counted.append(given)
        return rehearse(*given)

    monkeypatch.setattr(recording, "rehearse", counting)
    stages = "pp{}/1f1b mb8 dp{}/zero1/bucket:0"  # are sums under way? the first stage shows it, once
    cases = [("single", 3, 2), ("dp8", 24, 2), (stages.format(4, 2), 12, 6), (stages.format(6, 8), 24, 6)]
    for line, layers, number in cases:
        layout = Layout.parse(line)
        job, batch = gpt(layout, num_layers=layers)
        before = len(counted)
        assert record_layout(job, layout, batch, "cuda").num_rehearsals == len(counted) - before == number


@pytest.mark.sampled(0)
def test_layouts_of_the_same_options_are_asked_once_whether_they_leave_messages():
    known, found = None, []
    for line in (
        "pp2/zb-v mb8 dp2/zero1/bucket:0",
        "pp2/zb-v mb8 dp4/zero1/bucket:0",
    ):  # the sums of the other chunk are under way
        layout = Layout.parse(line)
        job, batch = gpt(layout, num_layers=12)
        known = known or ModelPlans(job.model)
        alone, beside = (record_layout(job, layout, batch, "cuda", model_plans=each) for each in (None, known))
        found.append((alone.num_rehearsals, beside.num_rehearsals))
        pricing = Pricing(Cluster.parse("a100-80gb:1x8"))
        a, b = (pricing.price(layout, each) for each in (alone, beside))
        assert (a.step_s, a.memory, a.traffic_by_axis) == (b.step_s, b.memory, b.traffic_by_axis)
    assert found == [(5, 5), (5, 4)]


@pytest.mark.sampled(0)
def test_stages_of_one_kind_are_priced_once(monkeypatch):
    walked, walk = [], Pricing._walk
    monkeypatch.setattr(Pricing, "_walk", lambda *given, **named: walked.append(given) or walk(*given, **named))
    counts = []
    for line, layers in (("pp4/1f1b mb8 dp2", 24), ("pp8/1f1b mb16 dp2", 48)):
        layout = Layout.parse(line)
        job, batch = gpt(layout, num_layers=layers)
        records, pricing = record_layout(job, layout, batch, "cuda"), Pricing(Cluster.parse("a100-80gb:2x8"))
        before = len(walked)
        first = pricing.price(layout, records)
        counts.append(len(walked) - before)
        again = pricing.price(layout, records)
        assert len(walked) == before + counts[-1]
        assert again == first
    assert counts[0] == counts[1]  # they grow with kinds of stages, not with stages or microbatches


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        for place, each in enumerate(self.blocks):
            each.layer_idx = place

    def forward(self, x, mask, labels):
        x = x if mask.all() else x * mask
        for each in self.blocks:
            x = each(x)
        return {"loss": nn.functional.mse_loss(x, labels)}


@pytest.mark.parametrize("line", ["dp2", "pp2/1f1b mb4", "tp2"])
def test_a_batch_of_names_with_the_loss_of_the_model_is_planned_though_its_code_asks_for_a_mask(line):
    x = torch.empty(64, 64, device="meta")
    plans = plan_layouts(Named(), CLUSTER[2], {"x": x, "mask": x > 0, "labels": x}, loss=ModelLoss(), layout=line)
    assert plans.best.step_s > 0
    assert "no two blocks" not in plans.best.records.note
    assert str(plans) == plans.text()
    assert repr(plans) == f"Plans({CLUSTER[2]}, 1 layouts, best '{Layout.parse(line)}')"


def test_a_batch_of_names_without_the_loss_of_the_model_is_refused():
    with pytest.raises(PlanError, match="a batch is a pair of inputs and targets"):
        plan_layouts(nn.Linear(4, 4), CLUSTER[2], {"input": torch.ones(2, 4)}, layout="dp2")


@pytest.mark.sampled(0)
def test_few_blocks_that_are_not_cut_as_all_are_do_not_stand_for_them(monkeypatch):
    layout = Layout.parse("tp2")
    job, batch = gpt(layout, num_layers=6)
    assert not record_layout(job, layout, batch, "cuda").note
    cuts, names = recording.cuts_of, []

    def of_one_block(blocks, plan):
        names.append(blocks.number)
        return (*cuts(blocks, plan), ("other", (1,))) if blocks.number < 2 else cuts(blocks, plan)

    monkeypatch.setattr(recording, "cuts_of", of_one_block)  # as where a cut of one block does not pay
    found = record_layout(job, layout, batch, "cuda")
    assert not found.note
    assert found.stages[0].fewer.num_blocks == (2,)
    assert max(names) == 3


@pytest.mark.parametrize("line", ["dp2/zero3 bf16 mb2", "dp2/zero2 bf16 mb2"])
def test_sums_of_sharded_gradients_count_as_gradients(line):
    _, _, _, records = recorded(line, 4)
    layout, job, batch, _ = recorded(line, 4)
    shard = 4 * sum(p.numel() for p in job.model.parameters()) // 2
    kinds = memory_by_stage(records)[0].by_kind
    assert kinds["gradients"] >= 0.9 * shard
    assert sum(kinds.values()) == pytest.approx(ledger_bytes(job, layout, batch, 0), rel=1e-3)


def test_layouts_that_sum_gradients_in_other_dtypes_are_named():
    lines = {"dp2/zero1 mb2 bf16": True, "dp2/zero1/fp32-sums mb2 bf16": False, "dp2/zero3 mb2 bf16": False,
             "dp2/zero1 bf16": False, "dp2/zero1 mb2": False}  # fmt: skip
    blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    batch = torch.ones(8, 16), torch.zeros(8, dtype=torch.long)
    found = {line: plan_layouts(blocks, CLUSTER[2], batch, layout=line) for line in lines}
    assert {line: each.best.records.has_narrow_sums for line, each in found.items()} == lines
    narrow, wide = (found[line] for line in list(lines)[:2])
    both = replace(narrow, layouts=(narrow.best, wide.best))
    assert "are summed in bf16 under mb2 dp2/zero1 bf16, in fp32 or not at all under the others" in both.text()
    assert "are summed in bf16 under mb2 dp2/zero1 bf16; with the option fp32-sums" in narrow.text()
    assert "are summed in" not in wide.text()


def test_a_price_prints_as_its_layout_seconds_and_memory():
    price = priced("dp2 bf16", 4)
    assert repr(price) == f"Price(dp2 bf16, {price.step_s:.3g} s, {price.memory_bytes / 1e9:.3g} GB)"
    assert len(repr(price.records)) < 1000


def test_what_a_layout_offloads_is_said():
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(32)))
    batch = torch.ones(8, 16), torch.zeros(8, dtype=torch.long)
    found, plain = (
        plan_layouts(model, CLUSTER[2], batch, layout=f"dp2/{options} bf16") for options in ("zero2/offload", "zero2")
    )
    row = found.to_dict()["layouts"][0]
    assert (
        row["offloaded_bytes"] == 32 * 16 * 16 // 2 * 3 * 4
    )  # of each parameter that a rank stores: itself, two moments
    assert "of host memory for each rank" in found.text()
    assert plain.to_dict()["layouts"][0]["offloaded_bytes"] == 0
    assert "offloaded" not in plain.text()


def test_what_hosts_hold_is_laid_beside_their_memory(tmp_path):
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(32)))
    batch, file = (torch.ones(8, 16), torch.zeros(8, dtype=torch.long)), tmp_path / "hosts.toml"

    def on(host_memory, line="dp2/zero2/offload bf16"):
        file.write_text(f'profile = "a100-80gb"\nnodes = "1x2"\n{host_memory}')
        return plan_layouts(model, str(file), batch, layout=line)

    held = on("").to_dict()["layouts"][0]["host_bytes"]
    assert held == 2 * 32 * 16 * 16 // 2 * 3 * 4
    enough, few = (on(f"host_memory_GB = {held / 1e9 + more}") for more in (0, -1e-9))
    assert enough.fits(enough.best)
    assert "not more than the" in enough.text()
    assert not few.fits(few.best)
    assert "does not fit" in few.text()
    assert "; more than the" in few.text()
    assert "is not known" in on("").text()
    on_disk = on("host_memory_GB = 1e-9", "dp2/zero2/offload:disk bf16")
    assert on_disk.to_dict()["layouts"][0]["host_bytes"] == 0
    assert on_disk.fits(on_disk.best)
    with pytest.raises(PlanError, match="has no 'host_memory_GB' that can be used"):
        on("host_memory_GB = -1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('type = "tpu"', "ranks cannot be on"),
        ("memory_GB = 80000000000", "not above 10,000,000"),
        ("in_node_GB_per_s = -5", "correct in_node_GB_per_s"),
        ("nodes = 4", 'write nodes = "1x4" into '),
        ("[peak_TFLOP_per_s]\nfp8 = 1979", "leave out fp8"),
    ],
)
def test_a_figure_of_a_cluster_that_cannot_be_is_refused_with_what_to_write(line, said, tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text(f'profile = "h100-80gb"\n{line}\n')
    with pytest.raises((LayoutError, PlanError)) as raised:
        Cluster.parse(str(file), 4)
    assert said in str(raised.value)


@pytest.mark.sampled(0)
def test_a_search_leaves_out_what_no_host_holds(tmp_path):
    file = tmp_path / "hosts.toml"
    file.write_text('profile = "a100-80gb"\nnodes = "1x2"\nhost_memory_GB = 1e-6')
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)))
    batch = torch.ones(8, 16), torch.zeros(8, dtype=torch.long)
    found = plan_layouts(model, str(file), batch, fix="dp2/zero2/offload", most_priced=1)
    assert not any(found.fits(each) for each in found.layouts)
    assert "host memory: more than a node has" in [each["reason"] for each in found.rejected()]


def test_a_plan_has_the_number_of_parameters_and_the_notes_of_its_text_as_data():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model.append(model[0])  # its parameters count once
    found = plan_layouts(
        model, CLUSTER[2], (torch.ones(8, 16), torch.zeros(8, dtype=torch.long)), layout="dp2 mb2 bf16"
    )
    said = found.to_dict()
    assert said["num_parameters"] == 4 * (16 * 16 + 16)
    assert f"{said['num_parameters']:,} parameters; a step has 8 samples" in found.text()
    assert [each.partition(": ")[0] for each in said["notes"]] == [
        "interval",
        "fitted",
        "guesses",
        "memory",
        "gradients",
    ]
    assert all(each.partition(": ")[2] in found.text() for each in said["notes"])


def test_a_plan_says_that_a_network_is_assumed_until_a_file_gives_it_and_that_narrow_weights_have_no_masters(tmp_path):
    model, batch = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), (torch.ones(8, 16), torch.zeros(8).long())

    def said(cluster, model=model):
        found = plan_layouts(model, cluster, batch, layout="dp4 bf16")
        sources = {row["name"]: row["source"] for row in found.constants()}
        return dict(found.notes()), sources["between_nodes"]

    assert said("h100-80gb:1x4")[0].keys() == {"interval", "fitted", "guesses", "memory"}
    notes, source = said("h100-80gb:2x2")
    assert notes["network"].startswith("25 GB/s of each accelerator to other nodes are assumed")
    assert source == "guess"
    assert "under dp8/zero3" in notes["interval"]
    own = tmp_path / "ours.toml"
    own.write_text('profile = "h100-80gb"\nnodes = "2x2"\nbetween_nodes_GB_per_s = 50\n')
    assert said(str(own)) == ({name: each for name, each in notes.items() if name != "network"}, "datasheet")
    other = tmp_path / "theirs.toml"
    other.write_text('profile = "h100-80gb"\nnodes = "2x2"\nmemory_GB = 90\n')
    assert "network" in said(str(other))[0]
    narrow = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).bfloat16()
    assert "without master weights in float32" in said("h100-80gb:1x4", narrow)[0]["weights"]


ROOT = Path(__file__).parents[2]


def test_how_far_memory_was_off_is_what_the_committed_rows_say():
    def newest(name):
        return json.loads(max((ROOT / f"benchmarks/{name}/results").glob("*.json")).read_text())

    off = max(max(abs(row["off_min"]), abs(row["off_max"])) for row in newest("ledger")["table"])
    assert off <= MEMORY_ON_CPUS < off + 0.001
    cards = (json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks/gpu/results").glob("*h100.json")))
    (on_card,) = (abs(row["off"]) for found in cards for row in found["rows"] if row["part"] == "memory")
    assert on_card <= MEMORY_ON_CARD < on_card + 0.001


def test_a_runner_up_within_one_percent_is_called_a_tie():
    price = priced("dp2 bf16", 6)
    ending = "a difference under 1% says nothing about which is faster"
    for times, is_tie in ((1.004, True), (0.996, True), (1.02, False)):
        other = price._replace(step_s=price.step_s * times)
        plans = Plans(plan_cluster(price.layout), (price, other), 8, 8)
        assert (ending in plans.text()) is is_tie, times


def test_labels_shorter_than_ids_are_an_error_of_the_plan():
    class Labelled(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 8)

        def forward(self, input_ids, labels):
            logits = self.table(input_ids)
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    ids = torch.zeros(4, 6, dtype=torch.long)
    given = {"loss": ModelLoss(shifted=False), "layout": "dp2"}
    plan_layouts(Labelled(), CLUSTER[2], {"input_ids": ids, "labels": ids}, **given)
    with pytest.raises(PlanError, match="check the shapes of the batch"):
        plan_layouts(Labelled(), CLUSTER[2], {"input_ids": ids, "labels": ids[:, 1:]}, **given)


def test_the_bubble_of_a_price_is_that_of_all_stages():
    price = priced("pp2/1f1b mb5 dp2 bf16", 6)
    assert price.bubble > 0
    assert Pricing(plan_cluster(price.layout)).timeline(price.layout, price.records).bubble == pytest.approx(
        price.bubble
    )


@pytest.mark.sampled(0)
@pytest.mark.parametrize("quiet_s", [-1.0, 1e9])
def test_a_long_search_says_on_standard_error_what_it_has_priced(monkeypatch, quiet_s):
    monkeypatch.setattr("shardwright.cli.planning._QUIET_S", quiet_s)
    words = ["plan", "--model", "mlp", "--cluster", "a100-80gb:1x2", "--batch", "8", "--most-priced", "1", "--json"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    (best,) = [row["layout"] for row in json.loads(found.stdout)["layouts"]]
    for said in (f"priced {best}: ", " layouts; the best are rehearsed and priced ("):
        assert (said in found.stderr) is (quiet_s < 0)
    assert not logging.getLogger("shardwright.planner").handlers


def test_the_help_says_that_a_plan_without_a_layout_searches_and_a_layout_of_few_ranks_which_cluster_to_write():
    said = CliRunner().invoke(app, ["plan", "--help"], env={"COLUMNS": "200"}).stdout
    assert "(a search)" in said
    assert "(single)" not in said
    found = CliRunner().invoke(app, ["plan", "--model", "mlp", "--layout", "dp4", "--cluster", "a100-80gb:1x8"])
    assert found.exit_code == 2
    assert "write --cluster a100-80gb:1x4" in found.stderr


@pytest.mark.sampled(0)
def test_beside_a_layout_that_does_not_fit_stands_the_fastest_of_the_same_sizes_that_does():
    words = ["plan", "--model", "gpt", *["--batch", "4", "--seq", "256", "--layout"], "dp2 bf16", "--fresh"]
    sizes = [word for each in ("num_layers=2", "width=1024", "num_heads=8") for word in ("--set", each)]
    found = CliRunner().invoke(app, [*words, *sizes, "--memory-limit", "0.0058", "--json"])
    assert found.exit_code == 2, found.output
    said = json.loads(found.stdout)
    assert [row["layout"] for row in said["layouts"]] == ["dp2 bf16"]
    (way,) = said["ways_out"]
    assert way.startswith("dp2/zero1 bf16 takes 443 MB, ")


def test_a_model_of_unlike_blocks_is_rehearsed_whole_and_says_so():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 24), nn.Linear(24, 4))
    batch = torch.ones(8, 8), torch.zeros(8, dtype=torch.long)
    plans = plan_layouts(model, CLUSTER[2], batch, layout="pp2 mb2")
    assert "pp2 mb2: rehearsed whole, which takes longer: no two blocks of the model are alike" in plans.text()
    assert len(plans.best.memory) == 2


def test_recomputed_blocks_take_a_forward_more():
    once, twice = (priced(f"dp2 bf16{words}", 6).waterfall for words in ("", " recompute:full"))
    assert 1.15 < (twice["matmul"] + twice["attention"]) / (once["matmul"] + once["attention"]) < 1.45


def test_fused_attention_counts_its_flops():
    assert priced("dp2 bf16", 6).waterfall["attention"] > 0


def test_faster_links_never_make_a_step_slower():
    layout, _, _, records = recorded("pp2/1f1b mb5 dp2 bf16", 6)
    cluster = plan_cluster(layout)
    faster = replace(cluster, device=replace(cluster.device, in_node_bytes_per_s=1e12))
    assert Pricing(faster).price(layout, records).step_s < Pricing(cluster).price(layout, records).step_s


def test_the_waterfall_of_the_command_adds_up_to_the_step_exactly():
    line = "plan --model mlp --layout dp2 --cluster h100-80gb:1x2 --batch 8 --json"
    found = CliRunner().invoke(app, line.split())
    assert found.exit_code == 0, found.output
    (row,) = json.loads(found.stdout)["layouts"]
    assert sum(row["waterfall"].values()) == row["step_s"]
    assert len(row["memory_by_stage"]) == 1
    assert row["traffic_by_axis"]["dp"] > 0


def test_a_cluster_of_other_ranks_and_a_batch_smaller_than_its_parts_are_refused():
    model, batch = nn.Linear(4, 4), (torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(LayoutError, match="another number of ranks"):
        plan_layouts(model, CLUSTER[4], batch, layout="dp2")
    with pytest.raises(LayoutError, match="write --batch 4"):
        plan_layouts(model, CLUSTER[4], batch, layout="dp4")


def test_a_layout_that_does_not_fit_ends_with_exit_code_2():
    line = "plan --model mlp --layout dp2 --cluster a100-80gb:1x2 --memory-limit 0.0001 --json"
    found = CliRunner().invoke(app, line.split())
    assert found.exit_code == 2, found.output
    # no layout of two ranks fits, nor one of more
    ways = json.loads(found.stdout)["ways_out"]
    assert ways[0] == "--memory-limit 0.002: dp2 takes 134 MB"
    assert ways[1] == "more devices: no layout that was priced on up to 8 fits"


def test_blocks_in_one_sharded_param_group_are_rehearsed_whole_and_equal_the_ledger():
    layout, job, batch, records = recorded("dp2/zero1 fp16 mb3", 4)
    assert "several blocks are one param group" in records.note
    memory = Pricing(plan_cluster(layout)).price(layout, records).memory[0]
    assert sum(memory.by_kind.values()) == pytest.approx(ledger_bytes(job, layout, batch, 0), rel=1e-3)


@pytest.mark.sampled(0)
def test_messages_between_stages_take_the_link_that_their_ranks_have():
    blocks = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    batch = torch.ones(64, 512), torch.zeros(64, dtype=torch.long)
    line = "pp4/1f1b mb8 tp2"
    inside, between = (plan_layouts(blocks, f"a100-80gb:{nodes}", batch, layout=line).best for nodes in ("1x8", "4x2"))
    assert between.step_s > inside.step_s
    two = plan_layouts(blocks, "a100-80gb:2x4", batch, layout=line).best  # half of the stages' messages stay inside
    assert inside.step_s < two.step_s < between.step_s


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [((12, 4), (3, 4, 8), (12, 8)), ((4, 12), (12, 8), (3, 4, 8)), ((3, 4, 5), (3, 5, 8), (3, 4, 8))],
    ids=["rows", "gradient of weights", "batches"],
)
def test_a_grouped_product_of_experts_counts_the_flops_of_its_rows(first, second, result):
    offsets = () if len(first) == 3 else (torch.tensor([2, 6, 12]),)
    args = torch.empty(first), torch.empty(second), *offsets
    record = operator_record(torch.ops.aten._grouped_mm.default, args, {}, torch.empty(result))
    assert record.part == "matmul"
    assert record.dims == (3, 4, 8, 5 if len(first) == 3 else 4)
    assert record.flops == 2 * 3 * 4 * 8 * record.dims[3]


@pytest.mark.sampled(0)
def test_products_in_place_count_the_flops_of_those_that_are_not():
    c, a, b = (torch.empty(size, device="meta") for size in ((4, 8), (4, 2), (2, 8)))
    records = [
        operator_record(call, (c, a, b), {}, c)
        for call in (torch.ops.aten.addmm_.default, torch.ops.aten.addmm.default)
    ]
    assert [each.flops for each in records] == [2 * 4 * 2 * 8] * 2
    assert {each.part for each in records} == {"matmul"}
    flops = [priced(f"{line} bf16", 6).flops for line in ("tp8", "tp2x4/2d")]
    assert flops[1] == pytest.approx(flops[0], rel=0.05)  # what a grid cuts in another way


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


def test_the_outermost_blocks_with_most_parameters_are_the_alike_ones():
    assert alike_blocks(nn.Sequential(*(Experts() for _ in range(3)))).names == ("0", "1", "2")


def test_blocks_that_hold_other_functions_or_lists_are_not_alike():
    blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    for place, each in enumerate(blocks):
        each.act, each.windows = (nn.functional.relu if place < 5 else nn.functional.gelu), [place // 2 * 0]
    assert alike_blocks(blocks).number == 5
    for place, each in enumerate(blocks):
        each.windows = [place // 2]
    assert alike_blocks(blocks).number == 2


@pytest.mark.filterwarnings("ignore:.*a decision by a sum")
def test_code_that_reads_values_of_activations_is_refused_and_of_inputs_priced():
    class Reads(nn.Linear):
        of_inputs = False

        def forward(self, x):
            y = super().forward(x)
            return y * (x if self.of_inputs else y).sum().item()

    batch = torch.ones(8, 8), torch.zeros(8, dtype=torch.long)
    for given in ({"layout": "dp2"}, {"most_priced": 1}):  # one layout, and a search
        with pytest.raises(PlanError, match="cannot be rehearsed without values"):
            plan_layouts(Reads(8, 8), CLUSTER[2], batch, **given)
        model = Reads(8, 8)
        model.of_inputs = True
        assert plan_layouts(model, CLUSTER[2], batch, **given).best.step_s > 0
        with pytest.raises(PlanError, match="cannot be rehearsed without values"):
            plan_layouts(model, CLUSTER[2], (batch[0].to("meta"), batch[1]), **given)


@pytest.mark.sampled(0)
def test_sums_of_the_gradients_of_one_chunk_are_hidden_by_the_chunks_that_follow():
    plans = {line: priced(f"pp2/{line} mb5 dp2 bf16", 12) for line in ("interleaved:v2", "1f1b")}
    ends = [place for place in plans["interleaved:v2"].records.action_orders[0].classes if not place.before]
    assert len(ends) == 1
    assert plans["interleaved:v2"].waterfall["dp"] < plans["1f1b"].waterfall["dp"]


@pytest.mark.sampled(0)
def test_the_sum_of_a_table_on_the_first_and_last_stage_is_among_their_ranks():
    records = recorded("pp4/1f1b mb5 dp2 bf16", 12)[-1]
    stage = records.stages[0].fewer
    messages = [
        each
        for shape in (*stage.actions.values(), stage.update)
        for each in shape.records
        if isinstance(each, MessageRecord) and each.kind == "all_reduce" and each.source == "pipeline"
    ]
    assert {each.ranks for each in messages} == {(0, 1, 6, 7)}


def test_offloaded_state_frees_the_device_and_takes_the_time_of_the_host_and_of_its_link():
    blocks = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    batch = torch.ones(64, 512), torch.zeros(64, dtype=torch.long)
    cluster = Cluster.parse(CLUSTER[2])

    def price(line, **figures):
        device = replace(cluster.device, **figures)
        return plan_layouts(blocks, replace(cluster, device=device), batch, layout=line).best

    here, offloaded = price("dp2/zero1 bf16"), price("dp2/zero1/offload bf16")
    state = 8 * 512 * 513 * 12 // 2  # fp32 parameters and two moments of one of two ranks
    assert offloaded.records.stages[0].fewer.offloaded_bytes == state / 8  # of one block
    assert offloaded_bytes(offloaded.records) == state
    assert state < here.memory_bytes - offloaded.memory_bytes < 16 / 12 * state  # gradients go there too
    assert offloaded.waterfall["optimizer"] > 5 * here.waterfall["optimizer"]
    slower = price("dp2/zero1/offload bf16", host_bytes_per_s=1e9)
    more_s = 2 * state / 3 / 0.75 * (1e-9 - 1 / cluster.device.host_bytes_per_s)
    assert slower.step_s - offloaded.step_s == pytest.approx(more_s, rel=1e-6)


class Halves(nn.Module):
    """Adds half of the features to a layer's result; ``reads`` the half from a tensor, and whether any is there."""

    def __init__(self, reads):
        super().__init__()
        self.layer, self.reads = nn.Linear(16, 8), reads

    def forward(self, x):
        half, is_any = x.shape[-1] // 2, True
        if self.reads:
            half = torch.div(torch.tensor(x.shape[-1], device=x.device), 2, rounding_mode="trunc").item()
            (half,) = torch.full((1,), half, device=x.device).tolist()
            is_any = (x != 0).any().item()
        y = self.layer(x)
        return y + x[:, :half] if is_any else y


def test_code_that_reads_sizes_and_conditions_is_priced_like_code_that_does_not():
    batch = torch.ones(8, 16), torch.zeros(8, dtype=torch.long)
    prices = [
        plan_layouts(nn.Sequential(Halves(reads), nn.Linear(8, 8)), "a100-80gb:1x2", batch, layout="dp2").layouts[0]
        for reads in (True, False)
    ]
    read, plain = prices
    assert read.memory_bytes == pytest.approx(plain.memory_bytes, abs=4096)  # of the few numbers that it compares
    assert read.waterfall["matmul"] == plain.waterfall["matmul"]
    assert read.step_s == pytest.approx(plain.step_s, rel=0.05)


@pytest.mark.sampled(0)
def test_batch_norms_of_one_pixel_are_priced_though_estimates_take_one_sample():
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(3, 3, 1), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3)) for _ in range(4)), nn.Flatten()
    )
    plans = plan_layouts(model, "a100-80gb:1x2", (torch.ones(8, 3, 4, 4), torch.zeros(8, dtype=torch.long)))
    assert plans.layouts


class WithGaps(nn.Module):
    """A block whose norms are in a list, in which one is None."""

    def __init__(self):
        super().__init__()
        self.norms, self.layer = nn.ModuleList([nn.LayerNorm(16), None]), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.layer(self.norms[0](x))


@pytest.mark.sampled(0)
def test_lists_of_modules_with_empty_places_are_searched():
    model, batch = nn.Sequential(*(WithGaps() for _ in range(4))), (torch.ones(8, 16), torch.zeros(8, dtype=torch.long))
    plans = plan_layouts(model, "a100-80gb:1x2", batch)
    assert len(plans.layouts) >= 2
