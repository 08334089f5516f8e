"""``ClusterJob``: a training run to start on a cluster of any kind, and the commands that start its ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.errors import PlanError
from shardwright.nodes import Nodes

TORCHRUN = "shardwright.cluster.torchrun"
"""The Python module that is run as torchrun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """A training run to start on a cluster: its layout, nodes and folder, and options of ``shardwright train``.

    ``out`` is the folder of the run, which all nodes share, and ``options`` are arguments to append to the ``train``
    command. ``time_s`` is the time limit in seconds, which only Slurm uses. ``save_s`` is the number of seconds that
    the ranks have to save before they are ended. ``restarts`` is how often the ranks are started again within the job
    after a failure; the run then continues from its newest checkpoint. ``cpus`` and ``gpus`` are numbers for each rank,
    which uses one GPU or none.

    Raises: PlanError: ``name`` is not a name that every cluster accepts, or a number is out of range.
    """

    layout: str
    nodes: Nodes
    out: str
    options: tuple[str, ...] = ()
    name: str = "shardwright"
    time_s: int = 86400
    save_s: int = 180
    restarts: int = 3
    cpus: int = 1
    gpus: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            allowed = "up to 40 of a-z, 0-9 and '-', a letter first"
            raise PlanError("no such name of a job", given=f"{self.name!r:.60}", allowed=allowed, fix="--name my-run")
        if not 0 < self.save_s < self.time_s:
            raise PlanError(
                "the ranks have no time to save before the limit",
                given=f"a limit of {self.time_s} s, --save-before {self.save_s}",
                allowed="seconds from 1 to less than the limit",
                fix="write --save-before 180, or a longer --time",
            )
        if self.restarts < 0 or self.cpus < 1:
            raise PlanError(
                "a job cannot be asked for with these numbers",
                given=f"--restarts {self.restarts}, --cpus {self.cpus}",
                allowed="restarts from 0, one CPU or more for each rank",
                fix="leave them out, for their defaults",
            )
        if self.gpus not in (0, 1):
            raise PlanError(
                "a rank cannot use this number of GPUs",
                given=f"--gpus {self.gpus}",
                allowed="1, or 0 for ranks on the CPU",
                fix="write --gpus 1; to use more GPUs of a node, give it more ranks with --nodes",
            )

    def train(self, python: str) -> list[str]:
        """Returns the ``shardwright train`` command of a rank as a list of arguments; ``python`` is the interpreter."""
        return [python, "-m", "shardwright.cli", *self._arguments()]

    def torchrun(self, python: str, run_id: str, node_rank: str, address: str, port: str, restarts: int) -> list[str]:
        """Returns the torchrun command that starts the ranks of one node, as a list of arguments.

        ``python`` is the interpreter. ``run_id`` names the rendezvous at ``address`` and ``port``, ``node_rank`` is the
        number of the node, and ``restarts`` is how often torchrun restarts the ranks after a failure.
        """
        place = {"nnodes": self.nodes.num_nodes, "nproc-per-node": self.nodes.ranks_per_node, "node-rank": node_rank}
        place |= {"master-addr": address, "master-port": port, "rdzv-id": run_id, "max-restarts": restarts}
        words = [word for key, value in place.items() for word in (f"--{key}", str(value))]
        return [python, "-m", TORCHRUN, *words, "-m", "shardwright.cli", *self._arguments()]

    def torchrun_environment(self) -> dict[str, str]:
        """Returns the environment variables that torchrun needs beside its command, by name.

        They set the number of OpenMP threads, and that torchrun, when told to stop, gives its ranks ``save_s`` seconds.
        The latter is a variable because torch 2.11 refuses the option ``--shutdown-timeout``, which came with 2.12;
        2.11 ignores the variable, and gives the ranks 30 seconds.
        """
        return {"OMP_NUM_THREADS": str(self.cpus), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.save_s)}

    def _arguments(self) -> Sequence[str]:
        return ["train", "--layout", self.layout, "--out", self.out, *self.options]


def seconds_of(text: str) -> int:
    """Returns a time limit in seconds, given in one of Slurm's notations, such as ``m``, ``m:s``, ``h:m:s`` or ``d-h``.

    After days come hours, then minutes and seconds: ``d-h``, ``d-h:m`` or ``d-h:m:s``.

    Raises: PlanError: the text is not in one of these notations.

    >>> seconds_of("1:30:00"), seconds_of("1-5:30"), seconds_of("45")
    (5400, 106200, 2700)
    """
    after_days = re.fullmatch(r"(\d{1,3})-(\d{1,4})(?::(\d{1,2}))?(?::(\d{1,2}))?", text)
    match = after_days or re.fullmatch(r"()(?:(\d{1,4}):)?(\d{1,6})(?::(\d{1,2}))?", text)
    if match is None:
        allowed = "minutes, hours:minutes:seconds or days-hours:minutes:seconds, as Slurm has them"
        raise PlanError("no such time limit", given=f"{text:.60}", allowed=allowed, fix="write --time 4:00:00")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    if not after_days and match[2] is not None and match[4] is None:  # minutes:seconds
        hours, minutes, seconds = 0, hours, minutes
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
