"""The search of layouts: what it tries comes from the registry, and what it says of the rest."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from contract.test_a_toy_axis import XP, Samples
from shardwright import launch, parallelize
from shardwright.cli.main import app
from shardwright.cost.cluster import Cluster
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout, Option
from shardwright.ledger.account import measure_memory
from shardwright.models import GPT, GPTConfig
from shardwright.models.losses import CrossEntropy
from shardwright.planner.candidate_layouts import _layouts, divisions, options_beside
from shardwright.planner.estimate import Estimator, declared_options
from shardwright.planner.explain import TIED
from shardwright.planner.outline import ModelPlans
from shardwright.planner.plans import plan_layouts
from shardwright.planner.price import Pricing
from shardwright.planner.schedule_cost import schedule_cost
from shardwright.planner.search import search
from shardwright.planner.search_constraints import RECOMPUTE, SearchConstraints
from shardwright.planner.search_result import SearchResult
from shardwright.planner.short import ShortModel
from shardwright.strategies import registered

BATCH = torch.ones(8, 16), torch.zeros(8, dtype=torch.long)


def model():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


@pytest.mark.sampled(0)
def test_a_search_prices_the_best_estimates_and_says_what_it_left_out():
    wide = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    batch = torch.ones(64, 512), torch.zeros(64, dtype=torch.long)
    plans = plan_layouts(wide, "a100-80gb:1x4", batch, most_priced=4)
    assert 2 <= len(plans.layouts) <= 4
    steps = [each.step_s for each in plans.layouts]
    assert all(one <= next_ * (1 + TIED) for one, next_ in pairwise(steps))  # of those that are as fast, the simplest
    found = plans.to_dict()
    assert found["searched"] > found["priced"] == found["fit"] == len(plans.layouts)
    assert found["searched"] == found["priced"] + sum(each["count"] for each in found["rejected"])
    assert sum(each["count"] for each in found["rejected"]) > 0
    assert found["runner_up"] == found["layouts"][1]["layout"]
    assert "runner-up" in plans.text()


@pytest.mark.sampled(0)
def test_a_layout_left_out_for_its_estimate_is_estimated_clearly_worse_than_the_best():
    narrow = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    batch = torch.ones(64, 64), torch.zeros(64, dtype=torch.long)
    found = plan_layouts(narrow, "a100-80gb:1x2", batch, most_priced=1)
    rows = {row["reason"]: row for row in found.rejected()}
    worse = rows["its estimate is not among the best"]["detail"]
    assert float(worse.partition("%")[0]) >= 1
    might_be = rows["it might be better than the best, but others were priced first"]
    assert found.to_dict()["unpriced"] == might_be["count"] > 0
    assert f"{might_be['count']:,} layouts whose estimates are less than 6% above the best price" in found.text()


def test_a_batch_that_copies_do_not_divide_is_cut_into_microbatches_of_no_more_samples_than_others():
    sizes, kinds = {"dp": 8}, {"dp": "copies"}
    numbers = [
        {each.num_microbatches for each in _layouts(sizes, kinds, batch, SearchConstraints(), SearchResult(), 8)}
        for batch in (500, 512)
    ]
    assert numbers == [{8, 16, 32, 62}, {8, 16, 32, 64}]  # of 62 or 63 samples, one each would be 63 microbatches


def test_a_strategy_with_an_axis_of_its_own_is_searched_without_an_edit():
    with registered(Samples(), XP):
        plans = plan_layouts(model(), "a100-80gb:1x2", BATCH, most_priced=2, fix="xp2")
        assert all(each.layout.factor("xp") is not None for each in plans.layouts)
        assert plans.best.traffic_by_axis["xp"] > 0


@pytest.mark.parametrize(
    ("line", "fix", "without", "allowed"),
    [
        ("dp8/zero1 tp2", "tp2 dp/zero1", (), True),
        ("dp8 tp2", "dp/zero1", (), False),
        ("dp8 tp2", "tp4", (), False),
        ("pp2/zb-v mb4", "", ("zb-v",), False),
        ("pp2 mb4", "", ("pp",), False),
        ("dp2/zero3/offload:disk", "", ("offload",), False),
        ("tp2x2/2d", "tp4/2d", (), True),
        ("tp2x2x2/3d", "tp4/2d", (), False),
        ("dp2 recompute:full", "recompute", (), True),
        ("dp2", "recompute", (), False),
    ],
)
def test_what_is_fixed_must_hold_and_what_is_left_out_must_not(line, fix, without, allowed):
    assert SearchConstraints(fix, without).allows(Layout.parse(line)) is allowed


def test_a_search_ends_however_many_layouts_are_refused():
    tried = []

    def record(layout, samples):
        tried.append(layout)
        raise LayoutError("not this one")

    found = search(Pricing(Cluster.parse("a100-80gb:8x8")), 64, record, SearchConstraints(limit_bytes=8e10, most=4))
    assert found.priced == 0
    assert len(tried) <= 3 * 4 + 4  # one more for each way to cut operators


@pytest.mark.sampled(0)
def test_stages_of_less_than_a_block_are_left_out():
    plans = plan_layouts(model(), "a100-80gb:1x8", BATCH, most_priced=1)
    assert "more stages than alike blocks" in [each["reason"] for each in plans.rejected()]


def test_every_division_of_the_ranks_is_tried_once():
    found = list(divisions(8, {"pp": "stages", "dp": "copies", "tp": "operators"}))
    assert len(found) == len({tuple(each.values()) for each in found}) == 10


def test_options_come_from_what_strategies_declare():
    beside = {str(each) for each in options_beside(Layout.parse("pp2 mb4 dp2"))}
    assert {"pp2/interleaved:v2 mb4 dp2", "pp2 mb4 dp2/zero1", "pp2 mb4 dp2 recompute:full"} <= beside


@pytest.mark.sampled(0)
def test_nothing_that_fits_ends_with_exit_code_2_and_the_nearest():
    line = "plan --model mlp --cluster a100-80gb:1x2 --memory-limit 0.0001 --most-priced 2 --fix dp2 --json"
    found = CliRunner().invoke(app, line.split())
    assert found.exit_code == 2
    said = json.loads(found.stdout)
    assert said["fit"] == 0
    (row,) = (each for each in said["rejected"] if each["reason"] == "memory: more than the limit")
    assert re.fullmatch(r".* of 0\.008 GB, .* \w+", row["detail"])
    assert not said["layouts"][0]["fits"]


@pytest.mark.parametrize(
    ("options", "tokens"), [("--set max_tokens=64", 64), ("--set max_tokens=64 --seq 32", 32), ("--model mlp", 8)]
)
def test_a_plan_is_of_samples_as_long_as_the_model_takes_unless_a_length_is_given(options, tokens):
    line = f"plan --layout dp2 --set num_layers=2 {options} --json"
    found = CliRunner().invoke(app, line.replace("--set num_layers=2 --model", "--model").split())
    assert found.exit_code == 0, found.output
    row, batch = json.loads(found.stdout)["layouts"][0], 8
    samples = batch if "mlp" in options else batch * tokens
    assert row["tokens_per_s"] * row["step_s_expected"] == pytest.approx(samples)
    assert ("the model's max_tokens" in found.stderr) == (tokens == 64)


def test_a_fix_that_no_layout_has_is_refused():
    with pytest.raises(LayoutError, match="no layout can be on a100-80gb:1x2"):
        plan_layouts(model(), "a100-80gb:1x2", BATCH, fix="tp3")


def test_each_number_of_ranks_gets_its_best_layout():
    line = "plan --model mlp --cluster a100-80gb:1x8 --ranks 1,2 --most-priced 1 --json"
    found = CliRunner().invoke(app, line.split())
    assert found.exit_code == 0, found.output
    assert [each["cluster"] for each in json.loads(found.stdout)["by_ranks"]] == ["a100-80gb:1x1", "a100-80gb:1x2"]


@pytest.mark.sampled(0)
def test_operators_are_not_cut_over_several_nodes():
    plans = plan_layouts(model(), "a100-80gb:2x1", BATCH, most_priced=1)
    assert "operators cut over more than 1 node" in [each["reason"] for each in plans.to_dict()["rejected"]]
    assert all(each.layout.factor("tp") is None for each in plans.layouts)


@pytest.mark.sampled(0)
def test_layouts_left_out_before_are_no_reason_to_price_none():
    batch = torch.ones(64, 16), torch.zeros(64, dtype=torch.long)
    plans = plan_layouts(model(), "a100-80gb:64x1", batch, most_priced=1)
    assert sum(each["count"] for each in plans.to_dict()["rejected"]) > 30
    assert len(plans.layouts) == 1


@pytest.mark.sampled(0)
def test_the_best_of_a_search_is_the_best_of_all_prices_where_candidates_are_few():
    cluster, batch = "a100-80gb:1x2", (torch.ones(4, 16), torch.zeros(4, dtype=torch.long))
    found = plan_layouts(model(), cluster, batch, without=["pp", "tp"], most_priced=4)
    lines = [f"mb{number} dp2{option} bf16" for number in (1, 2) for option in ("", "/zero1", "/zero2", "/zero3")]
    every = [plan_layouts(model(), cluster, batch, layout=line).best for line in lines]
    assert found.best.step_s <= min(each.step_s for each in every)


@pytest.mark.sampled(0)
def test_several_layouts_are_priced_before_one_is_called_the_best():
    plans = plan_layouts(model(), "a100-80gb:1x4", BATCH, most_priced=6)
    assert len(plans.layouts) >= 3
    assert plans.to_dict()["runner_up"] is not None


def test_what_options_save_and_what_schedules_cost_comes_from_plans():
    interleaved, plain = (schedule_cost("pp", (Option(*words),)) for words in (("interleaved", "v2"), ("1f1b",)))
    assert interleaved is not None
    assert plain is not None
    assert interleaved.idle == pytest.approx(plain.idle / 2)
    assert (interleaved.chunks, plain.chunks) == (2, 1)
    blocks = model()
    short = ShortModel(blocks, CrossEntropy(), BATCH, "cuda", {}, ModelPlans(blocks))
    cluster = Cluster.parse("a100-80gb:1x2")
    estimator = Estimator(Pricing(cluster), 8, "bf16", lambda *_: None, short.plan)
    saving = {option.name for option in estimator.saving_options("dp")}
    assert {"zero1", "zero2", "zero3"} <= saving
    assert not saving & {"ahead", "bucket", "fp32-sums"}


def test_a_schedule_that_rehearsals_with_few_microbatches_do_not_show_is_rehearsed_with_more():
    batch = torch.ones(96, 16), torch.zeros(96, dtype=torch.long)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(9)))
    plans = plan_layouts(blocks, "a100-80gb:1x4", batch, layout="pp4/dualpipe-v mb8")
    assert plans.best.step_s > 0


def estimator_of(model, batch, ranks, blocks=0, precision="bf16"):
    short = ShortModel(model, CrossEntropy(), batch, "cuda", {}, ModelPlans(model))
    blocks = blocks or len(model)
    given = short.plan, short.sent_bytes, blocks, short.summed_bytes, blocks, short.kept, short.ends
    return Estimator(Pricing(Cluster.parse(f"a100-80gb:1x{ranks}")), len(batch[0]), precision, short.record, *given)


def test_estimates_sum_gradients_in_each_microbatch_only_where_the_strategy_does():
    estimator = estimator_of(model(), BATCH, 2)
    for name, repeated in (("zero1", 0.0), ("zero2", 1.0), ("zero3", 1.0)):
        assert estimator._share(Layout.parse(f"dp2/{name}").factors[0]).repeated == pytest.approx(repeated), name


@pytest.mark.sampled(0)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_the_memory_of_recomputed_blocks_is_estimated_near_the_measured_peak_where_backwards_are_split(schedule):
    """A recomputed block's activations stay until the gradients of its weights are computed, which W puts off."""
    layout = Layout.parse(f"pp2/{schedule} mb6 recompute:full")
    gpt = GPT(GPTConfig(num_layers=8, width=32, vocabulary=40, max_tokens=64))
    tokens = torch.zeros(12, 64, dtype=torch.long)

    def peak(world):
        run = parallelize(gpt, layout, world, loss=CrossEntropy(), example=tokens)
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        for batch in run.shard([(tokens, tokens)] * 2):
            account = measure_memory(run, batch, optimizer)
        return account.peak_bytes

    measured = max(launch(peak, 2, ranks="threads"))
    estimator = estimator_of(gpt, (tokens, tokens), 2, blocks=8, precision="fp32")
    beside = estimator._passes((), "full", 1).beside  # of tensors, which are measured alone
    assert 0.85 * measured < estimator.estimate(layout).memory_bytes - beside < 1.2 * measured


