"""Finds out whether ``torchrun``, Slurm's ``srun`` or MPI's ``mpirun`` has started this process as a rank.

All other code reads torch's environment variables (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``).
This file sets those that are missing, from the variables of the other launchers.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

from shardwright.axes import MAX_SIZE
from shardwright.errors import PlanError

_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LAUNCHERS = {
    "mpirun of Open MPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpirun": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
}
"""Maps a launcher to its names for torch's four variables, innermost launcher first: ``srun`` may start ``mpirun``."""


def started_by(environment: MutableMapping[str, str] = os.environ) -> str:
    """Returns the name of the launcher that started this process as a rank, or "" if none did.

    It also sets in ``environment`` torch's variables that are missing, such as ``RANK``, from those of the launcher. A
    batch script of Slurm has a task number without being a rank, so that number counts only in a step of ``srun``, or
    if ``MASTER_ADDR`` is set. A run of one rank by ``srun`` or ``mpirun`` does not count. Any other launcher that sets
    ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR`` is called "torchrun".

    >>> started = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
    >>> started_by(started), started["RANK"], started["WORLD_SIZE"], started["LOCAL_RANK"]
    ('srun', '5', '8', '1')
    """
    for launcher, names in _LAUNCHERS.items():
        rank, size = (environment.get(name) for name in names[:2])
        if (
            rank is None
            or size is None
            or size in ("0", "1")
            or (launcher == "Slurm" and "MASTER_ADDR" not in environment)
        ):
            continue
        if (environment.get("RANK", rank), environment.get("WORLD_SIZE", size)) == (rank, size):
            for every in _LAUNCHERS.values():  # srun --mpi=pmi2 gives PMI's rank and size, and a local rank of its own
                if (environment.get(every[0]), environment.get(every[1])) == (rank, size):
                    for ours, name in zip(_TORCH, every, strict=True):
                        if name in environment:
                            environment.setdefault(ours, environment[name])
            return launcher
    if "TORCHELASTIC_RUN_ID" in environment or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return "torchrun"
    return ""


def is_started(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Returns whether a launcher such as torchrun started this process as a rank, so that ``launch`` starts no ranks.

    It sets torch's variables in ``environment``, as :func:`started_by` does.

    Raises: PlanError: this process is a rank, but ``MASTER_ADDR`` or ``MASTER_PORT`` is not set, or one of torch's
        variables is not the number that it should be.
    """
    launcher = started_by(environment)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if launcher and name not in environment]
    if missing:
        raise PlanError(
            f"ranks that {launcher} has started do not know where to meet",
            given=f"no {' and no '.join(missing)} in the environment",
            allowed="the name of the first rank's machine and a free port there, the same for all ranks",
            fix="export MASTER_ADDR=HOST MASTER_PORT=29500; in Slurm HOST is the first name that "
            "'scontrol show hostnames' prints",
        )
    if launcher:
        _check_numbers(environment, launcher)
    return bool(launcher)


def _check_numbers(environment: MutableMapping[str, str], launcher: str) -> None:
    """Raises PlanError if one of torch's variables that are set is not a number, or not one that a rank can have."""
    size = _count(environment, "WORLD_SIZE", 1, MAX_SIZE, launcher)
    for name, least, most in (("RANK", 0, size - 1), ("LOCAL_RANK", 0, size - 1), ("MASTER_PORT", 1, 2**16 - 1)):
        _count(environment, name, least, most, launcher)


def _count(environment: MutableMapping[str, str], name: str, least: int, most: int, launcher: str) -> int:
    text = environment.get(name, str(most))
    if not re.fullmatch("[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise PlanError(
            f"{launcher} has given a rank a number that cannot be",
            given=f"{name}={text[:40]!r}",
            allowed=f"{name} from {least} to {most}",
            fix=f"set {name} for each rank as torchrun does, or unset it with the other names of ranks",
        )
    return int(text)
