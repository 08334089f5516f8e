"""NCCL's rules without a card, for ranks that are threads: which call runs when, and who waits for whom.

A *communicator* is a set of members with one queue for each. A call enters the queue of its rank, and runs when it is
at the head there and its partners are at the heads of theirs. The rules are NCCL's:

- The first call of a communicator holds the host until all its members have come. One group of ranks has one
  communicator; a single send or receive has one for its *pair* of ranks, with both directions in one queue; several of
  them as one group (``batch_isend_irecv``) belong to the communicator of all ranks.
- Members make the same calls in the same order: kind, size, dtype, root.
- Tensors are contiguous, on the ranks' device, of a type that NCCL has.
- Bytes under way must not change: what is sent is compared when the call runs and again at ``wait``; a send that
  nothing waits for when it is found to be complete, or when the run ends. What is received is NaN until ``wait``,
  which finds out whether anything was written there before it.

Where every rank waits and nothing can run, each is told with its place. Variants: sends of few bytes complete before
their receiver comes, as NCCL's own buffers let some; communicators are there from the beginning.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

TYPES = {
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64,
}  # fmt: skip


class NcclRuleError(RuntimeError):
    """A rule that was broken, or ranks that wait for each other."""


@dataclass(frozen=True)
class Variant:
    """Which liberties NCCL takes: how many bytes a send may hold to complete alone, and which communicators exist."""

    eager_bytes: int = 0
    made_beforehand: bool = False


class Part(NamedTuple):
    """One message of a p2p call, as it enters the queue."""

    sends: bool
    peer: int
    tensor: Tensor
    values: Tensor | None  # those of a send


@dataclass(eq=False)
class Call:
    """A call in a queue, and torch's handle on it (``Work``)."""

    nccl: Nccl
    rank: int
    what: str
    key: object
    signature: tuple[Any, ...] = ()
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    run: Callable[[list[Call]], None] | None = None
    members: list[int] = field(default_factory=list)  # those whose tensors the outputs of a gather become
    sent: list[tuple[Tensor, bytes]] = field(default_factory=list)  # what is read, with its bytes at the call
    spoiled: list[tuple[Tensor, bytes]] = field(default_factory=list)  # what is written, with the bytes put there
    results: dict[int, Tensor] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    is_done: bool = False
    was_waited: bool = False

    def is_completed(self) -> bool:
        """Whether the call has run. From then on the memory of messages that were only sent may be used again."""
        if self.is_done and self.run is None and not self.outputs:
            self.nccl.let_go(self)
        return self.is_done

    def wait(self) -> bool:
        """Holds this rank until the call has run, and gives its results."""
        self.nccl.hold(self.rank, f"waits for {self.what}", lambda: self.is_done)
        if not self.was_waited:
            self.was_waited = True
            self.nccl.let_go(self)
            for place, tensor in enumerate(self.outputs):
                tensor.copy_(self.results[place])
            self.outputs, self.results = [], {}
        return True


@dataclass(eq=False)
class Communicator:
    """The queues of some ranks, and what sends that completed alone have left for their receivers."""

    members: tuple[int, ...]
    came: set[int] = field(default_factory=set)
    queues: dict[int, deque[Call]] = field(default_factory=dict)
    early: dict[tuple[int, int], deque[Tensor]] = field(default_factory=dict)


class Group(NamedTuple):
    """A process group: its ranks in ascending order and its name."""

    ranks: tuple[int, ...]
    name: str


