"""What memory a rank's tensors take, seen while it runs: every storage from its first operator to its last reference.

Bytes are those of storages, each counted once however many tensors look at it, and of the blocks of shared memory that
this rank's messages take. What else a transport needs for itself (a message's copy) is not counted, nor what lay there
before and nobody spoke of.
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
"""What memory is for. ``messages`` are gathered pieces and what is sent; ``backward`` is what a backward works on, with
what it computes again; ``shared`` are blocks of memory that the ranks of one machine share, where messages lie."""

ELSEWHERE = ("host", "disk")
"""Where state may rest that is offloaded: in no moment, since it is not the device's memory."""

_OURS = "shardwright."
_TRANSPORTS = tuple(f"{_OURS}comm.{name}" for name in ("threads", "transport", "shared", "sums", "exchange", "witness"))


class Moment(NamedTuple):
    """What was held when an operator had made something: bytes by kind, in the order of ``KINDS``."""

    action: str
    held: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return sum(self.held)


@dataclass(frozen=True)
class Account:
    """What one rank holds over a step. ``moments`` are in order; ``elsewhere`` are bytes that rest on host or disk."""

    moments: tuple[Moment, ...]
    elsewhere: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> Moment:
        """The moment at which most is held."""
        return max(self.moments, key=lambda moment: moment.num_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return self.peak.num_bytes

    def most(self) -> dict[str, int]:
        """The most that each kind takes, each at its own moment."""
        columns = zip(*(moment.held for moment in self.moments), strict=True)
        return dict(zip(KINDS, map(max, columns), strict=True))

    def at_peak(self) -> dict[str, int]:
        """The bytes of each kind at the peak."""
        return dict(zip(KINDS, self.peak.held, strict=True))


@dataclass
class _Held:
    num_bytes: int
    kind: str
    alive: weakref.ref[Any] = field(repr=False)


class Tracker(TorchDispatchMode):
    """Follows the storages that this thread's operators make, until they are gone.

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
        self._said: str | None = None
        self._known: dict[int, _Held] = {}
        self._totals: Counter[str] = Counter()
        self._gone: deque[int] = deque()  # by whichever thread let go of them
        self._moments: list[Moment] = []

    def hold(self, kind: str, tensors: Iterable[Any]) -> None:
        """These are of this kind, whether or not they were seen before."""
        self._forget()
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage(), kind)

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """While it lasts, whatever is made is of this kind."""
        before, self._said = self._said, kind
        try:
            yield
        finally:
            self._said = before

    def mark(self) -> None:
        """Notes what is held now."""
        self._forget()
        if self._blocks is not None:
            self._totals["shared"] = self._blocks.num_bytes
        self._moments.append(Moment(self.action, tuple(self._totals[kind] for kind in KINDS)))

    def account(self) -> Account:
        """What was held over time."""
        rests = {place: self._totals[place] for place in ELSEWHERE if self._totals[place]}
        return Account(tuple(self._moments), rests)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named: Mapping[str, Any] = kwargs or {}
        self._forget()
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._add(storage, "")  # it was there before, and nobody spoke of it
        result = function(*args, **named)
        self._forget()
        made = False
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    self._add(storage, self._kind())
                    made = True
        if function._schema.is_mutable:
            made |= max(map(self._resized, given), default=False)
        if made:
            self.mark()
        return result

    def _kind(self) -> str:
        asks = _who_asks()
        if asks in _TRANSPORTS:
            return ""
        if asks == f"{_OURS}comm.axis":
            return "messages"
        if self._said is not None:
            return self._said
        return "backward" if torch._C._current_graph_task_id() != -1 else "activations"

    def _add(self, storage: Any, kind: str) -> None:
        key = storage._cdata
        known = self._known.get(key)
        if known is not None:
            self._totals[known.kind] -= known.num_bytes
            known.kind, known.num_bytes = kind, storage.nbytes()
        else:
            alive = weakref.ref(storage, lambda _: self._gone.append(key))
            known = self._known[key] = _Held(storage.nbytes(), kind, alive)
        self._totals[kind] += known.num_bytes

    def _resized(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        known = self._known[storage._cdata]
        if known.num_bytes == storage.nbytes():
            return False
        self._add(storage, known.kind)
        return True

    def _forget(self) -> None:
        """Counts out what is gone."""
        while self._gone:
            known = self._known.pop(self._gone.popleft())
            self._totals[known.kind] -= known.num_bytes


def _who_asks() -> str:
    """The module of ours whose code called the operator."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        if name.startswith(_OURS) and not name.startswith(f"{_OURS}ledger."):
            return name
        frame = frame.f_back
    return ""
