"""``ClusterJob``: a training run as every kind of cluster starts it, and the torchrun command of its nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.errors import PlanError
from shardwright.nodes import Nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterJob:
    """A training run to start on a cluster: its layout, nodes and folder, and options of ``shardwright train``.

    ``out`` is the folder of the run, which all nodes share, and ``options`` are words for the end of the ``train``
    command. ``time_s`` is the time limit; ``cpus`` and ``gpus`` are those of each rank. ``save_s`` is the time that the
    ranks have to save before they are ended; ``restarts`` is how often they are started again within the job after a
    failure. After a restart the run continues from its newest checkpoint.

    Raises: PlanError: a name that a cluster cannot take, or numbers out of range.
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
        if min(self.restarts, self.gpus) < 0 or self.cpus < 1:
            raise PlanError(
                "a job cannot be asked for with these numbers",
                given=f"--restarts {self.restarts}, --cpus {self.cpus}, --gpus {self.gpus}",
                allowed="restarts and GPUs from 0, one CPU or more for each rank",
                fix="leave them out, for their defaults",
            )

    def train(self, python: str) -> list[str]:
        """Returns the command that one rank runs, as a list of words; ``python`` is the interpreter."""
        return [python, "-m", "shardwright.cli", *self._arguments()]

    def torchrun(self, python: str, run_id: str, node_rank: str, address: str, port: str, restarts: int) -> list[str]:
        """Returns the torchrun command that starts the ranks of one node, as a list of words.

        ``python`` is the interpreter. ``run_id`` names the rendezvous at ``address`` and ``port``, ``node_rank`` is the
        number of the node, and ``restarts`` is how often torchrun restarts the ranks after a failure.
        """
        place = {"nnodes": self.nodes.num_nodes, "nproc-per-node": self.nodes.ranks_per_node, "node-rank": node_rank}
        place |= {"master-addr": address, "master-port": port, "rdzv-id": run_id, "max-restarts": restarts}
        words = [word for key, value in place.items() for word in (f"--{key}", str(value))]
        shutdown = ["--shutdown-timeout", str(self.save_s)]
        return [python, "-m", "torch.distributed.run", *words, *shutdown, "-m", "shardwright.cli", *self._arguments()]

    def _arguments(self) -> Sequence[str]:
        return ["train", "--layout", self.layout, "--out", self.out, *self.options]


def seconds_of(text: str) -> int:
    """Returns the seconds of a time limit in Slurm's notation: ``m``, ``m:s``, ``h:m:s`` or ``d-h:m:s``.

    Raises: PlanError: the text is no such time.

    >>> seconds_of("1:30:00"), seconds_of("1-00:00:00"), seconds_of("45")
    (5400, 86400, 2700)
    """
    found = re.fullmatch(r"(?:(\d{1,3})-)?(?:(\d{1,4}):)?(\d{1,6})(?::(\d{1,2}))?", text)
    if found is None:
        allowed = "minutes, hours:minutes:seconds or days-hours:minutes:seconds, as Slurm has them"
        raise PlanError("no such time limit", given=f"{text:.60}", allowed=allowed, fix="write --time 4:00:00")
    days, hours, minutes, seconds = (int(each or 0) for each in found.groups())
    if found[2] is not None and found[4] is None:  # minutes:seconds
        hours, minutes, seconds = 0, hours, minutes
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
