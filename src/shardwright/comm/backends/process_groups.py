"""Creates the process groups of ranks that are processes, on the backend that suits the ranks of each group.

These are NCCL between GPUs, shared memory between ranks of one machine, and gloo otherwise. Between machines with
equally many ranks, large sums combine shared memory and gloo.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwright.comm.backends.block_sizes import Blocks
from shardwright.comm.backends.gloo import GlooChannel
from shardwright.comm.backends.message_blocks import Link, MessageExchange, folder_for_sockets
from shardwright.comm.backends.nccl import NcclChannel
from shardwright.comm.backends.nodes import nodes_of_ranks
from shardwright.comm.backends.run_folder import SAVES
from shardwright.comm.backends.shared_memory import SharedChannel
from shardwright.comm.backends.through_host import ChannelThroughHost
from shardwright.comm.backends.two_level import TwoLevelChannel, TwoLevels, has_two_levels
from shardwright.comm.backends.watchdog import Report, Watchdog, WatchedCall, end_with
from shardwright.comm.call_checker import CallChecker
from shardwright.comm.channel import Channel
from shardwright.comm.collective_call import CollectiveCall
from shardwright.comm.recorder import Recorder
from shardwright.devices import NATIVE
from shardwright.errors import CommunicationError, PlanError

_NO_TIMEOUT = timedelta(days=365)
"""For a send: gloo would close the connection at the end of torch's own timeout, and a slow receiver is no error."""

Links = Literal["auto", "sockets"]
"""How ranks of one machine communicate: through shared memory if possible (auto), or always over torch's groups."""

CPU = torch.device("cpu")


class ProcessTransport:
    """Creates the process groups (channels) of one rank that is a process.

    If the ranks communicate over NCCL, all groups do. Otherwise groups whose members are on one machine use shared
    memory, and the others use gloo. In a group with equally many ranks on each of several machines, a large sum goes
    through shared memory inside each machine and over gloo only between machines. With ``links`` "sockets" all is gloo.

    All ranks create their transports together, when torch's default process group exists. If they may share memory,
    they exchange their nodes through torch's store and connect to the ranks of their node by sockets in ``folder``,
    which is by default the folder for temporary files. ``timeout`` is the time limit of a call, and the watchdog calls
    ``report``.

    Raises: PlanError: ``link`` is to be emulated, but not all ranks share memory.
    """

    kind = "processes"

    def __init__(
        self, rank: int, size: int, recorder: Recorder, timeout: timedelta, call_checker: CallChecker | None,
        links: Links, folder: str | None = None, link: Link | None = None, device: torch.device = CPU,
        report: Report = end_with,
    ) -> None:  # fmt: skip
        self.rank, self.recorder, self.timeout, self.call_checker = rank, recorder, timeout, call_checker
        self.device, self._folder = device, folder
        self._over_nccl = has_native_group(device.type)
        self.torch_timeout = torch_timeout(timeout, over_nccl=self._over_nccl)
        self._watchdog = Watchdog(rank, timeout.total_seconds(), report)
        self._groups: dict[tuple[tuple[int, ...], str], Any] = {(tuple(range(size)), ""): dist.group.WORLD}
        self._levels: dict[tuple[int, ...], TwoLevels] = {}
        self._made: set[tuple[int, ...]] = set()
        self._num_channels: dict[tuple[int, ...], int] = {}
        self._names: dict[int, str] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        self._waited_for: SimpleQueue[tuple[Any, Tensor] | None] | None = None
        shares_memory = links == "auto" and size > 1 and not self._over_nccl
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

    def group(self, ranks: tuple[int, ...], name: str = "") -> Any:
        """Returns the ``torch.distributed`` group over ``ranks``, which is created at the members' first call.

        So all of ``ranks`` must make that call. ``name`` tells several groups over the same ranks apart.
        """
        ordered = tuple(sorted(ranks))
        if (ordered, name) not in self._groups:
            with _named("-".join(map(str, (*ordered, name)))):
                self._groups[ordered, name] = dist.new_group(
                    list(ordered), timeout=self.torch_timeout, use_local_synchronization=True
                )
        return self._groups[ordered, name]

    def channel(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Channel]:
        """Returns a new channel for each of ``groups`` (tuples of ranks) that holds this rank, by the group's index."""
        return {place: self.channel_of(ranks) for place, ranks in enumerate(groups) if self.rank in ranks}

    def channel_of(self, ranks: tuple[int, ...]) -> Channel:
        """Returns a new channel over ``ranks``, a group that holds this rank.

        All members must create the group's channels in the same order. The backend is chosen here: NCCL, shared memory
        or gloo, with copies through host memory if the tensors are on an accelerator and the backend is not NCCL.

        Raises: CommunicationError: two groups got the same 64-bit key.
        """
        channel = self._channel_of(ranks)
        self.recorder.channels.add(channel)
        return channel

    def _channel_of(self, ranks: tuple[int, ...]) -> Channel:
        number = self._num_channels.get(ranks, 0)
        self._num_channels[ranks] = number + 1
        name = f"{'-'.join(map(str, ranks))}/{number}"
        begin = self.call_starter(ranks, name)
        if self._over_nccl:
            return self._nccl_channel(ranks, begin)
        if self._exchange is None or len({self._hosts[rank] for rank in ranks}) > 1 or len(ranks) == 1:
            sockets = GlooChannel(self, ranks, begin)
            levels = self._levels_of(ranks) if self._exchange is not None else None
            channel: Channel = sockets if levels is None else TwoLevelChannel(sockets, levels, begin)
        else:
            channel = SharedChannel(self._exchange, ranks, self._key(name), begin, self.channel_of)
        return channel if self.device.type in ("cpu", "meta") else ChannelThroughHost(channel)

    def _levels_of(self, ranks: tuple[int, ...]) -> TwoLevels | None:
        """Returns the two levels of a group with equally many ranks on each of several nodes, or else None."""
        if ranks not in self._levels and has_two_levels(ranks, self._hosts):
            here = {rank: self._hosts[rank] for rank in ranks if self._hosts[rank] == self._hosts[self.rank]}
            exchange = _message_exchange(self.rank, here, self.timeout, None, None, f"{'-'.join(map(str, ranks))}/")
            self._levels[ranks] = TwoLevels(self.rank, ranks, self._hosts, exchange, self.group)
        return self._levels.get(ranks)

    def _nccl_channel(self, ranks: tuple[int, ...], begin: Callable[..., int]) -> NcclChannel:
        """Returns a channel over NCCL; the first one of a group also creates its communicator, with all members."""
        channel = NcclChannel(self, ranks, begin, self.device)
        members = tuple(sorted(ranks))
        if len(ranks) > 1 and members not in self._made:
            self._made.add(members)
            dist.all_reduce(torch.zeros(1, device=self.device), group=channel.group)
        return channel

    def _key(self, name: str) -> int:
        """Returns the number that identifies a channel in its messages: a hash of its name, equal on every member."""
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

        ``ranks`` are those of the group, and ``name`` distinguishes the group from others. In debug runs the function
        also checks that all ranks make the same call. Its argument ``meets`` is False for p2p messages: not all members
        of the group make these, so they are neither counted nor checked.
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
        """Keeps a sent tensor alive until the send ``work`` is done, even if the channel is freed before that."""
        if self._over_nccl:
            self._sent = [(send, tensor) for send, tensor in self._sent if not send.is_completed()]
            self._sent.append((work, message))
            return
        if self._waited_for is None:
            self._waited_for = SimpleQueue()
            self._sends = threading.Thread(target=_wait_for_sends, args=(self._waited_for,), name="sends", daemon=True)
            self._sends.start()
        self._waited_for.put((work, message))

    def watch(self, call: CollectiveCall, ranks: tuple[int, ...], works: Sequence[Any]) -> WatchedCall:
        """Lets the watchdog follow a call, so that this rank ends with an error if the call is not done in time.

        ``works`` are torch's handles of the call. NCCL needs it because ``wait`` itself reports no lost rank.
        """
        return self._watchdog.add(call, ranks, works)

    def close(self) -> None:
        """Tells the other ranks, in a debug run, that this rank makes no more collective calls."""
        if self.call_checker is not None:
            self.call_checker.leave()

    def fail(self, failure: CommunicationError) -> None:
        """Raises ``failure`` in a wait for a rank of this machine; in one over gloo or NCCL nothing can be raised."""
        if self._exchange is not None:
            self._exchange.failure = failure

    def abandon(self, failure: BaseException) -> None:
        """Closes this rank's connections, so that a rank of this machine that waits for it gets an error."""
        self.disconnect()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Returns a context in which a file in the run's folder asks the launcher to let this rank save."""
        sign = None if self._folder is None else Path(self._folder, f"{self.rank}{SAVES}")
        with suppress(OSError):  # without a sign there is less time
            if sign is not None:
                sign.touch()
        try:
            yield
        finally:
            if sign is not None:
                sign.unlink(missing_ok=True)

    def disconnect(self) -> None:
        """Ends this rank's helper threads, and closes its connections to the other ranks of this machine.

        torch's process groups stay.
        """
        self._watchdog.close()
        if self._waited_for is not None:
            self._waited_for.put(None)
            self._sends.join(timeout=1.0)  # it may wait for a rank that has failed, and ends with the process then
        for levels in self._levels.values():
            levels.close()
        if self._exchange is not None:
            self._exchange.close()


