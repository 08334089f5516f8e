"""The content of a run's page: the rows of the run's metrics, and its parts, each of which ran under one layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.formatting import first_line
from shardwright.report.description import Description
from shardwright.report.pictures import MetricRows


@dataclass(frozen=True, kw_only=True)
class TrainingPart:
    """The steps of a run from one start to the next, all under one layout.

    It has taken the steps from ``first_step`` + 1 to ``last_step``; none if the two are equal. ``facts`` is its entry
    in ``run.json``: options, command line, versions and more. ``description`` is that of its layout; if there is none,
    ``problem`` says why.
    """

    first_step: int
    last_step: int
    facts: Mapping[str, Any]
    rows: MetricRows
    description: Description | None = None
    problem: str = ""

    @property
    def num_steps(self) -> int:
        """The number of steps that this part of the run has taken and whose metrics are there."""
        return len(self.rows)

    @property
    def layout(self) -> str:
        """The layout line."""
        return str(self.options.get("layout", ""))

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the run, by name."""
        options = self.facts.get("options")
        return options if isinstance(options, Mapping) else {}

    @property
    def steps(self) -> str:
        """The steps in words, such as "steps 41 to 80"."""
        if not self.rows:
            return f"no step after {self.first_step:,}" if self.first_step else "no step"
        first, last = self.rows[0]["step"], self.rows[-1]["step"]
        return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A training run as a report shows it: its ``name``, its parts in order, and the rows of its metrics by step.

    ``num_damaged`` lines of the metrics could not be read.
    """

    name: str
    parts: tuple[TrainingPart, ...]
    rows: MetricRows
    num_damaged: int = 0

    @property
    def shown(self) -> tuple[TrainingPart, ...]:
        """The parts that have taken steps; the last part alone if none has."""
        return tuple(part for part in self.parts if part.rows) or self.parts[-1:]

    @property
    def last(self) -> TrainingPart:
        """The last part that has taken steps."""
        return self.shown[-1]

    @property
    def layouts(self) -> str:
        """The layouts of the run in words: "dp2 tp2, then tp2"."""
        lines = [part.layout for part in self.shown]
        return ", then ".join(line for n, line in enumerate(lines) if n == 0 or line != lines[n - 1])

    @property
    def seconds(self) -> float:
        """The seconds that all parts of the run took, from their start to their last step."""
        ends = [[row["time_s"] for row in part.rows if row.get("time_s") is not None] for part in self.parts]
        return sum(max(end, default=0.0) for end in ends)

    @property
    def resumes(self) -> list[tuple[int, str]]:
        """The steps after which the run was resumed, each with the layout from there on."""
        return [(part.first_step, part.layout) for part in self.shown if part.first_step]


def record_run(
    name: str,
    parts: Sequence[Mapping[str, Any]],
    rows: MetricRows,
    describe: Callable[[Mapping[str, Any]], Description],
    num_damaged: int = 0,
) -> TrainingRun:
    """Returns a run from the parts that its ``run.json`` lists, one at least, and the rows of its metrics.

    ``describe`` makes the description of a part's layout; the text of an error that it raises becomes the part's
    ``problem``. It is called once for all parts whose layout and options are equal. Parts without a step are not
    described, except for the last part of a run in which no part took a step. If several rows are of one step, the last
    one counts.
    """
    by_step = {row["step"]: row for row in rows}
    ordered = [by_step[step] for step in sorted(by_step)]
    starts = sorted(parts, key=lambda part: part["first_step"])
    ends = [*(int(part["first_step"]) for part in starts[1:]), None]
    training_parts, described = [], list[tuple[Mapping[str, Any], Description | None, str]]()
    for place, (facts, end) in enumerate(zip(starts, ends, strict=True)):
        first = int(facts["first_step"])
        part_rows = [row for row in ordered if first < row["step"] and (end is None or row["step"] <= end)]
        part = TrainingPart(
            first_step=first, last_step=part_rows[-1]["step"] if part_rows else first, facts=facts, rows=part_rows
        )
        if part_rows or (not ordered and place == len(starts) - 1):
            same = next((entry for entry in described if _is_same(entry[0], facts)), None)
            if same is None:
                same = (facts, *_described(facts, describe))
                described.append(same)
            part = TrainingPart(**{**vars(part), "description": same[1], "problem": same[2]})
        training_parts.append(part)
    return TrainingRun(name=name, parts=tuple(training_parts), rows=ordered, num_damaged=num_damaged)


def _described(
    facts: Mapping[str, Any], describe: Callable[[Mapping[str, Any]], Description]
) -> tuple[Description | None, str]:
    try:
        return describe(facts), ""
    except Exception as failure:  # any error, also of the model's own code: a page without a map is better than none
        return None, first_line(failure)


_NOT_DRAWN = ("steps", "stop_at", "lr", "schedule", "warmup", "weight_decay", "clip", "save_every", "keep")
"""Options that change nothing of a layout's description."""


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two parts of a run have the same description."""
    kept = [
        {key: value for key, value in part.get("options", {}).items() if key not in _NOT_DRAWN} for part in (one, other)
    ]
    return kept[0] == kept[1] and one.get("seconds") == other.get("seconds")


def run_names(folders: Sequence[Path]) -> list[str]:
    """Returns a short name for each folder: the last part of its path or, where these are equal, more of it.

    >>> run_names([Path("runs/a"), Path("runs/b")]), run_names([Path("one/run"), Path("two/run")])
    (['a', 'b'], ['one/run', 'two/run'])
    """
    paths = [Path(os.path.realpath(folder)).parts for folder in folders]  # resolve() raises for a circle of links
    for size in range(1, max(map(len, paths), default=1) + 1):
        names = ["/".join(parts[-size:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(parts[-1:])} ({number})" for number, parts in enumerate(paths, 1)]
