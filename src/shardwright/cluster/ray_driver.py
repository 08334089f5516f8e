"""Runs a training job on a Ray cluster: an actor on each node runs torchrun, and a failure restarts all nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from shardwright.cluster.job import ClusterJob
from shardwright.errors import CommunicationError, PlanError
from shardwright.formatting import first_line

WAIT_S = 600.0
"""The seconds that the driver waits until the cluster has the job's nodes free."""

END_S = 10.0
"""The seconds that torchrun has, after its ranks' time to save, to end them; killed processes have as long to end."""

_MARK = "SHARDWRIGHT_RAY_JOB"
"""The environment variable that names the run, the attempt and the node to which a process belongs."""


class _NodeJob:
    """The Ray actor of one node, which runs torchrun and with it the node's ranks.

    When an actor ends, Ray kills at most its direct child, which is torchrun. The ranks are torchrun's children, in
    sessions of their own, and would outlive their attempt, so ``stop`` ends them. The environment of torchrun and its
    ranks has a variable that names the run, the attempt and the node: by it they are found even if the process that
    started them was killed.
    """

    def __init__(self, run_id: str, attempt: int, node: int) -> None:
        self._run_mark, self._attempt_mark = f"{run_id}/", f"{run_id}/{attempt}/"
        self._node_mark = f"{run_id}/{attempt}/{node}"
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def address(self) -> tuple[str, str]:
        """Returns this node's address, as Ray knows it, and a free port."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), str(probe.getsockname()[1])

    def run(self, words: list[str], environment: dict[str, str]) -> int:
        """Runs torchrun with this interpreter, and returns its exit code.

        Ranks of an earlier attempt are killed first: some are left on this node if their actor was killed, for example
        because memory ran out.
        """
        _kill(lambda mark: mark.startswith(self._run_mark) and not mark.startswith(self._attempt_mark))
        environment = {**os.environ, **environment, _MARK: self._node_mark}
        self._torchrun = subprocess.Popen([sys.executable, *words], env=environment)
        if self._stopped:  # stop was called while ranks of an earlier attempt were being killed
            self.stop(0.0)
        return self._torchrun.wait()

    def stop(self, save_s: float) -> None:
        """Ends torchrun and its ranks, and returns when they are gone; the ranks have ``save_s`` seconds to save."""
        self._stopped = True
        if self._torchrun is not None:
            self._torchrun.terminate()  # torchrun tells its ranks, and kills those that have not ended after save_s
            with suppress(subprocess.TimeoutExpired):
                self._torchrun.wait(save_s + END_S)
        _kill(lambda mark: mark == self._node_mark)


def _kill(is_meant: Callable[[str], bool]) -> None:
    """Kills this node's processes whose mark (an environment variable) ``is_meant`` accepts; waits for their end."""
    killed = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended, or belongs to another user
            if is_meant(process.environ().get(_MARK, "")):
                process.kill()
                killed.append(process)
    end = time.monotonic() + END_S
    while any(map(_runs, killed)) and time.monotonic() < end:
        time.sleep(0.05)  # only children of this process could be waited for instead


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)  # a zombie holds no memory and no GPU
    return False


def run(job: ClusterJob, *, wait_s: float = WAIT_S) -> None:
    """Runs a training job on the Ray cluster to which this process is connected, and returns when training has ended.

    After a failure all ranks are started again, up to ``job.restarts`` times; ``wait_s`` is how many seconds each start
    waits until the cluster has the job's nodes free.

    Raises:
        CommunicationError: the nodes did not become free, or the ranks failed more than ``job.restarts`` times.
        PlanError: the ranks on every node refused their options or files, so a restart would not help.
    """
    import ray

    run_id = f"ray-{job.name}-{time.time_ns()}"
    for attempt in range(job.restarts + 1):
        try:
            codes = _attempt(ray, job, run_id, attempt, wait_s)
        except ray.exceptions.RayError as failure:  # a node is lost, and its actor with it
            codes = [f"{type(failure).__name__}: {first_line(failure)}"]
        if not any(codes):
            return
        sys.stderr.write(f"attempt {attempt + 1} of {job.restarts + 1} ended: {', '.join(map(str, codes))}\n")
        if set(codes) == {2}:  # the exit code of the train command for bad input
            raise PlanError(
                "the ranks refused their input",
                given=f"torchrun on each node ended with {', '.join(map(str, codes))}",
                allowed="options and files that 'shardwright train' accepts on every node",
                fix="see the lines of the ranks above",
            )
    raise CommunicationError(
        "the ranks failed on the Ray cluster",
        given=f"torchrun on each node ended with {', '.join(map(str, codes))}",
        allowed=f"{job.restarts} restarts",
        fix="see the lines of the ranks above",
    )


def _attempt(ray: Any, job: ClusterJob, run_id: str, attempt: int, wait_s: float) -> list[Any]:
    """Starts an actor on each node, by one placement group, and returns the exit codes of their torchruns.

    Whether it returns or raises, the ranks of the attempt have ended by then, except on nodes that are lost.
    """
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    num, ranks = job.nodes.num_nodes, job.nodes.ranks_per_node
    needs = {"CPU": ranks * job.cpus, **({"GPU": ranks * job.gpus} if job.gpus else {})}
    group, agents = placement_group([needs] * num, strategy="STRICT_SPREAD"), []
    try:
        if not group.wait(wait_s):
            nodes = [f"{node['NodeManagerAddress']} ({node['Resources'].get('CPU', 0):g} CPU)"
                     for node in ray.nodes() if node["Alive"]]  # fmt: skip
            raise CommunicationError(
                "not all nodes came",
                given=f"after {wait_s:g} s {len(nodes)} nodes: {', '.join(nodes)}",
                allowed=f"{num} nodes that each have {needs} free",
                fix="start the others with 'ray start --address', or ask for less with --nodes and --cpus",
            )
        for index in range(num):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "scheduling_strategy": where}
            options["max_concurrency"] = 2  # stop is called while run waits
            agents.append(ray.remote(_NodeJob).options(**options).remote(run_id, attempt, index))
        address, port = ray.get(agents[0].address.remote())
        words = [job.torchrun("", run_id, str(index), address, port, 0)[1:] for index in range(num)]
        environment = job.torchrun_environment()
        runs = [agent.run.remote(command, environment) for agent, command in zip(agents, words, strict=True)]
        return list(ray.get(runs))
    finally:
        stops = [agent.stop.remote(job.save_s) for agent in agents]
        if stops:  # a lost node answers with an error, or not at all
            ray.wait(stops, num_returns=len(stops), timeout=job.save_s + 3 * END_S)
        remove_placement_group(group)


def driver_script(job: ClusterJob) -> str:
    """Returns the source of a Python program that runs ``job`` on the Ray cluster on which the program is started.

    ``ray job submit`` can run the program.
    """
    return (
        '"""Trains on the Ray cluster that this runs on."""\n\n'
        "import ray\n\nfrom shardwright.cluster.job import ClusterJob\n"
        "from shardwright.cluster.ray_driver import run\nfrom shardwright.nodes import Nodes\n\n"
        f'ray.init(address="auto")\nrun({job!r})\n'
    )
