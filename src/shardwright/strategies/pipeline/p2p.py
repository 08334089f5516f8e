"""Sends nested tensors between pipeline stages (p2p), and posts receives ahead of use.

The first time that one chunk sends another values of some shapes, their :class:`ValueSpec` is sent first: shapes,
dtypes, which tensors need gradients, and all leaves that are no tensors. Later messages are tensors alone. A spec is
kept under a key that both sides compute from the shapes of the microbatch, so that shapes may change from step to step.

Large messages are received into buffers that are reused. Fresh memory is mapped page by page while it is filled: a
message of 4 MiB took 219 us in fresh memory and 88 us in reused memory (16 MiB 1,112 and 879; 1 MiB 27 and 23, too
little to be worth it; one core of a shared machine).

With the option ``scatter``, ranks that hold a tensor alike each send a part of it, to the same rank of the next stage.
There it is received into its place in a buffer for the whole tensor, which an all-gather then fills in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwright.comm.axis import Axis
from shardwright.comm.pending import Pending, done
from shardwright.errors import EXAMPLE, PlanError
from shardwright.sharding.tensor_shard import shard_of, tag, tagged
from shardwright.strategies.pipeline.messages import StageMessage
from shardwright.strategies.pipeline.scatter import may_scatter, part_sizes
from shardwright.strategies.pipeline.spec_bytes import pack, unpack

PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.Size, slice)
"""The types of leaves beside tensors that may cross between stages: plain values, dtypes, devices, sizes and slices."""


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor that a p2p message carries, and whether its gradient is sent back.

    ``shard`` is set for a shard of a tensor that tensor parallelism cuts: the whole tensor's shape, and the cuts of
    its dims as a :class:`TensorShard` has them. ``is_scattered`` says that each rank of the scatter axis sends a part
    of the tensor's elements, in the order of a contiguous tensor, and that these are all-gathered on arrival.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    shard: tuple[tuple[int, ...], tuple[bytes | None, ...]] | None = None
    is_scattered: bool = False


class ValueSpec(NamedTuple):
    """The structure of nested values that one chunk sends another: a :class:`TensorSpec` stands for each tensor."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The shapes and dtypes of the tensors (:class:`TensorSpec`), in the order of the tree's leaves."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))