def test_an_estimate_knows_that_stages_hold_whole_blocks_or_halves_where_those_would_be_uneven():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(12)))
    estimator = estimator_of(blocks, BATCH, 8)
    passes = estimator._passes((), None, 1)
    assert passes is not None

    def slowest(rest_s, stages):
        """A block takes a second, and what is not of a block so many, which are as many FLOPs."""
        estimator._cuts.clear()
        own = replace(passes, forward_s=12 + rest_s, backward_s=0.0, rest_s=rest_s, rest_flops=rest_s / (12 + rest_s))
        return estimator._cut(own, stages, 1)[0]

    assert slowest(0.0, 6) == pytest.approx(1)
    assert slowest(0.0, 8) == pytest.approx(1)  # of one and a half
    assert slowest(0.5, 12) == pytest.approx(1.5 / (12.5 / 12))
    assert slowest(0.5, 4) == pytest.approx(3.5 / (12.5 / 4))


@pytest.mark.sampled(0)
def test_parts_between_stages_are_chosen_where_the_stages_are_on_several_nodes():
    with torch.device("meta"):
        gpt = GPT(GPTConfig(num_layers=6, width=512, num_heads=8, max_tokens=1024, vocabulary=512, dropout=0.0))
    tokens = torch.zeros(16, 1024, dtype=torch.long)
    best = {}
    for cluster in ("a100-80gb:2x2", "a100-80gb:1x4"):
        words = ["sp", "seq", "regather", "zb-v", "dp"]
        given = {"fix": "pp2/1f1b mb8 tp2 bf16", "without": words, "most_priced": 2}
        found = plan_layouts(gpt, cluster, (tokens, tokens), **given)
        best[cluster] = str(found.best.layout)
    assert "pp2/1f1b/scatter" in best["a100-80gb:2x2"]
    assert "scatter" not in best["a100-80gb:1x4"]


