"""Writes and reads ``run.json`` in a training run's folder: the run's options, its data, versions and machine."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import psutil
import torch

import shardwright
from shardwright.errors import CheckpointError
from shardwright.formatting import first_line
from shardwright.models import MODELS
from shardwright.text_files import folders_near, read_text
from shardwright.train.config import TrainConfig, read_options
from shardwright.train.data import is_factory
from shardwright.train.loggers import logger_names
from shardwright.train.progress import write_json

RUN_FILE = "run.json"

MOST_RUN_BYTES = 2**26
"""The size in bytes up to which a ``run.json`` is read; it includes the seconds of layers."""


class RunPart(NamedTuple):
    """What one start of a run was given: a run has a part for each start that has taken steps.

    ``first_step`` is the number of steps that were done before, ``seconds`` are the seconds of layers, measured or,
    with a cluster, predicted, and ``command`` is the command line.
    """

    config: TrainConfig
    first_step: int
    world_size: int
    seconds: Mapping[str, float]
    command: str


def write_run(out: Path, part: RunPart, data: Any, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
    """Writes the file ``run.json`` of a run into its folder ``out``, in place of an earlier one.

    It holds the options, the seconds of layers, the number of ranks and the command line of this ``part``, its time,
    the versions and the machine that are used, the fingerprints of the data files (``data``), and the id of the
    ``torchrun`` job if there is one. ``parts`` in the file lists these entries for the ``earlier`` parts and for this
    one.
    """
    versions = {
        "shardwright": shardwright.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "numpy": numpy.__version__,
    }  # fmt: skip
    own = {
        "first_step": part.first_step,
        "options": part.config.to_dict(),
        "seconds": part.seconds,
        "world_size": part.world_size,
        "command": part.command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "machine": {"cpus": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total},
    }
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    write_json(out / RUN_FILE, {**own, "data": data, "torchrun": name, "parts": [*earlier, own]})


def command_line(arguments: Sequence[str]) -> str:
    """Returns the arguments of a process (``sys.argv``) as one line for a shell, without the folder of the program.

    >>> command_line(["/usr/bin/shardwright", "train", "--layout", "dp2 tp2"])
    "shardwright train --layout 'dp2 tp2'"
    """
    program = Path(arguments[0] if arguments and arguments[0] else "python")
    is_module = program.parts[-3:] == ("shardwright", "cli", "__main__.py")  # python -m shardwright.cli
    return shlex.join(["shardwright" if is_module else program.name, *arguments[1:]])


def parts_of(out: Path) -> list[dict[str, Any]]:
    """Returns the parts of the run in ``out``, in order: for each start, what ``run.json`` holds on it.

    Entries that are damaged are left out. A run that was written without parts has one, which began at step 0.

    Raises: CheckpointError: there is no run in ``out``, or its ``run.json`` is damaged.
    """
    options_of(out)  # raises if it is no run
    record = _run_file(out)
    listed = record.get("parts")
    parts = [part for part in listed if _is_part(part)] if isinstance(listed, list) else []
    return parts or [{"first_step": 0, **{key: record[key] for key in _OF_A_PART if key in record}}]


def parts_before(out: Path, first_step: int) -> list[dict[str, Any]]:
    """Returns the parts of the run in ``out`` that began before a step, from which it now goes on; none without a run.

    A part has the steps of one start. A run resumed from a checkpoint takes the steps after it again, so that later
    parts no longer belong to the run.
    """
    try:
        return [part for part in parts_of(out) if part["first_step"] < first_step]
    except CheckpointError:
        return []


_OF_A_PART = (
    "options",
    "seconds",
    "world_size",
    "command",
    "started",
    "versions",
    "machine",
    "predicted",
    "measured",
    "ranks",
)


def _is_part(part: Any) -> bool:
    """Returns whether an entry of ``parts`` has all entries of a part, so that a report can be made of it."""
    try:
        read_options(part["options"], given_in=RUN_FILE)
        return type(part["first_step"]) is int and 0 <= part["first_step"] < 2**63
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def read_run(out: Path, *, model: str | None = None, data: str | None = None) -> dict[str, Any]:
    """Returns the options with which a run in the folder ``out`` was started, without ``stop_at`` and ``profile``.

    ``model`` and ``data`` are those named on the command line, if they are; ``data`` takes the place of the run's. A
    folder may come from another person, so that code of it is used only if the command names it
    (:func:`check_named`), and loggers that are functions are left out.

    Raises: CheckpointError: there is no run, its model is not ``model``, or its model or data are a factory that is not
        named.
    """
    options = options_of(out)
    run_model = options.get("model", TrainConfig.model)
    if model is not None and model != run_model:
        raise CheckpointError(
            f"the run in '{out}' has another model", given=model, allowed=run_model, fix=f"write --model {run_model}"
        )
    if data is not None:
        options["data"] = data
    check_named(options, f"{RUN_FILE} of '{out}'", model=model, data=data)
    options["logger"] = ",".join(name for name in logger_names(options.get("logger", "")) if ":" not in name)
    return options


def check_named(options: Mapping[str, Any], given_in: str, *, model: str | None, data: str | None) -> None:
    """Raises CheckpointError if options of a run name code, as model or as data, that the command does not name.

    ``options`` are those of a run or of one of its parts, and ``given_in`` says where they stand. Importing a factory
    runs its code, so that one is used only if it is the ``model`` or the ``data`` that the command names.

    >>> check_named({"data": "a:b"}, "run.json", model=None, data="a:b")
    >>> check_named({"data": "a:b"}, "run.json", model=None, data=None)
    Traceback (most recent call last):
    shardwright.errors.CheckpointError: run.json names code that would run, the factory of its data: add --data a:b
      given:   a:b
      allowed: a factory that the command names too, or other data
      fix:     if you trust that code, add --data a:b
    """
    model_name, source = options.get("model", TrainConfig.model), options.get("data", TrainConfig.data)
    unnamed = {"model": model_name} if ":" in model_name and model_name != model else {}
    unnamed |= {"data": source} if is_factory(source) and source != data else {}
    if unnamed:
        flags = " ".join(f"--{option} {name}" for option, name in unnamed.items())
        of = " and that of its ".join(unnamed)
        raise CheckpointError(
            f"{given_in} names code that would run, the factory of its {of}: add {flags}",
            given=", ".join(unnamed.values()),
            allowed="a factory that the command names too, or "
            + ("other data" if "model" not in unnamed else f"one of {', '.join(MODELS)}"),
            fix=f"if you trust that code, add {flags}",
        )


def noted_data(out: Path) -> Mapping[str, Any]:
    """Returns the fingerprints of the data files with which the run in ``out`` was started, by file name.

    It is empty if the data had no files. Raises: CheckpointError: there is no run in ``out``, or the entry on its data
    is damaged.
    """
    options_of(out)  # raises if it is no run
    fingerprints = _run_file(out).get("data", {})
    if isinstance(fingerprints, dict) and all(map(_is_fingerprint, fingerprints.values())):
        return fingerprints
    raise CheckpointError(
        f"{RUN_FILE} of '{out}' is damaged: it does not say which data the run was started with",
        given=f"data = {fingerprints!r:.80}",
        allowed="for each file its size in bytes and its SHA-256",
        fix="restore the file, or add --changed-data to go on without a comparison",
    )


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, list) and [type(entry) for entry in value] == [int, str]


def _run_file(out: Path) -> Any:
    return json.loads(read_text(out / RUN_FILE, MOST_RUN_BYTES, pipes=False))


def options_of(out: Path) -> dict[str, Any]:
    """Returns the options of the run in ``out`` from its ``run.json``, without ``stop_at`` and ``profile``.

    Raises: CheckpointError: the file is missing or damaged.
    """
    try:
        record = _run_file(out)
        options = read_options(record["options"], given_in=RUN_FILE)
        return {key: value for key, value in options.items() if key not in ("stop_at", "profile")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
        near = folders_near(out, lambda folder: (folder / RUN_FILE).is_file())
        raise CheckpointError(
            f"there is no run at '{out}'",
            given=first_line(failure),
            allowed=f"the --out folder of a run, with {RUN_FILE} in it",
            fix=f"{f'write {near}' if near else 'check the path'}, or start a run there with train",
        ) from failure


def run_name_in(out: Path) -> str | None:
    """Returns the id of the ``torchrun`` job (``--rdzv-id``) that began the run in a folder.

    It is None if there is no run that can be read, or the run was begun without ``torchrun``.
    """
    try:
        job_id = _run_file(out).get("torchrun")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return job_id if isinstance(job_id, str) else None


def started_again(out: Path) -> bool:
    """Returns whether ``torchrun`` has restarted the run in ``out``, as it does after a rank or machine was lost.

    That is so if ``torchrun`` counts a restart of this process, or if the run in ``out`` was begun by the same job of
    ``torchrun`` (``--rdzv-id``): on a machine that lost no rank, no restart is counted.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none" and run_name_in(out) == name:
        return True
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
