"""Ranks on several nodes, which are network namespaces: they find each other, equal one device, and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager, suppress

import psutil
import pytest
import torch
from benchmarks.nodes import ENVIRONMENT, ROOT, nodes, why_not
from tests_dist import node_work
from tests_dist.command import FLAGS, end_all, losses_of_one_device, within

import shardwright as sw
from shardwright.checkpoint.manifest import steps_in
from shardwright.comm.backends.block_sizes import INLINE_BYTES
from shardwright.train.progress import read_metrics

LAYOUT = "pp2 mb2 dp2 tp2"
SCRIPT = str(ROOT / "tests_dist" / "node_work.py")
TRAIN = ["--module", "shardwright.cli", "train", *FLAGS]

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(why_not()), reason=why_not())]


def start(said, words):
    """Starts a command; what it says goes into a file."""
    with said.open("w") as file:
        return subprocess.Popen(words, start_new_session=True, stdout=file, stderr=file, env=os.environ | ENVIRONMENT)


@contextmanager
def started(each):
    """Runs commands on nodes, and ends all that is left of them."""
    processes = [start(said, words) for said, words in each]
    family = [psutil.Process(process.pid) for process in processes]
    try:
        yield processes
    finally:
        for process in processes:
            family += psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        end_all(family)
        for process in processes:
            process.wait()


def all_end_well(processes, folder):
    for process in processes:
        process.wait(timeout=200)
    said = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("said*")))
    assert [process.returncode for process in processes] == [0] * len(processes), said


def results_in(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]


def losses_of_steps(layout="single"):
    torch.manual_seed(0)
    return sw.launch(node_work.steps, 1, layout, ranks="threads")[0]["losses"]


def test_a_layout_over_two_nodes_equals_one_device_and_shares_memory_only_inside_of_a_node(tmp_path):
    with nodes(2) as made:
        each = [(tmp_path / f"said{n.number}", n.torchrun(2, 4, SCRIPT, LAYOUT, str(tmp_path))) for n in made]
        with started(each) as processes:
            all_end_well(processes, tmp_path)
    found = results_in(tmp_path)
    assert len(found) == 8
    for result in found:
        assert result["losses"] == pytest.approx(losses_of_steps(), rel=1e-5)
        assert result["ways"] == {"pp": "GlooChannel", "dp": "SharedChannel", "tp": "SharedChannel"}


def test_ranks_that_were_dealt_out_over_the_nodes_in_turn_are_renumbered_so_that_tp_stays_inside(tmp_path):
    with nodes(2) as made:
        each = []
        for rank in range(4):
            node, place = made[rank % 2], {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank // 2}
            place |= {"LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": made[0].address, "MASTER_PORT": 29511}
            each.append((tmp_path / f"said{rank}", node.rank(place, SCRIPT, "dp2 tp2", str(tmp_path))))
        with started(each) as processes:
            all_end_well(processes, tmp_path)
    for result in results_in(tmp_path):
        assert result["ways"] == {"dp": "GlooChannel", "tp": "SharedChannel"}
        assert result["losses"] == pytest.approx(losses_of_steps(), rel=1e-5)
        assert result["nodes"] == [0, 0, 1, 1]


def test_sums_over_ranks_of_two_nodes_are_taken_in_two_levels_and_equal_one_device(tmp_path):
    with nodes(2) as made:
        each = [(tmp_path / f"said{n.number}", n.torchrun(2, 2, SCRIPT, "dp4", str(tmp_path))) for n in made]
        with started(each) as processes:
            all_end_well(processes, tmp_path)
    found = results_in(tmp_path)
    assert [result["nodes"] for result in found] == [[0, 0, 1, 1]] * 4
    num_bytes = 4 * sum(parameter.numel() for parameter in node_work.plain().parameters())
    for result in found:
        assert result["ways"]["dp"] == "TwoLevelChannel"
        assert sum(result["sums"]) == 3 * num_bytes  # every gradient of each step
        assert min(result["sums"]) > INLINE_BYTES
        assert result["losses"] == pytest.approx(losses_of_steps(), rel=1e-5)


def test_train_over_two_nodes_equals_one_device(tmp_path):
    out = tmp_path / "run"
    words = [*TRAIN, "--layout", LAYOUT, "--steps", "4", "--out", str(out)]
    with nodes(2) as made:
        each = [(tmp_path / f"said{n.number}", n.torchrun(2, 4, *words)) for n in made]
        with started(each) as processes:
            all_end_well(processes, tmp_path)
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in rows] == pytest.approx(losses_of_one_device(out, tmp_path / "whole"), rel=1e-4)


STEPS = 4000


LOSSES = ["another node comes", "the node is started again", "the link is down and up again"]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_that_loses_a_node_goes_on_from_its_newest_checkpoint_when_there_are_enough_again(loss, tmp_path):
    out = tmp_path / "run"
    words = [*TRAIN, "--layout", "dp2 tp2", "--schedule", "constant", "--steps", str(STEPS), "--save-every", "5",
             "--out", str(out)]  # fmt: skip
    words += ["--timeout-s", "15"] if loss == LOSSES[2] else []  # no connection is closed: the ranks' wait has to end
    with nodes(3) as made:
        each = [(tmp_path / f"said{n.number}", n.torchrun(2, 2, *words, restarts=3)) for n in made]
        begun_s = time.time()
        with started(each[:2]) as (head, lost):
            assert within(120, lambda: read_metrics(out) or head.poll() is not None)
            start_s = time.time() - begun_s
            assert within(120, lambda: len(read_metrics(out)) >= 12 or head.poll() is not None)
            lost_s = time.time()
            if loss == LOSSES[2]:
                made[1].set_link("down")
                assert within(120, lambda: head.poll() is not None or not _ranks_of(head) + _ranks_of(lost))
                made[1].set_link("up")
            else:
                end_all([psutil.Process(lost.pid), *psutil.Process(lost.pid).children(recursive=True)])
            saved = int(steps_in(out / "checkpoints")[-1].name.removeprefix("step-"))
            came = {LOSSES[0]: each[2:], LOSSES[1]: [(tmp_path / "said again", each[1][1])], LOSSES[2]: []}[loss]
            with started(came):
                assert within(120, lambda: _goes_on(out, lost_s) or head.poll() is not None)
                recovered_s = time.time() - lost_s
                assert head.poll() is None, (tmp_path / f"said{made[0].number}").read_text()[-3000:]
                assert (lost.poll() is None) == (loss == LOSSES[2])
                print(f"a step {recovered_s:.1f} s after the loss; the first start took {start_s:.1f} s")
                os.killpg(head.pid, signal.SIGTERM)
                head.wait(timeout=60)
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    assert len(rows) > saved >= 10
    num_steps = min(len(rows), saved + 20)
    expected = losses_of_one_device(out, tmp_path / "whole", num_steps)
    assert [row["loss"] for row in rows[:num_steps]] == pytest.approx(expected, rel=1e-4)


def _ranks_of(torchrun):
    """The ranks that a torchrun has started and that have not ended."""
    found = []
    for child in psutil.Process(torchrun.pid).children(recursive=True):
        with suppress(psutil.Error):  # it ends at this moment, or has ended
            if "RANK" in child.environ():
                found.append(child)
    return found


def _goes_on(out, after_s):
    """Whether an attempt that began after that time has made a step."""
    if not (out / "run.json").exists() or (out / "run.json").stat().st_mtime < after_s:
        return False
    begun_s = (out / "run.json").stat().st_mtime
    return (out / "metrics.jsonl").stat().st_mtime > begun_s + 0.2
