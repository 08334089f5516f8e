"""Ranks as threads of one process: for doctests, property tests, notebooks and ``verify``.

A collective is a *meeting*: every member hands in its tensors and the last to arrive does the work, in the order
of the members, so that results repeat bit for bit. Ranks that disagree are told at once. When every live rank
waits and no meeting can complete, nobody ever will: all are told, each with the call it waits in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.axis import Channel, CollectiveCall, Pending
from shardwright.comm.backends.block_sizes import Blocks
from shardwright.comm.recorder import Record, Recorder
from shardwright.errors import CommunicationError

Contribution = dict[str, Any]


class StoppedError(CommunicationError):
    """Raised in the ranks that must end because another one failed."""


class _Rendezvous:
    """One call of one group: who has come, with what."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.calls: dict[int, CollectiveCall] = {}
        self.brought: dict[int, Contribution] = {}
        self.over = threading.Event()
        self.complete = False


class Hub:
    """What the ranks of one thread world share: open meetings, who waits where, and the first failure."""

    def __init__(self, num_ranks: int) -> None:
        self.lock = threading.Lock()
        self.live = set(range(num_ranks))
        self.meetings: dict[object, _Rendezvous] = {}
        self.waiting: dict[int, _Rendezvous] = {}
        self.failure: BaseException | None = None
        self.failed_rank: int | None = None

    def arrive(
        self,
        key: object,
        members: tuple[int, ...],
        rank: int,
        call: CollectiveCall,
        brought: Contribution,
        work: Callable[[list[Contribution]], None],
    ) -> _Rendezvous:
        """Joins a meeting; the last to come does its work. Does not wait."""
        with self.lock:
            self._check()
            meeting = self.meetings.setdefault(key, _Rendezvous(members))
            for other, theirs in meeting.calls.items():
                if not call.agrees(theirs):
                    self._fail(None, CommunicationError(_disagreement(rank, call, other, theirs)))
                    self._check()
            meeting.calls[rank] = call
            meeting.brought[rank] = brought
            complete = len(meeting.brought) == len(members)
        if complete:
            work([meeting.brought[member] for member in members])
            self._finish(key, meeting)
        return meeting

    def wait(self, rank: int, meeting: _Rendezvous, result: Any) -> Any:
        """Blocks until the meeting is over, or until it cannot be; returns ``result``."""
        with self.lock:
            if meeting.complete:
                return result
            self._check()
            self.waiting[rank] = meeting
            self._find_deadlock()
        meeting.over.wait()
        with self.lock:
            self.waiting.pop(rank, None)
            if not meeting.complete:  # what all have come to is over, even if one has failed since
                self._check()
        return result

    def leave(self, rank: int) -> None:
        """A rank has returned: whoever waits for it would wait for ever."""
        with self.lock:
            self.live.discard(rank)
            self._find_deadlock()

    def fail(self, rank: int | None, failure: BaseException) -> None:
        """Ends every rank; the first failure is the one that counts."""
        with self.lock:
            self._fail(rank, failure)

    def _finish(self, key: object, meeting: _Rendezvous) -> None:
        with self.lock:
            del self.meetings[key]
            for member in meeting.members:
                if self.waiting.get(member) is meeting:
                    del self.waiting[member]
            meeting.complete = True
            meeting.brought.clear()  # a member that waits late keeps nobody else's memory
            meeting.over.set()

    def _check(self) -> None:
        if self.failure is not None:
            if isinstance(self.failure, CommunicationError) and self.failed_rank is None:
                raise CommunicationError(str(self.failure))
            raise StoppedError(f"rank {self.failed_rank} failed: {self.failure!r}")

    def _fail(self, rank: int | None, failure: BaseException) -> None:
        if self.failure is None:
            self.failure, self.failed_rank = failure, rank
            for meeting in [*self.meetings.values(), *self.waiting.values()]:
                meeting.over.set()

    def _find_deadlock(self) -> None:
        if self.failure is not None or not self.live or len(self.waiting) < len(self.live):
            return
        lines = ["every rank waits and none can go on"]
        for rank, meeting in sorted(self.waiting.items()):
            absent = [member for member in meeting.members if member not in meeting.brought]
            lines.append(f"  rank {rank} waits in {meeting.calls[rank]} for rank {', '.join(map(str, absent))}")
        gone = sorted({m for w in self.waiting.values() for m in w.members} - self.live)
        if gone:
            lines.append(f"  rank {', '.join(map(str, gone))} has returned already")
        self._fail(None, CommunicationError("\n".join(lines)))


def _disagreement(rank: int, call: CollectiveCall, other: int, theirs: CollectiveCall) -> str:
    (a, mine), (b, yours) = sorted([(rank, call), (other, theirs)], key=lambda pair: pair[0])
    return (
        f"ranks {a} and {b} disagree on a call over axis '{call.axis}'\n"
        f"  rank {a}: {mine}\n  rank {b}: {yours}\n"
        "  fix:    let every rank of an axis make the same calls in the same order"
    )


def _disagreement_on_part(
    ranks: tuple[int, ...], call: CollectiveCall, to: int, out: Tensor, source: int, part: Tensor
) -> str:
    return (
        f"ranks {ranks[source]} and {ranks[to]} disagree on a part of {call.kind} over axis '{call.axis}' "
        f"for {call.source}\n"
        f"  rank {ranks[source]}: gives {list(part.shape)}\n  rank {ranks[to]}: takes {list(out.shape)}\n"
        "  fix:    compute the shapes from the same cut on every rank"
    )


