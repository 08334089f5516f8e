"""Seconds of operators and messages, profiles, constants."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shardwright.cost.cluster import MOST_LINK, Cluster
from shardwright.cost.constants import Constants
from shardwright.cost.device import profile, profiles
from shardwright.cost.operators import OperatorRecord, operator_s
from shardwright.errors import LayoutError, PlanError

BIG = OperatorRecord("matmul", 2 * 4096**3, 6 * 4096**2, "bf16", (1, 4096, 4096, 4096))


@pytest.mark.parametrize("name", sorted(profiles()))
def test_each_profile_has_dense_figures_and_names_its_source(name):
    device = profile(name)
    assert not device.warnings
    assert "datasheet" in device.source
    assert device.in_node_bytes_per_s < MOST_LINK * device.memory_bytes_per_s


def test_a_peak_with_sparsity_is_warned_of(tmp_path):
    path = tmp_path / "card.toml"
    path.write_text('profile = "a100-80gb"\n[peak_TFLOP_per_s]\nfp32 = 19.5\nbf16 = 1979\n')
    warnings = Cluster.parse(f"{path}:1x8").device.warnings
    assert len(warnings) == 2
    assert all("sparsity" in each for each in warnings)


def test_figures_far_over_those_of_the_profile_are_warned_of(tmp_path):
    path = tmp_path / "card.toml"
    path.write_text('profile = "a100-80gb"\nin_node_GB_per_s = 600\n[peak_TFLOP_per_s]\nfp32 = 19.5\nbf16 = 624\n')
    found = Cluster.parse(f"{path}:1x8").device.warnings
    assert ["in_node_GB_per_s" in each or "bf16" in each for each in found] == [True, True]


def test_links_that_may_be_given_both_ways_are_warned_of_without_a_profile_too(tmp_path):
    path = tmp_path / "card.toml"
    figures = 'type = "{}"\nmemory_GB = 80\nmemory_GB_per_s = 3350\nnum_multiprocessors = 132\n'
    rest = "in_node_GB_per_s = {}\nbetween_nodes_GB_per_s = 25\n[peak_TFLOP_per_s]\nfp32 = 67\nbf16 = 989\n"

    def warnings(kind, links):
        path.write_text(figures.format(kind) + rest.format(links))
        return Cluster.parse(f"{path}:1x8").device.warnings

    assert warnings("cuda", 450) == ()
    assert [each.partition(": ")[2] for each in warnings("cuda", 900)] == [
        "in_node_GB_per_s = 900 is 0.27 of the memory's bandwidth; links of accelerators carry up to 0.25 of it one "
        "way: is it of both ways?"
    ]
    assert warnings("cpu", 900) == ()


def test_constants_of_a_profile_are_those_of_clusters_and_files_that_name_it(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text('profile = "h100-80gb"\n[constants]\nmatmul_efficiency = 0.7\n')
    named, changed, other = (
        Cluster.parse(each).constants for each in ("h100-80gb:1x8", f"{path}:1x8", "b200:1x8")
    )  # fmt: skip
    assert named.matmul_efficiency < Constants().matmul_efficiency
    assert (changed.matmul_efficiency, changed.attention_efficiency) == (0.7, named.attention_efficiency)
    assert named.sources == dict.fromkeys(("matmul_efficiency", "attention_efficiency"), "published")
    assert changed.sources == {**named.sources, "matmul_efficiency": "guess"}
    assert other == Constants()


@pytest.mark.parametrize("text", ["memory_GBs = 94", '[constants]\nsource = "hearsay"', "[constants]\nlaunch_s = true"])
def test_a_file_with_keys_or_values_that_mean_nothing_is_refused(tmp_path, text):
    path = tmp_path / "card.toml"
    path.write_text(f'profile = "a100-80gb"\n{text}\n')
    with pytest.raises(PlanError):
        Cluster.parse(f"{path}:1x8")


def test_a_file_gives_nodes_figures_and_constants(tmp_path):
    path = tmp_path / "here.toml"
    path.write_text(
        'profile = "h100-80gb"\nnodes = "2x4"\nmemory_GB = 94\n[constants]\nsource = "measured"\nlaunch_s = 4e-6\n'
    )
    cluster = Cluster.parse(str(path))
    assert (cluster.num_ranks, cluster.device.memory_bytes, cluster.constants.launch_s) == (8, 94e9, 4e-6)
    assert {row["name"]: row["source"] for row in cluster.constants.rows()}["launch_s"] == "measured"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a100:1x8", "write a100-"),
        ("a100-80gb:0x8", "no such nodes"),
        ("a100-80gb:1000000x8", "1 to 999999 of either"),
        ("a100-80gb", "how many nodes"),
        ("missing.toml:1x8", "cannot read"),
    ],
)
def test_clusters_of_nonsense_are_refused_with_a_fix(text, error):
    with pytest.raises((PlanError, LayoutError), match=re.escape(error)):
        Cluster.parse(text)


def test_constants_outside_of_their_bounds_and_unknown_ones_are_refused():
    with pytest.raises(PlanError, match="out of bounds"):
        Constants(matmul_efficiency=1.17)
    with pytest.raises(PlanError, match="write launch_s"):
        Constants().with_values("measured", lanch_s=1.0)


def test_faster_figures_never_make_anything_slower():
    cluster = Cluster.parse("a100-80gb:4x8")
    for field in ("memory_bytes_per_s", "in_node_bytes_per_s", "between_nodes_bytes_per_s"):
        faster = replace(cluster.device, **{field: 2 * getattr(cluster.device, field)})
        for part in ("matmul", "attention", "memory"):
            record = BIG._replace(part=part)
            assert operator_s(record, faster, Constants()) <= operator_s(record, cluster.device, Constants())
        for ranks in ((0, 1), (0, 8), tuple(range(32))):
            for kind in ("all_reduce", "all_gather", "send"):
                sent = replace(cluster, device=faster).message_s(kind, 1e8, ranks)
                assert sent <= cluster.message_s(kind, 1e8, ranks)


def test_a_last_wave_of_few_tiles_costs_as_much_as_a_full_one():
    device = profile("a100-80gb")  # 108 multiprocessors: 109 tiles take two waves
    one, two = (
        operator_s(
            OperatorRecord("matmul", 2 * 128 * n * 128 * 4096, 0, "bf16", (1, 128, n * 128, 4096)), device, Constants()
        )
        for n in (108, 109)
    )
    assert two == pytest.approx(2 * one)


def test_rings_between_nodes_share_the_links_of_a_node():
    cluster = Cluster.parse("a100-80gb:2x8")
    alone = cluster.message_s("all_gather", 1e9, (0, 8))
    together = cluster.message_s("all_gather", 1e9, tuple(range(16)))
    assert together < alone, "eight links carry one ring of sixteen, each of eight rings of two has one"


@pytest.mark.parametrize("num_nodes", [2, 3, 4])
def test_a_sum_over_nodes_crosses_as_often_as_one_of_nodes_and_never_takes_longer_than_a_ring_of_its_ranks(num_nodes):
    cluster = replace(Cluster.parse(f"a100-80gb:{num_nodes}x8"), constants=Constants(between_hop_s=0, in_node_hop_s=0))
    every, one_each = range(8 * num_nodes), range(0, 8 * num_nodes, 8)
    sums = cluster.message_s("all_reduce", 1e9, every)
    assert sums == pytest.approx(cluster.message_s("all_reduce", 1e9 / 8, one_each))  # eight rings of an eighth each
    assert sums < sum(cluster.message_s(kind, 1e9, every) for kind in ("reduce_scatter", "all_gather"))
    slow = replace(cluster, device=replace(cluster.device, in_node_bytes_per_s=1e9))
    assert slow.message_s("all_reduce", 1e9, every) == pytest.approx(slow.message_s("all_reduce", 1e9, range(8)))


@pytest.mark.parametrize("dims", [(1, 0, 8, 8), (1, 8, 8, 0)])
def test_a_product_of_no_rows_or_its_weight_gradient_takes_the_time_of_its_bytes(dims):
    record = OperatorRecord("matmul", 0, 64.0, "bf16", dims)
    assert 0 < operator_s(record, profile("a100-80gb"), Constants()) < 1e-9


def test_a_cluster_without_nodes_is_told_how_its_own_option_is_written():
    with pytest.raises(LayoutError) as caught:
        Cluster.parse("a100-80gb:8")
    assert "write a100-80gb:1x8" in str(caught.value)
    assert "--nodes" not in str(caught.value)


def test_a_peak_that_a_file_does_not_give_is_that_of_its_profile_and_errors_name_the_file():
    cluster = Cluster.of_table("mine.toml", {"profile": "a100-80gb", "peak_TFLOP_per_s": {"bf16": 200}})
    assert cluster.device.name == "a100-80gb"
    assert (cluster.device.peak("bf16"), cluster.device.peak("fp32")) == (200e12, profile("a100-80gb").peak("fp32"))
    with pytest.raises(PlanError, match=r"mine\.toml"):
        Cluster.of_table("mine.toml", {"profile": "a100-80gb", "peak_TFLOP_per_s": {"bf16": "fast"}})
