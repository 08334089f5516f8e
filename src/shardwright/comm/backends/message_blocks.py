"""Messages between the ranks of one machine, over local sockets and through blocks of shared memory.

A long message is written to a block, whose file descriptor is sent over the socket once; a short one is sent in the
socket itself.
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
from shardwright.errors import CommunicationError, PlanError
from shardwright.tensor_bytes import bytes_of

POST, SUMMED, READ, NEW = 1, 2, 3, 4
"""The kinds of message. ``POST``: bytes are sent; ``SUMMED``: the sender's part of a sum is done; ``READ``: a block was
read; ``NEW``: a new block is shared.
"""

_HEADER = struct.Struct("<IQQQQQ")  # kind, channel, number, block, bytes, arrival (ns, monotonic)
_LONGEST_FOLDER = 52  # bytes: a local socket's path may have 103, and what comes after the folder up to 50


def folder_for_sockets() -> str:
    """Returns a writable folder whose path is short enough for local (Unix) sockets.

    It is Python's folder for temporary files if that will do, or else ``/tmp`` or ``/var/tmp``.

    Raises: PlanError: none of them will do, or there is none that can be written.
    """
    try:
        usual = tempfile.gettempdir()
    except FileNotFoundError as failure:
        raise PlanError(
            "there is no folder for temporary files",
            given=str(failure.strerror),
            allowed="a folder that can be written, with room",
            fix="free space there, or set TMPDIR to another folder",
        ) from failure
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
    """A slow network link to emulate between ranks of one machine; pass it to ``launch`` as ``link``.

    A rank's messages are sent one after the other at ``bytes_per_s``, and each arrives ``latency_s`` seconds after its
    last byte was sent.

    Raises: PlanError: a negative latency, or a bandwidth that is not above 0.

    >>> Link(latency_s=0.001, bytes_per_s=1e9).latency_s
    0.001
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.latency_s >= 0 and self.bytes_per_s > 0):
            raise PlanError(
                "a link cannot have this latency or bandwidth",
                given=str(self),
                allowed="a latency of 0 s or more, more than 0 bytes per second",
                fix="write Link(latency_s=0.001, bytes_per_s=1e9)",
            )


class ReceivedMessage(NamedTuple):
    """A received message: the index of the sender's shared-memory block that holds its bytes, or the bytes themselves.

    ``num_bytes`` is their number. If there are at most 4 KiB, they are in ``inline``, and ``block`` means nothing.
    Otherwise ``inline`` is empty.
    """

    block: int
    num_bytes: int
    inline: bytes


class MessageBlock:
    """A shared-memory buffer for messages: an unnamed file, memory-mapped."""

    def __init__(self, handle: int, num_bytes: int) -> None:
        self.handle, self.num_bytes = handle, num_bytes
        self.memory = mmap.mmap(handle, num_bytes)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    @staticmethod
    def new(num_bytes: int) -> MessageBlock:
        """Returns a new shared-memory buffer of ``num_bytes`` over an unnamed file.

        Raises: CommunicationError: it cannot have so many bytes, as under a limit of a file's size (``ulimit -f``).
        """
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("shardwright", 0)
        else:
            with tempfile.TemporaryFile() as file:
                handle = os.dup(file.fileno())
        try:
            os.ftruncate(handle, num_bytes)
            return MessageBlock(handle, num_bytes)
        except OSError as failure:
            os.close(handle)
            raise CommunicationError(
                "there is no shared memory for a message",
                given=f"{num_bytes:,} bytes: {failure.strerror}",
                allowed="memory for it, and no smaller limit of a file (ulimit -f)",
                fix='raise the limit, or launch with links="sockets"',
            ) from failure


