"""How a rank that is a process talks to the others: through shared memory on one machine, else ``torch.distributed``.

gloo's own all-gather and reduce-scatter are slow for large messages. Here an all-gather is one message to each
member, and a reduce-scatter is an all-to-all and a local sum in the order of the members, so that it repeats bit
for bit. gloo's all-reduce is good and is used as it is. ``benchmarks/collectives`` has the numbers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.axis import Channel, CollectiveCall, Pending
from shardwright.comm.backends.block_sizes import Blocks
from shardwright.comm.backends.message_blocks import Link, MessageExchange, folder_for_sockets
from shardwright.comm.backends.shared_memory import SharedChannel
from shardwright.comm.backends.shared_sums import parts_of
from shardwright.comm.call_checker import CallChecker
from shardwright.comm.failures import LostPartnerError
from shardwright.comm.recorder import Record, Recorder
from shardwright.errors import CommunicationError, PlanError

T = TypeVar("T")

Links = Literal["auto", "sockets"]
"""How ranks of one machine talk: through shared memory where they can, or always through torch's process groups."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessTransport:
    """The transport of one rank of a process world.

    Groups whose members share a machine go through its memory; the others through torch's process groups, of which
    there is one for each set of ranks.
    """

    kind = "processes"

    def __init__(
        self, rank: int, size: int, recorder: Recorder, timeout: timedelta, witness: CallChecker | None, links: Links,
        folder: str | None = None, link: Link | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.recorder, self.timeout, self.witness = rank, recorder, timeout, witness
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(size)): dist.group.WORLD}
        self._num_channels: dict[tuple[int, ...], int] = {}
        self._names: dict[int, str] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        self._hosts = _tell_hosts(rank, size) if links == "auto" and size > 1 and not _is_nccl() else {}
        if link is not None and size > 1 and len(set(self._hosts.values())) != 1:
            raise PlanError(
                "a slow link is emulated between ranks that share a machine's memory",
                given=f"{size} ranks, links='{links}'",
                allowed="ranks of one machine on the host's processors, links='auto'",
                fix="leave out link",
            )
        self._exchange = _exchange(rank, self._hosts, timeout, folder, link) if self._hosts else None
        self.blocks: Blocks | None = self._exchange.taken if self._exchange is not None else None

    def group(self, ranks: tuple[int, ...]) -> Any:
        """The process group of these ranks, made by its members at its first use."""
        ordered = tuple(sorted(ranks))
        if ordered not in self._groups:
            with _named("-".join(map(str, ordered))):
                self._groups[ordered] = dist.new_group(
                    list(ordered), timeout=self.timeout, use_local_synchronization=True
                )
        return self._groups[ordered]

    def channel(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Channel]:
        """See :class:`~shardwright.comm.world.Transport`."""
        return {place: self.channel_of(ranks) for place, ranks in enumerate(groups) if self.rank in ranks}

    def channel_of(self, ranks: tuple[int, ...]) -> Channel:
        """A channel of this rank's; its members ask for their shared channels in the same order."""
        number = self._num_channels.get(ranks, 0)
        self._num_channels[ranks] = number + 1
        name = f"{'-'.join(map(str, ranks))}/{number}"
        if self._exchange is None or len({self._hosts[rank] for rank in ranks}) > 1 or len(ranks) == 1:
            return ProcessChannel(self, ranks, name)
        calls = 0

        def begin(call: CollectiveCall, num_bytes: int, meets: bool) -> None:
            nonlocal calls
            calls += meets
            self.note(call, num_bytes)
            if meets and self.witness is not None:
                self.witness.check(call, ranks, f"{name}/{calls}")

        return SharedChannel(self._exchange, ranks, self._key(name), begin, self.channel_of)

    def _key(self, name: str) -> int:
        """What the messages of a channel bear in place of its name: its members find the same, each alone."""
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        other = self._names.setdefault(key, name)
        if other != name:  # a message of one would be taken for the other's
            raise CommunicationError(
                "two groups of ranks have the same key",
                given=f"{other} and {name}: {key}",
                allowed="a key of its own for each; equal ones are as rare as two equal 64-bit hashes",
                fix="ask for the groups in another order, or report this",
            )
        return key

    def note(self, call: CollectiveCall, num_bytes: int) -> None:
        """Records a call."""
        self.recorder.add(Record(call.kind, call.axis, num_bytes, call.source))

    def keep(self, work: Any, message: Tensor) -> None:
        """Keeps a message until it has gone: the sender may have let go of its channel by then."""
        self._sent = [(each, kept) for each, kept in self._sent if not each.is_completed()]
        self._sent.append((work, message))

    def close(self) -> None:
        """Tells the witness, if there is one, that this rank makes no more calls."""
        if self.witness is not None:
            self.witness.leave()

    def hang_up(self) -> None:
        """Ends the connections to the other ranks."""
        if self._exchange is not None:
            self._exchange.close()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Names the group made inside by its ranks alone: torch adds how many groups this rank has made, and members
    that have made other numbers of them would wait for each other for ever."""
    c10d = dist.distributed_c10d
    before = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: f"shardwright-{name}"
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = before


def _is_nccl() -> bool:
    return dist.get_backend() == "nccl"


def _tell_hosts(rank: int, size: int) -> dict[int, str]:
    """Which machine each rank runs on."""
    store = dist.distributed_c10d._get_default_store()
    boot = Path("/proc/sys/kernel/random/boot_id")
    here = boot.read_text().strip() if boot.exists() else ""
    store.set(f"host/{rank}", f"{socket.gethostname()}/{here}/{os.getuid()}")
    return {other: store.get(f"host/{other}").decode() for other in range(size)}


def _exchange(
    rank: int, hosts: dict[int, str], timeout: timedelta, inside: str | None, link: Link | None
) -> MessageExchange:
    """This rank's side of its machine's shared memory; the lowest rank of a machine makes the folder to meet in."""
    store = dist.distributed_c10d._get_default_store()
    first = min(other for other, host in hosts.items() if host == hosts[rank])
    if rank == first:
        store.set(f"folder/{first}", tempfile.mkdtemp(prefix="shardwright-", dir=inside or folder_for_sockets()))
    folder = Path(store.get(f"folder/{first}").decode())
    exchange = MessageExchange(rank, folder, timeout.total_seconds(), link)
    here = [other for other, host in hosts.items() if host == hosts[rank]]
    store.set(f"listens/{rank}", "yes")
    store.wait([f"listens/{other}" for other in here])
    exchange.connect(here)
    if rank == first:
        for other in here:
            store.wait([f"connected/{other}"] if other != rank else [f"listens/{rank}"])
        shutil.rmtree(folder)  # connections outlive the names they were made under
    else:
        store.set(f"connected/{rank}", "yes")
    return exchange


class ProcessChannel:
    """One group's calls, seen from one member."""

    def __init__(self, transport: ProcessTransport, ranks: tuple[int, ...], name: str) -> None:
        self.transport, self.ranks, self.name = transport, ranks, name
        self.index = ranks.index(transport.rank)
        self.group = transport.group(ranks) if len(ranks) > 1 else None
        self.native = self.group is not None and dist.get_backend(self.group) == "nccl"
        self._num_calls = 0

    def subset(self, indices: tuple[int, ...]) -> Channel:
        """See :class:`~shardwright.comm.axis.Channel`."""
        return self.transport.channel_of(tuple(self.ranks[i] for i in indices))

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._begin(call, sum(tensor.nbytes for tensor in tensors))
        message = tensors[0] if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])
        work = dist.all_reduce(message, _OPS[op], self.group, async_op=True)

        def finish() -> None:
            if len(tensors) > 1:
                for tensor, part in zip(tensors, message.split([t.numel() for t in tensors]), strict=True):
                    tensor.copy_(part.view_as(tensor))

        return self._pending(call, [work], finish)

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._begin(call, sum(part.nbytes for part in parts))
        if self.native:
            works = [
                dist.broadcast(part, group=self.group, group_src=self._place(i), async_op=True)
                for i, part in enumerate(parts)
            ]
            return self._pending(call, works, lambda: None)
        works = self._exchange([parts[index]] * len(parts), parts)
        return self._pending(call, works, lambda: None)

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._begin(call, sum(tensor.nbytes for tensor in tensors))
        parts = parts_of(tensors, sizes)
        received = [out if i == self.index else torch.empty_like(out) for i in range(len(parts))]
        works = self._exchange(parts, received)

        def finish() -> Tensor:
            received[self.index] = parts[self.index]  # all parts are kept until now: they were on their way
            torch.add(received[0], received[1], out=out)
            for term in received[2:]:
                out.add_(term)
            return out

        return self._pending(call, works, finish)

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._begin(call, sum(part.nbytes for part in parts))
        outs[self.index].copy_(parts[self.index])
        return self._pending(call, self._exchange(parts, outs), lambda: outs)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._begin(call, tensor.nbytes)
        work = dist.broadcast(tensor, group=self.group, group_src=self._place(source), async_op=True)
        return self._pending(call, [work], lambda: tensor)

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._begin(call, tensor.nbytes, meets=False)
        message = tensor.clone()  # gloo's isend is done once the receiver asks, and a sender does not wait for that
        self.transport.keep(dist.isend(message, group=self.group, group_dst=self._place(to), tag=0), message)
        return Pending(lambda: None)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._begin(call, tensor.nbytes, meets=False)
        work = dist.irecv(tensor, group=self.group, group_src=self._place(source), tag=0)
        return self._pending(call, [work], lambda: tensor)

    def _exchange(self, parts: list[Tensor], received: list[Tensor]) -> list[Any]:
        """Sends ``parts[i]`` to member i and receives ``received[i]`` from it, all at once."""
        others = [i for i in range(len(self.ranks)) if i != self.index]
        tag = 1 + self._num_calls % 2**20  # its own tag: messages of other calls may be under way
        if self.native:
            operations = [
                dist.P2POp(dist.irecv, received[i], group=self.group, group_peer=self._place(i)) for i in others
            ]
            operations += [
                dist.P2POp(dist.isend, parts[i], group=self.group, group_peer=self._place(i)) for i in others
            ]
            return list(dist.batch_isend_irecv(operations))
        works = [
            dist.irecv(received[i], group=self.group, group_src=self._place(i), tag=tag)
            for i in others
            if received[i].numel()
        ]
        works += [
            dist.isend(parts[i], group=self.group, group_dst=self._place(i), tag=tag)
            for i in others
            if parts[i].numel()
        ]
        return works

    def _place(self, index: int) -> int:
        """A member's number in the process group, whose ranks are in ascending order."""
        return sorted(self.ranks).index(self.ranks[index])

    def _begin(self, call: CollectiveCall, num_bytes: int, *, meets: bool = True) -> None:
        self.transport.note(call, num_bytes)
        self._num_calls += meets
        if meets and self.transport.witness is not None:
            self.transport.witness.check(call, self.ranks, f"{self.name}/{self._num_calls}")

    def _pending(self, call: CollectiveCall, works: Sequence[Any], result: Callable[[], T]) -> Pending[T]:
        def finish() -> T:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as failure:
                raise LostPartnerError(
                    f"{call} did not complete\n  ranks: {', '.join(map(str, self.ranks))}, this is "
                    f"{self.transport.rank}\n  torch says: {str(failure).splitlines()[0]}\n"
                    "  fix:   see which rank stopped first; --debug names ranks that make different calls"
                ) from failure
            return result()

        return Pending(finish)
