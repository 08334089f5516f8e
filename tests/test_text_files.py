"""Folders that a user may have meant are proposed by errors; pipes are read and written without waiting for ever."""

from __future__ import annotations

import contextlib
import os
import threading

import pytest

from shardwright import text_files
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
    with pytest.raises(CheckpointError, match=f"fix: +write '{run}', or start a run there with train"):
        options_of(tmp_path / "runs")


@pytest.mark.parametrize("meant", ["runs", "runs/mistyped", "runs/mistyped.safetensors"])
def test_weights_one_folder_deeper_are_proposed(tmp_path, meant):
    weights = with_file(tmp_path / "runs" / "first", "model.safetensors")
    with pytest.raises(CheckpointError, match=f"fix: +write '{weights}'"):
        open_store(tmp_path / meant)


def test_a_pipe_to_which_nothing_is_written_or_that_none_reads_is_an_error_and_not_waited_for(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(text_files, "PIPE_S", 0.01)
    with pytest.raises(OSError, match=r"nothing was written in 0\.01 s"):
        text_files.read_text(pipe, 100)
    with pytest.raises(OSError, match="No such device"):
        text_files.write_text(pipe, "a page")


def test_what_goes_through_a_pipe_is_read_whole(tmp_path):
    pipe, text = tmp_path / "pipe", "lines\n" * 50_000  # more than a pipe holds
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    assert text_files.read_text(pipe, 10**6) == text
    writer.join()
    found = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    while not found:
        with contextlib.suppress(OSError):  # the reader is not there yet
            text_files.write_text(pipe, text)
            reader.join()
    assert found == [text]