def test_options_that_only_show_something_or_choose_among_others_are_not_searched():
    names = {option.name for axis in ("pp", "dp", "tp") for option in declared_options(axis)}
    assert {"zb-v", "zero1", "sp", "2d", "offload"} <= names
    assert not names & {"auto", "bucket", "ahead", "no-overlap", "cut", "file", "fp32-sums"}


@pytest.mark.sampled(0)
def test_a_layout_of_stages_names_its_schedule_and_is_left_out_by_that_name():
    batch = torch.ones(64, 64), torch.zeros(64, dtype=torch.long)
    blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    found = plan_layouts(blocks, "a100-80gb:1x2", batch, fix="pp2", most_priced=6)
    options = [str(each.layout.factor("pp")) for each in found.layouts]
    assert "pp2" not in options
    assert len({str(each.layout) for each in found.layouts}) == len(found.layouts)
    without = plan_layouts(blocks, "a100-80gb:1x2", batch, fix="pp2", without=["1f1b"], most_priced=6)
    assert not any("1f1b" in str(each.layout) for each in without.layouts)


def test_a_word_that_names_nothing_is_not_left_out_in_silence():
    with pytest.raises(PlanError, match="write zero3"):
        plan_layouts(model(), "a100-80gb:1x2", BATCH, without=["zero-3"])
    with pytest.raises(PlanError, match="leave out --fix"):
        plan_layouts(model(), "a100-80gb:1x2", BATCH, layout="dp2", without=["zero3"])


