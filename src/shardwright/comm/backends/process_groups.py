"""Ranks that are processes: collectives through shared memory on one machine, else through ``torch.distributed``.

gloo's own all-gather and reduce-scatter are slow for large messages. Here an all-gather is one message to each member,
and a reduce-scatter is an all-to-all and a local sum in the order of the members, so that it repeats bit for bit.
gloo's all-reduce is good and is used as it is. ``benchmarks/collectives`` has the numbers.
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
from shardwright.comm.recorder import Recorder
from shardwright.errors import CommunicationError, PlanError

T = TypeVar("T")

Links = Literal["auto", "sockets"]
"""How ranks of one machine send: through shared memory where they can, or always through torch's process groups."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessTransport:
    """Makes the process groups (channels) of one rank that is a process.

    Groups whose members share a machine use its memory; the others use torch's process groups, one for each set of
    ranks.
    """

    kind = "processes"

    def __init__(
        self, rank: int, size: int, recorder: Recorder, timeout: timedelta, call_checker: CallChecker | None,
        links: Links, folder: str | None = None, link: Link | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.recorder, self.timeout, self.call_checker = rank, recorder, timeout, call_checker
        self._groups: dict[tuple[int, ...], Any] = {tuple(range(size)): dist.group.WORLD}
        self._num_channels: dict[tuple[int, ...], int] = {}
        self._names: dict[int, str] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        shares_memory = links == "auto" and size > 1 and dist.get_backend() != "nccl"
        self._hosts = _exchange_hosts(rank, size) if shares_memory else {}
        if link is not None and size > 1 and len(set(self._hosts.values())) != 1:
            raise PlanError(
                "a slow link can be emulated only between ranks that share a machine's memory",
                given=f"{size} ranks, links='{links}'",
                allowed="ranks of one machine on the host's processors, links='auto'",
                fix="leave out link",
            )
        self._exchange = _message_exchange(rank, self._hosts, timeout, folder, link) if self._hosts else None
        self.blocks: Blocks | None = self._exchange.block_sizes if self._exchange is not None else None

    def group(self, ranks: tuple[int, ...]) -> Any:
        """Returns the ``torch.distributed`` group of these ranks, which its members make at its first use."""
        ordered = tuple(sorted(ranks))
        if ordered not in self._groups:
            with _named("-".join(map(str, ordered))):
                self._groups[ordered] = dist.new_group(
                    list(ordered), timeout=self.timeout, use_local_synchronization=True
                )
        return self._groups[ordered]

    def channel(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Channel]:
        """Returns this rank's channel in each of ``groups`` that holds it, keyed by the group's index."""
        return {place: self.channel_of(ranks) for place, ranks in enumerate(groups) if self.rank in ranks}

    def channel_of(self, ranks: tuple[int, ...]) -> Channel:
        """Returns a new channel over a group that holds this rank; all members make their channels in one order."""
        number = self._num_channels.get(ranks, 0)
        self._num_channels[ranks] = number + 1
        name = f"{'-'.join(map(str, ranks))}/{number}"
        if self._exchange is None or len({self._hosts[rank] for rank in ranks}) > 1 or len(ranks) == 1:
            return ProcessChannel(self, ranks, self.call_starter(ranks, name))
        begin = self.call_starter(ranks, name)
        return SharedChannel(self._exchange, ranks, self._key(name), begin, self.channel_of)

    def _key(self, name: str) -> int:
        """The number that stands for a channel's name in its messages; every member computes the same one."""
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        other = self._names.setdefault(key, name)
        if other != name:  # messages of the two could not be told apart
            raise CommunicationError(
                "two groups of ranks have the same key",
                given=f"{other} and {name}: {key}",
                allowed="a different 64-bit key for each",
                fix="make the groups in another order, or report this",
            )
        return key

    def call_starter(self, ranks: tuple[int, ...], name: str) -> Callable[..., int]:
        """Returns a function to call at the start of each collective: it records the call and returns its number.

        In debug runs it also compares what the ranks call. ``meets``: all members make the call, so it counts; p2p
        messages do not.
        """
        num_calls = 0

        def begin(call: CollectiveCall, num_bytes: int, *, meets: bool = True) -> int:
            nonlocal num_calls
            num_calls += meets
            self.recorder.note(call, num_bytes)
            if meets and self.call_checker is not None:
                self.call_checker.check(call, ranks, f"{name}/{num_calls}")
            return num_calls

        return begin

    def keep(self, work: Any, message: Tensor) -> None:
        """Keeps a sent tensor alive until the send is done; the channel may be freed before that."""
        self._sent = [(each, kept) for each, kept in self._sent if not each.is_completed()]
        self._sent.append((work, message))

    def close(self) -> None:
        """Tells the other ranks, in a debug run, that this rank makes no more collective calls."""
        if self.call_checker is not None:
            self.call_checker.leave()

    def abandon(self, failure: BaseException) -> None:
        """Closes the connections: a rank of this machine that waits for this one gets an error."""
        self.disconnect()

    def disconnect(self) -> None:
        """Closes the shared-memory connections to the other ranks of this machine."""
        if self._exchange is not None:
            self._exchange.close()


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Names the group that is made inside by its ranks alone.

    torch adds the number of groups that this rank has made, and members with different numbers would deadlock.
    """
    c10d = dist.distributed_c10d
    before = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: f"shardwright-{name}"
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = before


def _exchange_hosts(rank: int, size: int) -> dict[int, str]:
    """The machine of each rank, exchanged through torch's store."""
    store = dist.distributed_c10d._get_default_store()
    boot = Path("/proc/sys/kernel/random/boot_id")
    here = boot.read_text().strip() if boot.exists() else ""
    store.set(f"host/{rank}", f"{socket.gethostname()}/{here}/{os.getuid()}")
    return {other: store.get(f"host/{other}").decode() for other in range(size)}


def _message_exchange(
    rank: int, hosts: dict[int, str], timeout: timedelta, parent: str | None, link: Link | None
) -> MessageExchange:
    """Connects this rank to its machine's ranks; the lowest of them makes the folder for their sockets."""
    store = dist.distributed_c10d._get_default_store()
    first = min(other for other, host in hosts.items() if host == hosts[rank])
    if rank == first:
        store.set(f"folder/{first}", tempfile.mkdtemp(prefix="shardwright-", dir=parent or folder_for_sockets()))
    folder = Path(store.get(f"folder/{first}").decode())
    exchange = MessageExchange(rank, folder, timeout.total_seconds(), link)
    here = [other for other, host in hosts.items() if host == hosts[rank]]
    store.set(f"listens/{rank}", "yes")
    store.wait([f"listens/{other}" for other in here])
    exchange.connect(here)
    if rank == first:
        for other in here:
            store.wait([f"connected/{other}"] if other != rank else [f"listens/{rank}"])
        shutil.rmtree(folder)  # the sockets are connected and need their names no more
    else:
        store.set(f"connected/{rank}", "yes")
    return exchange


class ProcessChannel:
    """One group's collectives through ``torch.distributed``. See :class:`~shardwright.comm.axis.Channel`."""

    def __init__(self, transport: ProcessTransport, ranks: tuple[int, ...], begin: Callable[..., int]) -> None:
        self.transport, self.ranks, self._begin = transport, ranks, begin
        self.index = ranks.index(transport.rank)
        self.group = transport.group(ranks) if len(ranks) > 1 else None
        self.native = self.group is not None and dist.get_backend(self.group) == "nccl"

    def subset(self, indices: tuple[int, ...]) -> Channel:
        """Returns a channel over some of the group's members."""
        return self.transport.channel_of(tuple(self.ranks[i] for i in indices))

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """Runs torch's all-reduce; several tensors are first joined in a copy."""
        self._begin(call, sum(tensor.nbytes for tensor in tensors))
        message = tensors[0] if len(tensors) == 1 else torch.cat([tensor.view(-1) for tensor in tensors])
        work = dist.all_reduce(message, _OPS[op], self.group, async_op=True)

        def finish() -> None:
            if len(tensors) > 1:
                for tensor, part in zip(tensors, message.split([t.numel() for t in tensors]), strict=True):
                    tensor.copy_(part.view_as(tensor))

        return self._pending(call, [work], finish)

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """All-gathers by a message of this rank's part to each member; on NCCL each member broadcasts its part."""
        number = self._begin(call, sum(part.nbytes for part in parts))
        if self.native:
            works = [
                dist.broadcast(part, group=self.group, group_src=self._place(i), async_op=True)
                for i, part in enumerate(parts)
            ]
            return self._pending(call, works, lambda: None)
        works = self._exchange(number, [parts[index]] * len(parts), parts)
        return self._pending(call, works, lambda: None)

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """Reduce-scatters by an all-to-all of the parts and a local sum in the order of the members."""
        number = self._begin(call, sum(tensor.nbytes for tensor in tensors))
        parts = parts_of(tensors, sizes)
        received = [out if i == self.index else torch.empty_like(out) for i in range(len(parts))]
        works = self._exchange(number, parts, received)

        def finish() -> Tensor:
            received[self.index] = parts[self.index]  # parts are kept until now: they were being sent
            torch.add(received[0], received[1], out=out)
            for term in received[2:]:
                out.add_(term)
            return out

        return self._pending(call, works, finish)

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """Runs an all-to-all: sends ``parts[i]`` to member i, and fills ``outs[i]`` with what it sent."""
        number = self._begin(call, sum(part.nbytes for part in parts))
        outs[self.index].copy_(parts[self.index])
        return self._pending(call, self._exchange(number, parts, outs), lambda: outs)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Runs torch's broadcast of ``tensor`` from member ``source``."""
        self._begin(call, tensor.nbytes)
        work = dist.broadcast(tensor, group=self.group, group_src=self._place(source), async_op=True)
        return self._pending(call, [work], lambda: tensor)

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Sends a copy of the tensor, so that the sender does not wait for the receiver."""
        self._begin(call, tensor.nbytes, meets=False)
        message = tensor.clone()  # gloo's isend completes only when the receiver has called
        self.transport.keep(dist.isend(message, group=self.group, group_dst=self._place(to), tag=0), message)
        return Pending(lambda: None)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Runs torch's receive into ``tensor``, from member ``source``."""
        self._begin(call, tensor.nbytes, meets=False)
        work = dist.irecv(tensor, group=self.group, group_src=self._place(source), tag=0)
        return self._pending(call, [work], lambda: tensor)

    def _exchange(self, number: int, parts: list[Tensor], received: list[Tensor]) -> list[Any]:
        """Sends ``parts[i]`` to member i and receives ``received[i]`` from it, all at once."""
        others = [i for i in range(len(self.ranks)) if i != self.index]
        tag = 1 + number % 2**20  # a tag of its own: messages of other calls may be in flight
        group, places = self.group, {i: self._place(i) for i in others}
        if self.native:
            operations = [dist.P2POp(dist.irecv, received[i], group=group, group_peer=places[i]) for i in others]
            operations += [dist.P2POp(dist.isend, parts[i], group=group, group_peer=places[i]) for i in others]
            return list(dist.batch_isend_irecv(operations))
        sources, targets = ([i for i in others if each[i].numel()] for each in (received, parts))
        works = [dist.irecv(received[i], group=group, group_src=places[i], tag=tag) for i in sources]
        return works + [dist.isend(parts[i], group=group, group_dst=places[i], tag=tag) for i in targets]

    def _place(self, index: int) -> int:
        """A member's number in the process group, whose ranks are in ascending order."""
        return sorted(self.ranks).index(self.ranks[index])

    def _pending(self, call: CollectiveCall, works: Sequence[Any], result: Callable[[], T]) -> Pending[T]:
        def finish() -> T:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as failure:
                raise LostPartnerError(
                    f"{call} did not complete\n  ranks: {', '.join(map(str, self.ranks))}, this is "
                    f"{self.transport.rank}\n  torch reports: {str(failure).splitlines()[0]}\n"
                    "  fix:   see which rank stopped first; --debug names ranks that make different calls"
                ) from failure
            return result()

        return Pending(finish)
