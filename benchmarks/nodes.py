"""Several nodes on one machine: network namespaces with addresses of their own, joined by a switch.

Each lives as long as a process that does nothing, so a test that is killed leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "ip"
TC = shutil.which("tc", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "tc"
ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
ENVIRONMENT["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = (
    "1"  # else torch 2.13 never tells a node that joins later where to meet
)

READY = "ready"
"""What a rank of :func:`world_on` prints once it can run variants."""

HEARTBEATS = "keep_alive_interval=2,keep_alive_max_attempt=5"
"""A node is lost to the others, and its place free, when torchrun has not heard of it for 10 s; by default 15."""


@dataclass(frozen=True)
class Node:
    """A namespace with one network interface."""

    number: int
    pid: int
    address: str
    spaces: tuple[str, ...] = ("--net",)

    def inside(self, *words: str) -> list[str]:
        """The command that runs these words on this node."""
        return ["nsenter", "--target", str(self.pid), *self.spaces, f"--wd={os.getcwd()}", "--", *words]

    def torchrun(self, nodes: int, ranks: int, *words: str, restarts: int = 0, head: str = "10.77.0.1") -> list[str]:
        """The command that starts this node's ranks; ``head`` is the address of the node that the others meet at."""
        options = ["--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:29400", "--rdzv-id", "cluster"]
        options += ["--rdzv-conf", f"is_host={str(self.address == head).lower()},{HEARTBEATS}"]
        options += ["--local-addr", self.address]
        options += ["--monitor-interval", "0.1"]
        return self.inside(sys.executable, "-m", "torch.distributed.run", *options, *words)

    def set_link(self, state: str) -> None:
        """Sets the link to the switch ``up`` or ``down``; a link that goes down closes no connection."""
        _run(self.pid, IP, "link", "set", "eth0", state)


def why_not() -> str:
    """Why there can be no nodes here; "" if there can."""
    tried = subprocess.run(
        ["unshare", "--net", IP, "link", "add", "sw0", "type", "bridge"], capture_output=True, text=True, check=False
    ) if shutil.which("unshare") else None  # fmt: skip
    if tried is None or tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip() if tried else 'no unshare'}"
    return ""


@contextmanager
def nodes(num: int, bits_per_s: str = "", names: Path | None = None) -> Iterator[list[Node]]:
    """So many nodes on one switch, whose links carry ``bits_per_s`` (as ``1gbit``), or what the machine can.

    With ``names``, a file for them, the nodes have host names, n0 and so on, by which they find each other.
    """
    spaces = ("--net", "--uts", "--mount") if names is not None else ("--net",)
    hosts = "".join(f"10.77.0.{number + 1} n{number}\n" for number in range(num))
    if names is not None:
        names.write_text(f"127.0.0.1 localhost\n{hosts}")
    with ExitStack() as stack:
        switch, *found = [stack.enter_context(_namespace(spaces)) for _ in range(num + 1)]
        _run(switch, IP, "link", "add", "sw0", "type", "bridge")
        _run(switch, IP, "link", "set", "sw0", "up")
        made = []
        for number, pid in enumerate(found):
            node = Node(number, pid, f"10.77.0.{number + 1}", spaces)
            if names is not None:
                for words in (["hostname", f"n{number}"], ["mount", "--bind", str(names), "/etc/hosts"]):
                    subprocess.run(node.inside(*words), check=True)
            _run(switch, IP, "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            _run(switch, IP, "link", "set", f"v{number}", "master", "sw0", "up")
            _run(pid, IP, "addr", "add", f"{node.address}/24", "dev", "eth0")
            for interface, space in (("eth0", pid), ("lo", pid)):
                _run(space, IP, "link", "set", interface, "up")
            if bits_per_s:
                limit = ("rate", bits_per_s, "burst", "256k", "latency", "50ms")
                _run(pid, TC, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
            made.append(node)
        yield made


def fork_ranks(
    places: Sequence[Node], port: int, descriptors: Sequence[Sequence[int]], *words: str
) -> subprocess.Popen[bytes]:
    """Starts one process that imports torch and forks a rank on each of these nodes, without torchrun.

    ``descriptors`` are those of each rank's input and output, and of its errors if there are three. ``words`` are the
    script that each rank runs, and its options. The process ends with code 1 if a rank fails.
    """
    ranks = []
    for rank, node in enumerate(places):
        place = {"RANK": rank, "WORLD_SIZE": len(places), "LOCAL_RANK": places[:rank].count(node)}
        place |= {"LOCAL_WORLD_SIZE": places.count(node), "MASTER_ADDR": places[0].address, "MASTER_PORT": port}
        ranks.append((node.pid, {name: str(value) for name, value in place.items()}, *descriptors[rank]))
    command = [sys.executable, str(ROOT / "benchmarks" / "node_ranks.py"), json.dumps(ranks), *words]
    passed = {each for several in descriptors for each in several}
    return subprocess.Popen(command, pass_fds=[*passed], env=os.environ | ENVIRONMENT, start_new_session=True)


@contextmanager
def world_on(places: Sequence[Node], port: int, *words: str) -> Iterator[Callable[[str], list[str]]]:
    """A world of one rank on each of these nodes, as a function that runs a variant and returns what each rank says.

    ``words`` are the script that each rank runs, and its options. A rank prints ``READY``, then reads the names of
    variants, one a line, and prints a line for each, such as the seconds of a step. The ranks are forks of one process.
    """
    inputs, outputs, theirs, files = [], [], [], ExitStack()
    for _ in places:
        (reads, told), (answers, writes) = os.pipe(), os.pipe()
        inputs.append(files.enter_context(os.fdopen(told, "w")))
        outputs.append(files.enter_context(os.fdopen(answers)))
        theirs.append((reads, writes))
    process = fork_ranks(places, port, theirs, *words)
    for descriptor in (each for pair in theirs for each in pair):
        os.close(descriptor)

    def run(name: str) -> list[str]:
        for each in inputs:
            print(name, file=each, flush=True)
        return [each.readline() for each in outputs]

    try:
        for each in outputs:
            assert each.readline().strip() == READY, "a rank did not start"
        yield run
        for each in inputs:
            each.close()
        assert process.wait(timeout=60) == 0, "a rank failed"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with suppress(BrokenPipeError):  # what a rank that has ended did not read
            files.close()


@contextmanager
def _namespace(spaces: tuple[str, ...]) -> Iterator[int]:
    """The process that holds namespaces."""
    holder = subprocess.Popen(["unshare", *spaces, "--", "sleep", "3600"])
    try:
        while b"sleep" not in Path(f"/proc/{holder.pid}/cmdline").read_bytes()[:6]:
            time.sleep(0.01)
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


def _run(pid: int, *words: str) -> None:
    subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "--", *words], check=True)
