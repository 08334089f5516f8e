"""The layout line: parsed, printed, refused."""

from __future__ import annotations

import pickle
import random
import re
from itertools import product
from math import isqrt, prod

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwright.axes import layout_axes
from shardwright.errors import LayoutError
from shardwright.layout import MAX_SIZE, Factor, Layout, Option
from shardwright.strategies import choose

NAMES = st.from_regex(r"[a-z0-9.-]{1,6}", fullmatch=True).filter(lambda n: n not in ("2d", "2.5d", "3d", "file"))
VALUES = st.text(st.characters(codec="utf-8", exclude_categories=("Z", "C")), min_size=1, max_size=8)
SIZES = st.integers(1, 9)


def fix_of(error: LayoutError) -> str:
    lines = str(error).splitlines()
    assert [line[:11].strip() for line in lines[1:]] == ["given:", "allowed:", "fix:"]
    return lines[-1].removeprefix("  fix:     ")


def refused(line: str) -> str:
    """The fix of a line that is refused, which has to work and to be canonical."""
    with pytest.raises(LayoutError) as caught:
        Layout.parse(line)
    fix = fix_of(caught.value)
    assert str(Layout.parse(fix)) == fix
    return fix


@st.composite
def factors(draw, axis: str) -> Factor:
    plain = st.builds(Option, NAMES, st.none() | VALUES.filter(lambda value: "/" not in value))
    file = st.lists(st.builds(Option, st.just("file"), st.none() | VALUES), max_size=1)
    options = draw(st.lists(plain, max_size=3, unique_by=lambda option: option.name)) + draw(file)
    num_numbers = draw(st.integers(1, {"pp": 1, "dp": 2, "cp": 1, "tp": 3}[axis]))
    if axis == "tp" and num_numbers > 1:
        options.append(Option("2d" if num_numbers == 2 else draw(st.sampled_from(["2.5d", "3d"]))))
    sizes = draw(st.tuples(*[SIZES] * num_numbers))
    return Factor(axis, sizes, tuple(draw(st.permutations(options))))


@st.composite
def layouts(draw) -> Layout:
    axes = draw(st.lists(st.sampled_from(["pp", "dp", "cp", "tp"]), unique=True))
    return Layout(
        tuple(draw(factors(axis)) for axis in axes),
        num_microbatches=draw(st.just(1) | st.integers(1, MAX_SIZE)),
        precision=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        recompute=draw(st.none() | st.sampled_from(["full", "selective", "None"]) | VALUES),
        own_statistics=draw(st.booleans()),
        compile=draw(st.sampled_from([None, "inductor", "aot_eager"])),
    )


# The meaning of a line.


@pytest.mark.parametrize(
    ("line", "canonical", "mesh"),
    [
        ("single", "single", "one rank"),
        ("dp4", "dp4", "dp=4"),
        ("dp4/zero3", "dp4/zero3", "dp=4"),
        ("dp2x4/zero3", "dp2x4/zero3", "replica=2 dp=4"),
        ("dp4/offload/zero3", "dp4/zero3/offload", "dp=4"),
        ("dp4/zero3/offload:disk", "dp4/zero3/offload:disk", "dp=4"),
        ("tp4", "tp4", "tp=4"),
        ("tp4/sp", "tp4/sp", "tp=4"),
        ("tp2x3/2d", "tp2x3/2d", "row=2 col=3"),
        ("tp3x2/2d", "tp3x2/2d", "row=3 col=2"),
        ("tp8/2d", "tp2x4/2d", "row=2 col=4"),
        ("tp2x2x2/2.5d", "tp2x2x2/2.5d", "depth=2 row=2 col=2"),
        ("tp8/2.5d:d2", "tp2x2x2/2.5d", "depth=2 row=2 col=2"),
        ("tp2x2x2/2.5d:d2", "tp2x2x2/2.5d", "depth=2 row=2 col=2"),
        ("tp2x2x2/3d", "tp2x2x2/3d", "depth=2 row=2 col=2"),
        ("tp8/3d", "tp2x2x2/3d", "depth=2 row=2 col=2"),
        ("pp4/1f1b mb8", "pp4/1f1b mb8", "pp=4"),
        ("pp4/interleaved:v2", "pp4/interleaved:v2", "pp=4"),
        ("pp4/file:/a/b.json", "pp4/file:/a/b.json", "pp=4"),
        ("pp4/file:a/cut:b", "pp4/file:a/cut:b", "pp=4"),
        ("pp4/cut:conv1,conv2,fc,out", "pp4/cut:conv1,conv2,fc,out", "pp=4"),
        ("mb8", "mb8", "one rank"),
        ("mb1", "single", "one rank"),
        ("mb8/own-statistics pp2", "pp2 mb8/own-statistics", "pp=2"),
        ("mb1/own-statistics", "single", "one rank"),
        ("cp2 fp16 recompute:blocks.*/mlp", "cp2 fp16 recompute:blocks.*/mlp", "cp=2"),
        ("dp1 tp1x1/2d", "dp1 tp1x1/2d", "dp=1 row=1 col=1"),
        (
            "  bf16\ttp2x2/2d  mb8 dp2/zero1 pp2/1f1b\n",
            "pp2/1f1b mb8 dp2/zero1 tp2x2/2d bf16",
            "pp=2 dp=2 row=2 col=2",
        ),
    ],
)
def test_a_line_means_this_mesh_and_prints_as_its_canonical_form(line, canonical, mesh):
    layout = Layout.parse(line)
    assert (str(layout), str(layout.mesh)) == (canonical, mesh)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "auto"])
