"""Reports the progress of a training run: a progress bar, ``metrics.jsonl`` with a JSON object a step, and loggers."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shardwright.file_locks import is_same
from shardwright.formatting import format_bytes, format_count, json_text, printable
from shardwright.train.loggers import open_logger

METRICS_FILE = "metrics.jsonl"
_NUMBERS = ("loss", "eval_loss", "lr", "grad_norm", "step_ms", "samples_per_s", "tokens_per_s", "time_s", "bubble")
_LINE_EVERY_S = 5.0


def say(text: str) -> None:
    """Prints a line on standard error, without buffering, unless that is closed: a run goes on without its lines."""
    with suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)  # noqa: T201  # all that training prints, beside the progress bar


class StatusLog:
    """Prints a line every few seconds on how much of a long piece of work is done; nothing if the work ends soon.

    ``what`` names the work, or is "" to print nothing. There are ``total`` pieces of it, which ``unit`` names.
    """

    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._start_s = self._last_line_s = time.monotonic()

    def show(self, done: int) -> None:
        """Prints a line if the last line, or the start, is some seconds ago and ``done`` is less than the total."""
        now = time.monotonic()
        if self._what and done < self._total and now - self._last_line_s > _LINE_EVERY_S:
            self._last_line_s = now
            left = (now - self._start_s) / done * (self._total - done)
            say(f"{self._what}: {done} of {self._total} {self._unit}, {left:.0f} s left")


class Log:
    """Shows the progress of a run, writes the metrics of its steps into ``metrics.jsonl``, and passes them to loggers.

    Progress is a bar on a terminal, else a line every few seconds, on standard error. Only rank 0 passes ``writes``; on
    the other ranks every method does nothing. A row that cannot be written, as on a full disk, does not end the run:
    the log warns once, and writes later rows if it can. A logger that fails is left out from then on, with a warning.
    ``loggers`` are names as ``--logger`` takes them, and ``options`` those of the run.
    """

    def __init__(
        self, out: Path, steps: int, first_step: int, *, writes: bool, loggers: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.writes = writes
        if not writes:
            return
        self._path, self._warned = out / METRICS_FILE, False
        self._file: FileIO | None = None  # stays open, so that its rows can be read even after the folder was removed
        self._loggers = {name: open_logger(name, out, options or {}) for name in loggers}
        console = Console(stderr=True)
        self._bar: Progress | None = None
        self._last_line_s = 0.0
        self._steps = steps
        self._evaluated = "eval loss of averages" if (options or {}).get("ema") else "eval loss"
        if console.is_terminal:
            columns = [
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[now]}"),
            ]
            self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
            self._task = self._bar.add_task("train", total=steps, completed=first_step, now="")
            self._bar.start()

    def add(self, row: dict[str, Any]) -> None:
        """Writes one step's metrics to the file, loggers and progress bar; failures to write become a warning."""
        if not self.writes:
            return
        with self._warning():
            if self._file is None:
                self._file = self._path.open("ab+", buffering=0)
            elif not is_same(self._file, self._path):  # it was removed, or moved with its folder
                with self._warning(), suppress(FileNotFoundError):
                    self.write_anew()
            _append(self._file, json_text(row) + "\n")
        for name in tuple(self._loggers):
            try:
                self._loggers[name].add(row)
            except Exception as failure:  # whatever a logger's package raises
                del self._loggers[name]
                self.warn(
                    f"warning: the logger '{name}' failed, and gets no more: {_one_line(failure)}; the run goes on"
                )
        with self._warning():
            self._show(row)

    def _show(self, row: dict[str, Any]) -> None:
        """Updates the progress bar, or prints a line every few seconds."""
        num_ranks = len(row["memory_bytes"])
        unit = "samples" if row.get("tokens_per_s") is None else "tokens"
        speed = row[f"{unit}_per_s"]
        now = f"loss {row['loss']:.4f}  {format_count(speed)} {unit}/s"
        if num_ranks > 1:
            now += f" ({format_count(speed / num_ranks)} a device)"
        if row.get("bubble") is not None:
            now += f"  bubble {row['bubble']:.0%}"
        if row.get("eval_loss") is not None:
            now += f"  {self._evaluated} {row['eval_loss']:.4f}"
        if num_ranks:
            now += f"  {format_bytes(max(row['memory_bytes']))} per rank"
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], now=now)
        elif time.monotonic() - self._last_line_s > _LINE_EVERY_S or row["step"] == self._steps or "eval_loss" in row:
            self._last_line_s = time.monotonic()
            left = (self._steps - row["step"]) * row["step_ms"] / 1000
            say(f"step {row['step']}/{self._steps}  {now}  {left:.0f} s left")

    def write_anew(self) -> None:
        """Writes all rows into a new ``metrics.jsonl`` if that file was removed or moved; else does nothing.

        Raises: OSError: the file cannot be written, or a file of that name exists again: that file is another run's,
            and stays as it is.
        """
        if self.writes and self._file is not None and not is_same(self._file, self._path):
            self._file.seek(0)
            file = self._path.open("xb+", buffering=0)
            try:
                _append(file, self._file.read().decode())
            except OSError:
                file.close()
                self._path.unlink()
                raise
            self._file.close()
            self._file = file

    def warn(self, text: str) -> None:
        """Prints ``text``, such as a warning, on standard error, above the progress bar if there is one."""
        if self.writes:
            # not by rich, which ends the process if standard error is a pipe that was closed
            say(text) if self._bar is None else self._bar.console.print(printable(text), markup=False)

    def close(self) -> None:
        """Ends the progress bar and closes the files."""
        if self.writes:
            for name, logger in self._loggers.items():
                try:
                    logger.close()
                except Exception as failure:  # whatever a logger's package raises
                    self.warn(f"warning: the logger '{name}' failed at its end: {_one_line(failure)}")
            with self._warning():
                if self._file is not None:
                    self._file.close()
            if self._bar is not None:
                self._bar.stop()

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Turns the first failure to write into a warning, and drops later ones."""
        try:
            yield
        except OSError as failure:
            if not self._warned:
                self._warned = True
                with suppress(OSError):  # standard error may be a file on the same disk
                    self.warn(f"warning: cannot write metrics: {failure}; the run goes on")

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _one_line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0]


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run's ``metrics.jsonl``, without lines that are damaged or not yet complete.

    The list is empty if there is no such file.
    """
    return read_metrics_counted(out)[0]


