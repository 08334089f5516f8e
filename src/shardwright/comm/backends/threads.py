"""The backend for ranks that are threads of one process: for doctests, property tests, notebooks and ``verify``.

In a collective every rank of the group hands over its tensors, and the last rank to arrive computes the results, in the
order of the group's ranks, so that they repeat bit for bit. Ranks that make different calls get an error at once. When
every rank that still runs waits and no collective can complete, all get an error that names the call each waits in.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.comm.backends.block_sizes import Blocks
from shardwright.comm.channel import Channel
from shardwright.comm.collective_call import FIX_CALLS, SAME_CALLS, CollectiveCall, disagreement
from shardwright.comm.pending import Pending
from shardwright.comm.recorder import Recorder
from shardwright.comm.user_calls import call_of_user
from shardwright.errors import CommunicationError, aligned

Contribution = dict[str, Any]
Work = Callable[[list[Contribution]], None]
"""A function that computes a collective; the last member to arrive calls it with the tensors of all members."""


class StoppedError(CommunicationError):
    """Raised in the ranks that must end because another rank failed."""


class _Rendezvous:
    """One collective call of one group: the members that have made the call, and their tensors."""

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self.calls: dict[int, CollectiveCall] = {}
        self.contributions: dict[int, Contribution] = {}
        self.complete = False
        self._gates: list[threading.Lock] = []

    def gate(self) -> threading.Lock:
        """Returns a lock that is held until :meth:`open`, which the caller waits for by acquiring it.

        Each rank that waits has a lock of its own, because a thread that wakes from a ``threading.Event`` first waits
        for the Event's lock.
        """
        gate = threading.Lock()
        gate.acquire()
        self._gates.append(gate)
        return gate

    def open(self) -> None:
        """Lets all waiting ranks go on: the call is complete, or the run has failed."""
        gates, self._gates = self._gates, []
        for gate in gates:
            gate.release()


class ThreadWorld:
    """The state shared by all ranks that are threads of one run: open collectives, waiting ranks, the first failure."""

    def __init__(self, num_ranks: int) -> None:
        self.lock = threading.RLock()  # reentrant: methods that hold it call fail()
        self.live = set(range(num_ranks))
        self.meetings: dict[object, _Rendezvous] = {}
        self.waiting: dict[int, _Rendezvous] = {}
        self._threads: dict[int, int] = {}
        self.failure: BaseException | None = None
        self.failed_rank: int | None = None
        self.num_saving = 0  # ranks that save what they hold after a failure

    def arrive(
        self, key: object, members: tuple[int, ...], rank: int, call: CollectiveCall, given: Contribution, work: Work
    ) -> _Rendezvous:
        """Hands over a rank's tensors ``given`` to a collective, and returns the collective's state without waiting.

        ``key`` identifies the collective, and is equal on all its ``members``. The last member that calls this runs
        ``work`` on the tensors of all members, in their order.

        Raises: CommunicationError: a member that came before makes a different call, or the run has failed.
        """
        with self.lock:
            self._check()
            meeting = self.meetings.setdefault(key, _Rendezvous(members))
            for other, theirs in meeting.calls.items():
                if not call.agrees(theirs):
                    self.fail(None, disagreement(call.axis, rank, call, other, theirs))
                    self._check()
            meeting.calls[rank] = call
            meeting.contributions[rank] = given
            complete = len(meeting.contributions) == len(members)
        if complete:
            work([meeting.contributions[member] for member in members])
            self._finish(key, meeting)
        return meeting

    def wait(self, rank: int, meeting: _Rendezvous, result: Any) -> Any:
        """Blocks until the collective ``meeting``, which :meth:`arrive` returned, is complete; returns ``result``.

        Raises: CommunicationError: the run fails before that; it also fails if every rank waits and none can go on.
        """
        with self.lock:
            if meeting.complete:
                return result
            self._check()
            self.waiting[rank], self._threads[rank] = meeting, threading.get_ident()
            gate = meeting.gate()
            self._find_deadlock()
        gate.acquire()
        if not meeting.complete:  # a complete meeting has its results, even if a rank has failed since
            with self.lock:
                self.waiting.pop(rank, None)
                if not meeting.complete:
                    self._check()
        return result

    def leave(self, rank: int) -> None:
        """Marks that a rank has finished its work, so that it joins no more collectives.

        When all other ranks that still run wait, and so wait in vain, they get an error.
        """
        with self.lock:
            self.live.discard(rank)
            self._find_deadlock()

    def fail(self, rank: int | None, failure: BaseException) -> None:
        """Makes every rank raise, in the call that it waits in or at its next one; only the first failure is kept.

        ``rank`` is the one that failed, -1 if the launcher was interrupted, or None if the failure is of all ranks.
        """
        with self.lock:
            if self.failure is None:
                self.failure, self.failed_rank = failure, rank
                for meeting in {*self.meetings.values(), *self.waiting.values()}:
                    meeting.open()

    def _finish(self, key: object, meeting: _Rendezvous) -> None:
        with self.lock:
            del self.meetings[key]
            for member in meeting.members:
                if self.waiting.get(member) is meeting:
                    del self.waiting[member]
            meeting.complete = True
            meeting.contributions.clear()  # a member that waits late must not keep the others' tensors alive
        meeting.open()  # after releasing the lock, which ranks that wake up need

    def _check(self) -> None:
        if self.failure is not None:
            if isinstance(self.failure, CommunicationError) and self.failed_rank is None:
                raise CommunicationError(str(self.failure))
            raise StoppedError(f"rank {self.failed_rank} failed: {self.failure!r}")

    def _find_deadlock(self) -> None:
        if self.failure is not None or not self.live or len(self.waiting) < len(self.live):
            return
        lines, frames = [], sys._current_frames()
        for rank, meeting in sorted(self.waiting.items()):
            absent = [member for member in meeting.members if member not in meeting.contributions]
            call = call_of_user(frames.get(self._threads[rank]))
            of = "" if call.startswith("Axis.") else f", called by {call},"
            lines.append(f"rank {rank} waits in {meeting.calls[rank]}{of} for rank {', '.join(map(str, absent))}")
        gone = sorted({m for w in self.waiting.values() for m in w.members} - self.live)
        if gone:
            lines.append(f"rank {', '.join(map(str, gone))} has returned already")
        failure = CommunicationError(
            "every rank waits and none can continue", given=aligned(lines), allowed=SAME_CALLS, fix=FIX_CALLS
        )
        self.fail(None, failure)


def _disagreement_on_part(
    ranks: tuple[int, ...], call: CollectiveCall, to: int, out: Tensor, source: int, part: Tensor
) -> CommunicationError:
    gives, takes = f"rank {ranks[source]}: gives {list(part.shape)}", f"rank {ranks[to]}: takes {list(out.shape)}"
    return CommunicationError(
        f"ranks {ranks[source]} and {ranks[to]} disagree on a part of {call.kind} over axis '{call.axis}' "
        f"for {call.source}",
        given=aligned([gives, takes]),
        allowed="a part of the shape that its member takes",
        fix="compute the shapes from the same cut on every rank",
    )


class ThreadTransport:
    """Creates the process groups (channels) of one rank that is a thread."""

    kind = "threads"
    blocks: Blocks | None = None

    def __init__(self, hub: ThreadWorld, rank: int, recorder: Recorder) -> None:
        self.hub, self.rank, self.recorder = hub, rank, recorder
        self._num_calls = 0

    def channel(self, groups: Sequence[tuple[int, ...]]) -> dict[int, Channel]:
        """Returns a channel for each of ``groups`` (tuples of ranks) that holds this rank, keyed by the group's index.

        All ranks call it equally often, with the same groups.
        """
        self._num_calls += 1
        return {
            place: ThreadChannel(self, ranks, (self._num_calls, place, ranks))
            for place, ranks in enumerate(groups)
            if self.rank in ranks
        }

    def close(self) -> None:
        """Marks that this rank makes no more collective calls, so that ranks which wait for it in vain get an error."""
        self.hub.leave(self.rank)

    def abandon(self, failure: BaseException) -> None:
        """Makes every other rank raise, in the call that it waits in or at its next, because this rank has failed."""
        self.hub.fail(None if isinstance(failure, CommunicationError) else self.rank, failure)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Returns a context in which ``launch`` waits for this rank, which saves what it holds after a failure."""
        with self.hub.lock:
            self.hub.num_saving += 1
        try:
            yield
        finally:
            with self.hub.lock:
                self.hub.num_saving -= 1