def test_a_schedule_is_an_option_of_pp(name):
    assert Layout.parse(f"pp4/{name}").factor("pp") == Factor("pp", (4,), (Option(name),))


def test_words_set_their_fields_and_leave_the_rest_at_one_device():
    assert Layout.parse("mb8 bf16 recompute:full") == Layout((), 8, "bf16", "full")
    assert Layout.parse("single") == Layout((), 1, "fp32", None) == Layout()
    assert Layout.parse("recompute:selective").recompute == "selective"


def test_an_option_is_found_by_its_name():
    factor = Layout.parse("pp4/interleaved:v2").factor("pp")
    assert factor is not None
    assert (factor.option("interleaved"), factor.option("1f1b")) == (Option("interleaved", "v2"), None)


@given(layouts())
def test_a_printed_layout_reads_back_as_itself(layout):
    line = str(layout)
    assert Layout.parse(line) == layout
    assert str(Layout.parse(line)) == line
    assert line == " ".join(line.split())
    assert pickle.loads(pickle.dumps(layout)) == layout


@given(layouts(), st.randoms(use_true_random=False))
def test_the_order_of_items_and_the_space_between_them_do_not_matter(layout, rng: random.Random):
    items = str(layout).split()
    rng.shuffle(items)
    assert Layout.parse(" \t\n".join(["", *items, ""])) == layout


@given(layouts())
def test_items_print_in_the_order_pp_mb_dp_cp_tp_precision_recompute_compile(layout):
    order = ("pp", "mb", "dp", "cp", "tp", "bf", "fp", "re", "co")
    places = [order.index(item[:2]) for item in str(layout).split() if item != "single"]
    assert places == sorted(set(places))


@given(layouts())
def test_the_mesh_has_the_product_of_the_sizes(layout):
    sizes = [size for factor in layout.factors for size in factor.sizes]
    assert layout.mesh.size == layout.num_ranks == prod(sizes)
    assert [size for _, size in layout.mesh.sizes] == sizes


# Grids.


@given(st.integers(1, 400))
def test_a_2d_grid_is_the_most_square_one_with_no_more_rows_than_columns(ranks):
    rows, cols = Factor("tp", (ranks,), (Option("2d"),)).sizes
    assert (rows * cols, rows <= cols) == (ranks, True)
    assert not [r for r in range(rows + 1, isqrt(ranks) + 1) if ranks % r == 0]


@given(st.integers(1, 100), st.integers(1, 8))
def test_a_2_5d_grid_has_the_depth_given_over_the_most_square_grid(square, depth):
    layout = Layout.parse(f"tp{depth * square}/2.5d:d{depth}")
    assert layout.factors[0].sizes == (depth, *Layout.parse(f"tp{square}/2d").factors[0].sizes)
    assert layout.factors[0].options == (Option("2.5d"),)


