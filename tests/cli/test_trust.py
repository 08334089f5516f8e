"""Folders, files and values that would harm: refused in a few lines, with exit code 2, and never with a traceback."""

from __future__ import annotations

import json
import os
import stat

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import app

TINY = ["--set", "num_layers=1", "--set", "width=16", "--set", "num_heads=2", "--seq", "16", "--batch", "4"]
TRAIN = ["train", "--steps", "1", "--ranks", "threads", *TINY]


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def refused(*arguments):
    """The text of a refusal: an error of four lines, and code 2."""
    found = run(*arguments)
    assert found.exit_code == 2, (found.output, found.exception)
    assert found.stderr.startswith("error: ")
    assert all(word in found.stderr for word in ("given:", "allowed:", "fix:")), found.stderr
    return found.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    assert run(*TRAIN, "--out", out).exit_code == 0
    return out


# ---- a run folder from another person


@pytest.fixture
def hostile(tmp_path):
    """A run folder whose model is a factory that writes a file when it is called."""
    out = tmp_path / "run"
    assert run(*TRAIN, "--out", out).exit_code == 0
    path = out / "run.json"
    found = json.loads(path.read_text())
    found["options"] |= {"model": "subprocess:Popen", "settings": {"args": f"('touch', '{tmp_path / 'executed'}')"}}
    path.write_text(json.dumps(found))
    return out


@pytest.mark.parametrize("verb", ["sample", "train"])
def test_a_factory_that_only_a_folder_names_is_never_imported(hostile, verb, monkeypatch):
    monkeypatch.setattr("importlib.import_module", None)
    command = ["sample", "--from", hostile] if verb == "sample" else ["train", "--resume", "--out", hostile]
    assert "add --model subprocess:Popen" in refused(*command, "--ranks", "threads")
    assert "has another model" in refused(*command, "--ranks", "threads", "--model", "os:system")
    assert not (hostile.parent / "executed").exists()


def test_a_factory_that_the_command_names_too_is_resumed_and_a_file_of_options_counts(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20)
    own = ["--model", "torch.nn:Embedding", "--set", "num_embeddings=256", "--set", "embedding_dim=256"]
    data = ["--data", tmp_path / "text", "--seq", "8", "--batch", "2", "--ranks", "threads", "--out", tmp_path / "run"]
    assert run("train", "--steps", "1", *own, *data).exit_code == 0
    again = ["train", "--resume", "--steps", "2", "--ranks", "threads", "--out", tmp_path / "run"]
    assert "add --model torch.nn:Embedding" in refused(*again)
    assert run(*again, "--model", "torch.nn:Embedding").exit_code == 0
    (tmp_path / "options.toml").write_text("model = 'torch.nn:Embedding'\nsteps = 3\n")
    assert run(*again[:2], *again[4:], "--config", tmp_path / "options.toml").exit_code == 0


# ---- export


def test_export_writes_beside_and_leaves_nothing_else(trained, tmp_path):
    to = tmp_path / "new" / "model.safetensors"
    assert run("checkpoint", "export", trained, to).exit_code == 0
    before = to.stat().st_ino
    assert run("checkpoint", "export", trained, to).exit_code == 0
    assert to.stat().st_ino != before
    assert [path.name for path in to.parent.iterdir()] == [to.name]


@pytest.mark.parametrize("kind", ["a device", "a pipe", "a folder", "a link", "a name that is too long"])
def test_export_refuses_a_target_that_is_no_regular_file_and_leaves_it(trained, tmp_path, kind):
    to = tmp_path / ("x" * 300 if "long" in kind else "target")
    if kind == "a device":
        try:
            os.mknod(to, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    elif kind == "a pipe":
        os.mkfifo(to)
    elif kind == "a folder":
        to.mkdir()
    elif kind == "a link":
        to.symlink_to(tmp_path / "elsewhere")
    before = to.lstat() if "long" not in kind else None
    assert f"cannot write '{to}'" in refused("checkpoint", "export", trained, to)
    assert before is None or to.lstat() == before
    assert len(list(tmp_path.iterdir())) == (before is not None)


def test_export_of_a_broken_checkpoint_is_refused_and_writes_nothing(trained, tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("shardwright.checkpoint.export.read_whole", fails)
    assert "could not be read" in refused("checkpoint", "export", trained, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
