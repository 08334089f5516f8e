"""Checks, before a run is resumed, that its model, its data and the order of its samples are those of its start."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.errors import PlanError
from shardwright.train.config import TrainConfig
from shardwright.train.data import fingerprint
from shardwright.train.out_folder import CHECKPOINTS


def check_regular(out: Path) -> None:
    """Raises PlanError unless a run's folder holds only regular files, folders and links to folders.

    Writes to a link to a file, a device or a pipe would go elsewhere. A file in place of the folder of checkpoints is
    refused too: otherwise it would be noticed only when the first checkpoint is written.
    """
    if (out / CHECKPOINTS).is_file():
        raise PlanError(
            f"'{out / CHECKPOINTS}' is no folder",
            given="a file",
            allowed="the folder of the run's checkpoints, or none",
            fix="remove it if you know what it is, or give another --out",
        )
    for path in sorted(out.iterdir()) if out.is_dir() else ():
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or path.is_dir()):
            raise PlanError(
                f"'{path}' is no regular file",
                given="a link to a file" if stat.S_ISLNK(mode) else "a device or a pipe",
                allowed="folders, links to folders, and files that are written here",
                fix="remove it if you know what it is, or give another --out",
            )


def _as_text(value: Any) -> Any:
    """Returns an option as text, so that settings given as text or as numbers compare equal."""
    return {key: str(setting) for key, setting in value.items()} if isinstance(value, Mapping) else str(value)


def check_same_run(config: TrainConfig, before: dict[str, Any]) -> None:
    """Raises PlanError if a resumed run changes an option that the model or the order of samples depends on.

    These are ``model``, ``settings``, ``data``, ``batch``, ``seq`` and ``seed``. ``before`` are the options with which
    the run was started; options that are missing in it are not compared.
    """
    for key in ("model", "settings", "data", "batch", "seq", "seed"):
        now = config.to_dict()[key]
        if key in before and _as_text(before[key]) != _as_text(now):
            raise PlanError(
                f"a resumed run cannot change '{key}'",
                given=f"{key}={now}, and the run was started with {before[key]}",
                allowed="another layout, more steps, another learning rate, schedule, clipping or saving",
                fix=f"leave out --{key}, or start a new run in another --out",
            )


def moved_schedule(config: TrainConfig, before: Mapping[str, Any], done: int) -> str:
    """Returns a line on how a changed number of steps moves the learning rate of a resumed run; "" if it does not.

    ``before`` are the options of the run so far, and ``done`` its number of steps.

    >>> print(moved_schedule(TrainConfig(steps=200), {"steps": 100}, 100))
    the cosine schedule now ends at step 200, not 100: the learning rate goes on at 0.000587, where it was 0.0001; ...
    """
    steps = before.get("steps")
    if config.schedule == "constant" or not isinstance(steps, int) or steps == config.steps or done >= config.steps:
        return ""
    known = {key: before[key] for key in ("lr", "schedule", "warmup") if key in before}
    last, next_ = replace(config, **known, steps=steps).learning_rate(done), config.learning_rate(done)
    if f"{last:.3g}" == f"{next_:.3g}":
        return ""
    return (
        f"the {config.schedule} schedule now ends at step {config.steps}, not {steps}: the learning rate goes on at "
        f"{next_:.3g}, where it was {last:.3g}; --schedule constant --lr {last:.3g} keeps it"
    )


def moved_decay(config: TrainConfig, before: Mapping[str, Any]) -> str:
    """Returns a line on the averages of a resumed run if their decay was changed; "" if it was not.

    ``before`` are the options of the run so far. If the run had no averages, or has none now, the result is "": loading
    or the first step warns then.

    >>> moved_decay(TrainConfig(ema=0.99), {"ema": 0.999})
    'the averages go on with the decay 0.99, where it was 0.999; --ema 0.999 keeps it'
    """
    decay = before.get("ema")
    if not config.ema or not decay or decay == config.ema:
        return ""
    return f"the averages go on with the decay {config.ema}, where it was {decay}; --ema {decay} keeps it"


def finished(config: TrainConfig, done: int) -> str:
    """Returns a line on a resumed run that has done all of its steps; "" if some are left.

    >>> finished(TrainConfig(steps=40), 40)
    'all 40 steps of this run are done: --steps 80 adds 40 more'
    """
    if done < config.steps:
        return ""
    return f"all {done} steps of this run are done: --steps {2 * done} adds {done} more"


def check_same_data(config: TrainConfig, before: Mapping[str, Any]) -> None:
    """Raises PlanError if a data file differs from its fingerprint at the run's start.

    ``before`` are the fingerprints of the run's start, by file name; if there are none, nothing is compared.
    """
    now = fingerprint(config.data) if before else {}
    for file in sorted(before.keys() | now.keys()):
        if before.get(file) == now.get(file):
            continue
        sizes = [f"{entry[0]:,} bytes" if entry else "no file" for entry in (before.get(file), now.get(file))]
        what = "another beginning or end" if sizes[0] == sizes[1] else f"{sizes[1]}, {sizes[0]} at the run's start"
        raise PlanError(
            "the data have changed since the run was started",
            given=f"'{file}': {what}",
            allowed="the same data, so that every sample comes once in an epoch; --changed-data accepts others",
            fix="restore the file, or add --changed-data to go on with it as it is",
        )
