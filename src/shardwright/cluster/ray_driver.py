"""A driver for Ray: an actor on each node runs torchrun there, and after a failure all are started again."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Any

from shardwright.cluster.job import ClusterJob
from shardwright.errors import CommunicationError

WAIT_S = 600.0
"""Seconds that the driver waits for the nodes that the job asks for."""


class _NodeJob:
    """The Ray actor of one node, which runs torchrun and with it the node's ranks."""

    def address(self) -> tuple[str, str]:
        """Returns this node's address, as Ray knows it, and a free port."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), str(probe.getsockname()[1])

    def run(self, words: list[str]) -> int:
        """Runs torchrun with this interpreter, and returns its exit code."""
        return subprocess.run([sys.executable, *words], check=False).returncode


def run(job: ClusterJob, *, wait_s: float = WAIT_S) -> None:
    """Runs a job on the Ray cluster to which this process belongs, and returns when the training has ended.

    ``wait_s`` is how many seconds to wait for the nodes of the job.

    Raises: CommunicationError: the nodes did not come, or the ranks failed more than ``job.restarts`` times.
    """
    import ray

    run_id = f"ray-{job.name}-{time.time_ns()}"
    for attempt in range(job.restarts + 1):
        try:
            codes = _attempt(ray, job, run_id, wait_s)
        except ray.exceptions.RayError as failure:  # a node has gone, and its agent with it
            codes = [f"{type(failure).__name__}: {str(failure).splitlines()[0]}"]
        if not any(codes):
            return
        sys.stderr.write(f"attempt {attempt + 1} of {job.restarts + 1} ended: {', '.join(map(str, codes))}\n")
        if set(codes) <= {0, 2}:  # bad input, which no restart mends
            break
    raise CommunicationError(
        "the ranks failed on the Ray cluster",
        given=f"torchrun on each node ended with {', '.join(map(str, codes))}",
        allowed=f"{job.restarts} restarts",
        fix="see the lines of the ranks above",
    )


def _attempt(ray: Any, job: ClusterJob, run_id: str, wait_s: float) -> list[Any]:
    """Starts an actor on each node, by one placement group, and returns the exit codes of their torchruns."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    num, ranks = job.nodes.num_nodes, job.nodes.ranks_per_node
    needs = {"CPU": ranks * job.cpus, **({"GPU": ranks * job.gpus} if job.gpus else {})}
    group = placement_group([needs] * num, strategy="STRICT_SPREAD")
    try:
        if not group.wait(wait_s):
            there = [f"{each['NodeManagerAddress']} ({each['Resources'].get('CPU', 0):g} CPU)"
                     for each in ray.nodes() if each["Alive"]]  # fmt: skip
            raise CommunicationError(
                "not all nodes came",
                given=f"after {wait_s:g} s {len(there)} nodes: {', '.join(there)}",
                allowed=f"{num} nodes that each have {needs} free",
                fix="start the others with 'ray start --address', or ask for less with --nodes and --cpus",
            )
        agents = []
        for index in range(num):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "scheduling_strategy": where}
            agents.append(ray.remote(_NodeJob).options(**options).remote())
        address, port = ray.get(agents[0].address.remote())
        words = [job.torchrun("", run_id, str(index), address, port, 0)[1:] for index in range(num)]
        return list(ray.get([agent.run.remote(each) for agent, each in zip(agents, words, strict=True)]))
    finally:
        remove_placement_group(group)


def driver_script(job: ClusterJob) -> str:
    """Returns the Python program of a job, which ``--dry-run`` prints and ``ray job submit`` runs."""
    return (
        '"""Trains on the Ray cluster that this runs on."""\n\n'
        "import ray\n\nfrom shardwright.cluster.job import ClusterJob\n"
        "from shardwright.cluster.ray_driver import run\nfrom shardwright.nodes import Nodes\n\n"
        f'ray.init(address="auto")\nrun({job!r})\n'
    )
