"""The Ray driver, on a cluster of two nodes that Ray pretends on this machine."""

from __future__ import annotations

import os

import pytest
from tests_dist.command import FLAGS

from shardwright.cluster.job import ClusterJob
from shardwright.errors import CommunicationError
from shardwright.nodes import Nodes
from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from shardwright.cluster import ray_driver  # noqa: E402

TINY = {"settings": {"num_layers": 1, "width": 16, "num_heads": 4, "dropout": 0.1}, "seq": 16, "batch": 5}
STEPS = 6

pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def two_nodes():
    """A Ray cluster of two nodes, each with room for two ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address)
    yield
    ray.shutdown()
    cluster.shutdown()


def job(out, **more):
    more = {"options": (*FLAGS, "--steps", str(STEPS), "--save-every", "2"), **more}
    return ClusterJob(**{"layout": "dp2 tp2", "nodes": Nodes(2, 2), "out": str(out), "restarts": 1, **more})


def test_ranks_on_two_nodes_of_ray_equal_one_device(two_nodes, tmp_path):
    ray_driver.run(job(tmp_path / "run"))
    rows = read_metrics(tmp_path / "run")
    train(TrainConfig(layout="single", steps=STEPS, **TINY), tmp_path / "whole", ranks="threads")
    expected = [row["loss"] for row in read_metrics(tmp_path / "whole")]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-4)


def test_nodes_that_never_come_are_counted_and_the_wait_is_said(two_nodes, tmp_path):
    with pytest.raises(CommunicationError) as raised:
        ray_driver.run(job(tmp_path / "run", layout="dp3 tp2", nodes=Nodes(3, 2)), wait_s=3.0)
    assert "not all nodes came" in str(raised.value)
    assert "after 3 s 2 nodes" in str(raised.value)