class ThreadTransport:
    """The transport of one rank of a thread world."""

    kind = "threads"
    blocks: Blocks | None = None

    def __init__(self, hub: Hub, rank: int, recorder: Recorder) -> None:
        self.hub, self.rank, self.recorder = hub, rank, recorder
        self._num_asked = 0

    def channel(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Channel]:
        """See :class:`~shardwright.comm.world.Transport`."""
        self._num_asked += 1
        return {
            place: ThreadChannel(self, ranks, (self._num_asked, place, ranks))
            for place, ranks in enumerate(groups)
            if self.rank in ranks
        }

    def close(self) -> None:
        """Tells the others that this rank makes no more calls."""
        self.hub.leave(self.rank)


class ThreadChannel:
    """One group's meetings, seen from one member."""

    def __init__(self, transport: ThreadTransport, ranks: tuple[int, ...], key: object) -> None:
        self.transport, self.ranks, self.key = transport, ranks, key
        self.index = ranks.index(transport.rank)
        self._num_calls = 0
        self._num_messages: dict[tuple[int, int], int] = {}
        self._num_subsets: dict[tuple[int, ...], int] = {}

    def subset(self, indices: tuple[int, ...]) -> ThreadChannel:
        """See :class:`~shardwright.comm.axis.Channel`."""
        # counted for each subset: its members need not have asked for the same others
        number = self._num_subsets[indices] = self._num_subsets.get(indices, 0) + 1
        ranks = tuple(self.ranks[i] for i in indices)
        return ThreadChannel(self.transport, ranks, (self.key, "subset", indices, number))

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """See :class:`~shardwright.comm.axis.Channel`."""

        def work(brought: list[Contribution]) -> None:
            for each in zip(*(one["tensors"] for one in brought), strict=True):
                total = each[0].clone()
                for other in each[1:]:
                    total.add_(other) if op == "sum" else torch.maximum(total, other, out=total)
                for tensor in each:
                    tensor.copy_(total)

        return self._meet(call, sum(t.nbytes for t in tensors), {"tensors": tensors}, work, None)

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """See :class:`~shardwright.comm.axis.Channel`."""

        def work(brought: list[Contribution]) -> None:
            for i, each in enumerate(brought):
                for j, source in enumerate(brought):
                    if i != j:
                        each["parts"][j].copy_(source["parts"][j])

        return self._meet(call, sum(part.nbytes for part in parts), {"parts": parts}, work, None)

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        # several are joined: the others may come late, and these need not be kept until then
        (message,) = tensors if len(tensors) == 1 else [torch.cat(tensors)]

        def work(brought: list[Contribution]) -> None:
            for i, each in enumerate(brought):
                each["out"].copy_(brought[0]["parts"][i])
                for other in brought[1:]:
                    each["out"].add_(other["parts"][i])

        brought = {"out": out, "parts": message.split(list(sizes))}
        return self._meet(call, message.nbytes, brought, work, out)

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """See :class:`~shardwright.comm.axis.Channel`."""

        def work(brought: list[Contribution]) -> None:
            for i, each in enumerate(brought):
                for j, source in enumerate(brought):
                    out, part = each["outs"][j], source["parts"][i]
                    if out.shape != part.shape:  # copying would repeat the part where it fits
                        raise CommunicationError(_disagreement_on_part(self.ranks, call, i, out, j, part))
                    out.copy_(part)

        return self._meet(call, sum(part.nbytes for part in parts), {"outs": outs, "parts": parts}, work, outs)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """See :class:`~shardwright.comm.axis.Channel`."""

        def work(brought: list[Contribution]) -> None:
            for i, each in enumerate(brought):
                if i != source:
                    each["tensor"].copy_(brought[source]["tensor"])

        return self._meet(call, tensor.nbytes, {"tensor": tensor}, work, tensor)

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._note(call, tensor.nbytes)
        # a copy, so that the sender may go on and overwrite what it sent
        self._join_message(call, self.index, to, {"tensor": tensor.clone()})
        return Pending(lambda: None)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """See :class:`~shardwright.comm.axis.Channel`."""
        self._note(call, tensor.nbytes)
        meeting = self._join_message(call, source, self.index, {"out": tensor})
        return Pending(lambda: self.transport.hub.wait(self.transport.rank, meeting, tensor))

    def _join_message(self, call: CollectiveCall, source: int, to: int, brought: Contribution) -> _Rendezvous:
        number = self._num_messages.get((source, to), 0)
        self._num_messages[source, to] = number + 1
        members = (self.ranks[source], self.ranks[to])
        call = call._replace(kind="message", details=f"from member {source} to member {to}")

        def work(pair: list[Contribution]) -> None:
            pair[1]["out"].copy_(pair[0]["tensor"])

        hub = self.transport.hub
        return hub.arrive((self.key, source, to, number), members, self.transport.rank, call, brought, work)

    def _meet(
        self,
        call: CollectiveCall,
        num_bytes: int,
        brought: Contribution,
        work: Callable[[list[Contribution]], None],
        result: Any,
    ) -> Pending[Any]:
        self._note(call, num_bytes)
        self._num_calls += 1
        hub, rank = self.transport.hub, self.transport.rank
        meeting = hub.arrive((self.key, self._num_calls), self.ranks, rank, call, brought, work)
        return Pending(lambda: hub.wait(rank, meeting, result))

    def _note(self, call: CollectiveCall, num_bytes: int) -> None:
        self.transport.recorder.add(Record(call.kind, call.axis, num_bytes, call.source))
