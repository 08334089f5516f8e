"""What ``describe`` says of a layout, against the plan and against arithmetic."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, sampled_from
from torch import nn

from processor_time import takes_less
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.models import MODELS
from shardwright.parallelize.planning import StepTraffic, make_plan
from shardwright.plan.plan import Job, Plan, StateLayout
from shardwright.report import description
from shardwright.report.description import describe
from shardwright.report.outline import layer_rows, num_grids, rank_grids, rank_groups, shortened
from shardwright.report.pictures import layout_figure
from shardwright.report.show import show_text
from shardwright.sharding.tensor_layout import TensorLayout

CASES = [
    ("single", "mlp", {}),
    ("dp3", "convnet", {}),
    ("dp2 tp4", "gpt", {"num_layers": 3}),
    ("tp3", "gpt", {"style": "llama", "width": 48, "num_heads": 6, "num_kv_heads": 2, "hidden": 50, "num_layers": 2}),
    ("mb2 dp2 tp2", "gpt", {"num_layers": 2, "tied": False}),
    ("dp5 tp4", "mlp", {}),
]
EVERY_CASE = pytest.mark.parametrize(("line", "model", "settings"), CASES, ids=[case[0] for case in CASES])


def job_and_inputs(model, settings, num_samples=7):
    entry = MODELS[model]
    config = entry.config(**settings)
    with torch.device("meta"):
        job = Job(entry.factory(config), entry.loss())
    return job, entry.example_batch(config, num_samples, 8, torch.Generator().manual_seed(0))[0]


@EVERY_CASE
def test_every_element_is_owned_by_one_rank_and_held_by_at_least_one(line, model, settings):
    job, _ = job_and_inputs(model, settings)
    found = describe(job, Layout.parse(line))
    size = sum(parameter.numel() for parameter in job.model.parameters())
    assert found["num_parameters"] == size
    assert sum(rank["num_owned"] for rank in found["ranks"]) == size
    assert sum(rank["num_parameters"] for rank in found["ranks"]) >= size


@EVERY_CASE
def test_shapes_sizes_and_coordinates_are_those_of_the_plan(line, model, settings):
    job, _ = job_and_inputs(model, settings)
    found, (plan, _) = describe(job, Layout.parse(line)), make_plan(job, Layout.parse(line))
    assert found["mesh"] == dict(plan.mesh.sizes)
    assert len(found["ranks"]) == found["world_size"] == plan.mesh.size
    for number, rank in enumerate(found["ranks"]):
        coord = plan.mesh.coord(number)
        held = sum(rest.parameter.num_elements(coord) for rest in plan.state.values())
        assert (rank["rank"], rank["coord"], rank["num_parameters"]) == (number, coord, held)
        states = [rank[f"{state}_bytes"] for state in ("parameter", "gradient", "optimizer")]
        assert states == [4 * held, 4 * held, 8 * held]  # float32; AdamW keeps two moments
    for parameter in found["parameters"]:
        shapes = {plan.compute[parameter["name"]].local_shape(coord) for coord in plan.mesh.coords()}
        assert {tuple(shape) for shape in parameter["local_shapes"]} == shapes
        assert len(parameter["local_shapes"]) == len(shapes)


@EVERY_CASE
def test_a_rank_sends_the_traffic_of_the_strategies_at_its_coordinate(line, model, settings):
    job, inputs = job_and_inputs(model, settings)
    plan, strategies = make_plan(job, Layout.parse(line))
    found = describe(job, Layout.parse(line), inputs=inputs)
    for rank in found["ranks"]:
        traffic = StepTraffic(job, plan, strategies, inputs).at(rank["coord"])  # for this rank alone
        assert rank["sent_bytes"] == {name: sum(t.sent_bytes for t in calls) for name, calls in traffic.items()}
    samples_of_a_copy = {tuple(r["coord"][a] for a in plan.inputs): r["samples"] for r in found["ranks"]}
    assert sum(samples_of_a_copy.values()) == 7


@EVERY_CASE
def test_a_description_survives_json_and_names_every_module_with_parameters_and_every_role(line, model, settings):
    job, inputs = job_and_inputs(model, settings)
    found = describe(job, Layout.parse(line), inputs=inputs)
    assert json.loads(json.dumps(found)) == found
    plan, _ = make_plan(job, Layout.parse(line))
    named = [layer["module"] for layer in found["layers"]]
    own = {path for path, m in job.model.named_modules() if next(m.parameters(recurse=False), None) is not None}
    assert set(named) == own | set(plan.roles)
    assert len(named) == len(set(named))
    assert all(layer["why"] for layer in found["layers"])


@EVERY_CASE
@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_text_names_every_distinct_layer_and_no_line_is_too_wide(line, model, settings, width):
    job, inputs = job_and_inputs(model, settings)
    found = describe(job, Layout.parse(line), inputs=inputs)
    text = show_text(found, width)
    rows = layer_rows(found)
    assert sum(row.num_layers for row in rows) == len(found["layers"])
    assert max(map(len, text.splitlines())) <= width
    if width == 200:
        for row in rows:
            assert row.module in text
            assert row.why in text
            assert all(shape in text for shape in row.shapes)


def test_three_equal_blocks_share_rows_and_a_block_that_differs_has_its_own():
    blocks = [nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for width in (16, 16, 16, 24)]
    model = nn.Sequential()
    model.blocks = nn.ModuleList(blocks)
    found = describe(Job(model, nn.Identity()), Layout.parse("tp2"))
    assert [(row.module, row.num_layers) for row in layer_rows(found)] == [
        ("blocks.{0..2}.0", 3), ("blocks.{0..2}.2", 3), ("blocks.3.0", 1), ("blocks.3.2", 1),
    ]  # fmt: skip


def test_ranks_have_the_same_slice_exactly_where_they_hold_the_same_pieces():
    job, _ = job_and_inputs("gpt", {"num_layers": 1})
    found, (plan, _) = describe(job, Layout.parse("dp3 tp2")), make_plan(job, Layout.parse("dp3 tp2"))
    held = [tuple(rest.parameter.pieces(rank["coord"]) for rest in plan.state.values()) for rank in found["ranks"]]
    for a, one in enumerate(found["ranks"]):
        for b, other in enumerate(found["ranks"]):
            assert (one["slice"] == other["slice"]) == (held[a] == held[b])


def test_flat_shards_are_counted_on_the_rank_that_stores_them(monkeypatch):
    job = Job(nn.Linear(5, 3), nn.Identity())

    def sliced(job, layout):
        plan, strategies = make_plan(job, layout)
        rest = {}
        for name, whole in plan.compute.items():
            rest[name] = StateLayout(whole, whole, TensorLayout.whole(whole.shape).flat("dp", 4))
        return replace(plan, state=rest), strategies

    monkeypatch.setattr(description, "make_plan", sliced)
    found = describe(job, Layout.parse("dp4"), inputs=torch.zeros(4, 5))
    assert [rank["gradient_bytes"] for rank in found["ranks"]] == [72] * 4
    assert sum(rank["optimizer_bytes"] for rank in found["ranks"]) == 2 * 4 * 18
    assert found["parameters"][0]["rest"]["optimizer"] == "flat slices over dp"
    assert [rank["slice"] for rank in found["ranks"]] == [0, 0, 0, 0]


def test_frozen_parameters_have_no_gradient_no_moments_and_no_sync():
    job = Job(nn.Linear(4, 4, bias=False).requires_grad_(False), nn.Identity())
    found = describe(job, Layout.parse("dp2"))
    assert found["ranks"][0] | {"coord": {}} == {
        "rank": 0, "coord": {}, "slice": 0, "num_parameters": 16, "num_owned": 16,
        "parameter_bytes": 64, "gradient_bytes": 0, "optimizer_bytes": 0,
    }  # fmt: skip
    assert found["parameters"][0]["sync"] == []


def test_an_invalid_layout_is_refused():
    with pytest.raises(LayoutError):
        describe(Job(nn.LayerNorm(4), nn.Identity()), Layout.parse("tp2"))


def test_three_thousand_ranks_are_described_and_shown_within_ten_seconds():
    job, inputs = job_and_inputs("gpt", {"num_layers": 12, "num_heads": 8}, num_samples=400)
    told = []

    def tell():
        found = describe(job, Layout.parse("dp384 tp8"), inputs=inputs)
        told.append((found, show_text(found)))

    assert takes_less(10, tell)
    found, text = told[0]
    assert found["world_size"] == len(found["ranks"]) == 3072
    assert sum(rank["num_owned"] for rank in found["ranks"]) == found["num_parameters"]
    assert len(text.splitlines()) < 100
    assert "3071" in text


@pytest.mark.parametrize("line", ["dp1000000", "dp500000 tp2", "mb3 dp125000 tp8"])
def test_a_million_ranks_are_described_and_shown_within_ten_seconds(line):
    job, inputs = job_and_inputs("gpt", {"num_layers": 2, "num_heads": 8})
    told = []

    def tell():
        found = describe(job, Layout.parse(line), inputs=inputs)
        told.append((found, show_text(found)))
        layout_figure(found)

    assert takes_less(10, tell)
    found, text = told[0]
    assert found["world_size"] == sum(rank["alike"] for rank in found["ranks"]) == 10**6
    assert len(json.dumps(found)) < 2**20
    assert " like it" in text
    assert "999999 " in text


@pytest.mark.parametrize("line", ["dp13", "dp13 tp2", "mb2 dp17 tp2", "mb3 dp40"])
@pytest.mark.parametrize("num_samples", [3, 7, 30, 100])
def test_ranks_described_as_alike_are_equal(monkeypatch, line, num_samples):
    job, inputs = job_and_inputs("mlp", {}, num_samples)
    every = describe(job, Layout.parse(line), inputs=inputs)["ranks"]
    assert "alike" not in every[0]
    monkeypatch.setattr(description, "MOST_RANKS", 12)
    monkeypatch.setattr(description, "DRAWN", 2)
    some = describe(job, Layout.parse(line), inputs=inputs)["ranks"]
    assert len(some) < len(every) == sum(rank["alike"] for rank in some)
    assert {some[0]["rank"], some[-1]["rank"]} == {0, len(every) - 1}

    def kinds(ranks):
        counts = Counter()
        for rank in ranks:
            told = {key: value for key, value in rank.items() if key not in ("rank", "coord", "alike")}
            counts[json.dumps(told, sort_keys=True)] += rank.get("alike", 1)
        return counts

    assert kinds(some) == kinds(every)
    for rank in some:
        assert every[rank["rank"]] | {"alike": rank["alike"]} == rank


@given(integers(1, 9), integers(1, 9), integers(0, 100))
def test_with_two_axes_that_cut_samples_alike_ranks_have_as_many(replica, dp, num_samples):
    plan = Plan.of(Job(nn.Linear(1, 1), nn.Identity()), Layout.parse(f"dp{replica}x{dp}/zero3"))
    plan = plan.cut_inputs("replica", 0).cut_inputs("dp", 0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(description, "_is_large", lambda plan: True)
        patched.setattr(description, "DRAWN", 1)
        some = [*description._coords(plan, (), num_samples)]
    found, expected = Counter(), Counter()
    for coord, alike in some:
        found[len(plan.batch_shard(coord).local_samples(num_samples))] += alike
    for coord in plan.mesh.coords():
        expected[len(plan.batch_shard(coord).local_samples(num_samples))] += 1
    assert found == expected
    assert len(some) <= 25


@pytest.mark.parametrize(
    ("line", "words"), [("dp1048576 tp2", "up to 1,048,576"), ("dp9 tp512", "differ from each other")]
)
def test_a_layout_with_too_many_different_ranks_is_refused(line, words):
    job = Job(nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)), nn.Identity())
    with pytest.raises(LayoutError, match=words):
        describe(job, Layout.parse(line))


@given(integers(1, 4), integers(1, 4), integers(1, 4), integers(1, 70))
def test_grids_show_every_rank_once_at_its_coordinate(pp, dp, tp, many):
    mesh = {"pp": pp, "dp": dp, "tp": tp}
    ranks = [
        {"rank": r, "coord": {"pp": r // (dp * tp), "dp": r // tp % dp, "tp": r % tp}, "samples": r % 3}
        | {"parameter_bytes": 0, "gradient_bytes": 0, "optimizer_bytes": 0}
        for r in range(pp * dp * tp)
    ]
    grids = rank_grids({"mesh": mesh, "ranks": ranks})
    assert len(grids) == num_grids({"mesh": mesh}) == pp
    assert [cell["rank"] for grid in grids for cell in grid.cells.values()] == list(range(len(ranks)))
    for grid in grids:
        assert (grid.height, grid.width) == (dp, tp)
        for (y, x), cell in grid.cells.items():
            assert (cell["coord"][grid.rows], cell["coord"][grid.columns]) == (y, x)
    groups = rank_groups({"mesh": mesh, "ranks": ranks}, many)
    assert sorted(rank["rank"] for group in groups for rank in group.ranks) == list(range(len(ranks)))
    assert all(len({rank["samples"] for rank in group.ranks}) == 1 for group in groups)
    assert len({group.name for group in groups}) == len(groups)


@given(integers(1, 30), sampled_from([3, 4, 8]))
def test_the_indices_left_out_are_between_the_first_ones_and_the_last(count, most):
    shown = shortened(count, most)
    assert len(shown) == min(count, most)
    assert shown[0] == 0
    assert shown[-1] == count - 1
    assert (None in shown) == (count > most)


@pytest.mark.parametrize("beside", ["dp2", "tp2"])
def test_the_reason_of_a_layer_on_one_stage_names_that_stage(beside):
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    layers = describe(Job(model, nn.MSELoss()), Layout.parse(f"{beside} pp2 mb2"))["layers"]
    said = {layer["module"]: layer["why"] for layer in layers if layer["role"] == "copied"}
    assert said["3"].endswith(": the ranks of stage 1 compute it whole")
    assert not any("every rank" in why for why in said.values())
    alone = describe(Job(model, nn.MSELoss()), Layout.parse(beside))["layers"]
    assert alone[2]["why"].endswith(": every rank computes it whole")


def test_a_layer_that_two_of_three_stages_call_names_both():
    twice = nn.Linear(4, 4)
    model = nn.Sequential(twice, nn.Linear(4, 4), nn.Tanh(), twice, nn.Tanh(), nn.Linear(4, 4))
    layers = describe(Job(model, nn.MSELoss()), Layout.parse("pp3/cut:0,2,5 mb2"))["layers"]
    said = {layer["module"]: layer["why"] for layer in layers}
    assert said["0"].endswith(": the ranks of stages 0, 1 compute it whole")
    assert said["5"].endswith(": the ranks of stage 2 compute it whole")
