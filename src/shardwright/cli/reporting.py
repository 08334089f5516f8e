"""The command ``shardwright report``: writes the page of a run anew, or a page that compares runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli import options as opt
from shardwright.cli.options import emit, report_errors, warn
from shardwright.errors import PlanError
from shardwright.initial_values import without_values
from shardwright.layout import Layout
from shardwright.parallelize.planning import job_for

if TYPE_CHECKING:
    from shardwright.report.training_runs import TrainingRun

PAGE, COMPARISON = "report.html", "comparison.html"


@report_errors
def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="The folder of a run; with --compare, of two or more.")
    ] = None,
    from_: Annotated[list[Path] | None, opt.FROM] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Write one page that compares the runs.")] = False,
    model: Annotated[
        str | None, typer.Option(help="The runs' own package.module:factory, to draw layouts with: its code is run.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The runs' own package.module:factory of a dataset: its code is run.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The page to write.", show_default=f"RUN/{PAGE}, or {COMPARISON}")
    ] = None,
    as_json: Annotated[bool, opt.JSON] = False,
) -> None:
    """Writes the report page of a run anew, from its folder; with --compare, one page with the curves of several runs.

    No rank is started, and the runs' folders stay as they are, but for the page.
    """
    from shardwright.report.compare_page import compare_runs, write_comparison_page
    from shardwright.report.run_page import write_run_page
    from shardwright.report.training_runs import run_names

    runs = [*(runs or ()), *(from_ or ())] or [opt.run_folder(None, None)]
    check_number(runs, compare=compare)
    records = [run_in(folder, name, model=model, data=data) for folder, name in zip(runs, run_names(runs), strict=True)]
    for run in records:
        for remark in remarks(run):
            warn(f"warning: {remark}")
    if compare:
        page = write_comparison_page(out or Path(COMPARISON), records)
        value = {"report": str(page), **compare_runs(records)}
        text = "\n".join([f"report  {page}", *(f"note    {note}" for note in value["remarks"])])
    else:
        page = write_run_page(out or runs[0] / PAGE, records[0])
        value = {"report": str(page), **figures(records[0])}
        text = f"report  {page}"
    emit(value, text, as_json=as_json)


def check_number(runs: Sequence[Path], *, compare: bool) -> None:
    """Raises PlanError unless one run is given or, to ``compare``, at least two different ones.

    >>> check_number([Path("a"), Path("b")], compare=False)
    Traceback (most recent call last):
    shardwright.errors.PlanError: a report is of one run
      given:   a b
      allowed: one folder, or --compare with two or more
      fix:     shardwright report --compare a b
    """
    folders = " ".join(map(str, runs))
    if not compare and len(runs) > 1:
        raise PlanError(
            "a report is of one run",
            given=folders,
            allowed="one folder, or --compare with two or more",
            fix=f"shardwright report --compare {folders}",
        )
    if compare and len({os.path.realpath(run) for run in runs}) < max(2, len(runs)):
        raise PlanError(
            "a comparison is of two or more different runs",
            given=folders,
            allowed="the folders of two or more runs, each once",
            fix=f"shardwright report --compare {runs[0]} ANOTHER",
        )


def run_in(folder: Path, name: str = "", *, model: str | None = None, data: str | None = None) -> TrainingRun:
    """Returns the run in a folder as a report shows it, with the description of each of its layouts.

    A factory that the folder names is called only if ``model`` or ``data`` names it too, since importing it runs its
    code.

    Raises: CheckpointError: there is no run in the folder. PlanError: a file of it is a link, or no regular file.
    """
    from shardwright.report.training_runs import record_run
    from shardwright.train.progress import read_metrics_counted
    from shardwright.train.run_file import parts_of
    from shardwright.train.same_run import check_regular

    check_regular(folder)
    parts = parts_of(folder)
    rows, num_damaged = read_metrics_counted(folder)
    return record_run(name or folder.name, parts, rows, lambda part: described(part, model, data), num_damaged)


def described(part: Mapping[str, Any], model: str | None = None, data: str | None = None) -> Mapping[str, Any]:
    """Returns the description of the layout of ``part``, one start of a run, with what is sent in a step.

    Raises: CheckpointError: the part's model or data are a factory that ``model`` or ``data`` does not name. PlanError:
        its options are wrong, or its data are not there to show the shape of a batch. LayoutError: the layout does not
        fit.
    """
    from shardwright.report.description import describe
    from shardwright.train.config import TrainConfig, read_options
    from shardwright.train.opening import inputs_of, opened
    from shardwright.train.run_file import check_named

    config = TrainConfig(**read_options(part["options"], given_in="the run"))
    check_named(config.to_dict(), "the run", model=model, data=data)
    with without_values():
        plain, loss, model_config = config.build()
    inputs = config.example(model_config)  # the shape of the data, without the data
    if inputs is None:
        plain, loss, _, read = opened(config)
        inputs = inputs_of(read, config.batch)
    layout = Layout.parse(config.layout)
    seconds = part.get("seconds")
    job = job_for(plain, loss, layout, inputs, config.num_tokens, config.roles)
    seconds = seconds if isinstance(seconds, dict) else {}
    is_predicted = seconds and config.cluster and not config.measured_costs  # as ``agreed_seconds`` chooses
    source = f"layers predicted for {config.cluster}" if is_predicted else ""
    return describe(job._replace(seconds=seconds), layout, inputs=inputs, seconds_from=source)


def remarks(run: TrainingRun) -> list[str]:
    """Returns sentences on what a run's page lacks: damaged metrics, steps, or maps of layouts that cannot be drawn."""
    notes = []
    if run.num_damaged:
        notes.append(f"{run.num_damaged} damaged lines of the metrics of {run.name} were left out")
    if not run.rows:
        notes.append(f"{run.name} has taken no step: the page has its layout and options alone")
    notes += [f"{run.name}, {part.layout}: no map of the layout: {part.problem}" for part in run.shown if part.problem]
    return notes


def figures(run: TrainingRun) -> dict[str, Any]:
    """Returns the figures of one run, of its parts, and remarks, as plain data for JSON."""
    from shardwright.report.compare_page import compare_runs

    parts = [
        {
            "first_step": part.first_step, "last_step": part.last_step, "layout": part.layout,
            "world_size": part.facts.get("world_size"), "command": part.facts.get("command"),
        }
        for part in run.shown
    ]  # fmt: skip
    own = compare_runs([run])["runs"][0]
    return {**own, "parts": parts, "damaged": run.num_damaged, "remarks": remarks(run)}
