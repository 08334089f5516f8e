"""The network interface on which torch's sockets listen: the user's choice, or the one that reaches the other nodes."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from shardwright.comm.backends.nodes import SOCKETS, bind_sockets, interface_to

ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
REACHED = {"node-a": "10.0.0.1", "node-b": "10.1.0.1", "here": "127.0.0.1"}
"""The address from which this machine would send to a host."""


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """A machine with two interfaces, and a name of its own that means a loopback address."""

    class Probe(socket.socket):
        def __init__(self, *given):
            super().__init__(socket.AF_INET, socket.SOCK_DGRAM)

        def connect(self, address):
            self.mine = REACHED[address[0]]

        def getsockname(self):
            return (self.mine, 0)

    def resolved(host, *given, **named):
        if host not in REACHED:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (host, 9))]

    monkeypatch.setattr("shardwright.comm.backends.nodes.socket", SimpleNamespace(
        getaddrinfo=resolved, socket=Probe, SOCK_DGRAM=socket.SOCK_DGRAM))  # fmt: skip
    found = {name: [SimpleNamespace(address=address)] for name, address in ADDRESSES.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)


@pytest.mark.parametrize(("host", "interface"), [("node-a", "eth0"), ("node-b", "ib0"), ("here", None), ("no", None)])
def test_the_interface_is_the_one_that_reaches_the_host(host, interface):
    assert interface_to(host) == interface


def test_all_of_torch_s_sockets_listen_on_the_interface_that_reaches_the_first_node():
    assert bind_sockets({"MASTER_ADDR": "node-b"}, "node-a") == dict.fromkeys(SOCKETS, "ib0")


def test_the_first_node_whose_name_means_its_loopback_asks_for_the_way_to_another():
    assert bind_sockets({"MASTER_ADDR": "here"}, "here", "node-a") == dict.fromkeys(SOCKETS, "eth0")
    assert bind_sockets({"MASTER_ADDR": "here"}) == {}


@pytest.mark.parametrize("given", SOCKETS)
def test_an_interface_that_the_user_has_given_is_kept(given):
    chosen = {"MASTER_ADDR": "node-a", given: "ib0"}
    assert bind_sockets(chosen) == {name: "eth0" for name in SOCKETS if name != given}