def test_stages_are_not_limited_by_blocks_that_are_a_small_part_of_the_model():
    blocks = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 128), nn.Linear(128, 128), nn.Linear(128, 128))
    short = ShortModel(blocks, CrossEntropy(), (torch.ones(8, 64), BATCH[1]), "cuda", {}, ModelPlans(blocks))
    assert (short.blocks.number, short.most_stages) == (2, 0)
    assert ShortModel(model(), CrossEntropy(), BATCH, "cuda", {}, ModelPlans(model())).most_stages == 4


def test_fewer_listed_layouts_keep_the_runner_up():
    one, two = (plan_layouts(nn.Linear(16, 16), "a100-80gb:1x2", BATCH, layout=line) for line in ("dp2", "dp2/zero1"))
    plans = replace(one, layouts=(one.best, two.best), top=1)
    assert len(plans.to_dict()["layouts"]) == 1
    assert plans.to_dict()["runner_up"] == "dp2/zero1"
    assert "runner-up" in plans.text()


@pytest.mark.sampled(0)
def test_numbers_of_ranks_have_the_same_nodes_in_any_order():
    found = []
    for ranks in ("6,8", "8,6"):
        line = f"plan --model mlp --ranks {ranks} --most-priced 1 --batch 48 --json"
        said = CliRunner().invoke(app, line.split())
        assert said.exit_code == 0, said.output
        found.append({each["cluster"] for each in json.loads(said.stdout)["by_ranks"]})
    assert found == [{"a100-80gb:1x6", "a100-80gb:1x8"}] * 2


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("fix", "holds"),
    [
        ("mb4", lambda each: each.num_microbatches == 4),
        ("mb1 dp2", lambda each: each.num_microbatches == 1),
        ("fp32", lambda each: each.precision == "fp32"),
        ("recompute:selective", lambda each: each.recompute == "selective"),
        ("pp/gpipe mb2", lambda each: "gpipe" in str(each.factor("pp"))),
    ],
)
def test_microbatches_precision_recomputation_and_schedules_can_be_fixed(fix, holds):
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(6)))
    plans = plan_layouts(blocks, "a100-80gb:1x2", BATCH, fix=fix, most_priced=2)
    assert all(holds(each.layout) for each in plans.layouts)


