"""Folders that a user may have meant are found near a path, and proposed by the errors of runs and of weights."""

from __future__ import annotations

import os

import pytest

from shardwright.errors import CheckpointError
from shardwright.text_files import folders_near
from shardwright.train.run_file import RUN_FILE, options_of
from shardwright.weights.stores import open_store


def with_file(folder, name, at=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("{}")
    os.utime(folder, (at, at))
    return folder


def near(path):
    return folders_near(path, lambda folder: (folder / "it").is_file())


def test_folders_below_beside_and_above_are_found_the_newest_first(tmp_path):
    old, new = with_file(tmp_path / "runs" / "old", "it", 1), with_file(tmp_path / "runs" / "deep" / "new", "it", 2)
    assert near(tmp_path / "runs") == f"'{new}' or '{old}'"
    assert near(tmp_path / "runs" / "missing") == f"'{new}' or '{old}'"
    assert near(old / "checkpoints") == f"'{old}'"
    assert near(tmp_path / "elsewhere" / "missing") == ""
    assert near(tmp_path) == f"'{old}'"  # the other lies three levels below


def test_at_most_three_are_proposed_and_links_are_not_followed(tmp_path):
    made = [with_file(tmp_path / f"{number}", "it", number) for number in range(5)]
    (tmp_path / "link").symlink_to(made[0])
    assert near(tmp_path) == " or ".join(f"'{each}'" for each in reversed(made[2:]))


def test_a_run_one_folder_deeper_is_proposed(tmp_path):
    run = with_file(tmp_path / "runs" / "first", RUN_FILE)
    with pytest.raises(CheckpointError, match=f"fix: +write '{run}', or start a run there without --resume"):
        options_of(tmp_path / "runs")


@pytest.mark.parametrize("meant", ["runs", "runs/mistyped", "runs/mistyped.safetensors"])
def test_weights_one_folder_deeper_are_proposed(tmp_path, meant):
    weights = with_file(tmp_path / "runs" / "first", "model.safetensors")
    with pytest.raises(CheckpointError, match=f"fix: +write '{weights}'"):
        open_store(tmp_path / meant)
