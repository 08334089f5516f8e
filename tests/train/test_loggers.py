"""Loggers and callbacks of a training run: they get each row on the first rank, and a logger that fails ends no run."""

from __future__ import annotations

import json
import struct
import sys
import types

import pytest

from shardwright.errors import PlanError
from shardwright.train.config import TrainConfig
from shardwright.train.loggers import LOGGERS, check_loggers, open_logger, scalars
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics
from shardwright.train.run_file import read_run

SMALL = {"num_layers": 2, "width": 8, "num_heads": 2}
ROW = {"step": 3, "loss": 0.5, "lr": 0.1, "grad_norm": None, "memory_bytes": [5, 7]}
SEEN: list[dict] = []


def take(row):
    SEEN.append(row)


def config(**options):
    return TrainConfig(**{"settings": SMALL, "seq": 8, "batch": 4, "steps": 3, "warmup": 1, **options})


@pytest.fixture
def importable(monkeypatch):
    """This module by a name that a command can import."""
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    SEEN.clear()


def test_a_function_gets_the_row_of_each_step_on_the_first_rank(tmp_path, importable):
    train(config(layout="dp2", logger="mine:take"), tmp_path / "run", ranks="threads")
    assert read_metrics(tmp_path / "run") == SEEN
    assert [row["step"] for row in SEEN] == [1, 2, 3]


def test_a_callback_that_returns_true_ends_the_run_with_a_checkpoint_on_all_ranks(tmp_path):
    rows = []

    def stop_at_two(row):
        rows.append(row["step"])
        return row["step"] == 2

    summary = train(config(layout="dp2"), tmp_path / "run", ranks="threads", on_step=stop_at_two)
    assert rows == [1, 2]
    assert summary["stopped"]
    assert summary["steps"] == 2
    assert summary["checkpoint"].endswith("00000002")