@pytest.mark.sampled(0)
def test_where_nothing_fits_what_would_is_priced():
    gpt = nn.Sequential(nn.Embedding(64, 64), *(nn.Linear(64, 64) for _ in range(4)))
    tokens = torch.zeros(4, 512, dtype=torch.long)
    given = {"most_priced": 1, "fix": "dp", "without": ["offload"]}
    least = plan_layouts(gpt, "a100-80gb:1x2", (tokens, tokens), layout="mb2 dp2/zero3 bf16 recompute:full").best
    limit = (0.9 * least.memory_bytes + 0.1 * least.memory[0].beside) / 80e9
    found = plan_layouts(gpt, "a100-80gb:1x2", (tokens, tokens), memory_limit=limit, **given)
    assert not found.fits(found.best)
    over = [each.step_s * (each.memory_bytes / (limit * 80e9)) ** 3 for each in found.layouts]
    assert len(over) > 2, "several to put in order"
    assert over == sorted(over), "the near ones that are not slow come first"
    said = "\n".join(found.ways_out)
    assert found.to_dict()["ways_out"] == list(found.ways_out)
    assert all(f"what would fit    {each}" in found.text() for each in found.ways_out)
    shorter, tokens_of = re.search(r"sequences of (\d+) tokens: (.*) takes", said), lambda n: tokens[:, :n]
    few = tokens_of(int(shorter[1]))
    assert found.fits(plan_layouts(gpt, "a100-80gb:1x2", (few, few), layout=shorter[2]).best)
    assert "a smaller batch does not help" in said


@pytest.mark.sampled(0)
def test_a_grid_can_be_fixed():
    plans = plan_layouts(model(), "a100-80gb:1x4", BATCH, fix="tp2x2/2d", most_priced=1)
    assert str(plans.best.layout.factor("tp")) == "tp2x2/2d"


@pytest.mark.sampled(0)
def test_any_recomputation_can_be_fixed():
    plans = plan_layouts(model(), "a100-80gb:1x2", BATCH, fix="recompute", most_priced=1)
    assert plans.best.layout.recompute is not None


def test_a_part_that_no_layout_has_is_named_with_what_can_be_without_it():
    with pytest.raises(LayoutError, match="3 does not divide 2 ranks"):
        plan_layouts(model(), "a100-80gb:1x2", BATCH, fix="tp3")
    with pytest.raises(LayoutError, match=r"leave out 'tp3' of --fix: .* can be looked at without it"):
        plan_layouts(model(), "a100-80gb:1x2", BATCH, fix="tp3")
    with pytest.raises(LayoutError, match="leave out 'mb9' of --fix"):
        plan_layouts(model(), "a100-80gb:1x2", BATCH, fix="mb9")


def test_schedules_with_more_chunks_than_blocks_are_counted():
    plans = plan_layouts(model(), "a100-80gb:1x4", BATCH, fix="pp4 mb4", most_priced=1)
    assert "more chunks than alike blocks" in [each["reason"] for each in plans.rejected()]