class Nccl:
    """All communicators of one run of ranks that are threads."""

    def __init__(self, num_ranks: int, variant: Variant, device: torch.device) -> None:
        self.variant, self.device, self.num_ranks = variant, device, num_ranks
        self._lock = threading.RLock()
        self._communicators: dict[object, Communicator] = {}
        self._waiting: dict[int, tuple[str, Callable[[], bool], threading.Condition]] = {}
        self._live = set(range(num_ranks))
        self._calls: dict[Call, None] = {}  # those whose tensors must not be touched yet
        self.failure: BaseException | None = None

    # ---- ranks

    def hold(self, rank: int, what: str, ready: Callable[[], bool]) -> None:
        """Holds a rank until it can go on; raises where no rank can."""
        with self._lock:
            self._waiting[rank] = what, ready, (gate := threading.Condition(self._lock))
            try:
                while not ready():
                    self._check()
                    self._find_circle()
                    gate.wait(1.0)
            finally:
                del self._waiting[rank]

    def leave(self, rank: int) -> None:
        """Notes that a rank has ended."""
        with self._lock:
            self._live.discard(rank)
            self._find_circle(raises=False)
            self._wake()

    def fail(self, failure: BaseException) -> None:
        """Ends every rank that waits."""
        with self._lock:
            self.failure = self.failure or failure
            self._wake()

    def check_all_done(self) -> None:
        """Raises where something is still in flight, has changed, or a result was never waited for."""
        for key, communicator in self._communicators.items():
            queued = [call.what for queue in communicator.queues.values() for call in queue]
            kept = [pair for pair, queue in communicator.early.items() if queue]
            if queued or kept:
                raise NcclRuleError(f"still in flight over {key}: {queued} {kept}")
        never = [call for call in self._calls if call.outputs]
        if never:
            raise NcclRuleError(f"nothing waited for {[f'rank {call.rank}: {call.what}' for call in never[:5]]}")
        for call in list(self._calls):
            self.let_go(call)

    def _wake(self) -> None:
        """Wakes the ranks that can go on, and no others: each that wakes takes turns with those that compute."""
        for _, ready, gate in self._waiting.values():
            if self.failure is not None or ready():
                gate.notify()

    def _check(self) -> None:
        if self.failure is not None:
            raise NcclRuleError(f"another rank failed: {self.failure}")

    def _find_circle(self, raises: bool = True) -> None:
        if not self._live or len(self._waiting) < len(self._live) or self.failure is not None:
            return
        if any(ready() for _, ready, _ in self._waiting.values()):
            return
        lines = ["every rank waits and none can go on"]
        for rank, (what, *_) in sorted(self._waiting.items()):
            lines.append(f"  rank {rank} {what}")
            for key, communicator in self._communicators.items():
                queue = communicator.queues.get(rank)
                if queue:
                    lines.append(f"    {key}: {', then '.join(call.what for call in list(queue)[:4])}")
        self.failure = NcclRuleError("\n".join(lines))
        self._wake()
        if raises:
            raise self.failure

    # ---- calls

    def enter(self, key: object, members: tuple[int, ...], call: Call) -> Call:
        """Puts a call into its rank's queue, and runs what can run now."""
        for tensor in (*call.inputs, *call.outputs, *(part.tensor for part in call.parts)):
            self._check_tensor(tensor, call)
        with self._lock:
            self._check()
            communicator = self._communicators.setdefault(key, Communicator(members))
            if call.rank not in communicator.came:
                communicator.came.add(call.rank)
                if not self.variant.made_beforehand:
                    self._wake()
                    self.hold(call.rank, f"makes {key}, first for {call.what}",
                              lambda: communicator.came >= set(members))  # fmt: skip
            read = [*call.inputs, *(part.tensor for part in call.parts if part.sends)]
            call.sent = [(tensor, _bytes_of(tensor)) for tensor in read]
            call.left = set(range(len(call.parts)))
            for tensor in call.outputs:
                call.results[len(call.results)] = tensor.clone()
                _spoil(tensor)
            call.spoiled = [(tensor, _bytes_of(tensor)) for tensor in call.outputs]
            communicator.queues.setdefault(call.rank, deque()).append(call)
            self._calls[call] = None
            if self._step(key, communicator):  # else no rank that waits can go on
                while self._step(key, communicator):
                    pass
                self._wake()
        return call

    def _check_tensor(self, tensor: Tensor, call: Call) -> None:
        if tensor.device.type != self.device.type or not tensor.is_contiguous() or tensor.dtype not in TYPES:
            raise NcclRuleError(
                f"rank {call.rank}: {call.what} was given a tensor that NCCL does not take: {tensor.device}, "
                f"{tensor.dtype}, strides {tensor.stride()} of {tuple(tensor.shape)}"
            )

    def _step(self, key: object, communicator: Communicator) -> bool:
        """Runs one thing that can run; returns whether there was one."""
        heads = {rank: queue[0] for rank, queue in communicator.queues.items() if queue}
        together = [heads[rank] for rank in communicator.members if rank in heads and heads[rank].run is not None]
        for first, other in pairwise(together):
            if first.signature != other.signature:
                self.failure = NcclRuleError(
                    f"members of {key} make different calls: rank {first.rank} {first.what} {first.signature}, "
                    f"rank {other.rank} {other.what} {other.signature}"
                )
                raise self.failure
        if len(together) == len(communicator.members):
            for call in together:
                self._compare(call)
            assert together[0].run is not None
            together[0].run(together)
            for call in together:
                self._finish(communicator, call)
            return True
        return any(self._step_messages(communicator, heads, call) for call in heads.values() if call.run is None)

    def _step_messages(self, communicator: Communicator, heads: dict[int, Call], call: Call) -> bool:
        """Moves one message of a p2p call at the head of its queue."""
        for place in sorted(call.left):
            part = call.parts[place]
            if not part.sends:
                continue
            other = heads.get(part.peer)
            match = _awaiting(other, call.rank)
            if match is not None and communicator.early.get((call.rank, part.peer)):
                continue  # what this rank sent before comes first
            small = len(call.parts) == 1 and part.tensor.nbytes <= self.variant.eager_bytes
            if match is None and not small:
                continue
            assert part.values is not None
            self._compare(call)
            if match is None:
                communicator.early.setdefault((call.rank, part.peer), deque()).append(part.values)
            else:
                assert other is not None
                self._deliver(communicator, other, match, part.values)
            call.left.discard(place)
            if not call.left:
                self._finish(communicator, call)
            return True
        for place in sorted(call.left):
            part = call.parts[place]
            early = communicator.early.get((part.peer, call.rank))
            if not part.sends and early:
                self._deliver(communicator, call, place, early.popleft())
                return True
        return False

    def _deliver(self, communicator: Communicator, call: Call, place: int, values: Tensor) -> None:
        into = call.parts[place].tensor
        if (values.numel(), values.dtype) != (into.numel(), into.dtype):
            self.failure = NcclRuleError(
                f"rank {call.rank}: {call.what} expects {into.numel()} of {into.dtype} from rank "
                f"{call.parts[place].peer}, which sends {values.numel()} of {values.dtype}"
            )
            raise self.failure
        index = next(i for i, tensor in enumerate(call.outputs) if tensor is into)
        call.results[index] = values.view(into.shape)
        call.left.discard(place)
        if not call.left:
            self._finish(communicator, call)

    def let_go(self, call: Call) -> None:
        """Gives the call's tensors back to the rank, once it is sure that the rank has not touched them before."""
        with self._lock:
            self._compare(call)
            self._calls.pop(call, None)
            call.sent, call.spoiled = [], []

    def _compare(self, call: Call) -> None:
        for kept, what in ((call.sent, "that are sent by"), (call.spoiled, "that wait for the results of")):
            for tensor, before in kept:
                if _bytes_of(tensor) != before:
                    failure = NcclRuleError(
                        f"rank {call.rank}: bytes {what} {call.what} changed while it was under way"
                    )
                    self.fail(failure)
                    raise failure

    def _finish(self, communicator: Communicator, call: Call) -> None:
        communicator.queues[call.rank].popleft()
        call.is_done = True
        call.inputs, call.parts = [], []


def _awaiting(call: Call | None, source: int) -> int | None:
    """The first message of a p2p call that a rank sends to it; None if there is none."""
    if call is None or call.run is not None:
        return None
    return next((i for i in sorted(call.left) if not call.parts[i].sends and call.parts[i].peer == source), None)


def _spoil(tensor: Tensor) -> None:
    """Overwrites what is not there yet."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 93)


def _bytes_of(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor, read without an operator, for which a stream would be waited for."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""
