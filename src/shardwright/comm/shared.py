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
from collections.abc import Callable, Sequence
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
    """One rank's connections to the other ranks of its machine, its blocks, and what was said to it."""

    def __init__(self, rank: int, folder: Path, timeout_s: float) -> None:
        self.rank, self.folder, self.timeout_s = rank, folder, timeout_s
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(folder / str(rank)))
        self.listener.listen(1024)
        self.peers: dict[int, socket.socket] = {}
        self.said: dict[tuple[int, int, int, int], _Posted] = {}
        self.theirs: dict[tuple[int, int], _Block] = {}
        self.blocks: list[_Block] = []
        self.free: dict[int, list[int]] = {}
        self.unread: dict[int, int] = {}
        self.known: set[tuple[int, int]] = set()

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
            self._add(int.from_bytes(_exactly(line, 4), "little"), line)

    def _add(self, peer: int, line: socket.socket) -> None:
        line.settimeout(self.timeout_s)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
        self.peers[peer] = line

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
        self.unread[place] = len(to)
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
        while key not in self.said:
            self._listen(peer)
        return self.said.pop(key)

    def their_block(self, peer: int, posted: _Posted) -> Tensor:
        """The bytes that a peer told."""
        if posted.num_bytes <= INLINE_BYTES:
            return torch.frombuffer(bytearray(posted.inline), dtype=torch.uint8) if posted.inline else torch.empty(0)
        return self.theirs[peer, posted.block].bytes[: posted.num_bytes]

    def done_reading(self, peer: int, posted: _Posted) -> None:
        """Gives a peer its block back."""
        if posted.num_bytes > INLINE_BYTES:
            self.tell(peer, _READ, 0, 0, posted.block)

    def close(self) -> None:
        """Ends all connections."""
        for line in (*self.peers.values(), self.listener):
            line.close()

    def _take(self, num_bytes: int) -> int:
        size = max(_LEAST_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length())
        if not self.free.get(size):
            self._hear_all()
        if self.free.get(size):
            return self.free[size].pop()
        self.blocks.append(_Block.new(size))
        return len(self.blocks) - 1

    def _introduce(self, peer: int, place: int) -> None:
        if (peer, place) not in self.known:
            self.known.add((peer, place))
            block = self.blocks[place]
            header = _HEADER.pack(_NEW, 0, 0, place, block.num_bytes)
            socket.send_fds(self.peers[peer], [header], [block.handle])

    def _send(self, peer: int, data: bytes) -> None:
        try:
            self.peers[peer].sendall(data)
        except (BrokenPipeError, ConnectionError) as failure:
            raise _Lost(peer) from failure

    def _listen(self, peer: int) -> None:
        """Takes in one message of a peer."""
        line = self.peers[peer]
        try:
            header, handles, _, _ = socket.recv_fds(line, _HEADER.size, 1)
            if header and len(header) < _HEADER.size:
                header += _exactly(line, _HEADER.size - len(header))
        except TimeoutError as failure:
            raise _Late(peer, self.timeout_s) from failure
        except ConnectionError as failure:
            raise _Lost(peer) from failure
        if not header:
            raise _Lost(peer)
        kind, channel, number, place, num_bytes = _HEADER.unpack(header)
        if kind == _NEW:
            self.theirs[peer, place] = _Block(handles[0], num_bytes)
        elif kind == _READ:
            self.unread[place] -= 1
            if not self.unread[place]:
                self.free.setdefault(self.blocks[place].num_bytes, []).append(place)
        else:
            inline = _exactly(line, num_bytes) if kind == _POST and num_bytes <= INLINE_BYTES else b""
            self.said[peer, kind, channel, number] = _Posted(place, num_bytes, inline)

    def _hear_all(self) -> None:
        """Takes in what has been said, without waiting for more."""
        waiting = select.poll()
        by_handle = {line.fileno(): peer for peer, line in self.peers.items()}
        for handle in by_handle:
            waiting.register(handle, select.POLLIN)
        while ready := [handle for handle, event in waiting.poll(0) if event & select.POLLIN]:
            for handle in ready:
                try:
                    self._listen(by_handle[handle])
                except _Lost:
                    waiting.unregister(handle)  # whoever waits for this peer will be told


