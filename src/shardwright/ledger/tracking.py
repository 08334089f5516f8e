"""Tracks the memory of a rank's tensors, storage by storage, from the operator that allocates it until it is freed.

A storage counts once, however many tensors view it. The blocks of shared memory for this rank's messages count too. Not
counted are a transport's own copies of messages, storages older than the tracker that were not registered with
``Tracker.hold`` and, on an accelerator, storages on other devices.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.analysis.on_meta.operator_results import tensors_of
from shardwright.comm.backends.block_sizes import Blocks
from shardwright.ledger.device_memory import DeviceMemory

KINDS = ("parameters", "gradients", "optimizer", "batch", "activations", "logits", "messages", "backward", "shared")
"""The kinds of memory, by use.

``parameters``: parameters, and the model's buffers. ``activations``: all that the forward allocates and that is of no
other kind. ``logits``: the loss's first argument, and all that the loss itself allocates. ``messages``: gathered
pieces, send buffers, and the buffers that stages keep for large messages. ``backward``: temporaries of the backward,
recomputed activations included. ``shared``: blocks of memory shared by the ranks of one machine, which carry messages.
"""

ELSEWHERE = ("host", "disk")
"""The places of offloaded state. Its bytes are in no snapshot, since they are not the device's memory."""

_OURS = "shardwright."
_MODES = f"{_OURS}ledger.", f"{_OURS}analysis."
_BACKENDS = (
    "threads",
    "process_groups",
    "group_channel",
    "gloo",
    "nccl",
    "shared_memory",
    "shared_sums",
    "two_level",
    "message_blocks",
)
_TRANSPORTS = (*(f"{_OURS}comm.backends.{name}" for name in _BACKENDS), f"{_OURS}comm.call_checker")
_MESSAGES = f"{_OURS}comm.axis", f"{_OURS}comm.pending"


class MemorySnapshot(NamedTuple):
    """The bytes held at one moment of a step, by kind of memory in the order of ``KINDS``.

    ``action`` is the action of the schedule that is running, as text such as "0F3", or "begin" before the first action,
    or "optimizer". A snapshot is taken after each operator that allocates memory, and at the end of each action.
    """

    action: str
    held: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes held at that moment, summed over all kinds of memory."""
        return sum(self.held)


@dataclass(frozen=True)
class MemoryAccount:
    """The memory of one rank over a step: ``moments`` are snapshots of the bytes held, in order.

    ``elsewhere`` has the bytes of state that is offloaded to host or disk, which are in no snapshot, and ``beside`` has
    estimates of the bytes that an accelerator holds beside tensors.
    """

    moments: tuple[MemorySnapshot, ...]
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    beside: Mapping[str, int] = field(default_factory=dict)
    """Estimates of the bytes that an accelerator holds beside tensors, by purpose; empty on a CPU."""

    @property
    def peak(self) -> MemorySnapshot:
        """The snapshot with the most bytes, summed over all kinds of memory."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment."""
        return self.peak.num_bytes

    @property
    def allocated_bytes(self) -> int:
        """The most bytes that an accelerator's allocator counts as allocated, or on a CPU the most bytes held at once.

        On an accelerator, rounding and the cuBLAS workspace are included, and blocks of shared memory are left out.
        """
        rest = self.beside.get("rounding", 0) + self.beside.get("workspace", 0)
        return self.peak_bytes - self.at_peak()["shared"] * bool(self.beside) + rest

    def most(self) -> dict[str, int]:
        """Returns the peak bytes of each kind of memory (parameters, activations, ...) over the step.

        The kinds may have their peaks at different moments; :meth:`at_peak` is one moment.
        """
        columns = zip(*(moment.held for moment in self.moments), strict=True)
        return dict(zip(KINDS, map(max, columns), strict=True))

    def at_peak(self) -> dict[str, int]:
        """Returns the bytes of each kind of memory (parameters, activations, ...) at the peak of their sum."""
        return dict(zip(KINDS, self.peak.held, strict=True))


@dataclass
class _StorageEntry:
    num_bytes: int
    kind: str
    alive: weakref.ref[Any] = field(repr=False)


OperatorRunner = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
"""A function that runs an operator of torch with its arguments and named arguments, and returns its results."""