class ThreadChannel(Channel):
    """One process group of ranks that are threads. See :class:`~shardwright.comm.channel.Channel`."""

    def __init__(self, transport: ThreadTransport, ranks: tuple[int, ...], key: object) -> None:
        self.transport, self.ranks, self.key = transport, ranks, key
        self.index = ranks.index(transport.rank)
        transport.recorder.channels.add(self)
        self._num_calls = 0
        self._num_messages: dict[tuple[int, int], int] = {}
        self._num_subsets: dict[tuple[int, ...], int] = {}

    def subset(self, indices: tuple[int, ...]) -> ThreadChannel:
        """Returns a channel over the members ``indices`` of this group."""
        # counted for each subset alone, because its members may have made different numbers of other subsets
        number = self._num_subsets[indices] = self._num_subsets.get(indices, 0) + 1
        ranks = tuple(self.ranks[i] for i in indices)
        return ThreadChannel(self.transport, ranks, (self.key, "subset", indices, number))

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """All-reduces ``tensors`` in place: sums, or takes the maximum, in the order of the members."""

        def work(contributions: list[Contribution]) -> None:
            for operands in zip(*(contribution["tensors"] for contribution in contributions), strict=True):
                total = operands[0].clone()
                for other in operands[1:]:
                    total.add_(other) if op == "sum" else torch.maximum(total, other, out=total)
                for tensor in operands:
                    tensor.copy_(total)

        return self._meet(call, sum(t.nbytes for t in tensors), {"tensors": tensors}, work, None)

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """All-gathers into ``parts``: copies each member's part to every other member."""

        def work(contributions: list[Contribution]) -> None:
            for i, target in enumerate(contributions):
                for j, source in enumerate(contributions):
                    if i != j:
                        target["parts"][j].copy_(source["parts"][j])

        return self._meet(call, sum(part.nbytes for part in parts), {"parts": parts}, work, None)

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """Reduce-scatters into ``out``: each member gets the sum of its part, added in the order of the members."""
        # several are joined in a copy: the caller may free them before the last member arrives
        (message,) = tensors if len(tensors) == 1 else [torch.cat(tensors)]

        def work(contributions: list[Contribution]) -> None:
            for i, target in enumerate(contributions):
                target["out"].copy_(contributions[0]["parts"][i])
                for other in contributions[1:]:
                    target["out"].add_(other["parts"][i])

        contribution = {"out": out, "parts": message.split(list(sizes))}
        return self._meet(call, message.nbytes, contribution, work, out)

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """Runs an all-to-all: copies each of ``parts`` into the ``outs`` of the member that it is for.

        Raises: CommunicationError: the member expects another shape.
        """

        def work(contributions: list[Contribution]) -> None:
            for i, target in enumerate(contributions):
                for j, source in enumerate(contributions):
                    out, part = target["outs"][j], source["parts"][i]
                    if out.shape != part.shape:  # copying would repeat the part where it fits
                        raise _disagreement_on_part(self.ranks, call, i, out, j, part)
                    out.copy_(part)

        return self._meet(call, sum(part.nbytes for part in parts), {"outs": outs, "parts": parts}, work, outs)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Broadcasts: copies the tensor of member ``source`` into every other member's ``tensor``."""

        def work(contributions: list[Contribution]) -> None:
            for i, target in enumerate(contributions):
                if i != source:
                    target["tensor"].copy_(contributions[source]["tensor"])

        return self._meet(call, tensor.nbytes, {"tensor": tensor}, work, tensor)

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Sends a copy of ``tensor`` to member ``to``, so that the sender may overwrite its own at once."""
        self.transport.recorder.note(call, tensor.nbytes)
        self._join_message(call, self.index, to, {"tensor": tensor.clone()})
        return Pending(lambda: None)

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Starts to fill ``tensor`` with the next message from member ``source``; ``wait`` blocks until it has come."""
        self.transport.recorder.note(call, tensor.nbytes)
        meeting = self._join_message(call, source, self.index, {"out": tensor})
        return Pending(lambda: self.transport.hub.wait(self.transport.rank, meeting, tensor))

    def _join_message(self, call: CollectiveCall, source: int, to: int, contribution: Contribution) -> _Rendezvous:
        number = self._num_messages.get((source, to), 0)
        self._num_messages[source, to] = number + 1
        members = (self.ranks[source], self.ranks[to])
        call = call._replace(kind="message", details=f"from member {source} to member {to}")

        def work(pair: list[Contribution]) -> None:
            pair[1]["out"].copy_(pair[0]["tensor"])

        hub = self.transport.hub
        return hub.arrive((self.key, source, to, number), members, self.transport.rank, call, contribution, work)

    def _meet(
        self, call: CollectiveCall, num_bytes: int, contribution: Contribution, work: Work, result: Any
    ) -> Pending[Any]:
        self.transport.recorder.note(call, num_bytes)
        self._num_calls += 1
        hub, rank = self.transport.hub, self.transport.rank
        meeting = hub.arrive((self.key, self._num_calls), self.ranks, rank, call, contribution, work)
        return Pending(lambda: hub.wait(rank, meeting, result))
