import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers
from torch import nn
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli.main import app
from shardwright.errors import LayoutError
from shardwright.mesh import Mesh
from shardwright.nodes import Nodes, crosses
from shardwright.parallelize.between_nodes import bytes_between, crossing_pairs, node_warnings
from shardwright.plan.traffic import Traffic

SMALL = integers(1, 4)


@given(SMALL, SMALL, SMALL, integers(1, 12))
def test_an_axis_crosses_nodes_exactly_where_one_of_its_groups_does(pp, dp, tp, ranks_per_node):
    mesh = Mesh(pp=pp, dp=dp, tp=tp)
    nodes = Nodes(-(-mesh.size // ranks_per_node), ranks_per_node)
    found = crossing_pairs(mesh, nodes.places(mesh.size))
    assert {axis for axis in mesh.axes if crosses(mesh, axis, nodes)} == set(found)


@given(SMALL, SMALL, SMALL)
def test_tp_stays_inside_wherever_nodes_have_a_multiple_of_its_ranks(pp, dp, tp):
    mesh = Mesh(pp=pp, dp=dp, tp=tp)
    assert not crosses(mesh, "tp", Nodes(pp * dp, tp))


def test_of_an_all_reduce_each_node_sends_to_the_next_what_a_rank_sends_in_a_ring():
    mesh, places = Mesh(dp=2, tp=2), Nodes(2, 2).places(4)
    calls = [Traffic("all_reduce", "dp", 1000, 2), Traffic("all_gather", "tp", 500, 2)]
    assert bytes_between(mesh, places, lambda _: calls, range(4)) == {"dp": 4000, "tp": 0}


def test_a_stage_sends_to_the_stages_beside_it_and_only_those_on_other_nodes_count():
    mesh, places = Mesh(pp=4), Nodes(2, 2).places(4)
    found = bytes_between(mesh, places, lambda rank: [Traffic("send", "pp", 1000, 4)], range(4))
    assert found == {"pp": 1000}  # of stages 1 and 2, half of what each sends


@pytest.mark.parametrize("text", ["", "2", "2x", "x4", "0x4", "2x4x2", "two", "-1x4"])
def test_nodes_that_are_no_two_numbers_are_refused_with_the_form_to_write(text):
    with pytest.raises(LayoutError, match="nodes x ranks on each, 1 to 999999 of either, such as 2x4"):
        Nodes.parse(text)


def test_nodes_are_found_in_the_environment_of_torchrun_slurm_and_mpi_where_they_have_as_many_ranks():
    slurm = {"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}
    mpi = {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    assert (Nodes.of_environment(slurm, 8), Nodes.of_environment(mpi, 6)) == (Nodes(2, 4), Nodes(2, 3))
    others = [({}, 1), ({"WORLD_SIZE": "8"}, 8), (slurm, 4), (slurm | {"SLURM_NTASKS_PER_NODE": "3"}, 8)]
    assert [Nodes.of_environment(*each) for each in others] == [None] * 4


def test_show_draws_which_axis_crosses_nodes_and_what_it_sends_there():
    words = ["show", "--layout", "pp2 mb2 dp2 tp2", "--nodes", "2x4", "--set", "num_layers=2", "--set", "width=16"]
    done = CliRunner().invoke(app, [*words, "--set", "num_heads=2", "--seq", "16"])
    assert done.exit_code == 0, done.output
    rows = {line.split("  ")[0]: line.split() for line in done.stdout.splitlines()}
    assert rows["node 1"][2:] == ["4", "to", "7", "1", "0,", "1", "0,", "1"]
    assert rows["between nodes"][2:] == ["crosses", "inside", "inside"]
    assert rows["sent there in a step"][5:] == ["80.0", "KiB", "0", "B", "0", "B"]


def test_only_an_axis_that_cuts_operators_is_warned_of_and_the_warning_has_its_price():
    assert node_warnings(Mesh(pp=2, dp=2, tp=2), Nodes(2, 4).places(8), {"pp": 9.0}) == []
    (text,) = node_warnings(Mesh(tp=4), Nodes(2, 2).places(4), {"tp": 2048.0})
    assert "'tp' crosses nodes: ranks 0 and 2 are on nodes 0 and 1, and 2.0 KiB a step go over the link" in text


@pytest.mark.parametrize("places", [(0, 1), (0, 0), ()])
def test_a_run_whose_tp_crosses_nodes_logs_one_warning(places, caplog):
    def work(world):
        with sw.without_values():
            plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        sw.parallelize(plain, "tp2", replace(world, nodes=places), loss=nn.MSELoss(), example=torch.zeros(2, 4))

    with caplog.at_level(logging.WARNING):
        sw.launch(work, 2, ranks="threads")
    found = [record.getMessage() for record in caplog.records if "crosses nodes" in record.getMessage()]
    assert len(found) == (places == (0, 1))
    assert all(" B a step go over the link between nodes" in text for text in found)