def call(function: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Runs an operator as torch does."""
    return function(*args, **named)


class Tracker(TorchDispatchMode):
    """A dispatch mode that tracks the storages allocated by this thread's operators until they are freed.

    ``blocks`` are the rank's blocks of shared memory, which count too. With ``device``, only storages on devices of its
    type count. ``run_operator`` runs each operator. A rehearsal passes a function that also records it, which saves a
    dispatch mode of its own.

    >>> with Tracker() as tracker:
    ...     x = torch.ones(100)
    ...     y = x.view(10, 10) * 2
    ...     del x
    ...     z = y + 1
    >>> [moment.num_bytes for moment in tracker.account().moments]
    [400, 800, 800]
    """

    def __init__(
        self, blocks: Blocks | None = None, device: torch.device | None = None, run_operator: OperatorRunner = call
    ) -> None:
        super().__init__()
        self._blocks, self._run_operator = blocks, run_operator
        self._device = device  # the accelerator, or the meta device in its place; None if all storages count
        self.memory = DeviceMemory() if device is not None else None
        self.action = "begin"
        self._forced_kind: str | None = None
        self._entries: dict[int, _StorageEntry] = {}
        self._totals: Counter[str] = Counter()
        self._freed: deque[int] = deque()  # a deque, since any thread may drop the last reference
        self._moments: list[MemorySnapshot] = []

    def hold(self, kind: str, tensors: Iterable[Any]) -> None:
        """Counts the storages of ``tensors`` as memory of this ``kind`` from now on, whatever they counted as before.

        Entries of ``tensors`` that are no tensors are skipped.
        """
        self._remove_freed()
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage(), kind)

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Returns a context in which new storages count as memory of this ``kind``, such as "gradients".

        Storages that collectives allocate are excepted: they keep their kind, "messages" or none.
        """
        before, self._forced_kind = self._forced_kind, kind
        try:
            yield
        finally:
            self._forced_kind = before

    def mark(self) -> None:
        """Appends a :class:`MemorySnapshot`, the bytes held now by kind, to the account's snapshots."""
        self._remove_freed()
        if self._blocks is not None:
            self._totals["shared"] = self._blocks.num_bytes
        self._moments.append(MemorySnapshot(self.action, tuple(self._totals[kind] for kind in KINDS)))

    def account(self, beside: Mapping[str, int] = MappingProxyType({})) -> MemoryAccount:
        """Returns the :class:`MemoryAccount` of the memory tracked so far.

        ``beside`` gives estimates of the memory held beside tensors, by purpose, to include in the account.
        """
        return MemoryAccount(
            tuple(self._moments), {at: self._totals[at] for at in ELSEWHERE if self._totals[at]}, dict(beside)
        )

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(function, args, kwargs or {})

    def run(self, function: Any, args: Any, named: Mapping[str, Any]) -> Any:
        """Runs an operator, tracks the storages that it allocates or resizes, and returns its results."""
        if function.is_view:  # it shares the storage of an argument
            return self._run_operator(function, args, named)
        self._remove_freed()
        tensors = tensors_of((args, named) if named else args)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._entries:
                self._add(storage, "")  # older than the tracker and never registered, so it is of no kind
        result = self._run_operator(function, args, named)
        self._remove_freed()
        has_grown = False
        for leaf in tensors_of(result):
            storage = leaf.untyped_storage()
            if storage._cdata not in self._entries:
                self._add(storage, self._kind())
                has_grown = True
        if function._schema.is_mutable:  # resize_ and set_ change the storage of an argument
            has_grown |= max(map(self._update_size, tensors), default=False)
        if has_grown:
            self.mark()
        return result

    def _kind(self) -> str:
        caller = _calling_module()
        if caller in _TRANSPORTS:
            return ""
        if caller in _MESSAGES:
            return "messages"
        if self._forced_kind is not None:
            return self._forced_kind
        return "backward" if torch._C._current_graph_task_id() != -1 else "activations"

    def _add(self, storage: Any, kind: str) -> None:
        key = storage._cdata
        entry = self._entries.get(key)
        if self._device is not None and kind in KINDS and storage.device.type != self._device.type:
            kind = ""
        if entry is not None:
            self._count(entry, -1)
            entry.kind, entry.num_bytes = kind, storage.nbytes()
        else:
            alive = weakref.ref(storage, lambda _: self._freed.append(key))
            entry = self._entries[key] = _StorageEntry(storage.nbytes(), kind, alive)
        self._count(entry, 1)

    def _count(self, entry: _StorageEntry, sign: int) -> None:
        self._totals[entry.kind] += sign * entry.num_bytes
        if self.memory is not None and entry.kind in KINDS:
            self.memory.count(entry.num_bytes, freed=sign < 0)

    def _update_size(self, tensor: Tensor) -> bool:
        """Returns whether the tensor's storage was resized since it was counted; its bytes are then counted again."""
        storage = tensor.untyped_storage()
        entry = self._entries[storage._cdata]
        if entry.num_bytes == storage.nbytes():
            return False
        self._add(storage, entry.kind)
        return True

    def _remove_freed(self) -> None:
        while self._freed:
            self._count(self._entries.pop(self._freed.popleft()), -1)


class RehearsalTracker(Tracker):
    """A :class:`Tracker` for steps on the meta device, in which no compiled code runs: see :class:`DispatchMode`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(function, args, kwargs or {})


def _calling_module() -> str:
    """Returns the name of the innermost shardwright module on the stack, or "" without one.

    Modules of the ledger and of ``analysis`` are skipped: their modes run the operators that other modules call, and a
    first step has more modes of ``analysis`` than a second step.
    """
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if name.startswith(_OURS) and not name.startswith(_MODES):
            return name
        frame = frame.f_back
    return ""
