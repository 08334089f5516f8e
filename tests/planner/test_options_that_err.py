"""What ``plan`` says of options that cannot be meant so: each is refused with what to write, or warned of."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.cli.planning import batches_in, ranks_in
from shardwright.cost.cluster import Cluster
from shardwright.errors import LayoutError, PlanError
from shardwright.planner.anchors import parse_anchor
from shardwright.planner.plan_arguments import check_words
from shardwright.planner.plan_text import warnings_of
from shardwright.planner.plans import plan_layouts

BATCH = torch.ones(8, 16), torch.zeros(8, dtype=torch.int64)


def layers():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def said(line):
    found = CliRunner().invoke(app, ["plan", "--model", "mlp", *line])
    assert not isinstance(found.exception, AssertionError)
    return found.exit_code, found.output


REFUSED = {
    "two anchors of a layout": (["--layout", "dp2", "--anchor", "dp2=1", "--anchor", "dp2=2"], "write --anchor 'dp2="),
    "a layout for several ranks": (["--layout", "dp2", "--ranks", "2,4"], "leave out --ranks"),
    "an anchor for several ranks": (["--anchor", "dp2=1", "--ranks", "2,4"], "write --ranks 2"),
    "a misspelt part": (["--cluster", "a100-80gb:1x2", "--fix", "dp/zerro1"], "write zero1"),
    "a cluster that was not measured": (["--cluster", "here"], "run shardwright calibrate"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_cannot_be_is_refused_with_what_to_write(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line, fix = REFUSED[name]
    code, text = said(line)
    assert code == 2
    assert fix in text


def test_a_precision_that_excludes_another_is_not_called_a_number_of_ranks():
    with pytest.raises(LayoutError) as raised:
        plan_layouts(layers(), "a100-80gb:1x4", BATCH, fix="bf16 fp16")
    assert "does not divide" not in str(raised.value)


def test_a_number_of_ranks_without_a_layout_leaves_those_of_the_others():
    code, text = said(["--cluster", "a100-80gb:1x2", "--ranks", "1,2", "--without", "tp,pp,cp", "--batch", "1"])
    assert code == 0
    assert "a100-80gb:1x1: " in text
    assert "2 ranks: no layout can be on a100-80gb:1x2" in text


def test_a_limit_that_leaves_memory_of_the_device_is_named_where_nothing_fits():
    plans = plan_layouts(layers(), "a100-80gb:1x1", BATCH, memory_limit=1e-5)
    assert "--memory-limit 0.0" in plans.text()
    assert "fits 0.001 % of the memory" in plans.text()
    assert "baseline          0 " not in plans.text()


def test_a_precision_that_the_card_lacks_and_a_constant_at_its_bound_are_warned_of():
    v100 = Cluster.parse("v100-32gb:1x1")

    def warnings(cluster, line):
        return " ".join(warnings_of(plan_layouts(layers(), cluster, BATCH, layout=line)))

    assert "has no peak" not in warnings(v100, "single")
    assert "has no peak in bf16" in warnings(v100, "bf16")
    bounded = replace(v100, constants=v100.constants.with_values("guess", matmul_efficiency=1.0))
    assert "matmul_efficiency is at its bound" in warnings(bounded, "single")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no file that is always full")
@pytest.mark.sampled(0)
def test_a_page_for_which_there_is_no_room_is_named():
    code, text = said(["--layout", "dp2", "--html", "/dev/full"])
    assert code == 2
    assert "No space left on device: '/dev/full'" in text


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("key", "value", "warns"), [("between_nodes", 50, False), ("in_node", 900, True)])
def test_a_link_of_both_ways_is_warned_of_where_the_profile_knows_it(key, value, warns, tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(f'profile = "h100-80gb"\nnodes = "2x8"\n{key}_GB_per_s = {value}\n')
    notes = Cluster.parse(str(path)).device.warnings
    assert any("of both ways" in each for each in notes) is warns


@pytest.mark.parametrize(
    "fix", ["mb2/own-statistics", "recompute:full", "dp/zero1/bucket:25", "fp32", "tp2x2/2d:summa"]
)
def test_what_a_fix_may_name_is_every_axis_option_and_precision(fix):
    with pytest.raises((LayoutError, PlanError)) as raised:
        plan_layouts(layers(), "a100-80gb:1x2", BATCH, fix=f"{fix} dp3", most_priced=1)
    assert "has this name" not in str(raised.value)


WRONG = {
    "a class for a model": ((nn.Linear, "a100-80gb:1x2", BATCH), {}, "write Linear(...)"),
    "no cluster": ((layers(), None, BATCH), {}, "write plan_layouts(model, 'a100-80gb:1x8', batch)"),
    "no sample": ((layers(), "a100-80gb:1x2", (BATCH[0][:0], BATCH[1][:0])), {}, "torch.zeros(64"),
    "lists for tensors": ((layers(), "a100-80gb:1x2", ([1, 2], [1, 2])), {}, "torch.zeros(64"),
    "no fix": ((layers(), "a100-80gb:1x2", BATCH), {"fix": None}, "write fix='tp8 dp/zero1'"),
    "words as text": ((layers(), "a100-80gb:1x2", BATCH), {"without": "zb-v,offload"}, "without=['zb-v', 'offload']"),
    "percent": ((layers(), "a100-80gb:1x2", BATCH), {"memory_limit": 92}, "write memory_limit=0.92"),
    "no limit": ((layers(), "a100-80gb:1x2", BATCH), {"memory_limit": float("nan")}, "write memory_limit=0.92"),
    "fewer tokens than none": ((layers(), "a100-80gb:1x2", BATCH), {"tokens": -5}, "write tokens=0"),
    "nothing to price": ((layers(), "a100-80gb:1x2", BATCH), {"most_priced": 0}, "write most_priced=1"),
    "an anchor without end": ((layers(), "a100-80gb:1x2", BATCH), {"anchors": {"dp2": float("inf")}}, "anchors={'dp8"),
    "an anchor as text": ((layers(), "a100-80gb:1x2", BATCH), {"anchors": {"dp2": "0.5"}}, "anchors={'dp8"),
    "a layout in two orders": (
        (layers(), "a100-80gb:1x2", BATCH), {"anchors": {"dp2 bf16": 0.5, "bf16 dp2": 5.0}}, "'dp2 bf16=SECONDS' once",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_given_in_python_is_refused_with_what_to_write(name):
    given, options, fix = WRONG[name]
    with pytest.raises((LayoutError, PlanError)) as raised:
        plan_layouts(*given, **options)
    assert fix in str(raised.value)


NONSENSE = st.text(alphabet="adptbzersmoxf0123456789/:,.=- ", max_size=14)


@settings(max_examples=200)
@example("dp")
@example("a100-80gb:0x8")
@example("a100-80gb:1x")
@example("auto:8-")
@example("dp2=1e400")
@given(text=NONSENSE)
def test_nonsense_is_refused_by_name_and_never_ends_in_another_error(text):
    for parse in (Cluster.parse, batches_in, ranks_in, parse_anchor, lambda words: check_words(None, words, [words])):
        with suppress(PlanError, LayoutError):
            parse(text)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    "option", ["--cluster", "--batch", "--ranks", "--anchor", "--fix", "--without", "--memory-limit"]
)
def test_nonsense_ends_the_command_with_exit_code_2_and_no_traceback(option):
    code, text = said(["--cluster", "a100-80gb:1x2", option, "zz9:/plural"])
    assert code == 2
    assert "Traceback" not in text
    assert "fix:" in text or "Invalid value" in text


@pytest.mark.sampled(0)
def test_more_bandwidth_makes_no_step_longer():
    cluster = Cluster.parse("a100-80gb:1x4")
    faster = replace(
        cluster, device=replace(cluster.device, in_node_bytes_per_s=2 * cluster.device.in_node_bytes_per_s)
    )
    for line in ("dp4", "dp4/zero3", "tp4", "pp2/1f1b mb2 tp2"):
        slow, fast = (plan_layouts(layers(), each, BATCH, layout=line).best.step_s for each in (cluster, faster))
        assert fast < slow if line == "dp4" else fast <= slow
