"""The nodes of a run: which node a rank is on, how ranks are numbered over nodes, and the network between them.

A node is what shares memory: a machine, or a container or network namespace of one. Ranks of one node must be
neighbors, because the mesh puts the axis that sends most (``tp``) on neighboring ranks. ``torchrun`` numbers them so;
``mpirun --map-by node`` and ``srun --distribution=cyclic`` deal them out in turn, and are renumbered::

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
    """Returns a text that is equal for two ranks if they share memory: host, boot, user and the container's namespaces.

    Containers of one machine may have the same host name and boot id, but have namespaces of their own.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname(), boot.read_text().strip() if boot.exists() else "", str(os.getuid())]
    for name in ("net", "mnt"):
        with suppress(OSError):  # another system has no namespaces
            parts.append(os.readlink(f"/proc/self/ns/{name}"))
    return "/".join(parts)


def nodes_of_ranks(store: Any, rank: int, size: int) -> dict[int, str]:
    """Returns the node of each rank as text, exchanged through torch's ``store``; every rank must call it."""
    store.set(f"host/{rank}", this_node())
    return dict(enumerate(each.decode() for each in store.multi_get([f"host/{other}" for other in range(size)])))


def ordered_by_node(nodes: Sequence[str]) -> list[int]:
    """Returns rank numbers in an order in which the ranks of one node are neighbors; rank 0 stays first.

    >>> ordered_by_node(["a", "b", "a", "b"]), ordered_by_node(["a", "a", "b", "b"])
    ([0, 2, 1, 3], [0, 1, 2, 3])
    """
    return sorted(range(len(nodes)), key=lambda rank: (nodes.index(nodes[rank]), rank))


def number_by_node(store: Any, rank: int, size: int) -> tuple[int, tuple[int, ...], tuple[str, ...]]:
    """Returns this rank's new number, under which a node's ranks are neighbors; each new number's node, and its host.

    ``rank`` is the number under which the launcher started it, ``size`` the number of ranks, and ``store`` torch's
    store, through which the ranks exchange their nodes. The results list nodes, counted from 0, and host names by
    new numbers.
    """
    names = nodes_of_ranks(store, rank, size)
    order = ordered_by_node([names[other] for other in range(size)])
    places = list(dict.fromkeys(names[other] for other in order))
    hosts = tuple(names[other].partition("/")[0] for other in order)
    return order.index(rank), tuple(places.index(names[other]) for other in order), hosts


def interface_to(host: str) -> str | None:
    """Returns the network interface through which this node reaches ``host``; None for loopback or an unknown host.

    It is needed where a machine's own name means a loopback address, as on Debian: torch would then listen on an
    address that other nodes cannot reach. Nothing is sent.

    >>> interface_to("127.0.0.1") is None
    True
    """
    with suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            mine = str(probe.getsockname()[0])
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address.partition("%")[0] == mine for each in addresses):
                return None if name in ("lo", "lo0") else str(name)
    return None


def bind_sockets(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Returns the environment variables that bind torch's sockets to the interface that reaches the other nodes.

    That is the one that reaches ``MASTER_ADDR``, or else one of ``hosts``. There are none if it is unknown or the
    loopback. A variable that ``environment`` already has is the user's choice, and is left out.
    """
    found = next(filter(None, map(interface_to, (environment.get("MASTER_ADDR", ""), *hosts))), None)
    return {} if found is None else {name: found for name in SOCKETS if name not in environment}