@given(st.integers(1, 200))
def test_a_3d_grid_is_the_most_cubic_one(ranks):
    sizes = Layout.parse(f"tp{ranks}/3d").factors[0].sizes
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    grids = [(a, b, ranks // a // b) for a, b in product(divisors, divisors) if ranks // a % b == 0]
    assert (prod(sizes), list(sizes)) == (ranks, sorted(sizes))
    assert sum(sizes) == min(map(sum, grids))


# What is refused.


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("dp2,tp2", "dp2 tp2"),
        ("dp2/zero3; tp2+bf16", "dp2/zero3 tp2 bf16"),
        ("", "single"),
        ("single dp4", "dp4"),
        ("single single", "single"),
        ("dp4 dp2", "dp4"),
        ("mb8 mb8", "mb8"),
        *(
            ("tp2 pd2", "dp2 tp2"),
            ("pt2", "tp2"),
            ("dt2 tp2", "dp2 tp2"),
            ("d2 t2", "dp2 tp2"),
            ("dpp2 tp2", "dp2 tp2"),
        ),
        *(("pp2 bm8", "pp2 mb8"), ("pp4 m8", "pp4 mb8"), ("tp2 bg16", "tp2 bf16"), ("dp2 fp61", "dp2 fp16")),
        *(("vp2", "pp4/interleaved:v2"), ("tp2 spatail", "tp2/spatial"), ("fdsp4", "dp4/zero3"), ("x2 tp2", "tp2")),
        ("bf16 fp16", "bf16"),
        ("recompute:full recompute:full", "recompute:full"),
        ("compile compile:aot_eager", "compile"),
        ("dp2 compiled", "dp2 compile"),
        ("compile:nvfuser", "compile"),
        ("dp4 fp32", "dp4"),
        ("fp8", "single"),
        ("DP4 BF16", "dp4 bf16"),
        ("ddp4", "dp4"),
        ("dp", "dp4"),
        ("dp0", "dp1"),
        ("dp0x4", "dp1x4"),
        ("dp-4", "dp4"),
        ("dp٤", "dp4"),
        ("dp2x2x2", "dp4x2"),
        ("pp2x2", "pp4"),
        ("cp2x3", "cp6"),
        ("tp2x2", "tp2x2/2d"),
        ("tp2x2/sp", "tp2x2/2d/sp"),
        ("tp2x2x2", "tp2x2x2/3d"),
        ("tp2X4/2d", "tp2x4/2d"),
        ("tp2x4/3d", "tp2x2x2/3d"),
        ("tp2x4/2.5d", "tp2x2x2/2.5d"),
        ("tp2x2x2/2d", "tp2x4/2d"),
        ("tp8/2.5d", "tp2x2x2/2.5d"),
        ("tp8/2.5d:d3", "tp2x2x2/2.5d"),
        ("tp8/2.5d:2", "tp2x2x2/2.5d"),
        ("tp8/2.5d:d0", "tp2x2x2/2.5d"),
        ("tp9/2.5d:d4", "tp3x1x3/2.5d"),
        ("tp2x2x2/2.5d:d4", "tp2x2x2/2.5d"),
        ("tp4/2d:x", "tp2x2/2d"),
        ("tp2x2/2d:sumna", "tp2x2/2d:summa"),
        ("tp8/3d:clasic", "tp2x2x2/3d:classic"),
        ("tp2x2/auto", "tp4/auto"),
        ("dp2 tp2x2x2/auto/sp", "dp2 tp8/auto/sp"),
        ("tp4/3d:d2", "tp1x2x2/3d"),
        ("tp4/2d/3d", "tp2x2/2d"),
        ("mb0", "single"),
        ("mb", "mb4"),
        ("mb4/statistics", "mb4/own-statistics"),
        ("recompute", "recompute:full"),
        ("recompute:", "recompute:full"),
        ("dp4zero3", "dp4/zero3"),
        ("dp4/ZeRO3", "dp4/zero3"),
        ("dp4//zero3/", "dp4/zero3"),
        ("dp4/zero_3", "dp4/zero3"),
        ("dp4/zero3/zero3", "dp4/zero3"),
        ("dp4/offload/offload:disk", "dp4/offload"),
        ("dp4/offload:a/b:", "dp4/offload:a"),
        ("pp4/file:", "pp4"),
        ("hello tp2x2 pp2", "pp2 tp2x2/2d"),
        ("dp999999999999/zero3", "dp1048576/zero3"),
        ("tp999999999999/2d", "tp1024x1024/2d"),
        ("tp4000x4000/3d", "tp64x128x128/3d"),
        ("mb999999999999", "mb1048576"),
        ("dp" + "9" * 5000, "dp1048576"),
        ("tp2x2x4/2.5d:d" + "9" * 5000, "tp2x2x4/2.5d"),
    ],
)
def test_a_wrong_line_names_the_nearest_that_works(line, fix):
    assert refused(line) == fix


