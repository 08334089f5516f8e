"""Collectives between processes of one machine, through memory that they share.

A member that has something to say copies it into a block of shared memory and tells the others where it lies, over
a local socket; they read it there. So a call costs one copy and one read, where a network stack costs many::

    rank 0   tensor --copy--> block  --"block 3"-->  rank 1   tensor += block 3   --"read"-->  the block is free

Starting a call copies and tells, and never waits; the reading happens in ``wait``. Messages of a few KB travel in
the socket itself. Blocks have no names: their descriptors are passed over the sockets, so nothing is left behind
when a rank is killed, and a rank that dies is noticed at once because its socket closes.

Sums are taken in the order of the members, so that they are equal on all and repeat bit for bit.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardwright.comm.axis import Call, Pending
from shardwright.comm.failures import LostPartnerError
from shardwright.mesh import balanced

T = TypeVar("T")

INLINE_BYTES = 4096
"""Messages up to this size travel in the socket."""

_HEADER = struct.Struct("<IIQQQ")  # kind, channel, number, block, bytes
_POST, _SUMMED, _READ, _NEW = 1, 2, 3, 4
_LEAST_BLOCK_BYTES = 2**16


class _Posted(NamedTuple):
    """What a peer said: the block that holds its bytes, or the bytes themselves."""

    block: int
    num_bytes: int
    inline: bytes


class _Block:
    """A piece of shared memory: an unnamed file, mapped."""

    def __init__(self, handle: int, num_bytes: int) -> None:
        self.handle, self.num_bytes = handle, num_bytes
        self.memory = mmap.mmap(handle, num_bytes)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)

    @staticmethod
    def new(num_bytes: int) -> _Block:
        """A fresh one."""
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("shardwright", 0)
        else:
            with tempfile.TemporaryFile() as file:
                handle = os.dup(file.fileno())
        os.ftruncate(handle, num_bytes)
        return _Block(handle, num_bytes)


class Exchange:
    """One rank's connections to the other ranks of its machine, its blocks, and what was said to it.

    It never waits for one rank without listening to all: a rank that sends while its partner's line is full takes in
    what was said to it meanwhile, so no circle of full lines can form.
    """

    def __init__(self, rank: int, folder: Path, timeout_s: float) -> None:
        self.rank, self.folder, self.timeout_s = rank, folder, timeout_s
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(folder / str(rank)))
        self.listener.listen(1024)
        self.peers: dict[int, socket.socket] = {}
        self.lost: set[int] = set()
        self.said: dict[tuple[int, int, int, int], _Posted] = {}
        self.sums: dict[tuple[int, int], _Sum] = {}
        self.theirs: dict[tuple[int, int], _Block] = {}
        self.blocks: list[_Block] = []
        self._free: dict[int, list[int]] = {}
        self._unread: dict[int, int] = {}
        self._known: set[tuple[int, int]] = set()
        self._ears = select.poll()
        self._by_handle: dict[int, int] = {}

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

    def post(self, channel: int, number: int, tensors: Sequence[Tensor], to: Sequence[int]) -> int:
        """Tells these ranks the bytes of some tensors, one after the other; returns the block, -1 for none."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if num_bytes <= INLINE_BYTES:
            data = b"".join(_bytes_of(tensor) for tensor in tensors)
            for peer in to:
                self._send(peer, _HEADER.pack(_POST, channel, number, 0, num_bytes) + data)
            return -1
        place = self._take(num_bytes)
        block, offset = self.blocks[place], 0
        for tensor in tensors:
            block.bytes[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            offset += tensor.nbytes
        self._unread[place] = len(to)
        for peer in to:
            self._introduce(peer, place)
            self._send(peer, _HEADER.pack(_POST, channel, number, place, num_bytes))
        return place

    def tell(self, peer: int, kind: int, channel: int, number: int, block: int = 0) -> None:
        """One word to a peer."""
        self._send(peer, _HEADER.pack(kind, channel, number, block, 0))

    def hear(self, peer: int, kind: int, channel: int, number: int) -> _Posted:
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
                raise _Lost(gone[0])
            if not self._listen(1.0) and time.monotonic() > end:
                raise _Late(peers[0], self.timeout_s)

    def their_block(self, peer: int, posted: _Posted) -> Tensor:
        """The bytes that a peer told."""
        if posted.num_bytes <= INLINE_BYTES:
            return torch.frombuffer(bytearray(posted.inline), dtype=torch.uint8) if posted.inline else torch.empty(0)
        return self.theirs[peer, posted.block].bytes[: posted.num_bytes]

    def done_reading(self, peer: int, posted: _Posted) -> None:
        """Gives a peer its block back."""
        if posted.num_bytes > INLINE_BYTES:
            self.tell(peer, _READ, 0, 0, posted.block)

    def hold(self, place: int) -> None:
        """Keeps an own block until one more :meth:`release`."""
        self._unread[place] += 1

    def release(self, place: int) -> None:
        """One reader is done with an own block; the last one makes it free."""
        self._unread[place] -= 1
        if not self._unread[place]:
            self._free.setdefault(self.blocks[place].num_bytes, []).append(place)

    def close(self) -> None:
        """Ends all connections."""
        for line in (*self.peers.values(), self.listener):
            line.close()

    def _take(self, num_bytes: int) -> int:
        size = max(_LEAST_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length())
        if not self._free.get(size):
            while self._listen(0.0):
                pass
        if self._free.get(size):
            return self._free[size].pop()
        self.blocks.append(_Block.new(size))
        return len(self.blocks) - 1

    def _introduce(self, peer: int, place: int) -> None:
        if (peer, place) not in self._known:
            self._known.add((peer, place))
            block = self.blocks[place]
            self._send(peer, _HEADER.pack(_NEW, 0, 0, place, block.num_bytes), block.handle)

    def _send(self, peer: int, data: bytes, handle: int | None = None) -> None:
        line, end = self.peers[peer], time.monotonic() + self.timeout_s
        while data:
            if peer in self.lost:
                raise _Lost(peer)
            try:
                sent = line.send(data) if handle is None else socket.send_fds(line, [data], [handle])
                data, handle = data[sent:], None  # a descriptor travels with the first byte
            except BlockingIOError:
                if not self._listen(0.01) and time.monotonic() > end:
                    raise _Late(peer, self.timeout_s) from None
            except ConnectionError:
                raise _Lost(peer) from None

    def _listen(self, wait_s: float) -> bool:
        """Takes in what any peer has said; False when nobody said anything for so long."""
        heard = False
        for handle, _ in self._ears.poll(int(wait_s * 1000)):
            peer = self._by_handle[handle]
            try:
                self._take_in(peer, self.peers[peer])
            except ConnectionError:
                self.lost.add(peer)  # what it said before is kept; whoever waits for more is told
                self._ears.unregister(handle)
            heard = True
        return heard

    def _take_in(self, peer: int, line: socket.socket) -> None:
        """One message of a peer."""
        header, handles, _, _ = socket.recv_fds(line, _HEADER.size, 1)
        if not header:
            raise ConnectionResetError
        header += _exactly(line, _HEADER.size - len(header))
        kind, channel, number, place, num_bytes = _HEADER.unpack(header)
        if kind == _NEW:
            self.theirs[peer, place] = _Block(handles[0], num_bytes)
        elif kind == _READ:
            self.release(place)
        else:
            inline = _exactly(line, num_bytes) if kind == _POST and num_bytes <= INLINE_BYTES else b""
            self.said[peer, kind, channel, number] = _Posted(place, num_bytes, inline)
            if kind == _POST and (channel, number) in self.sums:
                self.sums[channel, number].try_own_part()


class _Lost(Exception):  # noqa: N818
    def __init__(self, peer: int) -> None:
        super().__init__(f"rank {peer} has closed its connection")


class _Late(Exception):  # noqa: N818
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
    data: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


class _Sum:
    """A sum of many members under way: each sums one part over all blocks, into its own; then each takes all parts.

    A member sums its part as soon as it hears that all have posted, whichever call it waits in, so calls may be
    waited for in any order.
    """

    def __init__(
        self,
        exchange: Exchange,
        ranks: tuple[int, ...],
        key: tuple[int, int],
        tensors: list[Tensor],
        op: str,
        place: int,
    ) -> None:
        self.exchange, self.ranks, self.key = exchange, ranks, key
        self.tensors, self.op = tensors, op
        self.others = [rank for rank in ranks if rank != exchange.rank]
        size, first = sum(tensor.numel() for tensor in tensors), tensors[0]
        self.own = exchange.blocks[place].bytes[: size * first.element_size()].view(first.dtype)
        cuts = balanced(size, len(ranks))
        self.parts = {rank: slice(cuts[i], cuts[i + 1]) for i, rank in enumerate(ranks)}
        self.posted: dict[int, _Posted] = {}
        self.blocks: dict[int, Tensor] = {}
        self.place = place
        exchange.hold(place)  # the others may be done with it long before this member is
        exchange.sums[key] = self
        self.try_own_part()

    def try_own_part(self) -> None:
        """Sums this member's part, once all have posted."""
        exchange, key = self.exchange, self.key
        if self.posted or not all((rank, _POST, *key) in exchange.said for rank in self.others):
            return
        self.posted = {rank: exchange.said.pop((rank, _POST, *key)) for rank in self.others}
        dtype = self.own.dtype
        self.blocks = {rank: exchange.their_block(rank, said).view(dtype) for rank, said in self.posted.items()}
        self.blocks[exchange.rank] = self.own
        mine = self.parts[exchange.rank]
        total = self.blocks[self.ranks[0]][mine].clone()
        for rank in self.ranks[1:]:
            _combine(total, self.blocks[rank][mine], self.op)
        self.own[mine].copy_(total)
        for rank in self.others:
            exchange.tell(rank, _SUMMED, *key)

    def _has_posted(self, rank: int) -> bool:
        return bool(self.posted) or (rank, _POST, *self.key) in self.exchange.said

    def finish(self) -> None:
        """Waits for everyone's part and takes them all."""
        exchange = self.exchange
        for rank in self.others:
            exchange.wait_until(partial(self._has_posted, rank), [rank])
        # one tensor takes the parts where they lie; several are filled from the own block, once it has all of them
        target = self.tensors[0].view(-1) if len(self.tensors) == 1 else self.own
        for rank, part in self.parts.items():
            if rank != exchange.rank:
                exchange.hear(rank, _SUMMED, *self.key)
            if rank != exchange.rank or target is not self.own:
                target[part].copy_(self.blocks[rank][part])
        if target is self.own:
            _scatter_back(self.own, self.tensors)
        del exchange.sums[self.key]
        exchange.release(self.place)
        for rank, said in self.posted.items():
            exchange.done_reading(rank, said)


class SharedChannel:
    """One group's calls through shared memory, seen from one member."""

    def __init__(
        self, exchange: Exchange, ranks: tuple[int, ...], number: int, begin: Callable[[Call, int, bool], None],
        subset: Callable[[tuple[int, ...]], Any],
    ) -> None:  # fmt: skip
        self.exchange, self.ranks, self.number = exchange, ranks, number
        self.index = ranks.index(exchange.rank)
        self.others = [rank for rank in ranks if rank != exchange.rank]
        self._begin_call, self._subset = begin, subset
        self._num_calls = 0
        self._num_sent: dict[int, int] = {}
        self._num_received: dict[int, int] = {}
        exchange.connect(ranks)

    def subset(self, indices: tuple[int, ...]) -> Any:
        """See :class:`~shardwright.comm.axis.Channel`."""
        return self._subset(tuple(self.ranks[i] for i in indices))

    def all_reduce(self, call: Call, tensors: list[Tensor], op: str) -> Pending[None]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        number = self._begin(call, num_bytes)
        if len(self.ranks) > 2 and num_bytes > INLINE_BYTES:
            place = self._post(call, number, tensors, self.others)
            with self._naming(call):
                under_way = _Sum(self.exchange, self.ranks, (self.number, number), tensors, op, place)
            return self._pending(call, under_way.finish)
        # two members: a + b is b + a, to the last bit; more: each adds all terms in the order of the members
        mine = torch.cat([tensor.view(-1) for tensor in tensors]) if len(self.ranks) > 2 else None
        self._post(call, number, tensors, self.others)

        def finish() -> None:
            if mine is None:
                self._combine_with(self.others[0], number, tensors, op)
                return
            total = torch.empty_like(mine)
            for position, rank in enumerate(self.ranks):
                term = mine if position == self.index else self._read(rank, number, mine)[0]
                total.copy_(term) if position == 0 else _combine(total, term, op)
            _scatter_back(total, tensors)

        return self._pending(call, finish)

    def all_gather(self, call: Call, parts: list[Tensor], index: int) -> Pending[None]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        number = self._begin(call, sum(part.nbytes for part in parts))
        self._post(call, number, [parts[index]], self.others)

        def finish() -> None:
            for position, rank in enumerate(self.ranks):
                if position != index:
                    self._copy(rank, number, 0, parts[position])

        return self._pending(call, finish)

    def reduce_scatter(self, call: Call, out: Tensor, parts: list[Tensor]) -> Pending[Tensor]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        number = self._begin(call, sum(part.nbytes for part in parts))
        self._post(call, number, parts, self.others)
        before = sum(part.nbytes for part in parts[: self.index])

        def finish() -> Tensor:
            for position, rank in enumerate(self.ranks):
                if position == self.index:
                    term, give_back = parts[self.index], None
                else:
                    term, give_back = self._read(rank, number, out, before)
                out.copy_(term) if position == 0 else out.add_(term.to(out.device))
                self._give_back(give_back)
            return out

        return self._pending(call, finish)

    def all_to_all(self, call: Call, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        number = self._begin(call, sum(part.nbytes for part in parts))
        for position, rank in enumerate(self.ranks):
            if position != self.index:
                self._post(call, number, [parts[position]], [rank])
        outs[self.index].copy_(parts[self.index])

        def finish() -> list[Tensor]:
            for position, rank in enumerate(self.ranks):
                if position != self.index:
                    self._copy(rank, number, 0, outs[position])
            return outs

        return self._pending(call, finish)

    def broadcast(self, call: Call, tensor: Tensor, source: int) -> Pending[Tensor]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        number = self._begin(call, tensor.nbytes)
        if source == self.index:
            self._post(call, number, [tensor], self.others)
            return Pending(lambda: tensor)
        return self._pending(call, lambda: self._copy(self.ranks[source], number, 0, tensor))

    def send(self, call: Call, tensor: Tensor, to: int) -> Pending[None]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._begin_call(call, tensor.nbytes, False)
        number = self._num_sent.get(to, 0)
        self._num_sent[to] = number + 1
        self._post(call, number | 2**63, [tensor], [self.ranks[to]])
        return Pending(lambda: None)

    def receive(self, call: Call, tensor: Tensor, source: int) -> Pending[Tensor]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._begin_call(call, tensor.nbytes, False)
        number = self._num_received.get(source, 0)
        self._num_received[source] = number + 1
        return self._pending(call, lambda: self._copy(self.ranks[source], number | 2**63, 0, tensor))

    # ---- inside

    def _combine_with(self, rank: int, number: int, tensors: list[Tensor], op: str) -> None:
        """Adds what the only other member posted."""
        posted = self.exchange.hear(rank, _POST, self.number, number)
        theirs = self.exchange.their_block(rank, posted).view(tensors[0].dtype)
        parts = [p.view_as(t) for t, p in zip(tensors, theirs.split([t.numel() for t in tensors]), strict=True)]
        if op == "sum" and not tensors[0].is_cuda:
            torch._foreach_add_(tensors, parts)
        else:
            for tensor, part in zip(tensors, parts, strict=True):
                _combine(tensor, part, op)
        self.exchange.done_reading(rank, posted)

    def _read(self, rank: int, number: int, like: Tensor, offset: int = 0) -> tuple[Tensor, Any]:
        """What a member posted, as a tensor like this one, and what to give back once it is read."""
        posted = self.exchange.hear(rank, _POST, self.number, number)
        found = self.exchange.their_block(rank, posted)[offset : offset + like.nbytes]
        return found.view(like.dtype).view(like.shape), (rank, posted)

    def _copy(self, rank: int, number: int, offset: int, out: Tensor) -> Tensor:
        if out.numel():
            found, give_back = self._read(rank, number, out, offset)
            out.copy_(found)
            self._give_back(give_back)
        else:
            self.exchange.hear(rank, _POST, self.number, number)
        return out

    def _give_back(self, what: Any) -> None:
        if what is not None:
            self.exchange.done_reading(*what)

    def _begin(self, call: Call, num_bytes: int) -> int:
        self._begin_call(call, num_bytes, True)
        self._num_calls += 1
        return self._num_calls

    def _post(self, call: Call, number: int, tensors: Sequence[Tensor], to: Sequence[int]) -> int:
        with self._naming(call):
            return self.exchange.post(self.number, number, tensors, to)

    def _pending(self, call: Call, finish: Callable[[], T]) -> Pending[T]:
        def checked() -> T:
            with self._naming(call):
                return finish()

        return Pending(checked)

    @contextmanager
    def _naming(self, call: Call) -> Iterator[None]:
        """A partner that is gone, or late, becomes an error that names the call."""
        try:
            yield
        except (_Lost, _Late) as failure:
            raise self._lost(call, failure) from failure

    def _lost(self, call: Call, failure: Exception) -> LostPartnerError:
        return LostPartnerError(
            f"{call} did not complete: {failure}\n  ranks: {', '.join(map(str, self.ranks))}, this is "
            f"{self.exchange.rank}\n  fix:   see why that rank stopped; --debug names ranks that make different calls"
        )


def _combine(total: Tensor, term: Tensor, op: str) -> None:
    term = term.to(total.device)
    total.add_(term) if op == "sum" else torch.maximum(total, term, out=total)


def _scatter_back(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copies a flat tensor into several."""
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
