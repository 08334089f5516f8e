import pytest
from torch import nn

from shardwright import launch, parallelize, without_values
from shardwright.errors import PlanError
from shardwright.forward_stack import Rung, stack_of
from shardwright.models.gpt import GPT, GPTConfig
from shardwright.parallelize.explain import explained

LINE = "pp2 dp2/zero3 tp2 mb2 recompute:full"


def on_ranks(line, size, ask):
    with without_values():
        model = GPT(GPTConfig(num_layers=2, width=16, num_heads=2, dropout=0.1))
    return launch(lambda world: ask(parallelize(model, line, world)), size, ranks="threads")


@pytest.mark.sampled(0)
def test_a_layer_under_four_strategies_shows_every_rung_in_order():
    found = on_ranks(LINE, 8, lambda run: explained(run, "blocks.0.mlp.up"))
    forward = [(each["rung"], each["module"], each["by"]) for each in found[1]["forward"]]
    assert forward == [
        ("FRAME", "the model", "tensor_1d"),
        ("FOLLOWED", "the model", "tensor_1d"),
        ("RECOMPUTE", "blocks.0", "core"),
        ("FOLLOWED", "blocks.0", "tensor_1d"),
        ("FOLLOWED", "blocks.0.mlp", "tensor_1d"),
        ("UNSHARD", "blocks.0.mlp.up", "zero"),
        ("CALLERS", "blocks.0.mlp.up", "tensor_1d"),
        ("OPERATOR", "blocks.0.mlp.up", "tensor_1d"),
        ("GUARD", "blocks.0.mlp.up", "tensor_1d"),
        ("(own code)", "blocks.0.mlp.up", ""),
    ]
    weight, _ = found[1]["parameters"]
    assert (weight["name"], weight["shape"], weight["held"]) == ("blocks.0.mlp.up.weight", [64, 16], [32, 16])
    assert weight["stored"] == "only at pp 0, dim 0 over tp, flat slices over dp"
    assert found[1]["role"]["strategy"] == "tensor_1d"
    assert weight["elements_stored"] + found[3]["parameters"][0]["elements_stored"] == 32 * 16
    elsewhere = found[4]
    assert elsewhere["rank"] == 4
    assert [each["held"] for each in elsewhere["parameters"]] == [None, None]


@pytest.mark.sampled(0)
def test_what_a_run_has_wrapped_is_what_its_plan_has_said():
    def surprises(run):
        planned = (Rung.UNSHARD, Rung.ENTRY, Rung.OPERATOR, Rung.ATTEND, Rung.RECOMPUTE)
        return [
            (path, each.rung.name, each.by)
            for path, module in run.model.named_modules()
            for each in stack_of(module).wrappers
            if each.rung in planned and each.by not in run.plan.wrapped.get(path, {}).get(each.rung, ())
        ]

    assert on_ranks(LINE, 8, surprises) == [[]] * 8


def test_the_text_says_where_parameters_lie_what_runs_and_what_is_sent():
    text = on_ranks("dp2/zero3 bf16", 2, lambda run: run.explain("blocks.1.mlp.down"))[0]
    for words in (
        "'blocks.1.mlp.down', Linear, on rank 0 of dp2/zero3 bf16",
        "blocks.1.mlp.down.weight  whole [16, 64]",
        "to compute  [16, 64] bfloat16 on this rank: copied",
        "float32 on this rank: flat slices over dp",
        "UNSHARD     blocks.1.mlp.down",
        "2.0 KiB gathered over dp before each forward and each backward",
    ):
        assert words in text


def test_a_batch_norm_names_each_strategy_that_shares_its_statistics():
    norms = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))

    def ask(world):
        run = parallelize(norms, "dp2 tp2/spatial", world)
        return [(each["rung"], each["by"]) for each in explained(run, "1")["forward"]]

    wanted = [("FRAME", "spatial"), ("OPERATOR", "spatial"), ("STATISTICS", "data_parallel"), ("(own code)", "")]
    assert launch(ask, 4, ranks="threads") == [wanted] * 4


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(PlanError, match=r"no module 'blocks.0.mpl.up'(.|\n)*fix: +write blocks.0.mlp.up"):
        on_ranks("single", 1, lambda run: run.explain("blocks.0.mpl.up"))


def test_to_explain_changes_nothing():
    def work(run):
        before = [{key: id(value) for key, value in vars(module).items()} for module in run.model.modules()]
        for path, _ in run.model.named_modules():
            run.explain(path)
        run.explain("(loss)")
        return before == [{key: id(value) for key, value in vars(module).items()} for module in run.model.modules()]

    assert on_ranks("dp2 tp2", 4, work) == [True] * 4