def test_too_many_microbatches_are_refused_by_number():
    with pytest.raises(LayoutError, match="microbatches are counted from 1 to 1048576"):
        Layout.parse("pp2 mb1048577")


TYPED = """\
dp2 tp2 zero3 -> dp2/zero3 tp2; tp2dp2 -> dp2 tp2; pp2mb8dp2 -> pp2 mb8 dp2; dp2bf16 -> dp2 bf16; dp2z3 -> dp2/zero3
fsdp2 -> dp2/zero3; fsdp4 tp2 -> dp4/zero3 tp2; hsdp2x4 -> dp2x4/zero3; dp2 fsdp -> dp2/zero3; ddp2 -> dp2
dp8 ep8 -> dp8; pp=2 -> pp2; tp=2,dp=2 -> dp2 tp2; dp:2 tp:4 -> dp2 tp4; dp=2/zero3 -> dp2/zero3; 2dp 2tp -> dp2 tp2
tp 2 dp 2 -> dp2 tp2; dp2 zero-3 -> dp2/zero3; dp4 zero 3 -> dp4/zero3; zero2 dp4 -> dp4/zero2
zero3 -> dp4/zero3; dp2 stage3 -> dp2/zero3
TP2 -> tp2; sp2 -> tp2/sp; dp2 tp2 sp -> dp2 tp2/sp; dp2*tp2 -> dp2 tp2; dp2-tp2 -> dp2 tp2; mp2 -> tp2
tp4-2d -> tp2x2/2d; tensor_parallel=2 data-parallel 4 -> dp4 tp2; tp_size=2 -> tp2
pipeline2 -> pp2; pp4 1f1b mb8 -> pp4/1f1b mb8
pp2 vpp2 -> pp2/interleaved:v2; dp2 offload -> dp2/offload; dp2 bfloat16 -> dp2 bf16; dp2 half -> dp2 fp16; mbs4 -> mb4
dp2 grad_accum4 -> mb4 dp2; dp2 activation_checkpointing -> dp2 recompute:full; dp2 fp8 -> dp2"""


@pytest.mark.parametrize("case", [case.strip() for case in re.split("[;\n]", TYPED.strip())])
def test_a_fix_keeps_what_was_asked_in_the_words_of_other_libraries(case):
    line, fix = case.split(" -> ")
    assert refused(line) == fix
    assert choose(Layout.parse(fix)) or fix == "mb4"  # some strategy has each option


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("dp2/fsdp", "dp2/zero3"),
        ("dp2/zero-3 tp2 bf16", "dp2/zero3 tp2 bf16"),
        ("dp2/tp2", "dp2 tp2"),
        ("tp2/zero3 dp2", "dp2/zero3 tp2"),
        ("pp4/zbv mb8", "pp4/zb-v mb8"),
        ("dp2/recompute mb2", "mb2 dp2 recompute:full"),
        ("dp2/hybrid tp2", "dp2 tp2"),
    ],
)
def test_the_fix_of_an_option_that_no_strategy_has_is_a_whole_line(line, fix):
    with pytest.raises(LayoutError) as caught:
        choose(Layout.parse(line))
    assert fix_of(caught.value) == f"write {fix}"


PARTS = """single pp dp cp tp mb bf16 fp16 fp32 recompute: full file: 2d 2.5d 3d :d2 zero3 / x : 0 1 2 4 8
99999999 A . - , é"""


