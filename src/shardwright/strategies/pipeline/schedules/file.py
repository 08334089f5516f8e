"""Reads pipeline schedules from files and writes them: CSV, one row for each stage, or JSON.

CSV, two stages and two microbatches; a cell is chunk, kind, microbatch, and an empty cell is idle time::

    0F0,0F1,,0B0,,0B1
    ,1F0,1B0,1F1,1B1,

A cell without a chunk (``F0``) means the row's own: chunk 0 in the first row, 1 in the second. The letters and format
are those of the compute-only CSV of ``torch.distributed.pipelining``. JSON::

    {"name": "mine", "stages": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]}
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, cast

from shardwright.errors import LayoutError
from shardwright.plan.schedule import Action, ActionKind, Schedule
from shardwright.text_files import read_text

MOST_BYTES = 2**22
"""The size in bytes up to which a schedule file is read; a larger one is refused."""

_CELL = re.compile(r"([0-9]{1,9})?([FBIW])([0-9]{1,9})")
_FIX = "write chunk, kind, microbatch, like 0F3; leave a cell empty where the stage waits"


class _CellPosition(NamedTuple):
    """A cell's position in a schedule file: row and column, counted from one as in editors."""

    path: Path
    row: int
    column: int

    def __str__(self) -> str:
        return f"{self.path}, row {self.row} (stage {self.row - 1}), column {self.column}"


class _Cell(NamedTuple):
    """An action of a schedule file, and its position."""

    action: Action
    position: _CellPosition


def read_schedule(path: str | Path) -> Schedule:
    """Returns the pipeline schedule in a file: JSON if the name ends in ``.json``, CSV otherwise.

    The stage of a chunk follows from the row of its actions. Whether the schedule can run is checked separately, by
    :func:`~shardwright.strategies.pipeline.schedule_checks.check_schedule`.

    Raises: LayoutError: the file cannot be read, has more than 4 MiB or is not of this form; a cell is no action, a
        chunk is on two stages, a stage has no actions, or the numbers of chunks or microbatches have a gap.
    """
    path = Path(path)
    try:
        text = read_text(path, MOST_BYTES, "utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        _refuse(f"cannot read the schedule file {path}", given=why, fix="give the path of a CSV or JSON file")
    name, rows = _json_rows(path, text) if path.suffix.lower() == ".json" else (path.stem, _csv_rows(path, text))
    while rows and not any(rows[-1]):
        rows.pop()
    cells = [
        _Cell(_action(cell, position), position)
        for row, of_row in enumerate(rows, start=1)
        for column, cell in enumerate(of_row, start=1)
        if cell and (position := _CellPosition(path, row, column))
    ]
    if not cells:
        _refuse(f"no actions in the schedule file {path}", given="an empty file, or only empty cells")
    lists: list[list[Action]] = [[] for _ in rows]
    for action, position in cells:
        lists[position.row - 1].append(action)
    if [] in lists:
        empty = lists.index([])
        _refuse(f"no actions in {path}, row {empty + 1} (stage {empty})", given="only empty cells")
    num_microbatches = _count("microbatch", path, cells)
    return Schedule(name, tuple(map(tuple, lists)), _stages(path, cells), num_microbatches)


def _refuse(what: str, *, given: object, fix: str = _FIX, allowed: str | None = None) -> NoReturn:
    allowed = allowed or "one row for each stage, of cells like 0F3, or JSON: {'stages': [['0F0', ...], ...]}"
    raise LayoutError(what, given=given, allowed=allowed, fix=fix)


def _csv_rows(path: Path, text: str) -> list[list[str]]:
    """Returns the rows of cells of a CSV file, without the spaces around each cell."""
    try:
        return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text, newline=""))]
    except csv.Error as error:
        _refuse(f"the schedule file {path} is no CSV", given=error)


def _json_rows(path: Path, text: str) -> tuple[str, list[list[str]]]:
    """Returns the name and the cells of a JSON file; null is an idle slot."""
    what = f"the schedule file {path} is no schedule in JSON"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(what, given=error)
    unknown = sorted(value.keys() - {"name", "stages"}) if isinstance(value, dict) else []
    if unknown:
        _refuse(what, given=f"the key {json.dumps(unknown[0])}", fix=f"leave out {json.dumps(unknown[0])}")
    stages = value.get("stages") if isinstance(value, dict) else None
    if not isinstance(stages, list):
        _refuse(what, given="no list under 'stages'", fix="put one list of cells for each stage under 'stages'")
    rows = []
    for row, cells in enumerate(stages, start=1):
        if not isinstance(cells, list):
            _refuse(what, given=f"row {row} (stage {row - 1}) is {json.dumps(cells)}, no list")
        for column, cell in enumerate(cells, start=1):
            if not isinstance(cell, str | None):
                _refuse(f"a bad cell in {_CellPosition(path, row, column)}", given=json.dumps(cell))
        rows.append([(cell or "").strip() for cell in cells])
    return str(value.get("name", path.stem)), rows


def _action(cell: str, position: _CellPosition) -> Action:
    match = _CELL.fullmatch(cell)
    if match is None:
        _refuse(
            f"a bad cell in {position}",
            given=repr(cell),
            allowed="chunk (by default the row's own), F, B, I or W, microbatch",
        )
    chunk, kind, microbatch = match.groups()
    return Action(cast(ActionKind, kind), int(microbatch), position.row - 1 if chunk is None else int(chunk))


def _count(what: Literal["chunk", "microbatch"], path: Path, cells: list[_Cell]) -> int:
    """Returns the number of chunks or microbatches. Raises LayoutError if one is missing."""
    numbers = {getattr(cell.action, what) for cell in cells}
    missing = next(number for number in range(len(numbers) + 1) if number not in numbers)
    if missing != len(numbers):
        last = max(cells, key=lambda cell: getattr(cell.action, what))
        _refuse(
            f"{what} {missing} is missing in the schedule file {path}",
            given=f"{last.action} in row {last.position.row}, column {last.position.column}, but no {what} {missing}",
            allowed=f"every {what} from 0 to the last",
            fix=f"add the actions of {what} {missing}, or count from 0 without a gap",
        )
    return len(numbers)


def _stages(path: Path, cells: list[_Cell]) -> tuple[int, ...]:
    """Returns the stage of each chunk. Raises LayoutError if a chunk is on two stages."""
    first: dict[int, _Cell] = {}
    for cell in cells:
        before = first.setdefault(cell.action.chunk, cell)
        if before.position.row != cell.position.row:
            _refuse(
                f"chunk {cell.action.chunk} is on two stages in the schedule file {path}",
                given=" and ".join(
                    f"{c.action} in row {c.position.row}, column {c.position.column}" for c in (before, cell)
                ),
                allowed="every chunk on one stage",
                fix=f"move one of the two, or give it the number of a chunk of stage {cell.position.row - 1}",
            )
    return tuple(first[chunk].position.row - 1 for chunk in range(_count("chunk", path, cells)))
