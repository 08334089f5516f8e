"""Builds the config of a run from a command's options: flags, the TOML file, and the run that is resumed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwright import devices
from shardwright.cli.options import Shared, given, parse_pairs, warn
from shardwright.errors import CheckpointError
from shardwright.layout import Layout
from shardwright.train.config import TrainConfig, read_options, read_toml
from shardwright.train.refit import AUTO_FIT, refitted
from shardwright.train.run_file import options_of, read_run

OPTIONS_FILE = Path("run.toml")
"""The file of options that ``shardwright init`` writes; a command without ``--config`` says that it is not read."""


def with_file(shared: Shared, *names: str) -> Shared:
    """Returns the shared options, and those of ``names`` that the TOML file of ``--config`` has, if they are not given.

    For commands about a trained run, whose other options are its own.

    Raises: PlanError: as :func:`~shardwright.train.config.read_toml`.
    """
    path = shared.get("config")
    in_file = {} if path is None else read_toml(path)
    return {**{name: in_file[name] for name in names if name in in_file}, **shared}


def config_of(
    shared: Shared,
    base: dict[str, Any] | None = None,
    *,
    resumed: Path | None = None,
    fits: Path | None = None,
    **flags: Any,
) -> TrainConfig:
    """Returns the config of a run from, in rising precedence: the defaults, ``base``, the TOML file, the flags.

    ``shared`` and ``flags`` are the options of the command line; one that is None counts as not given. The pairs of
    ``--set`` and ``--role`` are added to those of the other sources. The options of the run in the folder ``resumed``
    replace ``base``. With ``fits``, the folder of a run, the layout may be ``auto-fit``, which is replaced by a layout
    for the ranks available; rank 0 prints the layout if it has changed.

    Raises: LayoutError, PlanError: an option is wrong. CheckpointError: ``resumed`` has no run, or :func:`read_run`
        refuses its model.
    """
    flags |= shared
    config = flags.pop("config", None)
    in_file = read_toml(config) if config is not None else {}
    if config is None and resumed is None and OPTIONS_FILE.is_file() and is_first_rank():
        warn(f"note: {OPTIONS_FILE} in this folder is not read: --config {OPTIONS_FILE} reads it")
    if resumed is not None:
        named = {key: flags.get(key, in_file.get(key)) for key in ("model", "data")}
        base = read_run(resumed, **named)
    tables = {
        "settings": parse_pairs("--set", "key", "value", flags.pop("set_", None)),
        "roles": parse_pairs("--role", "PATTERN", "ROLE", flags.pop("role", None)),
    }
    values = {**(base or {}), **in_file}
    values.update(read_options(given(**flags), given_in="the command"))
    if fits is not None:
        values.update(_fitted(values, fits))
    return TrainConfig(**{**values, **{name: {**values.get(name, {}), **more} for name, more in tables.items()}})


def _fitted(values: dict[str, Any], out: Path) -> dict[str, str]:
    """Returns the layout, refitted to the available ranks, if it says ``auto-fit``; else {}.

    A layout that differs from the earlier one in the folder ``out`` is printed.
    """
    line = values.get("layout", "")
    if AUTO_FIT not in line.split():
        return {}
    earlier = None
    with suppress(CheckpointError):  # the first start of the run
        earlier = options_of(out)["layout"]
    size = os.environ.get("WORLD_SIZE")
    layout = refitted(line, earlier, int(size) if size is not None else devices.count() or None)
    if is_first_rank() and layout != earlier:
        before = f"{earlier} -> " if earlier is not None else ""
        warn(f"{AUTO_FIT}: {before}{layout}, for the {Layout.parse(layout).num_ranks} ranks that there are")
    return {"layout": layout}


def is_first_rank() -> bool:
    """Returns whether this process is rank 0, which alone prints; under torchrun every rank runs the command."""
    return os.environ.get("RANK", "0") == "0"