class _Lost(Exception):  # noqa: N818
    def __init__(self, peer: int) -> None:
        super().__init__(f"rank {peer} has closed its connection")


class _Late(Exception):  # noqa: N818
    def __init__(self, peer: int, timeout_s: float) -> None:
        super().__init__(f"rank {peer} did not come within {timeout_s:.0f} s")


def _exactly(line: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = line.recv(num_bytes - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


def _bytes_of(tensor: Tensor) -> bytes:
    data: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


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
            place = self.exchange.post(self.number, number, tensors, self.others)
            return self._pending(call, lambda: self._sum_in_parts(number, tensors, place, op))
        # two members: a + b is b + a, to the last bit; more: each adds all terms in the order of the members
        mine = torch.cat([tensor.view(-1) for tensor in tensors]) if len(self.ranks) > 2 else None
        self.exchange.post(self.number, number, tensors, self.others)

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
        self.exchange.post(self.number, number, [parts[index]], self.others)

        def finish() -> None:
            for position, rank in enumerate(self.ranks):
                if position != index:
                    self._copy(rank, number, 0, parts[position])

        return self._pending(call, finish)

    def reduce_scatter(self, call: Call, out: Tensor, parts: list[Tensor]) -> Pending[Tensor]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        number = self._begin(call, sum(part.nbytes for part in parts))
        self.exchange.post(self.number, number, parts, self.others)
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
                self.exchange.post(self.number, number, [parts[position]], [rank])
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
            self.exchange.post(self.number, number, [tensor], self.others)
            return Pending(lambda: tensor)
        return self._pending(call, lambda: self._copy(self.ranks[source], number, 0, tensor))

    def send(self, call: Call, tensor: Tensor, to: int) -> Pending[None]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._begin_call(call, tensor.nbytes, False)
        number = self._num_sent.get(to, 0)
        self._num_sent[to] = number + 1
        try:
            self.exchange.post(self.number, number | 2**63, [tensor], [self.ranks[to]])
        except _Lost as failure:
            raise self._lost(call, failure) from failure
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

    def _sum_in_parts(self, number: int, tensors: list[Tensor], place: int, op: str) -> None:
        """Each member sums one part over all blocks, into its own block; then each takes all parts from them."""
        size = sum(tensor.numel() for tensor in tensors)
        dtype, own_rank = tensors[0].dtype, self.exchange.rank
        posted = {rank: self.exchange.hear(rank, _POST, self.number, number) for rank in self.others}
        blocks = {rank: self.exchange.their_block(rank, said).view(dtype) for rank, said in posted.items()}
        own = self.exchange.blocks[place].bytes[: size * tensors[0].element_size()].view(dtype)
        blocks[own_rank] = own
        cuts = balanced(size, len(self.ranks))
        parts = {rank: slice(cuts[i], cuts[i + 1]) for i, rank in enumerate(self.ranks)}
        mine = parts[own_rank]
        total = blocks[self.ranks[0]][mine].clone()
        for rank in self.ranks[1:]:
            _combine(total, blocks[rank][mine], op)
        own[mine].copy_(total)
        for rank in self.others:
            self.exchange.tell(rank, _SUMMED, self.number, number)
        # one tensor takes the parts where they lie; several are filled from the own block, once it has all of them
        target = tensors[0].view(-1) if len(tensors) == 1 else own
        for rank in self.ranks:
            if rank != own_rank:
                self.exchange.hear(rank, _SUMMED, self.number, number)
            if rank != own_rank or target is not own:
                target[parts[rank]].copy_(blocks[rank][parts[rank]])
        if target is own:
            _scatter_back(own, tensors)
        for rank, said in posted.items():
            self.exchange.done_reading(rank, said)

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

    def _pending(self, call: Call, finish: Callable[[], T]) -> Pending[T]:
        def checked() -> T:
            try:
                return finish()
            except (_Lost, _Late) as failure:
                raise self._lost(call, failure) from failure

        return Pending(checked)

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