@pytest.mark.sampled(0)
def test_a_search_finds_a_layout_that_fits_down_to_the_least_memory_that_any_takes(monkeypatch):
    estimate = Estimator.estimate

    def too_low(self, layout):
        found = estimate(self, layout)
        return found and found._replace(memory_bytes=0.4 * found.memory_bytes)

    monkeypatch.setattr(Estimator, "estimate", too_low)  # so that the fastest ones seem to fit
    wide = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    cluster = Cluster.parse("a100-80gb:1x2")
    batch = torch.empty(16, 1024, 256, device="meta"), torch.empty(16, 1024, dtype=torch.long, device="meta")
    given = {"fix": "dp2", "without": ["tp", "pp", "offload"], "most_priced": 1}
    first = plan_layouts(wide, cluster, batch, **given).best
    least = plan_layouts(wide, cluster, batch, layout="mb8 dp2/zero3 bf16 recompute:full").best
    assert least.memory_bytes < first.memory_bytes - 1
    for limit in (first.memory_bytes - 1, least.memory_bytes):
        found = plan_layouts(wide, cluster, batch, **given, memory_limit=limit / cluster.device.memory_bytes)
        assert found.fits(found.best)


MODELS_SEARCHED = {
    "with a large head": lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)), nn.Linear(512, 8000)),
    "alike": lambda: nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))),
    "unlike": lambda: nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 512)),
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", MODELS_SEARCHED)
def test_what_a_search_prunes_is_not_better_than_its_best_where_all_can_be_priced(name):
    """All that the search could have tried: the options of model copies, and what differs from them by one option."""
    blocks = MODELS_SEARCHED[name]()
    cluster = Cluster.parse("a100-80gb:1x2")
    # without the constant of a step, which would hide that one layout is faster than another
    cluster = replace(cluster, constants=cluster.constants.with_values("fitted", step_s=0.0))
    batch = torch.ones(2, blocks[0].in_features), torch.zeros(2, dtype=torch.long)
    found = plan_layouts(blocks, cluster, batch, fix="dp2", without=["tp", "pp"], most_priced=6)
    wanted, steps = SearchConstraints("dp2", without=("offload",)), {}
    for line in ("dp2 bf16", *(f"dp2/{option.name} bf16" for option in declared_options("dp"))):
        with suppress(LayoutError):
            beside = [each for each in options_beside(Layout.parse(line)) if each.num_microbatches == 1]
            for layout in {line, *(str(each) for each in beside if wanted.allows(each))} - steps.keys():
                with suppress(LayoutError, PlanError):
                    steps[layout] = plan_layouts(blocks, cluster, batch, layout=layout).best.step_s
    assert len(steps) > 7
    best = min(steps, key=lambda each: steps[each])
    assert found.best.step_s <= 1.005 * steps[best], (str(found.best.layout), best)


@pytest.mark.sampled(0)
def test_an_estimate_of_a_layout_that_fits_by_less_than_its_error_is_priced(monkeypatch):
    """Memory that is estimated a little over the limit is no reason to leave a layout out."""
    estimate = Estimator.estimate

    def too_much(self, layout):
        found = estimate(self, layout)
        return found and found._replace(memory_bytes=1.1 * found.memory_bytes)

    wide = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    batch = torch.ones(8, 512), torch.zeros(8, dtype=torch.long)
    given = {"fix": "dp2", "without": ["zero1", "zero2", "zero3", "offload"], "most_priced": 1}
    best = plan_layouts(wide, "a100-80gb:1x2", batch, **given).best
    monkeypatch.setattr(Estimator, "estimate", too_much)
    found = plan_layouts(wide, "a100-80gb:1x2", batch, **given, memory_limit=(best.memory_bytes + 1) / 80e9)
    assert found.best.layout == best.layout
    assert found.fits(found.best)


