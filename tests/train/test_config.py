"""Options are read from text and TOML; invalid ones are refused with a fix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import CheckpointError, LayoutError, PlanError
from shardwright.train.config import TrainConfig, read_options, read_toml
from shardwright.train.progress import write_json
from shardwright.train.run_file import RUN_FILE, read_run, run_name_in

NAN, INFINITY = float("nan"), float("inf")


def refused(kind, call, *args, **named):
    with pytest.raises(kind) as caught:
        call(*args, **named)
    text = str(caught.value)
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:4]] == ["given", "allowed", "fix"], text
    return text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("grace_s", value) for value in (NAN, INFINITY, -1.0, 0, 1e300)),
        *((key, value) for key in ("lr", "clip", "weight_decay", "timeout_s") for value in (NAN, INFINITY, -1.0)),
        *((key, 0) for key in ("batch", "seq", "steps", "timeout_s")),
        *(
            (key, -1)
            for key in ("batch", "steps", "warmup", "save_every", "keep", "eval_every", "eval_batches", "stop_at")
        ),
        ("weight_decay", 1.0),
        ("schedule", "sine"),
    ],
)
def test_an_invalid_value_is_refused_and_named(key, value):
    assert key in refused(PlanError, TrainConfig, **{key: value})


@pytest.mark.parametrize("line", ["", " ", "dp0", "dp2 dp2", "xp2", "dp2,tp2"])
def test_an_invalid_layout_line_is_refused(line):
    refused(LayoutError, TrainConfig, layout=line)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 3", "write steps"),
        ("stepz = 3\nLayout = 'dp2'\nseed = 1", "has no setting 'stepz' and none 'Layout'"),
        ("stepz = 3\nLayout = 'dp2'", "fix:     write steps; write layout"),
        ("ema = 1.5", "set ema=0.999"),
        ("steps = 'three'", "a whole number"),
        ("steps = 2.5", "a whole number"),
        ("steps = [3]", "a whole number"),
        ("tensorboard = 3", "true or false"),
        ("schedule = 'cosin'", "write schedule=cosine"),
        ("settings = 3", "write [settings] on a line of its own"),
        ("[settings.more]\n[extra]", "no setting 'extra'"),
        ("steps = ", "correct that line"),
        ("steps = 1\nsteps = 2", "correct that line"),
    ],
)
def test_an_invalid_toml_file_is_refused_with_a_fix(tmp_path, text, words):
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert words in refused(PlanError, lambda: TrainConfig(**read_toml(path)))


def test_a_toml_file_of_windows_may_begin_with_a_mark_of_its_encoding(tmp_path):
    (tmp_path / "run.toml").write_text("steps = 3", "utf-8-sig")
    assert read_toml(tmp_path / "run.toml") == {"steps": 3}


def test_a_file_that_is_not_text_and_a_missing_one_are_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    assert "is not TOML" in refused(PlanError, read_toml, tmp_path / "bytes")
    assert "cannot read" in refused(PlanError, read_toml, tmp_path / "nowhere")
    assert "cannot read" in refused(PlanError, read_toml, tmp_path)


def test_a_run_is_read_back_as_it_was_written(tmp_path):
    config = TrainConfig(layout="tp2 dp2", settings={"num_layers": 1, "style": "llama"}, lr=3e-4, stop_at=2)
    write_json(tmp_path / RUN_FILE, {"options": config.to_dict()})
    assert TrainConfig(**read_run(tmp_path)) == TrainConfig(**{**config.to_dict(), "stop_at": 0})


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"options": 3}', '{"options": {"stepz": 3}}', "\x00"])
def test_an_invalid_run_file_is_refused(tmp_path, text):
    (tmp_path / RUN_FILE).write_text(text)
    refused(CheckpointError, read_run, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"torchrun": 3}', "[" * 100_000])
def test_a_folder_without_a_run_of_torchrun_names_none(tmp_path, text):
    (tmp_path / RUN_FILE).write_text(text)
    assert run_name_in(tmp_path) is None


def test_words_become_values_of_the_right_type():
    found = read_options({"steps": "7", "lr": "1e-3", "tensorboard": "yes", "layout": " dp2 "}, given_in="flags")
    assert found == {"steps": 7, "lr": 1e-3, "tensorboard": True, "layout": "dp2"}


@given(st.sampled_from(["cosine", "linear", "constant"]), st.integers(1, 50), st.integers(0, 60), st.integers(0, 200))
def test_the_rate_is_above_zero_never_above_the_highest_and_only_falls_after_the_warm_up(schedule, steps, warmup, step):
    config = TrainConfig(steps=steps, warmup=warmup, lr=2.0, schedule=schedule)
    rate, following = config.learning_rate(step), config.learning_rate(step + 1)
    assert 0 < rate <= 2.0
    assert following > rate if step + 1 < warmup else following <= 2.0
    if step >= warmup:
        assert following <= rate
        assert rate >= 0.2 * (1 - 1e-12)


def test_a_run_ends_at_stop_at_or_when_all_steps_are_done():
    assert [TrainConfig(steps=5, stop_at=stop).last_step for stop in (0, 3, 5, 9)] == [5, 3, 5, 5]
