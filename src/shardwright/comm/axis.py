"""``Axis``: a rank's process group along one direction of the mesh, through which strategies reach other ranks.

Each call is recorded with its *payload* in bytes: the size of the whole tensor in question, not the bytes that a ring
algorithm sends for it (:func:`~shardwright.comm.recorder.ring_factor`).

| call | payload |
|---|---|
| ``all_reduce``, ``broadcast`` | the tensor |
| ``all_gather`` | the gathered tensor |
| ``reduce_scatter`` | the tensor that is summed |
| ``all_to_all`` | all parts of this rank, the one it keeps included |
| ``send``, ``receive`` | the message |
| ``barrier`` | one byte |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright import devices
from shardwright.comm.channel import Channel, Message
from shardwright.comm.collective_call import CollectiveCall
from shardwright.comm.pending import Pending, done
from shardwright.comm.wait_times import waits
from shardwright.errors import CommunicationError


def _in_place(tensor: Tensor, start: Callable[[Tensor], Pending[Any]]) -> Pending[Tensor]:
    """Starts a call on ``tensor``, or on a contiguous copy that ``wait`` copies back."""
    whole = tensor.detach()
    message = whole.contiguous()
    pending = start(message)

    def finish() -> Tensor:
        pending.wait()
        if message is not whole:
            whole.copy_(message)
        return tensor

    return Pending(finish)


def _of_sizes(shape: torch.Size, dim: int, sizes: Sequence[int]) -> list[list[int]]:
    """Returns the shape once for each of ``sizes``, with that size in place of the size of dim ``dim``."""
    before = dim % len(shape)
    return [[*shape[:before], size, *shape[before + 1 :]] for size in sizes]


@dataclass(frozen=True)
class Axis:
    """A rank's process group along one direction of the mesh: ``size``, ``index``, collectives and p2p messages.

    Most calls exist twice: ``all_reduce`` returns the result, ``all_reduce_async`` a :class:`Pending`. The ranks of the
    axis, its members, are numbered 0 to ``size - 1``. All members make the same collective calls in the same order,
    with tensors of one dtype; the slices that they hold of a tensor may differ in size. On an axis of size 1 a
    collective returns what it was given, and sends and records nothing. On tensors without elements, no call but an
    all-to-all sends or records anything. Autograd does not see the calls; :mod:`shardwright.comm.autograd` has
    functions with a backward.

    ``ranks`` are the members' ranks in the run, and ``index`` is this rank's number among them. ``channel`` sends the
    messages, calls are recorded under the name ``source``, and received messages are put on ``device``.

    Raises: CommunicationError, from any call or its ``wait``: another rank has ended, is too late or makes a different
        call, where the backend can find that out.

    >>> from shardwright.comm.launch import run_on_threads
    >>> from shardwright.mesh import Mesh
    >>> run_on_threads(Mesh(tp=3), lambda axes: axes["tp"].all_reduce(torch.ones(2)).tolist())
    [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    channel: Channel
    source: str = "core"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def size(self) -> int:
        """The number of ranks on the axis."""
        return len(self.ranks)

    def for_strategy(self, name: str) -> Axis:
        """Returns this axis, but with its calls recorded under ``name``, the name of a strategy."""
        return replace(self, source=name)

    def subset(self, indices: Sequence[int]) -> Axis:
        """Returns a new axis over the members ``indices`` of this one, renumbered in the order given.

        Those members all call it, and no others. All members in their old order give this axis itself.

        Raises: CommunicationError: this rank is not among the members, or one is given twice or does not exist.
        """
        indices = tuple(indices)
        if self.index not in indices or len(set(indices)) != len(indices) or not set(indices) <= {*range(self.size)}:
            raise CommunicationError(
                f"cannot take a subset of axis '{self.name}'",
                given=f"members {list(indices)}, on member {self.index}",
                allowed=f"different members, from 0 to {self.size - 1}, with {self.index} among them",
                fix="call subset on its members only",
            )
        if indices == tuple(range(self.size)):
            return self
        ranks = tuple(self.ranks[i] for i in indices)
        return replace(self, ranks=ranks, index=indices.index(self.index), channel=self.channel.subset(indices))

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """All-reduces ``tensor`` in place, by sum or, if ``op`` is "max", by maximum, and returns ``tensor``.

        Raises: CommunicationError: there is something to send, and ``op`` is neither "sum" nor "max".
        """
        return self.all_reduce_async(tensor, op).wait()

    def all_reduce_async(self, tensor: Tensor, op: str = "sum") -> Pending[Tensor]:
        """Starts :meth:`all_reduce`; ``wait`` of the returned :class:`Pending` gives the tensor."""
        if self.size == 1 or tensor.numel() == 0:
            return done(tensor)
        if op not in ("sum", "max"):
            raise CommunicationError("no such reduction", given=op, allowed="sum, max", fix="use sum")
        call = self._call("all_reduce", tensor.shape, tensor.dtype, op)
        return _in_place(tensor, lambda message: self.channel.all_reduce(call, [message], op))

    def all_reduce_together_async(self, tensors: Sequence[Tensor]) -> Pending[None]:
        """Starts one all-reduce (sum) of several tensors of one dtype, each in place, as one message.

        The tensors must be contiguous.
        """
        operands = [tensor.detach() for tensor in tensors if tensor.numel()]
        assert all(tensor.is_contiguous() for tensor in operands), "a tensor with gaps cannot be overwritten in place"
        if self.size == 1 or not operands:
            return done(None)
        shape = (sum(tensor.numel() for tensor in operands),)
        return self.channel.all_reduce(self._call("all_reduce", shape, operands[0].dtype, "sum"), operands, "sum")

    def all_gather(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """All-gathers the members' tensors, and returns one tensor in which they are joined along ``dim``.

        ``sizes`` are the tensors' lengths along ``dim``, by default all equal to this member's.

        Raises: CommunicationError: the axis has several members, and there is not one size for each, or this member's
            size is wrong.
        """
        return self.all_gather_async(tensor, dim, sizes).wait()

    def all_gather_async(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Pending[Tensor]:
        """Starts :meth:`all_gather`; ``wait`` of the returned :class:`Pending` gives the joined tensor."""
        if self.size == 1:
            return done(tensor)
        sizes = self._sizes("all_gather", sizes, tensor.shape[dim])
        if prod(tensor.shape[: dim % tensor.dim()]) > 1:  # parts with gaps between them in the joined tensor
            parts, came = self.gather_parts_async(tensor, _of_sizes(tensor.shape, dim, sizes))
            return Pending(lambda: (came.wait(), torch.cat(parts, dim))[1])
        mine = tensor.detach().movedim(dim, 0).contiguous()
        whole = mine.new_empty((sum(sizes), *mine.shape[1:]))
        whole.split(list(sizes))[self.index].copy_(mine)
        pending = self.all_gather_into_async(whole, sizes)
        return Pending(lambda: pending.wait().movedim(0, dim))

    def all_gather_into_async(self, whole: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Starts an in-place all-gather along dim 0 of ``whole``, in which this member's part is already filled.

        ``whole`` is contiguous, and ``sizes`` are the lengths of all members' parts. ``wait`` of the returned
        :class:`Pending` gives ``whole``.

        Raises: CommunicationError: there is not one size for each member.
        """
        self._sizes("all_gather", sizes, sizes[self.index])
        if self.size == 1 or whole.numel() == 0:
            return done(whole)
        parts = list(whole.detach().split(list(sizes)))
        call = self._call("all_gather", whole.shape, whole.dtype, f"in parts {list(sizes)}")
        pending = self.channel.all_gather(call, parts, self.index)
        return Pending(lambda: (pending.wait(), whole)[1])

    def gather_parts_async(self, mine: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[list[Tensor], Pending[None]]:
        """Starts an all-gather that returns the members' tensors separately, without copying them into one.

        ``shapes[i]`` is the shape of member i's tensor. Returns the tensors, and the :class:`Pending` to wait for
        before another member's tensor is read.
        """
        whole = mine.detach().contiguous()
        if self.size == 1:
            return [whole], done(None)
        parts = [whole if i == self.index else whole.new_empty(tuple(shape)) for i, shape in enumerate(shapes)]
        if not any(part.numel() for part in parts):
            return parts, done(None)
        sizes = [part.numel() for part in parts]
        call = self._call("all_gather", (sum(sizes),), whole.dtype, f"in parts {sizes}")
        return parts, self.channel.all_gather(call, [part.view(-1) for part in parts], self.index)

    def reduce_scatter_parts_async(self, parts: Sequence[Tensor]) -> Pending[Tensor]:
        """Starts a reduce-scatter of separate tensors of one dtype: member i gets the sum of all members' ``parts[i]``.

        ``wait`` of the returned :class:`Pending` gives this member's sum. Over shared memory between processes, nothing
        is copied to join the parts.
        """
        shape = parts[self.index].shape
        pending = self.reduce_scatter_together_async(parts, [part.numel() for part in parts])
        return Pending(lambda: pending.wait().view(shape))

    def reduce_scatter_together_async(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Pending[Tensor]:
        """Starts a reduce-scatter of several tensors of one dtype as if joined into one flat tensor.

        The flat tensor is summed over the members and cut into one part for each, of ``sizes`` elements; ``wait`` of
        the returned :class:`Pending` gives this member's part. Over shared memory between processes, nothing is copied
        to join the tensors, and they may be freed at once.
        """
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        if self.size == 1:
            return done(flat[0] if len(flat) == 1 else torch.cat(flat))
        out = flat[0].new_empty(sizes[self.index])
        if not sum(sizes):
            return done(out)
        call = self._call("reduce_scatter", (sum(sizes),), out.dtype, f"in parts {list(sizes)}")
        return self.channel.reduce_scatter(call, out, flat, sizes)

    def reduce_scatter(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """Sums the members' tensors, and returns this member's slice of the sum along ``dim`` (a reduce-scatter).

        ``sizes`` are the lengths of all members' slices, by default equal.

        Raises: CommunicationError: no sizes are given, and ``dim`` cannot be cut evenly among the members.
        """
        return self.reduce_scatter_async(tensor, dim, sizes).wait()

    def reduce_scatter_async(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Pending[Tensor]:
        """Starts :meth:`reduce_scatter`; ``wait`` of the returned :class:`Pending` gives this member's slice."""
        if self.size == 1:
            return done(tensor)
        whole = tensor.detach().movedim(dim, 0).contiguous()
        if sizes is None and whole.shape[0] % self.size:
            raise CommunicationError(
                f"reduce_scatter over axis '{self.name}' cannot cut dim {dim} evenly",
                given=f"size {whole.shape[0]}, {self.size} members",
                allowed="any sizes, when they are given",
                fix="pass sizes, one for each member",
            )
        sizes = sizes or [whole.shape[0] // self.size] * self.size
        out = whole.new_empty((sizes[self.index], *whole.shape[1:]))
        if whole.numel() == 0:
            return done(out.movedim(0, dim))
        call = self._call("reduce_scatter", whole.shape, whole.dtype, f"in parts {list(sizes)}")
        row = whole[0].numel()
        pending = self.channel.reduce_scatter(call, out.view(-1), [whole.view(-1)], [size * row for size in sizes])
        return Pending(lambda: (pending.wait(), out.movedim(0, dim))[1])

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Sends ``parts[i]`` to each member i, and returns the tensors that the members sent here (an all-to-all).

        ``shapes[i]`` is the shape of the tensor from member i; all tensors are of one dtype. ``parts`` and ``shapes``
        have an entry for this member too.

        Raises: CommunicationError: the axis has several members, and there is not one part and one shape for each.
        """
        return self.all_to_all_async(parts, shapes).wait()

    def all_to_all_async(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Pending[list[Tensor]]:
        """Starts :meth:`all_to_all`; ``wait`` of the returned :class:`Pending` gives the received tensors."""
        sent_parts = [part.detach().contiguous() for part in parts]
        if self.size == 1:
            return done(sent_parts)
        if len(sent_parts) != self.size or len(shapes) != self.size:
            raise CommunicationError(
                f"all_to_all over axis '{self.name}' needs a part for each member",
                given=f"{len(sent_parts)} parts, {len(shapes)} shapes",
                allowed=f"{self.size} of each",
                fix="pass an empty tensor for a member that gets nothing",
            )
        outs = [sent_parts[0].new_empty(tuple(shape)) for shape in shapes]
        return self.channel.all_to_all(self._call("all_to_all", (), sent_parts[0].dtype), outs, sent_parts)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Broadcasts: overwrites ``tensor`` with the tensor of member ``source``, and returns ``tensor``."""
        return self.broadcast_async(tensor, source).wait()

    def broadcast_async(self, tensor: Tensor, source: int = 0) -> Pending[Tensor]:
        """Starts :meth:`broadcast`; ``wait`` of the returned :class:`Pending` gives the tensor."""
        if self.size == 1 or tensor.numel() == 0:
            return done(tensor)
        call = self._call("broadcast", tensor.shape, tensor.dtype, f"from member {source}")
        return _in_place(tensor, lambda message: self.channel.broadcast(call, message, source))

    def barrier(self) -> None:
        """Blocks until every rank of the axis has called it.

        On an accelerator, it also waits for all work that is queued on this rank's device. On an axis of size 1 it does
        nothing.
        """
        if self.size > 1:
            call = self._call("barrier", (1,), torch.uint8)
            self.channel.all_reduce(call, [torch.zeros(1, dtype=torch.uint8, device=self.device)], "max").wait()
            devices.synchronize(self.device)

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends ``tensor`` to member ``to`` of the axis, point to point, without waiting for the receiver.

        ``tensor`` may be changed at once, because a copy of it is sent.

        Raises: CommunicationError: over NCCL, :meth:`connect` has not connected the two members.
        """
        self.send_async(tensor, to).wait()

    def send_async(self, tensor: Tensor, to: int) -> Pending[None]:
        """Does what :meth:`send` does, and returns a :class:`Pending` whose ``wait`` does not wait for the receiver."""
        whole = tensor.detach().contiguous()
        if whole.numel() == 0:
            return done(None)
        return self.channel.send(self._call("send", whole.shape, whole.dtype, f"to member {to}"), whole, to)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Waits for the next tensor that member ``source`` of the axis sends here, point to point, and returns it.

        ``shape`` and ``dtype`` are those of the tensor that is sent.

        Raises: CommunicationError: over NCCL, :meth:`connect` has not connected the two members.
        """
        return self.receive_async(shape, dtype, source).wait()

    def receive_async(
        self, shape: Sequence[int], dtype: torch.dtype, source: int, into: Tensor | None = None
    ) -> Pending[Tensor]:
        """Starts :meth:`receive`, so that the transfer overlaps with compute; ``wait`` of the result gives the tensor.

        ``into`` is a contiguous tensor to fill, of the given shape and dtype; by default a new one is allocated.
        """
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device) if into is None else into
        if tensor.numel() == 0:
            return done(tensor)
        call = self._call("receive", tensor.shape, tensor.dtype, f"from member {source}")
        return self.channel.receive(call, tensor, source)

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Creates the connections for p2p messages between ``pairs`` of members; every member passes the same pairs.

        Over NCCL it must be called before the first :meth:`send` or :meth:`receive` between the two members of a pair;
        :meth:`send_and_receive_async` does not need it. With other backends it does nothing.
        """
        if self.size > 1:
            self.channel.connect(sorted({(min(pair), max(pair)) for pair in pairs if len(set(pair)) == 2}))

    def send_and_receive_async(
        self, sends: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], dtype: torch.dtype
    ) -> Pending[dict[int, Tensor]]:
        """Starts p2p messages to and from other members at once, each recorded as one send or one receive.

        ``sends`` holds the tensors to send, and ``shapes`` the shapes of the tensors to receive, both by the other
        member's number; all tensors are of ``dtype``. Either mapping may be empty. No message waits for another, so
        members that name each other in different orders cannot deadlock. ``wait`` of the returned :class:`Pending`
        gives the received tensors by member.
        """
        sent_tensors = {to: tensor.detach().contiguous() for to, tensor in sends.items()}
        received_tensors = {
            source: torch.empty(tuple(shape), dtype=dtype, device=self.device) for source, shape in shapes.items()
        }
        going = [
            Message(self._call("send", tensor.shape, dtype, f"to member {to}"), tensor, to)
            for to, tensor in sent_tensors.items() if tensor.numel()
        ]  # fmt: skip
        coming = [
            Message(self._call("receive", tensor.shape, dtype, f"from member {source}"), tensor, source)
            for source, tensor in received_tensors.items() if tensor.numel()
        ]  # fmt: skip
        pending = self.channel.send_and_receive(going, coming) if going or coming else done(None)
        return Pending(lambda: (pending.wait(), received_tensors)[1])

    def _call(self, kind: str, shape: Sequence[int], dtype: torch.dtype, details: str = "") -> CollectiveCall:
        waits.axis = self.name
        return CollectiveCall(kind, self.name, self.source, tuple(shape), dtype, details)

    def _sizes(self, kind: str, sizes: Sequence[int] | None, mine: int) -> Sequence[int]:
        sizes = sizes or [mine] * self.size
        if len(sizes) != self.size or sizes[self.index] != mine:
            raise CommunicationError(
                f"{kind} over axis '{self.name}' was given sizes that are not the members'",
                given=f"sizes {list(sizes)}, member {self.index} of {self.size} holds {mine}",
                allowed="one size for each member, the caller's own at its index",
                fix="compute the sizes from the same cut on every rank",
            )
        return sizes
