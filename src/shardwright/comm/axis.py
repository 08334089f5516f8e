"""``Axis``: all that a strategy sees of the world, one rank's handle on one direction of the mesh.

Sizes in bytes on record are each call's *payload*: the whole tensor that the call is about, before any ring
factor (:func:`~shardwright.comm.recorder.ring_factor`).

| call | payload |
|---|---|
| ``all_reduce``, ``broadcast`` | the tensor |
| ``all_gather`` | the gathered whole |
| ``reduce_scatter`` | the whole that is summed |
| ``all_to_all`` | what this rank gives away and keeps |
| ``send``, ``receive`` | the message |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from shardwright.errors import CommunicationError

Result = TypeVar("Result")


class CollectiveCall(NamedTuple):
    """One call as every member of the group must make it; ``source`` and ``details`` are for messages."""

    kind: str
    axis: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    details: str = ""

    def agrees(self, other: CollectiveCall) -> bool:
        """Whether two ranks that make these calls mean the same one."""
        return (self.kind, self.axis, self.shape, self.dtype, self.details) == (
            (other.kind, other.axis, other.shape, other.dtype, other.details)
        )

    def __str__(self) -> str:
        what = f"{self.kind} of {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        return f"{what} {self.details} over axis '{self.axis}' for {self.source}".replace("  ", " ")


class Pending(Generic[Result]):
    """A call that is under way. ``wait`` returns its result; until then leave its tensors alone."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._result: Result

    def wait(self) -> Result:
        """Blocks until the call is done; calling it again returns the same result."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result


def done(result: Result) -> Pending[Result]:
    """A call that had nothing to do."""
    return Pending(lambda: result)


class Channel(Protocol):
    """How one backend moves the tensors of one group, seen from one member. All calls are asynchronous.

    A channel records what it moves and reports ranks that disagree; ``Axis`` has already checked the arguments.
    Tensors are contiguous and detached.
    """

    def all_reduce(self, call: CollectiveCall, tensors: list[Tensor], op: str) -> Pending[None]:
        """Overwrites each of ``tensors``, of one dtype, with the sum or maximum over the group: one message."""
        ...

    def all_gather(self, call: CollectiveCall, parts: list[Tensor], index: int) -> Pending[None]:
        """Fills ``parts[i]`` with member i's; ``parts[index]`` holds this member's."""
        ...

    def reduce_scatter(
        self, call: CollectiveCall, out: Tensor, tensors: list[Tensor], sizes: Sequence[int]
    ) -> Pending[Tensor]:
        """Fills ``out``, of one dim, with the sum over members of part ``index`` of their ``tensors``, end to end.

        Part i has ``sizes[i]`` elements, wherever tensors begin and end.
        """
        ...

    def all_to_all(self, call: CollectiveCall, outs: list[Tensor], parts: list[Tensor]) -> Pending[list[Tensor]]:
        """Fills ``outs[i]`` with what member i holds in ``parts[index]``."""
        ...

    def broadcast(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Overwrites ``tensor`` with member ``source``'s."""
        ...

    def send(self, call: CollectiveCall, tensor: Tensor, to: int) -> Pending[None]:
        """Gives ``tensor`` to member ``to``; never waits for the receiver to ask."""
        ...

    def receive(self, call: CollectiveCall, tensor: Tensor, source: int) -> Pending[Tensor]:
        """Fills ``tensor`` with the next message from member ``source``."""
        ...

    def subset(self, indices: tuple[int, ...]) -> Channel:
        """A channel for some of the members; all of those must ask for it, in the same order."""
        ...