class MessageExchange:
    """One rank's sockets to the other ranks of its machine, its shared-memory blocks, and the messages received.

    In ``folder``, the same for all ranks, each rank creates a socket that is named by its number. ``timeout_s`` is the
    time limit of each wait, in seconds, and ``link`` a slow link to emulate, if any.

    While the rank waits for a message of one rank, it reads from all. While its send buffer is full, it goes on
    receiving, so that ranks with full buffers cannot deadlock.
    """

    def __init__(self, rank: int, folder: Path, timeout_s: float, link: Link | None = None) -> None:
        self.rank, self.folder, self.timeout_s, self.link = rank, folder, timeout_s, link
        self._link_free_ns = 0  # when the emulated link has sent all bytes given to it so far
        self._in_flight: list[tuple[int, int, tuple[int, int, int, int], ReceivedMessage]] = []  # a heap, by arrival
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(folder / str(rank)))
        self.listener.listen(1024)
        self.peers: dict[int, socket.socket] = {}
        self.lost_peers: set[int] = set()
        self.failure: CommunicationError | None = None  # to be raised by a rank that waits
        self.received: dict[
            tuple[int, int, int, int], ReceivedMessage
        ] = {}  # by peer, kind, channel, number of the call
        self.when_posted: dict[tuple[int, int], Callable[[], None]] = {}  # callbacks of all-reduces, by (channel, call)
        self.peer_blocks: dict[tuple[int, int], MessageBlock] = {}  # mapped here, by peer and block
        self.blocks: list[MessageBlock] = []
        self.block_sizes = Blocks()
        self._shared: set[tuple[int, int]] = set()  # (peer, block) whose descriptor was sent
        self._poll = select.poll()
        self._by_handle: dict[int, int] = {}  # peers by file descriptor, as poll returns it
        self._order = itertools.count()  # breaks ties of arrival in the heap

    def connect(self, ranks: Sequence[int]) -> None:
        """Opens sockets to those of ``ranks`` to which this rank has none yet; they must call it too.

        Of each pair, the higher rank connects and the lower one accepts.

        Raises: TimeoutError: a higher rank does not connect within the timeout. Another OSError: a lower rank has not
            created its socket yet.
        """
        for peer in ranks:
            if peer < self.rank and peer not in self.peers:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connection.connect(str(self.folder / str(peer)))
                connection.sendall(self.rank.to_bytes(4, "little"))
                self._add(peer, connection)
        self.listener.settimeout(self.timeout_s)
        while any(peer > self.rank and peer not in self.peers for peer in ranks):
            connection, _ = self.listener.accept()
            self._add(int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "little"), connection)

    def _add(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        self.peers[peer] = connection
        self._by_handle[connection.fileno()] = peer
        self._poll.register(connection.fileno(), select.POLLIN)

    def post(
        self, channel: int, number: int, tensors: Sequence[Tensor], to: Sequence[int], sent: int | None = None
    ) -> int:
        """Sends the bytes of ``tensors``, joined, to the ranks ``to``, without waiting until these read them.

        The tensors may be changed at once, because their bytes are copied.

        Returns the index of the shared-memory block that holds the bytes, or -1 if they are few enough to go through
        the sockets. ``channel`` and ``number`` identify the call: its process group, and its number in the group.
        ``sent`` is how many bytes an emulated link carries; by default all bytes for each rank.

        Raises: LostError: a rank has closed its connection. LateError: a full socket was not read in time.
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
            self._share_block(peer, place)
            self._send(peer, _HEADER.pack(POST, channel, number, place, num_bytes, arrival))
        return place

    def notify(self, peer: int, kind: int, channel: int, number: int, block: int = 0, read: int = 0) -> None:
        """Sends rank ``peer`` a message without payload, such as that a block was read (``kind`` is ``READ``).

        ``kind``, ``channel`` and ``number`` identify the message as in :meth:`receive`, and ``block`` is the index of
        the block in question. ``read`` is how many bytes of a block ``peer`` reads after this message, which an
        emulated link counts as sent.

        Raises: as :meth:`post`.
        """
        arrival = self._arrival_ns(read) if read else 0
        self._send(peer, _HEADER.pack(kind, channel, number, block, 0, arrival))

    def _arrival_ns(self, num_bytes: int) -> int:
        """Returns the ``time.monotonic_ns()`` at which a message sent now arrives over the emulated link.

        Returns 0 if no link is emulated.
        """
        if self.link is None:
            return 0
        begin = max(time.monotonic_ns(), self._link_free_ns)
        self._link_free_ns = begin + int(num_bytes / self.link.bytes_per_s * 1e9)
        return self._link_free_ns + int(self.link.latency_s * 1e9)

    def receive(self, peer: int, kind: int, channel: int, number: int) -> ReceivedMessage:
        """Waits for one message from rank ``peer``, and returns it.

        ``kind`` says what is sent, such as ``POST`` for a tensor's bytes; ``channel`` identifies the process group, and
        ``number`` the call in it.

        Raises: as :meth:`wait_until`.
        """
        key = (peer, kind, channel, number)
        self.wait_until(lambda: key in self.received, [peer])
        return self.received.pop(key)

    def wait_until(self, ready: Callable[[], bool], peers: Sequence[int]) -> None:
        """Receives messages from all ranks until ``ready()`` returns True.

        Raises: LostError: one of the ranks ``peers`` has closed its connection. LateError: the timeout is over, and
            messages have stopped coming. ``failure``, once it is set.
        """
        end = time.monotonic() + self.timeout_s
        while not ready():
            if self.failure is not None:
                raise self.failure
            gone = [peer for peer in peers if peer in self.lost_peers]
            if gone:
                raise LostError(gone[0])
            is_late = not self._receive_any(1.0) and time.monotonic() > end
            if is_late and self.lost_peers.isdisjoint(peers):
                raise LateError(peers[0], self.timeout_s)

    def peer_bytes(self, peer: int, posted: ReceivedMessage) -> Tensor:
        """Returns the bytes of a message from rank ``peer`` as a flat uint8 tensor.

        It is a view of the block that holds the bytes, or a new tensor if they came through the socket. For a message
        without bytes it is empty, and its dtype means nothing.
        """
        if posted.num_bytes <= INLINE_BYTES:
            return torch.frombuffer(bytearray(posted.inline), dtype=torch.uint8) if posted.inline else torch.empty(0)
        return self.peer_blocks[peer, posted.block].bytes[: posted.num_bytes]

    def done_reading(self, peer: int, posted: ReceivedMessage) -> None:
        """Tells rank ``peer`` that this rank has read a message, so that ``peer`` can reuse the message's block.

        Nothing is sent for a message that came through the socket. Raises: as :meth:`post`.
        """
        if posted.num_bytes > INLINE_BYTES:
            self.notify(peer, READ, 0, 0, posted.block)

    def close(self) -> None:
        """Closes this rank's sockets to the other ranks, which then get LostError if they wait for this rank."""
        for connection in (*self.peers.values(), self.listener):
            connection.close()

    def _take(self, num_bytes: int, readers: int) -> int:
        def listen() -> None:  # READ messages that wait in the sockets may free a block
            while self._receive_any(0.0):
                pass

        place = self.block_sizes.take(num_bytes, readers, listen)
        if place == len(self.blocks):
            self.blocks.append(MessageBlock.new(self.block_sizes.sizes[place]))
        return place

    def _share_block(self, peer: int, place: int) -> None:
        if (peer, place) not in self._shared:
            self._shared.add((peer, place))
            block = self.blocks[place]
            self._send(peer, _HEADER.pack(NEW, 0, 0, place, block.num_bytes, 0), block.handle)

    def _send(self, peer: int, data: bytes, handle: int | None = None) -> None:
        connection, end = self.peers[peer], time.monotonic() + self.timeout_s
        while data:
            if peer in self.lost_peers:
                raise LostError(peer)
            try:
                sent = connection.send(data) if handle is None else socket.send_fds(connection, [data], [handle])
                data, handle = data[sent:], None  # a descriptor travels with the first byte
            except BlockingIOError:
                if not self._receive_any(0.01) and time.monotonic() > end:
                    raise LateError(peer, self.timeout_s) from None
            except ConnectionError:
                raise LostError(peer) from None

    def _receive_any(self, wait_s: float) -> bool:
        """Reads one message from each rank that has sent any, and returns whether any came within ``wait_s``.

        It returns earlier, with False, if a rank closes its connection.
        """
        progress = self._store_arrived()
        if self._in_flight and not progress:
            wait_s = min(wait_s, max(0.0, (self._in_flight[0][0] - time.monotonic_ns()) / 1e9))
        if 0 < wait_s < 0.001:
            time.sleep(wait_s)  # poll counts whole milliseconds
        for handle, _ in self._poll.poll(0 if progress else int(wait_s * 1000)):
            peer = self._by_handle[handle]
            try:
                self._read_message(peer, self.peers[peer])
            except ConnectionError:
                self.lost_peers.add(peer)  # its earlier messages are kept; waiting for more raises
                self._poll.unregister(handle)
            else:  # closing is no progress: else each rank that gives up would prolong the others' wait
                progress = True
        return self._store_arrived() or progress

    def _store_arrived(self) -> bool:
        """Stores the messages in flight over the emulated link that have arrived by now."""
        delivered = False
        while self._in_flight and self._in_flight[0][0] <= time.monotonic_ns():
            _, _, key, posted = heapq.heappop(self._in_flight)
            self._store(key, posted)
            delivered = True
        return delivered

    def _store(self, key: tuple[int, int, int, int], posted: ReceivedMessage) -> None:
        self.received[key] = posted
        if key[1] == POST and key[2:] in self.when_posted:  # an all-reduce may have all tensors now
            self.when_posted[key[2:]]()

    def _read_message(self, peer: int, connection: socket.socket) -> None:
        """Reads one message from the socket of rank ``peer``, and stores it or acts on it."""
        header, handles, _, _ = socket.recv_fds(connection, _HEADER.size, 1)
        if not header:  # end of stream: the peer has closed
            raise ConnectionResetError
        header += _exactly(connection, _HEADER.size - len(header))
        kind, channel, number, place, num_bytes, arrival_ns = _HEADER.unpack(header)
        if kind == NEW:
            self.peer_blocks[peer, place] = MessageBlock(handles[0], num_bytes)
        elif kind == READ:
            self.block_sizes.release(place)
        else:
            inline = _exactly(connection, num_bytes) if kind == POST and num_bytes <= INLINE_BYTES else b""
            key, posted = (peer, kind, channel, number), ReceivedMessage(place, num_bytes, inline)
            if arrival_ns:
                heapq.heappush(self._in_flight, (arrival_ns, next(self._order), key, posted))
            else:
                self._store(key, posted)


class LostError(Exception):
    """Raised if a rank from which a message is awaited, or to which one is sent, has closed its connection."""

    def __init__(self, peer: int) -> None:
        super().__init__(f"rank {peer} has closed its connection")


class OtherSizeError(Exception):
    """Raised if a rank has sent a message of more or fewer bytes than this rank expects."""


class LateError(Exception):
    """Raised if a rank has sent no message, or has not read from its full socket, within the timeout."""

    def __init__(self, peer: int, timeout_s: float) -> None:
        super().__init__(f"rank {peer} did not come within {timeout_s:.0f} s")


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Returns the next ``num_bytes`` of a socket, for the rest of a message of which a part was read."""
    data = b""
    while len(data) < num_bytes:
        try:
            more = connection.recv(num_bytes - len(data))
        except BlockingIOError:
            ready = select.poll()
            ready.register(connection.fileno(), select.POLLIN)
            ready.poll(1000)
            continue
        if not more:
            raise ConnectionResetError
        data += more
    return data


def _bytes_of(tensor: Tensor) -> bytes:
    data: bytes = bytes_of(tensor.cpu()).numpy().tobytes()
    return data
