"""Ranks on several nodes, which are network namespaces: they find each other, equal one device, and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress

import psutil
import pytest
from benchmarks.nodes import ENVIRONMENT, ROOT, fork_ranks, nodes, why_not
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


def run_ranks(places, folder, *words):
    """Runs a script as a rank on each of these nodes, all forks of one process; what ranks say goes into files."""
    with ExitStack() as files:
        nothing = files.enter_context(open(os.devnull)).fileno()
        said = [files.enter_context((folder / f"said{rank}").open("w")).fileno() for rank in range(len(places))]
        process = fork_ranks(places, 29511, [(nothing, each, each) for each in said], *words)
    try:
        all_end_well([process], folder)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def all_end_well(processes, folder):
    for process in processes:
        process.wait(timeout=200)
    said = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("said*")))
    assert [process.returncode for process in processes] == [0] * len(processes), said


def results_in(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))]


def losses_of_steps():
    return sw.launch(node_work.steps, 1, "single", ranks="threads")[0]["under"]["single"]["losses"]


def check_two_levels(found, line):
    """Every gradient of each step was summed in two levels, inside of a node and between nodes."""
    num_bytes = 4 * sum(parameter.numel() for parameter in node_work.plain().parameters())
    for result in found:
        assert result["under"][line]["ways"]["dp"] == "TwoLevelChannel"
        assert sum(result["under"][line]["sums"]) == 3 * num_bytes
        assert min(result["under"][line]["sums"]) > INLINE_BYTES


def test_layouts_over_two_nodes_equal_one_device_share_memory_only_inside_of_a_node_and_sum_in_two_levels(tmp_path):
    lines = LAYOUT, "dp8"  # under one start, whose processes take longer than their steps
    with nodes(2) as made:
        each = [(tmp_path / f"said{n.number}", n.torchrun(2, 4, SCRIPT, str(tmp_path), *lines)) for n in made]
        with started(each) as processes:
            all_end_well(processes, tmp_path)
    found, expected = results_in(tmp_path), losses_of_steps()
    assert [result["nodes"] for result in found] == [[0] * 4 + [1] * 4] * 8
    for result in found:
        assert result["under"][LAYOUT]["ways"] == {"pp": "GlooChannel", "dp": "SharedChannel", "tp": "SharedChannel"}
        for line in lines:
            assert result["under"][line]["losses"] == pytest.approx(expected, rel=1e-5)
    check_two_levels(found, "dp8")


def test_ranks_that_were_dealt_out_over_the_nodes_in_turn_are_renumbered_so_that_tp_stays_inside(tmp_path):
    lines = "dp2 tp2", "dp4"
    with nodes(2) as (one, other):
        run_ranks([one, other] * 2, tmp_path, SCRIPT, str(tmp_path), *lines)
    found, expected = results_in(tmp_path), losses_of_steps()
    assert [result["nodes"] for result in found] == [[0, 0, 1, 1]] * 4
    for result in found:
        assert result["under"]["dp2 tp2"]["ways"] == {"dp": "GlooChannel", "tp": "SharedChannel"}
        for line in lines:
            assert result["under"][line]["losses"] == pytest.approx(expected, rel=1e-5)
    check_two_levels(found, "dp4")


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


def killed(torchrun):
    end_all([psutil.Process(torchrun.pid), *psutil.Process(torchrun.pid).children(recursive=True)])


@pytest.mark.timeout(600)
def test_a_run_that_loses_a_node_goes_on_from_its_newest_checkpoint_when_there_are_enough_again(tmp_path):
    """Three losses of one run: another node comes, that node is started again, its link is down and up again."""
    out = tmp_path / "run"
    # no connection is closed where a link is down: the ranks' wait has to end
    words = [*TRAIN, "--layout", "dp2 tp2", "--schedule", "constant", "--steps", str(STEPS), "--save-every", "5",
             "--timeout-s", "15", "--out", str(out)]  # fmt: skip
    saved = 0
    with nodes(3) as made, ExitStack() as running:

        def begin(node, name):
            return running.enter_context(started([(tmp_path / name, node.torchrun(2, 2, *words, restarts=5))]))[0]

        def goes_on_after(moment_s):
            assert within(120, lambda: _goes_on(out, moment_s) or head.poll() is not None)
            assert head.poll() is None, (tmp_path / "said head").read_text()[-3000:]
            print(f"a step after {time.time() - moment_s:.1f} s")

        def loses():
            """The moment of the loss, when there are checkpoints that the run has made since the one before."""
            assert within(120, lambda: len(read_metrics(out)) >= saved + 12 or head.poll() is not None)
            return time.time()

        def newest():
            return int(steps_in(out / "checkpoints")[-1].name.removeprefix("step-"))

        begun_s = time.time()
        head, other = begin(made[0], "said head"), begin(made[1], "said")
        goes_on_after(begun_s)
        for node, name in ((made[2], "said another"), (made[2], "said again")):
            lost_s = loses()
            killed(other)
            saved = newest()
            other = begin(node, name)
            goes_on_after(lost_s)
        lost_s = loses()
        made[2].set_link("down")
        assert within(120, lambda: head.poll() is not None or not _ranks_of(head) + _ranks_of(other))
        made[2].set_link("up")
        saved = newest()
        goes_on_after(lost_s)
        assert other.poll() is None
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
