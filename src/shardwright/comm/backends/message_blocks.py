"""One rank's lines to the other ranks of its machine, the blocks of memory that they share, and what was said.

A line is a local socket. What is long lies in a block, whose descriptor was passed over the line once; what is short
travels in the line itself.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardwright.comm.backends.block_sizes import INLINE_BYTES, Blocks
from shardwright.errors import PlanError

POST, SUMMED, READ, NEW = 1, 2, 3, 4
"""What a message says: here are bytes; my part is summed; your block is read; this is a block of mine."""

_HEADER = struct.Struct("<IQQQQQ")  # kind, channel, number, block, bytes, when it arrives (ns of the machine's clock)
_LONGEST_FOLDER = 52  # bytes: a local socket's path may have 103, and what comes after the folder up to 50


def folder_for_sockets() -> str:
    """The folder for temporary files, or one with a shorter path where local sockets would not fit into it.

    Raises: PlanError: there is none.
    """
    usual = tempfile.gettempdir()
    for folder in (usual, "/tmp", "/var/tmp"):
        if len(os.fsencode(folder)) <= _LONGEST_FOLDER and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise PlanError(
        "the folder for temporary files has too long a path for local sockets",
        given=f"{usual}: {len(os.fsencode(usual))} bytes",
        allowed=f"up to {_LONGEST_FOLDER} bytes",
        fix="set TMPDIR to a folder with a shorter path that can be written",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A slow link to emulate: what a rank says arrives after ``latency_s`` and its bytes, one message after the other.

    >>> Link(latency_s=0.001, bytes_per_s=1e9).latency_s
    0.001
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise PlanError(
                "no link is like this",
                given=str(self),
                allowed="a latency of 0 s or more, more than 0 bytes per second",
                fix="write Link(latency_s=0.001, bytes_per_s=1e9)",
            )


class Posted(NamedTuple):
    """What a peer said: the block that holds its bytes, or the bytes themselves."""

    block: int
    num_bytes: int
    inline: bytes


class Block:
    """A piece of shared memory: an unnamed file, mapped."""

    def __init__(self, handle: int, num_bytes: int) -> None:
        self.handle, self.num_bytes = handle, num_bytes
        self.memory = mmap.mmap(handle, num_bytes)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    @staticmethod
    def new(num_bytes: int) -> Block:
        """A fresh one."""
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("shardwright", 0)
        else:
            with tempfile.TemporaryFile() as file:
                handle = os.dup(file.fileno())
        os.ftruncate(handle, num_bytes)
        return Block(handle, num_bytes)


class MessageExchange:
    """One rank's connections to the other ranks of its machine, its blocks, and what was said to it.

    It never waits for one rank without listening to all: a rank that sends while its partner's line is full takes in
    what was said to it meanwhile, so no circle of full lines can form.
    """

    def __init__(self, rank: int, folder: Path, timeout_s: float, link: Link | None = None) -> None:
        self.rank, self.folder, self.timeout_s, self.link = rank, folder, timeout_s, link
        self._link_free_ns = 0
        self._under_way: list[tuple[int, int, tuple[int, int, int, int], Posted]] = []  # a heap, by arrival
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(folder / str(rank)))
        self.listener.listen(1024)
        self.peers: dict[int, socket.socket] = {}
        self.lost: set[int] = set()
        self.said: dict[tuple[int, int, int, int], Posted] = {}
        self.when_posted: dict[tuple[int, int], Callable[[], None]] = {}
        self.theirs: dict[tuple[int, int], Block] = {}
        self.blocks: list[Block] = []
        self.taken = Blocks()
        self._known: set[tuple[int, int]] = set()
        self._ears = select.poll()
        self._by_handle: dict[int, int] = {}
        self._order = itertools.count()

    def connect(self, ranks: Sequence[int]) -> None:
        """Meets these ranks, which do the same: the higher one calls, the lower one answers."""
        for peer in ranks:
            if peer < self.rank and peer not in self.peers:
                line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                line.connect(str(self.folder / str(peer)))
                line.sendall(self.rank.to_bytes(4, "little"))
                self._add(peer, line)
        self.listener.settimeout(self.timeout_s)
        while any(peer > self.rank and peer not in self.peers for peer in ranks):
            line, _ = self.listener.accept()
            self._add(int.from_bytes(line.recv(4, socket.MSG_WAITALL), "little"), line)

    def _add(self, peer: int, line: socket.socket) -> None:
        line.setblocking(False)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        self.peers[peer] = line
        self._by_handle[line.fileno()] = peer
        self._ears.register(line.fileno(), select.POLLIN)

    def post(
        self, channel: int, number: int, tensors: Sequence[Tensor], to: Sequence[int], sent: int | None = None
    ) -> int:
        """Tells these ranks the bytes of some tensors, one after the other; returns the block, -1 for none.

        ``sent`` is how many bytes they read together: each all of them, when left out.
        """
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        arrival = self._arrival_ns(num_bytes * len(to) if sent is None else sent)
        if num_bytes <= INLINE_BYTES:
            data = b"".join(_bytes_of(tensor) for tensor in tensors)
            for peer in to:
                self._send(peer, _HEADER.pack(POST, channel, number, 0, num_bytes, arrival) + data)
            return -1
        place = self._take(num_bytes, len(to))
        block, offset = self.blocks[place], 0
        for tensor in tensors:
            block.bytes[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            offset += tensor.nbytes
        for peer in to:
            self._introduce(peer, place)
            self._send(peer, _HEADER.pack(POST, channel, number, place, num_bytes, arrival))
        return place

    def tell(self, peer: int, kind: int, channel: int, number: int, block: int = 0, read: int = 0) -> None:
        """One word to a peer, which then reads so many bytes."""
        arrival = self._arrival_ns(read) if read else 0
        self._send(peer, _HEADER.pack(kind, channel, number, block, 0, arrival))

    def _arrival_ns(self, num_bytes: int) -> int:
        """When a message that begins now is there: behind those before it. 0: at once."""
        if self.link is None:
            return 0
        begin = max(time.monotonic_ns(), self._link_free_ns)
        self._link_free_ns = begin + int(num_bytes / self.link.bytes_per_s * 1e9)
        return self._link_free_ns + int(self.link.latency_s * 1e9)

    def hear(self, peer: int, kind: int, channel: int, number: int) -> Posted:
        """What a peer said about a call; waits until it does."""
        key = (peer, kind, channel, number)
        self.wait_until(lambda: key in self.said, [peer])
        return self.said.pop(key)

    def wait_until(self, ready: Callable[[], bool], peers: Sequence[int]) -> None:
        """Listens to all until ``ready``; these peers are those whose words are missing."""
        end = time.monotonic() + self.timeout_s
        while not ready():
            gone = [peer for peer in peers if peer in self.lost]
            if gone:
                raise LostError(gone[0])
            if not self._listen(1.0) and time.monotonic() > end:
                raise LateError(peers[0], self.timeout_s)

    def their_block(self, peer: int, posted: Posted) -> Tensor:
        """The bytes that a peer told."""
        if posted.num_bytes <= INLINE_BYTES:
            return torch.frombuffer(bytearray(posted.inline), dtype=torch.uint8) if posted.inline else torch.empty(0)
        return self.theirs[peer, posted.block].bytes[: posted.num_bytes]

    def done_reading(self, peer: int, posted: Posted) -> None:
        """Gives a peer its block back."""
        if posted.num_bytes > INLINE_BYTES:
            self.tell(peer, READ, 0, 0, posted.block)

    def hold(self, place: int) -> None:
        """Keeps an own block until one more :meth:`release`."""
        self.taken.hold(place)

    def release(self, place: int) -> None:
        """One reader is done with an own block; the last one makes it free."""
        self.taken.release(place)

    def close(self) -> None:
        """Ends all connections."""
        for line in (*self.peers.values(), self.listener):
            line.close()

    def _take(self, num_bytes: int, readers: int) -> int:
        def listen() -> None:
            while self._listen(0.0):
                pass

        place = self.taken.take(num_bytes, readers, listen)
        if place == len(self.blocks):
            self.blocks.append(Block.new(self.taken.sizes[place]))
        return place

    def _introduce(self, peer: int, place: int) -> None:
        if (peer, place) not in self._known:
            self._known.add((peer, place))
            block = self.blocks[place]
            self._send(peer, _HEADER.pack(NEW, 0, 0, place, block.num_bytes, 0), block.handle)

    def _send(self, peer: int, data: bytes, handle: int | None = None) -> None:
        line, end = self.peers[peer], time.monotonic() + self.timeout_s
        while data:
            if peer in self.lost:
                raise LostError(peer)
            try:
                sent = line.send(data) if handle is None else socket.send_fds(line, [data], [handle])
                data, handle = data[sent:], None  # a descriptor travels with the first byte
            except BlockingIOError:
                if not self._listen(0.01) and time.monotonic() > end:
                    raise LateError(peer, self.timeout_s) from None
            except ConnectionError:
                raise LostError(peer) from None

    def _listen(self, wait_s: float) -> bool:
        """Takes in what any peer has said; False when nobody said anything for so long."""
        heard = self._deliver()
        if self._under_way and not heard:
            wait_s = min(wait_s, max(0.0, (self._under_way[0][0] - time.monotonic_ns()) / 1e9))
        if 0 < wait_s < 0.001:
            time.sleep(wait_s)  # poll counts whole milliseconds
        for handle, _ in self._ears.poll(0 if heard else int(wait_s * 1000)):
            peer = self._by_handle[handle]
            try:
                self._take_in(peer, self.peers[peer])
            except ConnectionError:
                self.lost.add(peer)  # what it said before is kept; whoever waits for more is told
                self._ears.unregister(handle)
            heard = True
        return self._deliver() or heard

    def _deliver(self) -> bool:
        """Hands over what has arrived by now of what was under way."""
        delivered = False
        while self._under_way and self._under_way[0][0] <= time.monotonic_ns():
            _, _, key, posted = heapq.heappop(self._under_way)
            self._say(key, posted)
            delivered = True
        return delivered

    def _say(self, key: tuple[int, int, int, int], posted: Posted) -> None:
        self.said[key] = posted
        if key[1] == POST and key[2:] in self.when_posted:
            self.when_posted[key[2:]]()

    def _take_in(self, peer: int, line: socket.socket) -> None:
        """One message of a peer."""
        header, handles, _, _ = socket.recv_fds(line, _HEADER.size, 1)
        if not header:
            raise ConnectionResetError
        header += _exactly(line, _HEADER.size - len(header))
        kind, channel, number, place, num_bytes, arrival_ns = _HEADER.unpack(header)
        if kind == NEW:
            self.theirs[peer, place] = Block(handles[0], num_bytes)
        elif kind == READ:
            self.release(place)
        else:
            inline = _exactly(line, num_bytes) if kind == POST and num_bytes <= INLINE_BYTES else b""
            key, posted = (peer, kind, channel, number), Posted(place, num_bytes, inline)
            if arrival_ns:
                heapq.heappush(self._under_way, (arrival_ns, next(self._order), key, posted))
            else:
                self._say(key, posted)


class LostError(Exception):
    """A rank that has gone."""

    def __init__(self, peer: int) -> None:
        super().__init__(f"rank {peer} has closed its connection")


class OtherSizeError(Exception):
    """A rank that said more or less than it should."""

    def __init__(self, peer: int, said: int, expected: int) -> None:
        super().__init__(f"rank {peer} sent {said} bytes where {expected} are expected")


class LateError(Exception):
    """A rank that did not come in time."""

    def __init__(self, peer: int, timeout_s: float) -> None:
        super().__init__(f"rank {peer} did not come within {timeout_s:.0f} s")


def _exactly(line: socket.socket, num_bytes: int) -> bytes:
    """The rest of a message that has begun."""
    data = b""
    while len(data) < num_bytes:
        try:
            more = line.recv(num_bytes - len(data))
        except BlockingIOError:
            ready = select.poll()
            ready.register(line.fileno(), select.POLLIN)
            ready.poll(1000)
            continue
        if not more:
            raise ConnectionResetError
        data += more
    return data


def _bytes_of(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one element is contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    data: bytes = flat.view(torch.uint8).numpy().tobytes()
    return data