def spec_of(values: Any, where: str) -> tuple[ValueSpec, list[Tensor]]:
    """Returns the :class:`ValueSpec` of nested values, and their tensors; ``where`` names the sender in errors.

    Raises: PlanError: a leaf that is neither a tensor nor a plain value.

    >>> spec, tensors = spec_of({"x": torch.ones(2), "n": 3}, "chunk 0")
    >>> [leaf if isinstance(leaf, int) else leaf.shape for leaf in spec.leaves]
    [(2,), 3]
    """
    leaves, tree = tree_flatten(values)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise PlanError(
                f"the output of {where} is no tree of tensors",
                given=type(leaf).__name__,
                allowed="tensors, numbers, strings and None, in tuples, lists and dicts",
                fix=f"{EXAMPLE}, on which the forward is recorded; or return the tensors of the {type(leaf).__name__}",
            )
    specs = tuple(_tensor_spec(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return ValueSpec(tree, specs), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _tensor_spec(tensor: Tensor) -> TensorSpec:
    part = tagged(tensor)
    known = None if part is None else (tuple(part.shape), part.cuts)
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, known)


def scattered(spec: ValueSpec, is_whole: Sequence[bool], axis: Axis | None) -> ValueSpec:
    """Returns a spec in which whole tensors are marked to be sent in parts, one part by each rank of ``axis``.

    ``is_whole`` says for each tensor whether every rank of ``axis`` holds the same whole tensor. A tensor is not sent
    in parts if it has fewer elements than there are ranks, or if ``axis`` is None.

    >>> spec, _ = spec_of([torch.ones(4), torch.ones(1)], "chunk 0")
    >>> axis = Axis("tp", (0, 1), 0, channel=None)
    >>> [leaf.is_scattered for leaf in scattered(spec, [True, True], axis).leaves]
    [True, False]
    """
    if axis is None:
        return spec
    wholes = iter(is_whole)
    leaves = [
        leaf._replace(is_scattered=next(wholes) and may_scatter(prod(leaf.shape), axis.size))
        if isinstance(leaf, TensorSpec)
        else leaf
        for leaf in spec.leaves
    ]
    return spec._replace(leaves=tuple(leaves))


def fill(spec: ValueSpec, tensors: Sequence[Tensor]) -> Any:
    """Returns the nested values that a :class:`ValueSpec` describes, with ``tensors`` as their tensors, in order.

    Tensors that the spec describes as shards are marked as such.
    """
    for leaf, tensor in zip(spec.tensors, tensors, strict=True):
        if leaf.shard is not None:
            tag(tensor, shard_of(*leaf.shard))
    iterator = iter(tensors)
    return tree_unflatten([next(iterator) if isinstance(leaf, TensorSpec) else leaf for leaf in spec.leaves], spec.spec)


LEAST_BYTES = 2 * 2**20
"""The size in bytes from which on a message is received into a reused buffer; smaller ones get fresh memory."""


@dataclass
class _Buffer:
    memory: Tensor
    idle_references: int  # the reference count of its storage while nothing else refers to it
    was_used: bool = True


@dataclass
class ReceiveBuffers:
    """One stage's host buffers for messages of 2 MiB or more, each reused once no other tensor shares its storage.

    The schedule does not tell when a buffer is free: autograd, a module that keeps its input or a user's view may still
    refer to it. So the storage's reference count decides. Smaller messages get fresh tensors, and on a GPU all do:
    torch's caching allocator reuses memory there, and knows which streams use it.

    ``are_reused`` is False on a GPU, and in a rehearsal that stands for one.
    """

    are_reused: bool = True
    _kept: dict[tuple[tuple[int, ...], torch.dtype], list[_Buffer]] = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        """Yields the buffers that are kept now."""
        return (buffer.memory for buffers in self._kept.values() for buffer in buffers)

    def begin(self) -> None:
        """Begins a run of a schedule, and frees the buffers that the last run did not use."""
        used = {key: [buffer for buffer in buffers if buffer.was_used] for key, buffers in self._kept.items()}
        self._kept = {key: buffers for key, buffers in used.items() if buffers}
        for buffer in (kept_buffer for buffers in self._kept.values() for kept_buffer in buffers):
            buffer.was_used = False

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a tensor of this shape and dtype to receive into, from a reused buffer if one is free."""
        shape = tuple(shape)
        if not self.are_reused or prod(shape) * dtype.itemsize < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype, device=device)
        buffers = self._kept.setdefault((shape, dtype), [])
        for buffer in buffers:
            if _num_references(buffer.memory) == buffer.idle_references:
                buffer.was_used = True
                return buffer.memory.detach()
        memory = torch.empty(shape, dtype=dtype, device=device)
        buffers.append(_Buffer(memory, _num_references(memory)))
        return memory.detach()


def _num_references(tensor: Tensor) -> int:
    """Returns how many tensors, in any thread and in autograd, share this one's storage."""
    number: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return number


KEPT_KEYS = 256
"""The number of keys whose specs are cached, the most recently used ones; more if one run of a schedule has more."""


@dataclass
class _EdgeSpecs:
    """The message specs cached under one key, by edge (from chunk, to chunk), and the edges whose receiver knows them.

    ``reached`` says, for each activation of an edge that needs a gradient, whether the last backward has reached it.
    """

    specs: dict[tuple[int, int], ValueSpec] = field(default_factory=dict)
    announced: set[tuple[int, int]] = field(default_factory=set)
    reached: dict[tuple[int, int], tuple[bool, ...]] = field(default_factory=dict)

    def tells_reached(self, edge: tuple[int, int]) -> bool:
        """Returns whether an edge's next gradients are sent with word of which activations the backward reached."""
        has_any = any(leaf.needs_gradient for leaf in self.specs[edge].tensors)
        return has_any and not all(self.reached.get(edge, (False,)))


class _Receive(NamedTuple):
    """A receive that was begun, into ``whole`` or, if ``is_part``, into this rank's part of it."""

    pending: Pending[Tensor]
    whole: Tensor
    is_part: bool


@dataclass
class P2P:
    """One pipeline stage's sends to and receives from other stages over the axis ``pp``; shapes are sent only once.

    All stages call :meth:`begin` with the same keys in the same order, so that all keep, and drop, the same cached
    specs. ``scatter`` is the axis whose ranks each send a part of what they hold alike; None if each sends the whole.
    """

    axis: Axis
    scatter: Axis | None = None
    buffers: ReceiveBuffers = field(default_factory=ReceiveBuffers)
    _by_key: dict[object, _EdgeSpecs] = field(default_factory=dict)
    _by_microbatch: dict[int, _EdgeSpecs] = field(default_factory=dict)
    _queues: dict[int, deque[StageMessage]] = field(default_factory=dict)
    _posted: dict[StageMessage, list[_Receive]] = field(default_factory=dict)
    _source_of: dict[StageMessage, int] = field(default_factory=dict)

    def begin(self, arrivals: Mapping[int, Sequence[StageMessage]], keys: Sequence[object]) -> None:
        """Prepares for one run of a schedule; ``arrivals`` are the messages to receive, by sending stage, in order.

        ``keys[m]`` is the key under which the specs (shapes and dtypes) of microbatch m's messages are cached.
        """
        assert not self._posted, "every message of the last run was taken"
        self._queues = {stage: deque(messages) for stage, messages in arrivals.items()}
        self._source_of = {message: stage for stage, messages in arrivals.items() for message in messages}
        self.buffers.begin()
        self._by_microbatch = {}
        for number, key in enumerate(keys):
            # Taken out and put back, so that the dict's order is that of the last use.
            self._by_microbatch[number] = self._by_key[key] = self._by_key.pop(key, _EdgeSpecs())
        for key in list(self._by_key)[: -max(KEPT_KEYS, len(keys))]:
            del self._by_key[key]

    def has_key(self, key: object) -> bool:
        """Returns whether the shapes and dtypes of messages are cached under ``key``."""
        return key in self._by_key

    def set_spec(self, key: object, edge: tuple[int, int], spec: ValueSpec, *, announced: bool) -> None:
        """Stores, under ``key``, the shapes and dtypes of messages from chunk to chunk (``edge``), as if received.

        Backwards count as reaching all of them. With ``announced`` this stage sends them with no message of its own, as
        if it had done so before. For rehearsals alone: in a run the sender sends both with its first message.
        """
        kept = self._by_key.setdefault(key, _EdgeSpecs())
        kept.specs[edge] = spec
        if announced:
            kept.announced.add(edge)
        kept.reached[edge] = tuple(True for leaf in spec.tensors if leaf.needs_gradient)

    def spec(self, message: StageMessage) -> ValueSpec:
        """Returns the shapes and dtypes of a message's activations, which their gradients have too."""
        return self._by_microbatch[message.microbatch].specs[message.source, message.target]

    def set_local_spec(self, message: StageMessage, spec: ValueSpec) -> None:
        """Stores the shapes and dtypes of values that pass between two chunks of this stage, without a message."""
        self._by_microbatch[message.microbatch].specs[message.source, message.target] = spec

    def send(self, message: StageMessage, spec: ValueSpec, tensors: Sequence[Tensor], to: int) -> None:
        """Sends the activations of a message to stage ``to``; the first time, their shapes and dtypes are sent before.

        Traffic: one send for each tensor, of this rank's part if it is scattered; the first time on an edge under the
            microbatch's key, two more before.
        Raises: PlanError: shapes, dtypes or values that are no tensors differ from those sent before.
        """
        kept, edge = self._by_microbatch[message.microbatch], (message.source, message.target)
        before = kept.specs.setdefault(edge, spec)
        if before != spec:
            raise PlanError(
                f"the values from chunk {message.source} to chunk {message.target} have other shapes or types than "
                "before",
                given=f"{spec.leaves}, before {before.leaves}",
                allowed="shapes that follow from those of the batch: the receiver expects no others",
                fix="keep shapes that depend on values inside one stage",
            )
        if edge not in kept.announced:
            kept.announced.add(edge)
            packed = _pack_spec(spec)
            data = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(self.axis.device)
            core = self.axis.for_strategy("core")
            core.send(torch.tensor([data.numel()], device=self.axis.device), to)
            core.send(data, to)
        for leaf, tensor in zip(spec.tensors, tensors, strict=True):
            self._send(leaf, tensor, to)

    def reached(self, message: StageMessage) -> tuple[bool, ...]:
        """Returns, for each activation of a message that needs a gradient, whether the backward has reached it.

        ``message`` carries gradients, and is the last such message between its two chunks that was taken.
        """
        return self._by_microbatch[message.microbatch].reached.get((message.source, message.target), ())

    def send_gradients(
        self, message: StageMessage, gradients: Sequence[Tensor], reached: tuple[bool, ...], to: int
    ) -> None:
        """Sends gradients of a message's activations to stage ``to``, which sent these and so knows the shapes.

        ``reached`` says which of them the backward has reached; the gradients of others are zeros. The receiver is told
        the first time, and as long as one was not reached: a parameter behind that activation has no gradient, which is
        not a gradient of zeros.

        Traffic: one send for each tensor, of this rank's part if the activation was scattered; while the receiver is
            told, one more of a byte for each tensor before.
        """
        kept, edge = self._by_microbatch[message.microbatch], (message.source, message.target)
        if kept.tells_reached(edge):
            kept.reached[edge] = reached
            self.axis.for_strategy("core").send(torch.tensor(reached, dtype=torch.uint8, device=self.axis.device), to)
        leaves = (leaf for leaf in kept.specs[edge].tensors if leaf.needs_gradient)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            self._send(leaf, gradient, to)

    def _send(self, leaf: TensorSpec, tensor: Tensor, to: int) -> None:
        if leaf.is_scattered:
            assert self.scatter is not None, "else nothing is scattered"
            sizes = part_sizes(tensor.numel(), self.scatter.size)
            tensor = tensor.detach().contiguous().view(-1).split(sizes)[self.scatter.index]
        self.axis.send(tensor, to)

    def post(self, messages: Sequence[StageMessage]) -> None:
        """Posts receives, without waiting, for ``messages`` and all that their senders send earlier.

        It stops before a message ahead of which the sender tells shapes, or which activations a backward has reached;
        :meth:`take` receives that one.
        """
        for message in messages:
            queue = self._queues.get(self._source_of.get(message, -1))
            while queue and message not in self._posted:
                first = queue[0]
                kept, edge = self._by_microbatch[first.microbatch], (first.source, first.target)
                if edge not in kept.specs or (first.kind == "B" and kept.tells_reached(edge)):
                    break
                self._post(queue.popleft())

    def take(self, message: StageMessage) -> list[Tensor]:
        """Waits until ``message`` is received, and returns its tensors in the order of the sender's leaves.

        Traffic: one all-gather over ``scatter`` for each tensor that is scattered.
        """
        stage = self._source_of[message]
        # Messages of one stage come in its order, so those before this one are posted first.
        while message not in self._posted:
            first = self._queues[stage].popleft()
            kept, edge = self._by_microbatch[first.microbatch], (first.source, first.target)
            core = self.axis.for_strategy("core")
            if edge not in kept.specs:
                assert first.kind == "F", "values cross before their gradients do"
                size = int(core.receive((1,), torch.int64, stage))
                kept.specs[edge] = _unpack_spec(bytes(core.receive((size,), torch.uint8, stage).tolist()))
            if first.kind == "B" and kept.tells_reached(edge):
                num = sum(leaf.needs_gradient for leaf in kept.specs[edge].tensors)
                kept.reached[edge] = tuple(map(bool, core.receive((num,), torch.uint8, stage).tolist()))
            self._post(first)
        posted = self._posted.pop(message)
        for receive in posted:
            receive.pending.wait()
        gathers = [self._gather(receive) for receive in posted]  # in the same order on all ranks of ``scatter``
        return [pending.wait() for pending in gathers]

    def _gather(self, received: _Receive) -> Pending[Tensor]:
        whole = received.whole
        if not received.is_part:
            return done(whole)
        assert self.scatter is not None, "else nothing is scattered"
        pending = self.scatter.all_gather_into_async(whole.view(-1), part_sizes(whole.numel(), self.scatter.size))
        return Pending(lambda: (pending.wait(), whole)[1])

    def _post(self, message: StageMessage) -> None:
        spec, source, posted = self.spec(message), self._source_of[message], list[_Receive]()
        for leaf in spec.tensors:
            if message.kind == "F" or leaf.needs_gradient:
                whole = into = self.buffers.take(leaf.shape, leaf.dtype, self.axis.device)
                if leaf.is_scattered:
                    assert self.scatter is not None, "else nothing is scattered"
                    into = whole.view(-1).split(part_sizes(whole.numel(), self.scatter.size))[self.scatter.index]
                begun = self.axis.receive_async(into.shape, leaf.dtype, source, into)
                posted.append(_Receive(begun, whole, leaf.is_scattered))
        self._posted[message] = posted


def _pack_spec(spec: ValueSpec) -> bytes:
    """Returns a spec as bytes; in place of its TreeSpec they have a tree of the same form, with numbers as leaves."""
    leaves = [list(leaf) if isinstance(leaf, TensorSpec) else leaf for leaf in spec.leaves]  # PLAIN has no list
    return pack(tree_unflatten(list(range(len(spec.leaves))), spec.spec), leaves)


def _unpack_spec(packed: bytes) -> ValueSpec:
    tree, leaves = unpack(packed)
    specs = tuple(TensorSpec(*leaf) if isinstance(leaf, list) else leaf for leaf in leaves)
    return ValueSpec(tree_flatten(tree)[1], specs)


def share_output(axis: Axis, output: Any, source: int) -> Any:
    """Broadcasts the model's output from the stage ``source`` that computed it, and returns it on every stage.

    Every rank of ``axis`` calls it; ``output`` is read on ``source`` alone.

    Traffic: one broadcast of its spec's size, one of its spec and one of each tensor.
    Raises: PlanError: on ``source``, the output has a leaf that is neither a tensor nor a plain value.
    """
    here = axis.index == source
    tensors: list[Tensor] = []
    packed = b""
    if here:
        spec, tensors = spec_of(output, "the last chunk")
        packed = _pack_spec(spec)
    core = axis.for_strategy("core")
    size = int(core.broadcast(torch.tensor([len(packed)], device=axis.device), source))
    data = torch.frombuffer(bytearray(packed or bytes(size)), dtype=torch.uint8).to(axis.device)
    spec = _unpack_spec(bytes(core.broadcast(data, source).tolist()))
    if not here:
        tensors = [torch.empty(leaf.shape, dtype=leaf.dtype, device=axis.device) for leaf in spec.tensors]
    return fill(spec, [core.broadcast(tensor.contiguous(), source) for tensor in tensors])
