"""The nodes of a run: which node a rank is on, how ranks are numbered over nodes, and the network between them.

A node is what shares memory: a machine, or a container or network namespace of one. The ranks of a node must have
consecutive numbers, because the mesh puts the axis that sends most (``tp``) on consecutive ranks. ``torchrun`` numbers
them so. ``mpirun --map-by node`` and ``srun --distribution=cyclic`` give the nodes one rank each in turn, and these
ranks are renumbered::

    node           a  b  a  b
    started as     0  1  2  3
    rank           0  2  1  3
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The environment variables that choose the network interface of torch's own sockets."""


def this_node() -> str:
    """Returns a text that identifies this process's node: it is equal for two ranks if they can share memory.

    It consists of the host name, the boot id, the user id and the network and mount namespaces. Containers of one
    machine may have the same host name and boot id, but have namespaces of their own.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname(), boot.read_text().strip() if boot.exists() else "", str(os.getuid())]
    for name in ("net", "mnt"):
        with suppress(OSError):  # another system has no namespaces
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
    return "/".join(parts)


def nodes_of_ranks(store: Any, rank: int, size: int) -> dict[int, str]:
    """Returns a text for each rank that identifies its node, equal for ranks that can share memory.

    The texts are exchanged through torch's ``store``, so every rank must call it. ``rank`` is this rank's number, and
    ``size`` the number of ranks.
    """
    store.set(f"host/{rank}", this_node())
    return dict(enumerate(text.decode() for text in store.multi_get([f"host/{other}" for other in range(size)])))


def ordered_by_node(nodes: Sequence[str]) -> list[int]:
    """Returns the rank numbers reordered so that those of one node are neighbors; rank 0 stays first.

    ``nodes`` is the node of each rank, as text.

    >>> ordered_by_node(["a", "b", "a", "b"]), ordered_by_node(["a", "a", "b", "b"])
    ([0, 2, 1, 3], [0, 1, 2, 3])
    """
    return sorted(range(len(nodes)), key=lambda rank: (nodes.index(nodes[rank]), rank))


def number_by_node(store: Any, rank: int, size: int) -> tuple[int, tuple[int, ...], tuple[str, ...]]:
    """Renumbers the ranks so that those of a node are neighbors, and returns this rank's new number, nodes and hosts.

    Nodes (counted from 0) and host names are tuples, with an entry for each new rank number. ``rank`` is the number
    that the launcher gave this rank, ``size`` the number of ranks, and ``store`` torch's store, through which the ranks
    exchange their nodes. Every rank must call it.
    """
    names = nodes_of_ranks(store, rank, size)
    order = ordered_by_node([names[other] for other in range(size)])
    places = list(dict.fromkeys(names[other] for other in order))
    hosts = tuple(names[other].partition("/")[0] for other in order)
    return order.index(rank), tuple(places.index(names[other]) for other in order), hosts


def interface_to(host: str) -> str | None:
    """Returns the name of the network interface through which this node reaches ``host``, such as "eth0".

    Returns None if that is the loopback interface, or if the host is unknown. On some systems, such as Debian, a
    machine's own name means a loopback address, so torch would listen where other nodes cannot reach it. No message is
    sent to the host.

    >>> interface_to("127.0.0.1") is None
    True
    """
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            mine = str(probe.getsockname()[0])
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address.partition("%")[0] == mine for entry in addresses):
                return None if name in ("lo", "lo0") else str(name)
    return None


def bind_sockets(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Returns the environment variables that bind torch's sockets to the interface that reaches the other nodes.

    The interface is the one that reaches the host in ``MASTER_ADDR``, or else the first of ``hosts`` that has one. If
    there is none but the loopback, no variables are returned. A variable that ``environment`` already has is the user's
    choice, and is left out.
    """
    interface = next(filter(None, map(interface_to, (environment.get("MASTER_ADDR", ""), *hosts))), None)
    return {} if interface is None else {name: interface for name in SOCKETS if name not in environment}