def _wait_for_sends(sends: SimpleQueue[tuple[Any, Tensor] | None]) -> None:
    """Waits for sends over gloo in turn, because a send that is not waited for never counts as complete."""
    while (sent := sends.get()) is not None:
        with suppress(RuntimeError):  # a lost partner: the call that needs it reports it
            sent[0].wait(_NO_TIMEOUT)
        del sent


def has_native_group(kind: str) -> bool:
    """Returns whether torch's default process group sends between devices of type ``kind`` directly, as NCCL does.

    The group may have several backends: ``init_process_group()`` without a name gives "cpu:gloo,cuda:nccl".
    """
    if dist.get_backend() in NATIVE:
        return True
    return any(f"{kind}:{backend}" in dist.get_backend_config().split(",") for backend in NATIVE)


def torch_timeout(timeout: timedelta, *, over_nccl: bool) -> timedelta:
    """Returns the timeout to give torch's process groups: ``timeout``, or twice that over NCCL and similar backends.

    So shardwright's watchdog, whose error names the call, reports before that of torch.
    """
    return 2 * timeout if over_nccl else timeout


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Returns a context in which torch names a new process group by ``name`` alone.

    torch's own name contains the number of groups that this rank has made, and members with different numbers would
    deadlock.
    """
    c10d = dist.distributed_c10d
    before = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = lambda ranks: f"shardwright-{name}"
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = before


def _exchange_hosts(rank: int, size: int) -> dict[int, str]:
    """Returns the node of each rank, exchanged through torch's store."""
    return nodes_of_ranks(dist.distributed_c10d._get_default_store(), rank, size)


def _message_exchange(
    rank: int, hosts: dict[int, str], timeout: timedelta, parent: str | None, link: Link | None, name: str = ""
) -> MessageExchange:
    """Connects this rank to the ranks of its machine, and returns the exchange of messages with them.

    The lowest rank creates the folder for the sockets. ``name`` tells several exchanges of the same ranks apart.
    """
    store = PrefixStore(name, dist.distributed_c10d._get_default_store())
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