@dataclass(frozen=True)
class Axis:
    """A rank's handle on one direction of the mesh: ``size``, ``index``, collectives, messages.

    Every collective exists twice: ``all_reduce`` returns the result, ``all_reduce_async`` returns a
    :class:`Pending` whose ``wait`` does. Members are counted 0 to ``size - 1`` along the axis; sizes along the
    cut dim may differ. An axis of one member sends nothing and records nothing, nor does a call about no elements.

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
        """How many ranks the axis joins."""
        return len(self.ranks)

    def for_strategy(self, name: str) -> Axis:
        """The same axis, its calls recorded as ``name``'s."""
        return replace(self, source=name)

    def subset(self, indices: Sequence[int]) -> Axis:
        """The axis over some of its members, renumbered in the order given; this rank must be one of them."""
        indices = tuple(indices)
        if self.index not in indices or len(set(indices)) != len(indices):
            raise CommunicationError(
                f"cannot take a subset of axis '{self.name}'",
                given=f"members {list(indices)}, asked for by member {self.index}",
                allowed=f"different members, from 0 to {self.size - 1}, with {self.index} among them",
                fix="let only the members of the subset ask for it",
            )
        if indices == tuple(range(self.size)):
            return self
        ranks = tuple(self.ranks[i] for i in indices)
        return replace(self, ranks=ranks, index=indices.index(self.index), channel=self.channel.subset(indices))

    # --- collectives ---------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Overwrites ``tensor`` with the sum (or ``"max"``) over the axis, and returns it."""
        return self.all_reduce_async(tensor, op).wait()

    def all_reduce_async(self, tensor: Tensor, op: str = "sum") -> Pending[Tensor]:
        """Starts :meth:`all_reduce`."""
        if self.size == 1 or tensor.numel() == 0:
            return done(tensor)
        if op not in ("sum", "max"):
            raise CommunicationError("no such reduction", given=op, allowed="sum, max", fix="use sum")
        whole = tensor.detach()
        message = whole.contiguous()
        pending = self.channel.all_reduce(self._call("all_reduce", whole, op), [message], op)

        def finish() -> Tensor:
            pending.wait()
            if message is not whole:
                whole.copy_(message)
            return tensor

        return Pending(finish)

    def all_reduce_together_async(self, tensors: Sequence[Tensor]) -> Pending[None]:
        """Starts the sum of several contiguous tensors of one dtype, each overwritten, as one message."""
        given = [tensor.detach() for tensor in tensors if tensor.numel()]
        assert all(tensor.is_contiguous() for tensor in given), "a tensor with gaps cannot be overwritten in place"
        if self.size == 1 or not given:
            return done(None)
        shape = (sum(tensor.numel() for tensor in given),)
        call = CollectiveCall("all_reduce", self.name, self.source, shape, given[0].dtype, "sum")
        return self.channel.all_reduce(call, given, "sum")

    def all_gather(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """Joins the members' tensors along ``dim``; ``sizes`` gives each member's size there when they differ."""
        return self.all_gather_async(tensor, dim, sizes).wait()

    def all_gather_async(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Pending[Tensor]:
        """Starts :meth:`all_gather`."""
        if self.size == 1:
            return done(tensor)
        mine = tensor.detach().movedim(dim, 0).contiguous()
        sizes = self._sizes("all_gather", sizes, mine.shape[0])
        whole = mine.new_empty((sum(sizes), *mine.shape[1:]))
        if whole.numel() == 0:
            return done(whole.movedim(0, dim))
        parts = list(whole.split(list(sizes)))
        parts[self.index].copy_(mine)
        call = self._call("all_gather", whole, f"in parts {list(sizes)}")
        pending = self.channel.all_gather(call, parts, self.index)
        return Pending(lambda: (pending.wait(), whole.movedim(0, dim))[1])

    def all_gather_into_async(self, whole: Tensor, sizes: Sequence[int]) -> Pending[Tensor]:
        """Starts an all-gather in place: ``whole`` has one dim, and this member's part of it is filled already."""
        self._sizes("all_gather", sizes, sizes[self.index])
        if self.size == 1 or whole.numel() == 0:
            return done(whole)
        parts = list(whole.detach().split(list(sizes)))
        call = self._call("all_gather", whole, f"in parts {list(sizes)}")
        pending = self.channel.all_gather(call, parts, self.index)
        return Pending(lambda: (pending.wait(), whole)[1])

    def gather_parts_async(self, mine: Tensor, shapes: Sequence[Sequence[int]]) -> tuple[list[Tensor], Pending[None]]:
        """Starts an all-gather that leaves the members' tensors apart: nothing is copied to join them.

        ``shapes[i]`` is member i's. Returns the parts, and what to wait for before any but the own one is read.
        """
        whole = mine.detach().contiguous()
        if self.size == 1:
            return [whole], done(None)
        parts = [whole if i == self.index else whole.new_empty(tuple(shape)) for i, shape in enumerate(shapes)]
        if not any(part.numel() for part in parts):
            return parts, done(None)
        call = self._call_about("all_gather", [part.numel() for part in parts], whole.dtype)
        return parts, self.channel.all_gather(call, [part.view(-1) for part in parts], self.index)

    def reduce_scatter_parts_async(self, parts: Sequence[Tensor]) -> Pending[Tensor]:
        """Starts the sum over members of their ``parts[index]``, which lie apart: nothing is copied to cut them."""
        shape = parts[self.index].shape
        pending = self.reduce_scatter_together_async(parts, [part.numel() for part in parts])
        return Pending(lambda: pending.wait().view(shape))

    def reduce_scatter_together_async(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> Pending[Tensor]:
        """Starts the sum of several tensors of one dtype, flat and end to end, of which member i gets ``sizes[i]``.

        Nothing is copied to join them, where members share memory; and there they may be let go of at once.
        """
        flat = [tensor.detach().reshape(-1) for tensor in tensors]
        if self.size == 1:
            return done(flat[0] if len(flat) == 1 else torch.cat(flat))
        out = flat[0].new_empty(sizes[self.index])
        if not sum(sizes):
            return done(out)
        call = self._call_about("reduce_scatter", sizes, out.dtype)
        return self.channel.reduce_scatter(call, out, flat, sizes)

    def reduce_scatter(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
        """Sums over the axis and leaves each member its part of ``dim``: ``sizes``, or equal parts."""
        return self.reduce_scatter_async(tensor, dim, sizes).wait()

    def reduce_scatter_async(self, tensor: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Pending[Tensor]:
        """Starts :meth:`reduce_scatter`."""
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
        call = self._call("reduce_scatter", whole, f"in parts {list(sizes)}")
        row = whole[0].numel()
        pending = self.channel.reduce_scatter(call, out.view(-1), [whole.view(-1)], [size * row for size in sizes])
        return Pending(lambda: (pending.wait(), out.movedim(0, dim))[1])

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Gives ``parts[i]`` to member i and returns what each gave; ``shapes[i]`` is what member i sends here."""
        return self.all_to_all_async(parts, shapes).wait()

    def all_to_all_async(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Pending[list[Tensor]]:
        """Starts :meth:`all_to_all`."""
        given = [part.detach().contiguous() for part in parts]
        if self.size == 1:
            return done(given)
        if len(given) != self.size or len(shapes) != self.size:
            raise CommunicationError(
                f"all_to_all over axis '{self.name}' needs a part for each member",
                given=f"{len(given)} parts, {len(shapes)} shapes",
                allowed=f"{self.size} of each",
                fix="pass an empty tensor for a member that gets nothing",
            )
        outs = [given[0].new_empty(tuple(shape)) for shape in shapes]
        call = CollectiveCall("all_to_all", self.name, self.source, (), given[0].dtype)
        return self.channel.all_to_all(call, outs, given)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrites ``tensor`` with member ``source``'s, and returns it."""
        return self.broadcast_async(tensor, source).wait()

    def broadcast_async(self, tensor: Tensor, source: int = 0) -> Pending[Tensor]:
        """Starts :meth:`broadcast`."""
        if self.size == 1 or tensor.numel() == 0:
            return done(tensor)
        whole = tensor.detach()
        call = self._call("broadcast", whole, f"from member {source}")
        pending = self.channel.broadcast(call, whole.contiguous(), source)
        if whole.is_contiguous():
            return Pending(lambda: (pending.wait(), tensor)[1])
        return Pending(lambda: (whole.copy_(pending.wait()), tensor)[1])

    def barrier(self) -> None:
        """Returns once every member has called it."""
        if self.size > 1:
            call = CollectiveCall("barrier", self.name, self.source, (1,), torch.uint8)
            self.channel.all_reduce(call, [torch.zeros(1, dtype=torch.uint8, device=self.device)], "max").wait()

    # --- messages ------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends ``tensor`` to member ``to``."""
        self.send_async(tensor, to).wait()

    def send_async(self, tensor: Tensor, to: int) -> Pending[None]:
        """Starts :meth:`send`; it does not wait for the receiver."""
        whole = tensor.detach().contiguous()
        if whole.numel() == 0:
            return done(None)
        return self.channel.send(self._call("send", whole, f"to member {to}"), whole, to)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        """Receives the next tensor from member ``source``."""
        return self.receive_async(shape, dtype, source).wait()

    def receive_async(
        self, shape: Sequence[int], dtype: torch.dtype, source: int, into: Tensor | None = None
    ) -> Pending[Tensor]:
        """Starts :meth:`receive`: posted early, the message lands while the rank computes.

        ``into``, contiguous and of that shape, is filled in place of fresh memory.
        """
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device) if into is None else into
        if tensor.numel() == 0:
            return done(tensor)
        return self.channel.receive(self._call("receive", tensor, f"from member {source}"), tensor, source)

    # --- inside --------------------------------------------------------------------------------------------

    def _call_about(self, kind: str, sizes: Sequence[int], dtype: torch.dtype) -> CollectiveCall:
        return CollectiveCall(kind, self.name, self.source, (sum(sizes),), dtype, f"in parts {list(sizes)}")

    def _call(self, kind: str, tensor: Tensor, details: str) -> CollectiveCall:
        return CollectiveCall(kind, self.name, self.source, tuple(tensor.shape), tensor.dtype, details)

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