@given(st.text() | st.lists(st.sampled_from([*PARTS.split(), *"//  \0\u2028"]), max_size=14).map("".join))
@example("\x1f\x85\u2028 dp4/ zero3:\x00")
def test_any_text_is_a_layout_or_a_layout_error_with_a_line_that_works(text):
    try:
        layout = Layout.parse(text)
    except LayoutError:
        refused(text)
    else:
        assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "build",
    [
        lambda: Option("a b"),
        lambda: Option("Zero"),
        lambda: Option(""),
        lambda: Option("a:b"),
        lambda: Option("a", ""),
        lambda: Option("a", "b/c"),
        lambda: Option("file", "b c"),
        lambda: Option("a", 2),  # type: ignore[arg-type]
        lambda: Factor("xp", (2,)),
        lambda: Factor("depth", (2,)),
        lambda: Factor("dp", ()),
        lambda: Factor("dp", (0,)),
        lambda: Factor("dp", (True,)),
        lambda: Factor("dp", (2.0,)),  # type: ignore[arg-type]
        lambda: Factor("dp", (MAX_SIZE, 2)),
        lambda: Factor("dp", (10**5000,)),
        lambda: Factor("pp", (2, 2)),
        lambda: Factor("tp", (2, 2)),
        lambda: Factor("dp", (2,), (Option("a"), Option("a", "b"))),
        lambda: Layout((Factor("dp", (2,)), Factor("dp", (2,)))),
        lambda: Layout((), 0),
        lambda: Layout((), True),
        lambda: Layout((), MAX_SIZE + 1),
        lambda: Layout((), precision="fp8"),  # type: ignore[arg-type]
        lambda: Layout((), recompute=""),
        lambda: Layout((), recompute="a b"),
        lambda: Layout((), own_statistics=2),  # type: ignore[arg-type]
    ],
)
def test_what_is_wrong_cannot_be_built(build):
    with pytest.raises(LayoutError) as caught:
        build()
    assert fix_of(caught.value)


def test_factors_are_put_in_order_and_grids_made_explicit_when_built():
    layout = Layout((Factor("tp", (8,), (Option("2d"),)), Factor("pp", (2,))))
    assert layout == Layout((Factor("pp", (2,)), Factor("tp", (2, 4), (Option("2d"),))))


# The dictionary form.


