"""A run whose model fails within a step, on one rank, saves the step before: its ranks agree by files."""

import pytest

from shardwright.checkpoint.manifest import steps_in
from shardwright.errors import RankFailedError
from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics

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
