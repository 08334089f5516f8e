"""A strategy with an axis of its own is one file that touches no other: two of them, here, beside all that is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch import nn

import shardwright as sw
from contract import test_every_strategy, test_pairs
from contract.cases import (
    CHECKS,
    CONVNET,
    DEEP,
    GPT2,
    GPT2_APART,
    MLP,
    check_equal,
    check_traffic,
    lays_out,
    line_of,
    pairs,
    spellings,
)
from contract.test_checkpoints import check_same_bits
from ledger.test_ledger import check_close, data, plain
from shardwright.analysis.traced.batch_norms import batch_norms
from shardwright.analysis.traced.structure import owners
from shardwright.axes import LayoutAxis, layout_axes, mesh_axes
from shardwright.comm.autograd import cut_to_whole, sum_gradient
from shardwright.errors import LayoutError
from shardwright.forward_stack import Rung, set_forward
from shardwright.mesh import balanced
from shardwright.operators.batch_norm import share_statistics
from shardwright.plan.option import StrategyOption
from shardwright.plan.param_groups import split_into_param_groups
from shardwright.plan.plan import Job, Plan, Shard
from shardwright.plan.traffic import StepCalls, Traffic, statistics_traffic, sync_traffic
from shardwright.report.description import describe
from shardwright.report.show import show_text
from shardwright.sharding.box import balanced_ranges
from shardwright.strategies import STRATEGIES, registered
from shardwright.strategy import check_samples_apart

# ---- one: copies of the model, each with samples of its own


@dataclass(frozen=True)
class Samples:
    name: ClassVar[str] = "toy_samples"
    axis: ClassVar[str] = "xp"
    phase: ClassVar[str] = "operators"
    default: ClassVar[bool] = True
    options: ClassVar[Mapping[str, StrategyOption]] = {"small": StrategyOption("every block alone")}
    source: ClassVar[str] = "none"

    def place(self, job, plan):
        check_samples_apart(job.model, str(plan.layout.factor("xp")))
        if plan.layout.factor("xp").option("small") is not None:
            plan = replace(plan, param_groups=split_into_param_groups(job.model, least_bytes=0))
        for axis in plan.layout.factor("xp").mesh_axes:
            plan = plan.cut_inputs(axis, dim=0)
        return plan

    def apply(self, job, axes, plan):
        names = plan.layout.factor("xp").mesh_axes
        share_statistics((norm for _, norm in batch_norms(job.model)), [axes[name] for name in names])

    def traffic(self, plan, batch, coord):
        for axis in plan.layout.factor("xp").mesh_axes:
            yield from sync_traffic(plan, coord, axis)
            yield from statistics_traffic(plan, batch, coord, axis)


XP = LayoutAxis(
    "xp",
    order=5,
    kind="copies",
    mesh_axes=(("xp",), ("rack", "xp")),
    sizes="xp4, or racks x machines: xp2x4",
    keyword="samples",
    keys={"small": (int,)},
    written=lambda entry: ["small" if entry.get("small") else "", entry.get("options", "")],
)


# ---- two: every rank computes some of the outputs of each Linear


@dataclass(frozen=True)
class Outputs:
    name: ClassVar[str] = "toy_outputs"
    axis: ClassVar[str] = "yp"
    phase: ClassVar[str] = "operators"
    default: ClassVar[bool] = True
    options: ClassVar[Mapping[str, StrategyOption]] = {}
    source: ClassVar[str] = "none"

    def cut(self, model, plan):
        users = [name for _, _, _, name in owners(model)]
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) and module.out_features >= plan.mesh["yp"] > 1:
                names = [f"{path}.{own}" for own, _ in module.named_parameters()]
                if all(users.count(name) == 1 for name in names):
                    yield path, module.out_features, names

    def sizes(self, plan):
        return [(path, size) for path, size in plan.notes.items() if plan.noted_by[path] == self.name]

    def place(self, job, plan):
        for path, size, names in self.cut(job.model, plan):
            for name in names:
                plan = plan.cut(name, "yp", 0, balanced_ranges(size, plan.mesh["yp"]))
            plan = plan.use(path, dy={"yp": Shard(-1)}).role(path, self.name, "outputs", "a toy")
            plan = plan.note(path, size, by=self.name)  # claims the rung OPERATOR of the module's forward, too
        return plan

    def apply(self, job, axes, plan):
        axis = axes.get("yp")

        def forward(module, size):
            sizes = [b - a for a, b in pairwise(balanced(size, axis.size))]
            return lambda x: cut_to_whole(
                nn.functional.linear(sum_gradient(x, axis), module.weight, module.bias), axis, -1, sizes
            )

        for path, size in self.sizes(plan):
            module = job.model.get_submodule(path)
            set_forward(module, Rung.OPERATOR, "its own outputs", by=self.name, forward=forward(module, size))

    def traffic(self, plan, batch, coord):
        size = plan.mesh["yp"]
        for module_calls in batch.module_calls:
            for visit in (each for path, _ in self.sizes(plan) for each in module_calls.get(path, ())):
                y_bytes, x_bytes = (torch.Size(s).numel() * visit.element_bytes for s in (visit.y_shape, visit.x_shape))
                yield Traffic("all_gather", "yp", y_bytes, size, visit.num_forwards)
                if visit.needs_gradient:
                    yield Traffic("all_reduce", "yp", x_bytes, size)
        yield from sync_traffic(plan, coord, "yp")


YP = LayoutAxis("yp", order=40, kind="operators", mesh_axes=(("yp",),), sizes="one number: yp4")


@pytest.fixture(autouse=True)
def toys():
    with registered(Samples(), XP), registered(Outputs(), YP):
        yield


# ---- the promises of every strategy


LINES = {
    "xp1": MLP,
    "xp3": DEEP,
    "xp2/small": GPT2,
    "xp2x2": CONVNET,
    "xp2 dp2": GPT2,
    "xp2 dp2/zero3/bucket:0": DEEP,
    "xp2 tp2": GPT2,
    "xp2 tp2x2/2d": MLP,
    "xp2 tp2/spatial": CONVNET,
    "pp2 xp2": DEEP,
    "pp2/zb-h1 mb3 xp2 dp2": GPT2,
    "xp2 recompute:full": GPT2,
    "yp2": MLP,
    "yp3": GPT2_APART,
    "dp2 yp2": GPT2_APART,
    "dp2/zero2/bucket:0 yp2": DEEP,
    "pp2 yp2": GPT2_APART,
    "yp2 recompute:selective": GPT2_APART,
    "xp2 yp2": CONVNET,
}


@pytest.mark.parametrize("line", LINES)
def test_a_strategy_with_an_axis_of_its_own_keeps_the_promises_of_every_strategy(line):
    case = LINES[line]
    line = line if " mb" in line else line_of(case, line)
    assert lays_out(line, case)
    for check in CHECKS:
        check(line, case)


@pytest.mark.parametrize("name", ["toy_samples", "toy_outputs"])
def test_the_contract_writes_the_lines_of_a_new_axis_by_itself(name):
    """What a new file gets without being named anywhere: its options, sizes and pairs, held to all promises."""
    strategy = STRATEGIES[name]
    written = {factor for size in (2, 4) for factor in spellings(strategy, size)}
    assert {f"{strategy.axis}2", *(f"{strategy.axis}2/{option}" for option in strategy.options)} <= written
    laid_out = test_every_strategy.laid_out(strategy, 2, DEEP)
    assert [line for line in laid_out if f"{strategy.axis}2" in line]
    test_every_strategy.test_a_strategy_keeps_its_promises(strategy, 2, DEEP)
    beside = [pair for pair in pairs() if strategy in pair]
    assert {other.axis for pair in beside for other in pair} == set(layout_axes()) & {
        s.axis for s in STRATEGIES.values()
    }
    ((one, other),) = [pair for pair in beside if STRATEGIES["data_parallel"] in pair]
    test_pairs.test_a_strategy_keeps_its_promises_beside_every_other(one, other, DEEP)


@pytest.mark.parametrize(("line", "other"), [("xp2", "tp2"), ("xp2 dp2/zero1", "pp2"), ("yp2", "xp3"), ("dp3", "yp2")])
def test_what_an_axis_of_its_own_saves_another_loads_bit_for_bit(line, other, tmp_path):
    check_same_bits(line_of(DEEP, line), line_of(DEEP, other), DEEP, tmp_path)


@pytest.mark.of_threads  # what stands in for NCCL keeps copies of its own
@pytest.mark.parametrize("line", ["xp2", "xp2 dp2/zero1", "yp2"])
def test_the_ledger_predicts_the_peak_of_a_strategy_with_an_axis_of_its_own(line):
    check_close(plain, line, data())


# ---- the line, the mesh, the dictionary, the report


def test_the_line_the_mesh_and_the_dictionary_take_the_axis_from_its_file():
    layout = sw.Layout.parse("yp2 dp2 bf16 mb4 xp2x3/small pp2")
    assert str(layout) == "pp2 mb4 xp2x3/small dp2 yp2 bf16"
    assert sw.Layout.parse(str(layout)) == layout
    assert str(layout.mesh) == "pp=2 rack=2 xp=3 dp=2 yp=2"
    assert sw.Layout.from_dict({"samples": {"size": "2x3", "small": 1}, "data": 2}) == sw.Layout.parse(
        "xp2x3/small dp2"
    )
    assert mesh_axes("copies") == ("rack", "xp", "replica", "dp")


@pytest.mark.parametrize(
    ("line", "fix"), [("xq2", "xp2"), ("xp2x2x2", "xp4x2"), ("yp2x2", "yp4"), ("xp", "xp4"), ("xp2 xp2", "xp2")]
)
def test_a_wrong_line_names_the_nearest_on_an_axis_of_its_own(line, fix):
    with pytest.raises(LayoutError) as caught:
        sw.Layout.parse(line)
    assert str(caught.value).endswith(f"fix:     {fix}")


def test_show_describes_a_strategy_with_an_axis_of_its_own():
    (inputs, _) = GPT2.batches[0]
    found = describe(Job(GPT2.model, GPT2.loss), sw.Layout.parse("xp2 tp2"), inputs=inputs)
    assert found["mesh"] == {"xp": 2, "tp": 2}
    assert [rank["samples"] for rank in found["ranks"]] == [4, 4, 3, 3]
    assert found["ranks"][0]["sent_bytes"]["toy_samples"] > 0
    assert "\n  xp 1   2 A    3 B\n" in show_text(found, width=110)


def test_a_strategy_and_its_axis_are_gone_when_they_are_no_longer_registered():
    assert {"toy_samples", "toy_outputs"} <= set(STRATEGIES)
    assert list(layout_axes()) == ["pp", "xp", "dp", "cp", "tp", "yp"]
    zp = LayoutAxis("zp", order=50, kind="copies", mesh_axes=(("zp",),), sizes="one number: zp4")
    with registered(type("Third", (Samples,), {"name": "third", "axis": "zp"})(), zp):
        assert str(sw.Layout.parse("zp2 yp2")) == "yp2 zp2"
    assert "third" not in STRATEGIES
    with pytest.raises(LayoutError, match="zp2"):
        sw.Layout.parse("zp2")


# ---- what clashes


def changed(**fields):
    """The axis ``zp``, which clashes with nothing, but for these fields."""
    plain = LayoutAxis("zp", order=50, kind="copies", mesh_axes=(("zp",),), sizes="one number: zp4", keyword="zs")
    return replace(plain, **fields)


@pytest.mark.parametrize(
    ("fields", "axis", "what"),
    [
        ({}, changed(name="tp"), "two axes are called 'tp'"),
        ({}, changed(mesh_axes=(("row",),)), "two axes are called 'row'"),
        ({}, changed(mesh_axes=(("world",),)), "no axis of the mesh can be called"),
        ({}, changed(order=10), "two axes have the order 10"),
        ({}, changed(keyword="data"), "two axes are called 'data'"),
        ({}, changed(keyword="precision"), "another such key"),
        ({}, changed(name="mb"), "no axis can be called 'mb'"),
        ({}, changed(name="z2"), "no axis can be called 'z2'"),
        ({"name": "zero", "axis": "zp"}, changed(), "two strategies are called 'zero'"),
        ({"axis": "zq"}, None, "no strategy defines the axis 'zq'"),
        ({"axis": "dp"}, None, "two strategies are the default of 'dp'"),
    ],
)
def test_a_name_an_axis_or_a_place_that_another_has_is_refused(fields, axis, what):
    strategy = type("Third", (Samples,), {"name": "third", **fields})()
    before = dict(STRATEGIES), dict(layout_axes())
    with pytest.raises(LayoutError, match=what) as caught, registered(strategy, axis):
        pass
    assert all(f"\n  {word}" in str(caught.value) for word in ("given:", "allowed:", "fix:"))
    assert (dict(STRATEGIES), dict(layout_axes())) == before


# ---- the promises can be broken


def test_a_toy_that_forgets_its_gradients_or_its_traffic_is_caught():
    class Forgets(Samples):
        def place(self, job, plan):
            return replace(plan, inputs={**plan.inputs, "xp": 0})

    class Silent(Samples):
        def traffic(self, plan: Plan, batch: StepCalls, coord: Mapping[str, int]) -> tuple[Traffic, ...]:
            return ()

    with pytest.raises(AssertionError, match="NOT equal to one device"):
        check_equal("xp2", MLP, strategies=[Forgets()])
    with pytest.raises(AssertionError, match=r"makes calls that traffic\(\) does not state"):
        check_traffic("xp2", MLP, strategies=[Silent()])
