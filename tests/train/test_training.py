import json

import pytest

from shardwright.errors import CheckpointError, PlanError
from shardwright.train.config import TrainConfig, read_toml
from shardwright.train.loop import Stop, train
from shardwright.train.progress import read_metrics

TINY = {"settings": {"num_layers": 1, "width": 16, "num_heads": 2, "dropout": 0.1}, "seq": 16, "batch": 6, "warmup": 2}


def losses_of(out):
    return [row["loss"] for row in read_metrics(out)]


def run(out, line, steps, **options):
    config = TrainConfig(layout=line, steps=12, stop_at=steps, **{**TINY, **options})
    return train(config, out, resume=(out / "metrics.jsonl").exists(), ranks="threads")


@pytest.mark.sampled(0)
def test_the_same_run_has_the_same_curve_under_any_layout(tmp_path):
    for line in ("single", "dp3", "tp2", "dp2 tp2 mb2"):
        run(tmp_path / line, line, 6)
    expected = losses_of(tmp_path / "single")
    assert expected[-1] < expected[0]
    for line in ("dp3", "tp2", "dp2 tp2 mb2"):
        assert losses_of(tmp_path / line) == pytest.approx(expected, rel=1e-5)


@pytest.mark.sampled(0)
def test_a_run_resumed_under_the_same_layout_repeats_the_uninterrupted_one_bit_for_bit(tmp_path):
    run(tmp_path / "whole", "dp2", 8)
    run(tmp_path / "parts", "dp2", 5)
    run(tmp_path / "parts", "dp2", 8)
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")


@pytest.mark.sampled(0)
def test_a_run_resumed_under_another_layout_follows_the_uninterrupted_one(tmp_path):
    run(tmp_path / "whole", "single", 8)
    run(tmp_path / "parts", "dp2 tp2", 4)
    run(tmp_path / "parts", "tp3", 8)
    assert losses_of(tmp_path / "parts") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)


def test_metrics_have_a_row_for_each_step_and_evaluations_where_asked(tmp_path):
    summary = run(tmp_path / "run", "dp2", 4, eval_every=2, eval_batches=2, tensorboard=True, save_every=1, keep=2)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [("eval_loss" in row) for row in rows] == [False, True, False, True]
    assert all(len(row["memory_bytes"]) == 2 and row["tokens_per_s"] > 0 for row in rows)
    assert summary["steps"] == 4
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 2


def test_a_run_with_a_stop_request_saves_and_can_be_resumed(tmp_path):
    stop = Stop()
    stop.request()
    config = TrainConfig(layout="dp2", steps=5, **TINY)
    summary = train(config, tmp_path / "run", ranks="threads", stop=stop)
    assert summary["stopped"]
    assert summary["steps"] == 1
    assert train(config, tmp_path / "run", resume=True, ranks="threads")["steps"] == 5


@pytest.mark.parametrize("key", ["batch", "seed", "seq"])
def test_a_resumed_run_cannot_change_what_its_samples_depend_on(tmp_path, key):
    run(tmp_path / "run", "single", 1)
    with pytest.raises(PlanError, match=f"cannot change '{key}'"):
        run(tmp_path / "run", "single", 2, **{key: 7})


def test_resuming_a_run_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        train(TrainConfig(steps=1, **TINY), tmp_path / "none", resume=True, ranks="threads")


def test_a_toml_file_is_read_with_its_types(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('layout = "dp2"\nsteps = 7\nlr = 0.01\n[settings]\nwidth = 24\n')
    assert read_toml(path) == {"layout": "dp2", "steps": 7, "lr": 0.01, "settings": {"width": 24}}
    path.write_text("lerning_rate = 1\n")
    with pytest.raises(PlanError, match="no setting 'lerning_rate'"):
        read_toml(path)


def test_the_rate_warms_up_and_comes_down_to_a_tenth():
    for schedule in ("cosine", "linear"):
        config = TrainConfig(steps=100, warmup=10, lr=1.0, schedule=schedule)
        rates = [config.learning_rate(step) for step in range(100)]
        assert rates[:10] == sorted(rates[:10])
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert max(rates) == 1.0
        assert config.learning_rate(100) == pytest.approx(0.1)
