"""What this machine lacks for a part of the library, with what to type, as ``shardwright doctor`` lists it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwright import devices

PACKAGES = {
    "tensorboard": ("train --logger tensorboard", "pip install 'shardwright[tensorboard]'"),
    "wandb": ("train --logger wandb", "pip install wandb"),
    "mlflow": ("train --logger mlflow", "pip install mlflow"),
    "cloudpickle": ("ranks that are processes, started from a notebook", "pip install 'shardwright[notebook]'"),
    "ray": ("launch --ray", "pip install 'shardwright[cluster]'"),
}
"""Packages that parts of the library use: for what, and the line that installs each."""

LEAST_FREE_BYTES = 2**30
"""The free memory below which a run that is larger than an example will hardly start."""


class MissingItem(NamedTuple):
    """Something that is missing: what it is, what it is needed for, and what to type."""

    what: str
    needed_for: str
    fix: str


def lacks(facts: Mapping[str, Any]) -> list[dict[str, str]]:
    """Returns what this machine lacks, as plain data for JSON; what the library always needs comes first.

    ``facts`` are the figures that :func:`~shardwright.report.machine.measure_machine` has measured so far.
    """
    return [lack._asdict() for lack in _lacks(facts)]


def _lacks(facts: Mapping[str, Any]) -> Iterator[MissingItem]:
    if "gloo" not in facts["backends"]:
        yield MissingItem("torch's gloo", "ranks that are processes", "install a build of torch with torch.distributed")
    if facts["free_memory_bytes"] < LEAST_FREE_BYTES:
        yield MissingItem("free memory", "more than an example", "end other programs, or take a larger machine")
    if not facts["devices"] and shutil.which("nvidia-smi") is not None:
        fix = "install torch's CUDA build, as pytorch.org says for this driver"
        yield MissingItem("a torch that sees the NVIDIA cards", "ranks on GPUs", fix)
    native = devices.backend_of(devices.accelerator())
    if facts["devices"] and native not in facts["backends"]:
        yield MissingItem(f"torch's {native}", "collectives between GPUs", "install torch's build for these cards")
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None and shutil.which("clang++") is None:
        fix = "apt-get install g++, or set CXX to a compiler"
        yield MissingItem(f"a C++ compiler ({compiler})", "the word compile on a CPU", fix)
    for name, (use, fix) in PACKAGES.items():
        if importlib.util.find_spec(name) is None:
            yield MissingItem(f"the package {name}", use, fix)


def lacks_text(entries: list[dict[str, str]]) -> list[str]:
    """Returns a line for each entry of :func:`lacks`.

    >>> lacks_text([{"what": "the package ray", "needed_for": "launch --ray", "fix": "pip install ray"}])
    ['missing: the package ray, for launch --ray: pip install ray']
    """
    return [f"missing: {entry['what']}, for {entry['needed_for']}: {entry['fix']}" for entry in entries]