def read_metrics_counted(out: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the rows that :func:`read_metrics` returns, and the number of damaged lines that it leaves out.

    A last line that a kill has cut short is not counted.
    """
    path = out / METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    rows = [_row(line) for line in lines]
    num_damaged = sum(row is None and line.endswith(b"\n") for line, row in zip(lines, rows, strict=True))
    return [row for row in rows if row is not None], num_damaged


def _row(line: bytes) -> dict[str, Any] | None:
    """Returns the row of metrics in a line; None if the line is damaged."""
    try:
        row = json.loads(line)
        step = row["step"]
        numbers = [value for key in _NUMBERS if (value := row.get(key)) is not None]
        numbers += [*(row.get("memory_bytes") or []), *(row.get("held_bytes") or [])]
        fits = all(isinstance(value, int | float) and isfinite(value) for value in numbers)
        return row if fits and type(step) is int and 0 <= step < 2**63 else None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError):
        return None


def _append(file: FileIO, line: str) -> None:
    """Appends a whole line or nothing, since half a line would hide later ones. Raises OSError: no room for it."""
    data = line.encode()
    before = file.seek(0, os.SEEK_END)
    if (written := file.write(data)) != len(data):
        file.truncate(before)
        raise OSError(errno.ENOSPC, f"wrote {written} of {len(data)} bytes", str(file.name))


def add_missing_row(out: Path, row: Mapping[str, Any]) -> None:
    """Appends a step's row to ``metrics.jsonl``, unless the last row there is that of this step or of a later one.

    An incomplete line at the end of the file, which a killed rank has left, is removed first.

    Raises: OSError: there is no such file, or the row cannot be written.
    """
    with (out / METRICS_FILE).open("rb+", buffering=0) as file:
        *whole, half = file.read().splitlines(keepends=True) or [b""]
        if half.endswith(b"\n"):
            whole, half = [*whole, half], b""
        last = _row(whole[-1]) if whole else None
        if last is None or last["step"] < row["step"]:
            file.truncate(file.tell() - len(half))
            _append(file, json_text(row) + "\n")


def cut_metrics(out: Path, last_step: int) -> int:
    """Removes the rows of ``metrics.jsonl`` after ``last_step``, because a resumed run writes them again.

    Damaged rows are removed too, and their number is returned, without a last line that a kill has cut short. The file
    is cut in place: that needs no disk space, and a kill leaves the file either whole or cut. If a damaged row stands
    before rows that are kept, these are written into a new file, which then replaces the old one. A missing file is
    created empty.

    Raises: OSError: the file cannot be read or written.
    """
    path = out / METRICS_FILE
    path.touch()
    lines = path.read_bytes().splitlines(keepends=True)
    rows = [_row(line) for line in lines]
    kept, step = [], -1
    for line, row in zip(lines, rows, strict=True):  # a step's row comes twice if two ranks have written it at once
        if row is not None and step < row["step"] <= last_step:
            kept.append(line)
            step = row["step"]
    if kept == lines[: len(kept)]:
        os.truncate(path, sum(map(len, kept)))
    else:
        partial = path.with_name(f".{path.name}")
        partial.write_bytes(b"".join(kept))
        partial.replace(path)
    return sum(row is None and line.endswith(b"\n") for line, row in zip(lines, rows, strict=True))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes ``value`` as a JSON file atomically, so that a killed run leaves no half file."""

    partial = path.with_name(f".{path.name}")
    partial.write_text(json_text(value, indent=1) + "\n")
    partial.replace(path)
