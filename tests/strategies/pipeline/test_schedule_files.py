"""Schedules in files: read back as written, in the letters torch writes, and broken ones refused with the place."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.strategies.pipeline.schedule_checks import check_schedule
from shardwright.strategies.pipeline.schedules import build
from shardwright.strategies.pipeline.schedules.file import read_schedule
from shardwright.strategies.pipeline.simulate import ChunkTimes, simulate
from strategies.pipeline.by_hand import NAMES, schedules


def write_schedule(schedule, path):
    """Writes a schedule as JSON or CSV; CSV does not keep its name."""
    rows = [[str(action) for action in actions] for actions in schedule.actions]
    if path.suffix == ".json":
        path.write_text(json.dumps({"name": schedule.name, "stages": rows}))
    else:
        path.write_text("".join(",".join(row) + "\n" for row in rows))


@given(schedules(most_stages=5, most_microbatches=7), st.sampled_from(["mine.csv", "mine.json"]))
def test_a_schedule_is_read_back_as_it_was_written(schedule, name):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write_schedule(schedule, path)
        again = read_schedule(path)
    assert again == (schedule if path.suffix == ".json" else replace(schedule, name="mine"))
    check_schedule(again, schedule.num_microbatches)


@given(schedules(most_stages=4, most_microbatches=5), st.randoms(use_true_random=False))
def test_idle_slots_spaces_and_rows_of_any_length_change_nothing(schedule, random):
    rows = []
    for actions in schedule.actions:
        cells = []
        for action in actions:
            cells += [" "] * random.randrange(3) + [f" {action} "]
        rows.append(",".join(cells + [""] * random.randrange(3)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.csv"
        path.write_text("\r\n".join(rows) + "\r\n\r\n", encoding="utf-8-sig")
        assert read_schedule(path) == replace(schedule, name="mine")


@pytest.mark.parametrize("name", NAMES)
def test_the_cells_are_those_of_torch(name):
    torch_action = pytest.importorskip("torch.distributed.pipelining.schedules")._Action
    for actions in build(name, 2, 3).actions:
        for action in actions:
            theirs = torch_action.from_str(str(action))
            assert str(theirs) == str(action)
            assert (theirs.stage_index, theirs.microbatch_index) == (action.chunk, action.microbatch)


def test_a_cell_without_a_chunk_means_the_chunk_of_its_row(tmp_path):
    (tmp_path / "mine.csv").write_text("F0,F1,,B0,,B1\n,F0,B0,F1,B1\n")
    assert read_schedule(tmp_path / "mine.csv") == replace(build("1f1b", 2, 2), name="mine")


@pytest.mark.parametrize(
    ("text", "name"),
    [('{"name": "best", "stages": [["0F0", null, "0B0"]]}', "best"), ('{"stages": [["F0", "B0"]]}', "mine")],
)
def test_json_keeps_the_name_and_may_leave_it_out(tmp_path, text, name):
    (tmp_path / "mine.JSON").write_text(text)
    schedule = read_schedule(str(tmp_path / "mine.JSON"))
    assert schedule.name == name
    assert simulate(schedule, ChunkTimes.equal(1)).makespan_s == 3


def refused(tmp_path, content, name="mine.csv"):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(LayoutError) as error:
        read_schedule(path)
    text = str(error.value)
    assert str(path) in text
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == ["given", "allowed", "fix"]
    return text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["cannot read", "No such file"]),
        (b"\xff\xfe0F0", ["not text in UTF-8"]),
        ("", ["no actions", "an empty file"]),
        (",,\n\n,", ["no actions", "only empty cells"]),
        ("0F0,0B0\n,\n1F0,1B0", ["row 2 (stage 1)", "only empty cells"]),
        ("0F0,0X0", ["row 1 (stage 0), column 2", "'0X0'"]),
        ("0F0,0B0\n1F0,1b0", ["row 2 (stage 1), column 2", "'1b0'"]),
        ("0F0,-1B0", ["column 2", "'-1B0'"]),
        ("0F0,0B", ["column 2", "'0B'"]),
        ("0F0,0F99999999999999999999", ["column 2", "'0F99999999999999999999'"]),
        ("0F0,0B0,0F٣", ["column 3", "'0F٣'"]),
        ("a\0b", ["column 1"]),
        ("0F0,0B0\n0F1,0B1", ["chunk 0 is on two stages", "0F0 in row 1, column 1", "0F1 in row 2, column 1"]),
        ("0F0,0B0,1F0\n1F0,1B0", ["chunk 1 is on two stages", "1F0 in row 1, column 3", "1F0 in row 2, column 1"]),
        ("0F0,0B0\n2F0,2B0", ["chunk 1 is missing", "2F0 in row 2, column 1"]),
        ("0F0,0B0,0F999999999", ["microbatch 1 is missing", "0F999999999 in row 1, column 3"]),
    ],
)
def test_a_broken_csv_file_is_refused_with_the_place(tmp_path, content, words):
    text = refused(tmp_path, content)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["cannot read"]),
        ("{", ["no schedule in JSON", "line 1"]),
        ("[" * 100_000, ["no schedule in JSON"]),
        ("[]", ["no list under 'stages'"]),
        ("{}", ["no list under 'stages'"]),
        ('{"stages": 3}', ["no list under 'stages'"]),
        ('{"stages": []}', ["no actions"]),
        ('{"stages": [["0F0"], 3]}', ["row 2 (stage 1) is 3"]),
        ('{"stages": [["0F0", 3]]}', ["row 1 (stage 0), column 2", "3"]),
        ('{"stages": [["0F0", "0Q0"]]}', ["row 1 (stage 0), column 2", "'0Q0'"]),
    ],
)
def test_a_broken_json_file_is_refused_with_the_place(tmp_path, content, words):
    text = refused(tmp_path, content, "mine.json")
    assert [word for word in words if word not in text] == []


def test_a_file_that_would_take_long_to_read_is_refused_by_its_size(tmp_path):
    assert "more than 4194304 bytes" in refused(tmp_path, b"F0," * 1_400_000)


def test_a_folder_is_no_schedule(tmp_path):
    with pytest.raises(LayoutError, match="cannot read the schedule file"):
        read_schedule(tmp_path)


@given(st.binary(max_size=60) | st.text("0123FBIW,\n \"'[]{}:", max_size=40).map(str.encode))
def test_whatever_the_bytes_a_file_is_a_schedule_or_refused(content):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("mine.csv", "mine.json"):
            path = Path(folder) / name
            path.write_bytes(content)
            try:
                schedule = read_schedule(path)
                check_schedule(schedule)
            except LayoutError:
                continue