@pytest.mark.parametrize(
    ("mapping", "line"),
    [
        ({"data": 1, "pipeline": 1, "tensor": {"size": 4, "mode": "2d"}}, "tp2x2/2d"),
        ({"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, "tp2x2x2/2.5d"),
        ({"tensor": {"size": 8, "mode": "3d"}}, "tp2x2x2/3d"),
        ({"tensor": {"size": 4, "mode": "1d"}}, "tp4"),
        ({"tensor": {"size": 4, "mode": None}}, "tp4"),
        ({"tensor": {"size": 4, "options": "sp"}}, "tp4/sp"),
        ({"tensor": {"size": "3x2", "mode": "2d"}}, "tp3x2/2d"),
        ({"tensor": {"size": 1, "mode": "2d"}}, "single"),
        ({"tensor": None}, "single"),
        ({}, "single"),
        ({"data": {"size": 4, "zero": 3}, "tensor": 2}, "dp4/zero3 tp2"),
        ({"data": {"size": 4, "zero": 0}}, "dp4"),
        ({"data": {"size": "2x4", "zero": 3, "options": "offload:disk"}}, "dp2x4/zero3/offload:disk"),
        ({"pipeline": {"size": 4, "schedule": "1f1b", "microbatches": 8}}, "pp4/1f1b mb8"),
        ({"pipeline": {"size": 4, "schedule": "file:/a/b", "options": "cut:a,b"}}, "pp4/cut:a,b/file:/a/b"),
        ({"pipeline": {"size": 1, "microbatches": 8}}, "mb8"),
        (
            {"context": 2, "microbatches": 8, "precision": "bf16", "recompute": "full"},
            "mb8 cp2 bf16 recompute:full",
        ),
    ],
)
def test_a_dictionary_means_this_line_also_under_the_key_parallel(mapping, line):
    assert str(Layout.from_dict(mapping)) == line
    assert str(Layout.from_dict({"parallel": mapping})) == line


@given(layouts())
def test_a_dictionary_agrees_with_the_line(layout):
    names = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}
    mapping = {
        "microbatches": f"{layout.num_microbatches}/own-statistics"
        if layout.own_statistics
        else layout.num_microbatches,
        "precision": layout.precision,
        "recompute": layout.recompute,
        "compile": layout.compile,
    }
    for factor in layout.factors:
        options = "/".join(map(str, factor.options)) or None
        mapping[names[factor.axis]] = {"size": "x".join(map(str, factor.sizes)), "options": options}
    kept = tuple(factor for factor in layout.factors if factor.size > 1)
    expected = Layout(
        kept, layout.num_microbatches, layout.precision, layout.recompute, layout.own_statistics, layout.compile
    )
    assert Layout.from_dict(mapping) == expected == Layout.parse(str(expected))


@given(st.integers(2, 64), st.sampled_from(["1d", "2d", "3d"]), st.integers(2, 8), st.integers(1, 3), SIZES)
def test_numbers_and_modes_in_a_dictionary_agree_with_the_line(tensor, mode, data, zero, microbatches):
    mapping = {
        "tensor": {"size": tensor, "mode": mode},
        "data": {"size": data, "zero": zero},
        "pipeline": {"size": 2, "schedule": "1f1b", "microbatches": microbatches},
    }
    grid = "" if mode == "1d" else f"/{mode}"
    assert Layout.from_dict(mapping) == Layout.parse(f"pp2/1f1b mb{microbatches} dp{data}/zero{zero} tp{tensor}{grid}")


@pytest.mark.parametrize(
    ("mapping", "named"),
    [
        ({"tensr": 4}, "write tensor"),
        ({"tensor": {"size": 4, "moed": "2d"}}, "write mode"),
        ({"data": {"size": 4, "mode": "2d"}}, "key in 'data'"),
        ({"parallel": {"data": 4}, "paralel": 1}, "write parallel"),
        ({"parallel": {"data": 4}, "fp16": 1}, "write one of those allowed"),
        ({"parallel": {"parallel": {"data": 4}}}, "'parallel'"),
        ({"parallel": 4}, "a dictionary"),
        ({3: 4}, "given:   3"),
        ({"data": True}, "given:   True"),
        ({"data": "4"}, "given:   '4'"),
        ({"data": 4.0}, "given:   4.0"),
        ({"data": [4]}, "given:   [4]"),
        ({"data": 0}, "fix:     dp1"),
        ({"data": -4}, "given:   -4"),
        ({"data": 10**5000}, "a huge number"),
        ({"data": {"zero": 3}}, "add 'size'"),
        ({"data": {"size": 4, "zero": "3"}}, "given:   '3'"),
        ({"data": {"size": 4, "zero": True}}, "given:   True"),
        ({"data": {"size": 4, "options": ["zero3"]}}, "a text"),
        ({"data": {"size": 4, "options": "zero3 tp4"}}, "a text without spaces"),
        ({"pipeline": {"size": 4, "microbatches": 8}, "microbatches": 8}, "given twice"),
        ({"microbatches": 0}, "mb0"),
        ({"microbatches": "4/own"}, "mb4/own-statistics"),
        ({"tensor": {"size": 8, "mode": "2d", "depth": 2}}, "only mode 2.5d has a depth"),
        ({"tensor": {"size": 8, "depth": 2}}, "only mode 2.5d has a depth"),
        ({"tensor": {"size": 8, "mode": "2.5d"}}, "fix:     tp2x2x2/2.5d"),
        ({"tensor": {"size": 8, "mode": "2.5d", "depth": 3}}, "fix:     tp2x2x2/2.5d"),
        ({"tensor": {"size": 8, "mode": 2}}, "given:   2"),
        ({"precision": "tp4"}, "bf16"),
        ({"recompute": True}, "given:   True"),
        ([("data", 4)], "no dictionary"),
        (None, "no dictionary"),
        ("dp4", "no dictionary"),
    ],
)
def test_a_wrong_dictionary_is_a_layout_error_that_names_the_fault(mapping, named):
    with pytest.raises(LayoutError, match=re.escape(named)) as caught:
        Layout.from_dict(mapping)
    assert fix_of(caught.value)


KEYS = [key for axis in layout_axes().values() for key in (axis.keyword, *axis.keys)]
KEYS += ["size", "options", "parallel", "microbatches", "precision"]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["2d", "2.5d", "4"])
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYS) | LEAVES, inner)
)


@given(TREES)
def test_any_dictionary_is_a_layout_or_a_layout_error(tree):
    try:
        layout = Layout.from_dict(tree)
    except LayoutError as error:
        fix_of(error)
    else:
        assert Layout.parse(str(layout)) == layout
