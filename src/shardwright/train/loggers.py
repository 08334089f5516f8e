"""Adapters that pass the metrics of each step to a logger: TensorBoard, Weights & Biases, MLflow, a function.

``shardwright train --logger NAME`` opens them, on the first rank alone; no package is imported before that. An adapter
is a few lines: it takes the run's folder and options, and returns a function for rows of metrics and one for the end.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwright.errors import PlanError, fix_for
from shardwright.models import load_named

Row = Mapping[str, Any]
"""The metrics of one step: numbers by name, "step" among them; None where there is none, and lists by rank."""


class StepLog(NamedTuple):
    """A logger that is open: ``add(row)`` takes the metrics of a step, and ``close()`` ends it."""

    add: Callable[[Row], Any]
    close: Callable[[], Any]


def scalars(row: Row) -> dict[str, float]:
    """Returns the numbers in a row of metrics that loggers draw, such as the memory of the rank that holds most.

    >>> scalars({"step": 3, "loss": 0.5, "grad_norm": None, "memory_bytes": [5, 7]})
    {'loss': 0.5, 'memory_bytes': 7}
    """
    numbers = {key: max(value) if isinstance(value, list) and value else value for key, value in row.items()}
    return {key: value for key, value in numbers.items() if isinstance(value, int | float) and key != "step"}


def _tensorboard(out: Path, options: Mapping[str, Any]) -> StepLog:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(out / "tensorboard"))

    def add(row: Row) -> None:
        for key, value in scalars(row).items():
            writer.add_scalar(key, value, row["step"])

    return StepLog(add, writer.close)


def _wandb(out: Path, options: Mapping[str, Any]) -> StepLog:
    import wandb

    run = wandb.init(project="shardwright", name=out.name, dir=str(out), config=dict(options))
    return StepLog(lambda row: run.log(scalars(row), step=row["step"]), run.finish)


def _mlflow(out: Path, options: Mapping[str, Any]) -> StepLog:
    import mlflow

    mlflow.start_run(run_name=out.name)
    mlflow.log_params({key: str(value)[:500] for key, value in options.items()})
    return StepLog(lambda row: mlflow.log_metrics(scalars(row), step=row["step"]), mlflow.end_run)


LOGGERS: Mapping[str, tuple[Callable[[Path, Mapping[str, Any]], StepLog], str]] = {
    "tensorboard": (_tensorboard, "pip install 'shardwright[tensorboard]'"),
    "wandb": (_wandb, "pip install wandb"),
    "mlflow": (_mlflow, "pip install mlflow"),
}
"""The adapters by name, each with the line that installs its package."""


def logger_names(text: str) -> list[str]:
    """Returns the loggers that ``--logger`` names, which are separated by commas.

    >>> logger_names("tensorboard, mine.package:log")
    ['tensorboard', 'mine.package:log']
    """
    return [name for entry in text.split(",") if (name := entry.strip())]


def check_loggers(names: Sequence[str]) -> None:
    """Raises PlanError for a logger that does not exist, or whose package is missing; functions are imported.

    >>> check_loggers(["tensorbord"])
    Traceback (most recent call last):
    shardwright.errors.PlanError: no such logger
      given:   tensorbord
      allowed: tensorboard, wandb, mlflow, or package.module:function
      fix:     write --logger tensorboard
    """
    for name in names:
        if ":" in name:
            load_named(name)
        elif name not in LOGGERS:
            allowed = f"{', '.join(LOGGERS)}, or package.module:function"
            fix = fix_for(name, LOGGERS, before="write --logger ")
            raise PlanError("no such logger", given=name, allowed=allowed, fix=fix)
        elif not _is_installed(name):
            raise PlanError(
                f"the package of the logger '{name}' is not installed",
                given=f"--logger {name}",
                allowed="metrics.jsonl, which is always written, and loggers whose package is installed",
                fix=f"{LOGGERS[name][1]}, or leave out --logger {name}",
            )


def _is_installed(name: str) -> bool:
    """Returns whether a package can be imported; a plain folder of its name, such as ``wandb`` of its logs, is none."""
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def open_logger(name: str, out: Path, options: Mapping[str, Any]) -> StepLog:
    """Opens a logger for the run in the folder ``out``; ``options`` are those of the run, which some loggers keep.

    A function that is named as ``package.module:function`` is called with each row.

    Raises: PlanError: there is no such function, or the logger's package raises, as without a server that it needs.
    """
    if ":" in name:
        return StepLog(load_named(name), lambda: None)
    try:
        return LOGGERS[name][0](out, options)
    except Exception as failure:  # whatever a logger's package raises
        raise PlanError(
            f"the logger '{name}' cannot be opened",
            given=f"{type(failure).__name__}: {failure}".strip().splitlines()[0],
            allowed="a logger whose account, server and folder are set up, as its package says",
            fix=f"set it up, or leave out --logger {name}",
        ) from failure
