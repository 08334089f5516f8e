"""The Ray driver's job of one node, and its attempts, without Ray: ``tests_dist/test_ray.py`` has a Ray cluster."""

import os
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from shardwright.cluster import ray_driver
from shardwright.cluster.job import ClusterJob
from shardwright.errors import CommunicationError, PlanError
from shardwright.nodes import Nodes

# Like torchrun it starts its rank in a session of its own, and passes SIGTERM on to it.
TORCHRUN = """
import signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: rank.terminate())
sys.exit(rank.wait())
"""
RANK = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
def save(*_):
    (folder / "saved").touch()
    sys.exit(3)
signal.signal(signal.SIGTERM, {on_signal})
(folder / "number.part").write_text(f"{{os.getpid()}} {{os.getppid()}}")
(folder / "number.part").rename(folder / "number")
time.sleep(100)
"""
SAVES, HANGS = RANK.format(on_signal="save"), RANK.format(on_signal="signal.SIG_IGN")


def within(seconds, holds):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def start(node_job, rank, folder):
    """Runs a job in a thread; returns its rank, the torchrun of that and a list that gets the exit code."""
    folder.mkdir()
    codes = []
    words = ["-c", TORCHRUN, rank, str(folder)]
    threading.Thread(target=lambda: codes.append(node_job.run(words, {"GIVEN": "yes"})), daemon=True).start()
    within(30, (folder / "number").exists)
    return *(psutil.Process(int(word)) for word in (folder / "number").read_text().split()), codes


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def run_id():
    """The name of a run, of which nothing is left after the test."""
    name = f"test-{os.getpid()}-{time.time_ns()}"
    yield name
    ray_driver._kill(lambda mark: mark.startswith(name))


def test_ranks_that_are_stopped_save_first(run_id, tmp_path):
    node_job = ray_driver._NodeJob(run_id, 0, 0)
    rank, torchrun, codes = start(node_job, SAVES, tmp_path / "node")
    assert rank.environ()["GIVEN"] == "yes"
    node_job.stop(30.0)
    assert (tmp_path / "node" / "saved").exists()
    assert not runs(rank)
    assert not runs(torchrun)
    within(5, lambda: codes == [3])


def test_ranks_that_hang_are_killed_after_the_seconds_for_a_save_and_with_them_torchrun(run_id, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_driver, "END_S", 0.2)
    node_job = ray_driver._NodeJob(run_id, 0, 0)
    rank, torchrun, _ = start(node_job, HANGS, tmp_path / "node")
    began = time.monotonic()
    node_job.stop(0.5)
    assert time.monotonic() - began >= 0.5
    assert not runs(rank)
    assert not runs(torchrun)


def test_a_rank_whose_torchrun_was_killed_is_ended_with_its_node(run_id, tmp_path):
    node_job = ray_driver._NodeJob(run_id, 0, 0)
    rank, torchrun, codes = start(node_job, HANGS, tmp_path / "node")
    torchrun.kill()
    within(5, lambda: codes == [-9])
    assert runs(rank)
    node_job.stop(30.0)
    assert not runs(rank)


def test_an_attempt_ends_what_an_attempt_before_it_left_and_leaves_its_other_nodes_alone(run_id, tmp_path):
    left, _, _ = start(ray_driver._NodeJob(run_id, 0, 0), HANGS, tmp_path / "left")
    first, second = ray_driver._NodeJob(run_id, 1, 0), ray_driver._NodeJob(run_id, 1, 1)
    of_first, _, _ = start(first, SAVES, tmp_path / "first")
    assert not runs(left)
    of_second, _, _ = start(second, SAVES, tmp_path / "second")
    assert runs(of_first)
    first.stop(30.0)
    assert not runs(of_first)
    assert runs(of_second)


@pytest.mark.parametrize(
    ("codes", "failure", "num_attempts"),
    [
        ([2, 2], PlanError, 1),
        ([1, 2], CommunicationError, 4),  # one node may have lost its files; another may have lost this node
        ([1, 1], CommunicationError, 4),
    ],
)
def test_input_that_all_nodes_refuse_is_not_tried_again(codes, failure, num_attempts, monkeypatch, capsys):
    attempts = []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(exceptions=SimpleNamespace(RayError=KeyError)))
    monkeypatch.setattr(ray_driver, "_attempt", lambda *given: attempts.append(given) or codes)
    with pytest.raises(failure):
        ray_driver.run(ClusterJob(layout="dp2", nodes=Nodes(2, 1), out="run", restarts=3))
    assert len(attempts) == num_attempts
    assert capsys.readouterr().err.startswith(f"attempt 1 of 4 ended: {codes[0]}, {codes[1]}")
