"""A run whose model fails within a step, on one rank, saves the step before: its ranks agree by files."""

import os
import signal
import time

import pytest
import torch

import shardwright as sw
from shardwright.checkpoint import saving
from shardwright.checkpoint.manifest import steps_in
from shardwright.comm import world as worlds
from shardwright.errors import RankFailedError
from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics


def saves_and_fails(world, folder, rank):
    run = sw.parallelize(torch.nn.Linear(4, 4), "dp2/zero3", world, loss=sw.MeanSquaredError())
    plain = saving.save_file

    def late(*given):
        time.sleep(1)
        plain(*given)

    saving.save_file, worlds.WRITERS_S = late, 60.0  # in this rank's process; 3 s would be little on a busy machine
    sw.save(folder, run, wait=False)
    if world.rank == rank:
        raise RuntimeError("of the work")
    world.everyone().barrier()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_fail_beside_a_save_wait_some_seconds_for_it(tmp_path, rank):
    with pytest.raises(RankFailedError, match=f"(?s)rank {rank} failed.*of the work"):
        sw.launch(saves_and_fails, 2, tmp_path, rank)
    assert [step.name for step in steps_in(tmp_path)] == ["step-00000000"]


def stops(world, folder, launcher):
    run = sw.parallelize(torch.nn.Linear(4, 4), "dp2", world, loss=sw.MeanSquaredError())
    optimizer, batch = run.optimizer(torch.optim.AdamW), (torch.ones(4, 4), torch.ones(4, 4))
    for part in run.shard([batch] * 100_000):
        run.step(part)
        optimizer.step()
        if run.stop_requested():
            return sw.save(folder, run, optimizer).name
        if run.num_steps == 3 and world.rank == 1:
            os.kill(launcher, signal.SIGTERM)
    raise AssertionError("it was not told")


def test_a_loop_of_a_persons_own_that_asks_saves_at_the_signal_that_its_launcher_gets(tmp_path):
    names = sw.launch(stops, 2, tmp_path, os.getpid())
    assert names == [steps_in(tmp_path)[-1].name] * 2
    assert names[0] >= "step-00000003"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


OPTIONS = {"model": "tests_dist.failing_model:failing", "seq": 16, "batch": 4, "steps": 6}


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3"])
def test_a_step_that_fails_on_one_rank_leaves_a_checkpoint_of_the_step_before(tmp_path, monkeypatch, line):
    monkeypatch.setenv("FAILS_ON", "1")
    out, config = tmp_path / "run", TrainConfig(layout=line, **OPTIONS)
    with pytest.raises(RankFailedError, match=r"(?s)rank 1 failed.*the fourth step is too much"):
        train(config, out)
    assert [step.name for step in steps_in(out / "checkpoints")] == ["step-00000003"]
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000003"]
    monkeypatch.delenv("FAILS_ON")
    train(config, out, resume=True)
    train(TrainConfig(layout="single", **OPTIONS), tmp_path / "whole", ranks="threads")
    found, expected = ([row["loss"] for row in read_metrics(each)] for each in (out, tmp_path / "whole"))
    assert found == pytest.approx(expected, rel=1e-5)


SOON_S = 10


@pytest.mark.parametrize(("line", "rank", "saved"), [("dp3", 1, [3]), ("dp2", 0, [3]), ("dp2/zero3", 1, [])])
def test_ranks_that_are_left_save_without_one_that_is_killed_if_they_hold_all(tmp_path, monkeypatch, line, rank, saved):
    monkeypatch.setenv("FAILS_ON", str(rank))
    monkeypatch.setenv("FAILS_BY", str(int(signal.SIGKILL)))
    out, config = tmp_path / "run", TrainConfig(layout=line, **OPTIONS)
    with pytest.raises(RankFailedError, match=f"rank {rank} was killed by SIGKILL"):
        train(config, out)
    ended_s = time.time()
    assert [path.name for path in (out / "checkpoints").glob("*")] == [f"step-0000000{step}" for step in saved]
    if not saved:
        return
    assert ended_s - (out / "metrics.jsonl").stat().st_mtime < SOON_S
    monkeypatch.delenv("FAILS_ON")
    assert train(config, out, resume=True)["steps"] == 6
    train(TrainConfig(layout="single", **OPTIONS), tmp_path / "whole", ranks="threads")
    found, expected = ({row["step"]: row["loss"] for row in read_metrics(each)} for each in (out, tmp_path / "whole"))
    assert {4, 5, 6} <= found.keys()
    assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-5)