DRAWN = {
    "gpt": GPTConfig(num_layers=6, width=256, num_heads=4, max_tokens=512, vocabulary=512),
    "llama": GPTConfig(style="llama", num_layers=6, width=512, num_heads=4, max_tokens=256, vocabulary=64),
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", DRAWN)
def test_the_best_of_a_search_where_memory_binds_is_the_best_of_all_prices(name):
    config = DRAWN[name]
    with torch.device("meta"):
        decoder = GPT(config)
    tokens = torch.zeros(4, config.max_tokens, dtype=torch.long, device="meta")
    # without the constant of a step, which would hide that one layout is faster than another
    cluster = Cluster.parse("a100-80gb:1x2")
    cluster = replace(cluster, constants=cluster.constants.with_values("fitted", step_s=0.0))
    lines = [f"dp2{option} mb{number} bf16" for option in ("", "/zero3") for number in (1, 2)]
    layouts = [replace(Layout.parse(line), recompute=recompute) for line in lines for recompute in RECOMPUTE]
    prices = [plan_layouts(decoder, cluster, (tokens, tokens), layout=layout).best for layout in layouts]
    limit = sorted(each.memory_bytes for each in prices)[len(prices) // 2]
    steps = sorted(each.step_s for each in prices if each.memory_bytes <= limit)
    assert 0 < len(steps) < len(prices), "memory binds"
    given = {"fix": "dp2", "without": ["tp", "pp", "offload", "zero1", "zero2"], "most_priced": 12}
    found = plan_layouts(decoder, cluster, (tokens, tokens), **given, memory_limit=limit / cluster.device.memory_bytes)
    own = sorted(each.step_s for each in found.layouts if found.fits(each))
    assert own[0] <= steps[0] * (1 + 1e-9)
    assert own == sorted(own), "the list is in the order of prices"
    assert found.found.unpriced == 0


def pictures_normed():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip


PICTURES = torch.randn(16, 3, 8, 8), torch.zeros(16, dtype=torch.long)


@pytest.mark.sampled(0)
def test_a_search_for_a_model_with_batch_norms_has_no_microbatches():
    plans = plan_layouts(pictures_normed(), "a100-80gb:1x4", PICTURES)
    assert len(plans.layouts) >= 2
    assert all(each.layout.num_microbatches == 1 for each in plans.layouts)
    left = {each["reason"]: each["nearest"] for each in plans.to_dict()["rejected"]}
    assert not any("mb" in line for why, line in left.items() if "might be better" in why)
    (why,) = (why for why in left if "computes statistics over the batch" in why)
    assert "--fix mb/own-statistics allows it" in why
    assert "/own-statistics" not in left[why]


@pytest.mark.sampled(0)
def test_the_whole_batch_of_a_model_with_batch_norms_is_priced_as_it_is():
    """Each device has 200 samples or more, whose price is no multiple of that of eight."""
    pictures = torch.randn(800, 3, 8, 8), torch.zeros(800, dtype=torch.long)
    plans = plan_layouts(pictures_normed(), "a100-80gb:1x4", pictures)
    (alone,) = plan_layouts(pictures_normed(), "a100-80gb:1x4", pictures, layout="dp4 bf16").layouts
    assert plans.best.layout.num_microbatches == 1
    assert plans.best.step_s <= alone.step_s * (1 + TIED)


@pytest.mark.parametrize("batch", [64, 4096])
@pytest.mark.sampled(0)
def test_batches_of_any_size_are_searched(batch):
    tokens = torch.zeros(batch, 16, dtype=torch.long)
    gpt = GPT(GPTConfig(num_layers=2, width=32, num_heads=4, vocabulary=64, max_tokens=16))
    assert plan_layouts(gpt, "a100-80gb:1x8", (tokens, tokens), loss=CrossEntropy(), most_priced=1).layouts


@pytest.mark.sampled(0)
def test_microbatches_that_are_left_out_are_not_searched():
    plans = plan_layouts(model(), "a100-80gb:1x2", BATCH, without=["mb"], most_priced=2)
    assert all(each.layout.num_microbatches == 1 for each in plans.layouts)


def test_a_fix_that_batch_norms_refuse_is_mended_by_statistics_of_their_own():
    with pytest.raises(LayoutError, match=r"write --fix 'pp2 mb/own-statistics', which"):
        plan_layouts(pictures_normed(), "a100-80gb:1x4", PICTURES, fix="pp2")
    with pytest.raises(LayoutError, match=r"write --fix 'mb2/own-statistics', which"):
        plan_layouts(pictures_normed(), "a100-80gb:1x4", PICTURES, fix="mb2")


@pytest.mark.sampled(0)
def test_a_search_with_statistics_of_each_microbatch_has_stages_too():
    plans = plan_layouts(pictures_normed(), "a100-80gb:1x4", PICTURES, fix="pp2 mb/own-statistics")
    assert all(each.layout.own_statistics for each in plans.layouts)
    assert {each.layout.factor("pp").size for each in plans.layouts} == {2}
    plans = plan_layouts(pictures_normed(), "a100-80gb:1x4", PICTURES, fix="mb4/own-statistics")
    assert {each.layout.num_microbatches for each in plans.layouts} == {4}