def test_a_logger_that_fails_is_left_out_with_one_warning_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    def fail(row):
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(fail=fail, take=take))
    SEEN.clear()
    summary = train(config(logger="mine:fail,mine:take"), tmp_path / "run", ranks="threads")
    assert summary["steps"] == 3
    assert len(SEEN) == 3
    warning = " ".join(capsys.readouterr().err.split())
    assert warning.count("the logger 'mine:fail' failed, and gets no more: ConnectionError: no network") == 1


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("wandb", "pip install wandb"),
        ("mlflow", "pip install mlflow"),
        ("wandbs", "write --logger wandb"),
        ("no.such:thing", "set PYTHONPATH"),
        ("mine:SMALL", "write mine:"),
    ],
)
def test_a_logger_that_is_not_there_is_refused_before_ranks_start(tmp_path, monkeypatch, importable, name, fix):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PlanError) as caught:
        train(config(logger=name), tmp_path / "run", ranks="threads")
    assert fix in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_adapters_give_their_package_the_numbers_of_a_step_and_end_with_the_run(tmp_path, monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("finished")
    )
    wandb = types.SimpleNamespace(init=lambda **options: calls.append(options["config"]) or run)
    mlflow = types.SimpleNamespace(
        start_run=lambda run_name: calls.append(run_name), log_params=calls.append,
        log_metrics=lambda values, step: calls.append((values, step)), end_run=lambda: calls.append("ended"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    numbers = {"loss": 0.5, "lr": 0.1, "memory_bytes": 7}
    for name, begun, end in (("wandb", [{"a": 1}], "finished"), ("mlflow", [tmp_path.name, {"a": "1"}], "ended")):
        calls.clear()
        logger = open_logger(name, tmp_path, {"a": 1})
        logger.add(ROW)
        logger.close()
        assert calls == [*begun, (numbers, 3), end]


def logged_by_wandb(folder):
    """The numbers of each step in the file of an offline run of the real W&B."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("run/wandb/offline-run-*/*.wandb")
    data, at = file.read_bytes(), 7  # records of a few hundred bytes in the format of LevelDB's log, after a header
    assert data.startswith(b":W&B")
    assert len(data) < 2**15, "more than one block"
    while at < len(data):
        _, size, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a record in one part"
        record, at = Record(), at + 7 + size
        record.ParseFromString(data[at - size : at])
        if record.WhichOneof("record_type") == "history":
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            yield row["_step"], {key: value for key, value in row.items() if not key.startswith("_")}


def logged_by_mlflow(folder):
    """The numbers of each step in the store of the real MLflow."""
    from mlflow import MlflowClient

    client = MlflowClient()
    (run,) = client.search_runs(["0"])
    assert run.info.run_name == "run"
    assert run.info.status == "FINISHED"
    assert run.data.params["layout"] == "dp2 tp2"
    rows = {}
    for key in run.data.metrics:
        for each in client.get_metric_history(run.info.run_id, key):
            rows.setdefault(each.step, {})[key] = each.value
    return sorted(rows.items())


@pytest.mark.filterwarnings("ignore")  # those of the packages
@pytest.mark.parametrize(("name", "read"), [("wandb", logged_by_wandb), ("mlflow", logged_by_mlflow)])
def test_the_real_package_keeps_the_numbers_of_each_step(tmp_path, monkeypatch, name, read):
    pytest.importorskip(name, reason=f"needs {name}: pip install wandb mlflow-skinny")
    monkeypatch.chdir(tmp_path)
    for key, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }.items():
        monkeypatch.setenv(key, value)
    train(config(layout="dp2 tp2", logger=name), tmp_path / "run", ranks="threads")
    found = [(step, pytest.approx(numbers)) for step, numbers in read(tmp_path)]
    assert [(row["step"], scalars(row)) for row in read_metrics(tmp_path / "run")] == found


def test_a_logger_that_cannot_be_opened_is_an_error_of_the_options_on_every_rank(tmp_path, monkeypatch):
    def init(**options):
        raise ConnectionError("no account")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setattr("shardwright.train.loggers._is_installed", lambda name: True)
    with pytest.raises(PlanError, match="no account"):
        train(config(layout="dp2", logger="wandb"), tmp_path / "run", ranks="threads")


def test_tensorboard_reads_what_was_written(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = open_logger("tensorboard", tmp_path, {})
    logger.add(ROW)
    logger.close()
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(3, 0.5)]


def test_the_same_logger_is_asked_for_once():
    assert config(logger="tensorboard", tensorboard=True).loggers == ["tensorboard"]
    check_loggers([])


@pytest.mark.sampled(0)
def test_rows_and_the_progress_line_tell_the_bubble_memory_and_tokens_of_a_device(tmp_path, capsys):
    train(config(layout="pp2 mb2", steps=2), tmp_path / "run", ranks="threads")
    rows = read_metrics(tmp_path / "run")
    assert all(0 <= row["bubble"] < 1 and len(row["memory_bytes"]) == 2 for row in rows)
    line = capsys.readouterr().err.splitlines()[-1]
    assert " a device)" in line
    assert "bubble " in line
    assert "per rank" in line
    train(config(layout="dp2", steps=1), tmp_path / "other", ranks="threads")
    assert read_metrics(tmp_path / "other")[0]["bubble"] is None


@pytest.mark.sampled(0)
def test_a_run_is_profiled_for_some_steps_into_its_folder(tmp_path):
    summary = train(config(layout="dp2", steps=7, profile=2), tmp_path / "run", ranks="threads")
    trace = (tmp_path / "run" / "trace.json").read_text()
    assert summary["trace"] == str(tmp_path / "run" / "trace.json")
    assert [f'"step {number}"' in trace for number in range(7)] == [False] * 4 + [True, True, False]
    assert "profile" not in read_run(tmp_path / "run"), "a resumed run is profiled only if it is asked to"


def test_a_folder_of_a_run_brings_no_function_along(tmp_path, importable):
    train(config(logger="mine:take,tensorboard", steps=1), tmp_path / "run", ranks="threads")
    assert read_run(tmp_path / "run")["logger"] == "tensorboard"


def test_a_folder_of_the_name_of_a_package_is_not_the_package(tmp_path, monkeypatch):
    (tmp_path / "logged_elsewhere").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(LOGGERS, "logged_elsewhere", (lambda *_: None, "pip install it"))
    with pytest.raises(PlanError, match="is not installed"):
        check_loggers(["logged_elsewhere"])
