"""The Ray driver, on a cluster of two nodes that Ray pretends on this machine."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import psutil
import pytest
from tests_dist.command import FLAGS, end_all, losses_of_one_device, within

from shardwright.cluster.job import ClusterJob
from shardwright.errors import CommunicationError, PlanError
from shardwright.nodes import Nodes
from shardwright.train.progress import read_metrics

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from shardwright.cluster import ray_driver  # noqa: E402

STEPS = 6
LONG = 300  # enough not to end before its ranks are found and one of them is stopped

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
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    expected = losses_of_one_device(tmp_path / "run", tmp_path / "whole")
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-4)


def test_nodes_that_never_come_are_counted_and_the_wait_is_said(two_nodes, tmp_path):
    with pytest.raises(CommunicationError) as raised:
        ray_driver.run(job(tmp_path / "run", layout="dp3 tp2", nodes=Nodes(3, 2)), wait_s=3.0)
    assert "not all nodes came" in str(raised.value)
    assert "after 3 s 2 nodes" in str(raised.value)


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks_on(out):
    """The ranks that train into a folder, by number and time of their start."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(out) in process.cmdline() and "RANK" in process.environ():
                found[process.pid, process.create_time()] = process
    return found


def test_ranks_of_an_attempt_whose_actor_is_killed_have_ended_before_the_next_attempt_begins(two_nodes, tmp_path):
    out = tmp_path / "run"
    options = (*FLAGS, "--steps", str(LONG), "--schedule", "constant", "--save-every", "5")
    driver = ThreadPoolExecutor(1).submit(ray_driver.run, job(out, options=options, save_s=5))
    try:
        assert within(120, lambda: len(read_metrics(out)) >= 7 or driver.done())
        first = ranks_on(out)
        assert len(first) == 4
        torchruns = {rank.ppid(): rank for rank in first.values()}
        assert len(torchruns) == 2
        torchruns.popitem()[1].suspend()  # a rank that does not end of itself, and for which the others wait
        psutil.Process(torchruns.popitem()[0]).parent().kill()  # the actor of the other node, but not its torchrun
        assert within(120, lambda: ranks_on(out).keys() - first.keys() or driver.done())
        assert not any(map(runs, first.values()))
        driver.result(timeout=200)
    finally:  # after a failure Ray cannot be shut down before the driver has ended
        within(60, lambda: driver.done() or end_all(ranks_on(out).values()))
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [*range(1, LONG + 1)]
    expected = losses_of_one_device(out, tmp_path / "whole")
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-4)


def test_input_that_the_ranks_refuse_is_not_tried_again(two_nodes, tmp_path, capsys):
    with pytest.raises(PlanError) as raised:
        ray_driver.run(job(tmp_path / "run", options=(*FLAGS, "--data", str(tmp_path / "nowhere"))))
    assert "torchrun on each node ended with 2, 2" in str(raised.value)
    assert "attempt 2" not in capsys.readouterr().err
