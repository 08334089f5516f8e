"""The memory that a rank's tensors take, followed storage by storage from the operator that makes it until it is freed.

A storage counts once, however many tensors view it. Shared-memory blocks of this rank's messages count too. Not
counted: a transport's own copies of messages, and older storages not registered with ``Tracker.hold``.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.comm.backends.block_sizes import Blocks

KINDS = ("parameters", "gradients", "optimizer", "batch", "activations", "logits", "messages", "backward", "shared")
"""What memory is used for. ``messages``: gathered pieces and send buffers. ``backward``: temporaries of the backward,
recomputed activations included. ``shared``: blocks of memory shared by one machine's ranks, which carry messages."""

ELSEWHERE = ("host", "disk")
"""Where offloaded state is stored. These bytes are in no moment, since they are not the device's memory."""

_OURS = "shardwright."
_BACKENDS = ("threads", "process_groups", "shared_memory", "shared_sums", "message_blocks")
_TRANSPORTS = (*(f"{_OURS}comm.backends.{name}" for name in _BACKENDS), f"{_OURS}comm.call_checker")


class MemorySnapshot(NamedTuple):
    """The bytes held right after an operator has allocated memory, by kind of memory in the order of ``KINDS``."""

    action: str
    held: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes held at that moment, summed over all kinds of memory."""
        return sum(self.held)


@dataclass(frozen=True)
class Account:
    """The memory of one rank over a step: ``moments`` in order, and the bytes offloaded to host or disk."""

    moments: tuple[MemorySnapshot, ...]
    elsewhere: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> MemorySnapshot:
        """The moment at which the most bytes are held."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment."""
        return self.peak.num_bytes

    def most(self) -> dict[str, int]:
        """Returns the most bytes of each kind of memory (parameters, activations, ...), each at a moment of its own."""
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


class Tracker(TorchDispatchMode):
    """Follows the storages that this thread's operators allocate, until they are freed.

    >>> with Tracker() as tracker:
    ...     x = torch.ones(100)
    ...     y = x.view(10, 10) * 2
    ...     del x
    ...     z = y + 1
    >>> [moment.num_bytes for moment in tracker.account().moments]
    [400, 800, 800]
    """

    def __init__(self, blocks: Blocks | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blocks = blocks
        self.action = "begin"
        self._forced_kind: str | None = None
        self._entries: dict[int, _StorageEntry] = {}
        self._totals: Counter[str] = Counter()
        self._freed: deque[int] = deque()  # a deque, since any thread may drop the last reference
        self._moments: list[MemorySnapshot] = []

    def hold(self, kind: str, tensors: Iterable[Any]) -> None:
        """Counts these tensors' storages as ``kind`` of memory from now on, whether or not they were seen before."""
        self._remove_freed()
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage(), kind)

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """Counts every storage allocated inside this context as ``kind`` of memory, such as "gradients"."""
        before, self._forced_kind = self._forced_kind, kind
        try:
            yield
        finally:
            self._forced_kind = before

    def mark(self) -> None:
        """Adds a :class:`MemorySnapshot`, the bytes of each kind that are held now, to the account."""
        self._remove_freed()
        if self._blocks is not None:
            self._totals["shared"] = self._blocks.num_bytes
        self._moments.append(MemorySnapshot(self.action, tuple(self._totals[kind] for kind in KINDS)))

    def account(self) -> Account:
        """Returns the memory so far: every moment with its bytes by kind, and the offloaded bytes."""
        return Account(tuple(self._moments), {at: self._totals[at] for at in ELSEWHERE if self._totals[at]})

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: Mapping[str, Any] = kwargs or {}
        self._remove_freed()
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._entries:
                self._add(storage, "")  # older than the tracker and never registered: entered, but in no kind
        result = function(*args, **named)
        self._remove_freed()
        has_grown = False
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._entries:
                    self._add(storage, self._kind())
                    has_grown = True
        if function._schema.is_mutable:  # resize_ and set_ change the storage of an argument
            has_grown |= max(map(self._update_size, given), default=False)
        if has_grown:
            self.mark()
        return result

    def _kind(self) -> str:
        caller = _calling_module()
        if caller in _TRANSPORTS:
            return ""
        if caller == f"{_OURS}comm.axis":
            return "messages"
        if self._forced_kind is not None:
            return self._forced_kind
        return "backward" if torch._C._current_graph_task_id() != -1 else "activations"

    def _add(self, storage: Any, kind: str) -> None:
        key = storage._cdata
        entry = self._entries.get(key)
        if entry is not None:
            self._totals[entry.kind] -= entry.num_bytes
            entry.kind, entry.num_bytes = kind, storage.nbytes()
        else:
            alive = weakref.ref(storage, lambda _: self._freed.append(key))
            entry = self._entries[key] = _StorageEntry(storage.nbytes(), kind, alive)
        self._totals[kind] += entry.num_bytes

    def _update_size(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage was resized since it was entered; its bytes are then counted anew."""
        storage = tensor.untyped_storage()
        entry = self._entries[storage._cdata]
        if entry.num_bytes == storage.nbytes():
            return False
        self._add(storage, entry.kind)
        return True

    def _remove_freed(self) -> None:
        while self._freed:
            entry = self._entries.pop(self._freed.popleft())
            self._totals[entry.kind] -= entry.num_bytes


def _calling_module() -> str:
    """The name of the innermost shardwright module on the stack, other than the ledger; empty if there is none."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if name.startswith(_OURS) and not name.startswith(f"{_OURS}ledger."):
            return name
        frame = frame.f_back
    return ""
