"""Stores how tensors on the meta device were filled, and computes the initial values of one of them from that."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from shardwright.tensor_bytes import bytes_of

_GENERATOR_LOCK = threading.Lock()
"""A lock that is held while random numbers are drawn, because ranks as threads share torch's default generator."""


@contextmanager
def numbers_from(text: str) -> Iterator[None]:
    """Returns a context in which torch's default generator of the CPU draws numbers that depend on ``text`` alone.

    Its state is restored at the end. One thread at a time is inside such a context; others wait.

    >>> with numbers_from("0/layer"):
    ...     first = torch.rand(3)
    >>> with numbers_from("0/layer"):
    ...     torch.equal(torch.rand(3), first)
    True
    """
    key = hashlib.blake2b(text.encode(), digest_size=8).digest()
    with _GENERATOR_LOCK, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(key, "little") >> 1)
        yield


class StorageView(NamedTuple):
    """A meta tensor as a view of a numbered storage: its dtype, shape, strides and offset there.

    ``num_bytes`` is the size of the whole storage. Offset and strides are in elements.
    """

    storage: int
    num_bytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def is_whole(self) -> bool:
        """Returns whether the view covers all of its storage."""
        return prod(self.size) * self.dtype.itemsize == self.num_bytes

    def of(self, storages: dict[int, torch.UntypedStorage]) -> Tensor:
        """Returns the view as a tensor on the CPU; ``storages`` maps storage numbers to the memory that it lies in.

        A storage that ``storages`` lacks is allocated, uninitialized, and added.
        """
        if self.storage not in storages:
            storages[self.storage] = torch.UntypedStorage(self.num_bytes)
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(
            storages[self.storage], self.offset, self.size, self.stride
        )


def view_of(tensor: Tensor, number: int) -> StorageView:
    """Returns a meta tensor's shape, strides, dtype and offset in its storage, whose number is ``number``."""
    num_bytes, offset = tensor.untyped_storage().nbytes(), int(tensor.storage_offset())
    return StorageView(number, num_bytes, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)


@dataclass(frozen=True)
class RngState:
    """The state, before a draw, of a ``torch.Generator`` that a model's constructor made itself."""

    state: Tensor

    def generator(self) -> torch.Generator:
        """Returns a generator in this state."""
        generator = torch.Generator(device="cpu")
        generator.set_state(self.state)
        return generator


class WriteCall(NamedTuple):
    """A recorded call of an operator that wrote to the storages of tensors on the meta device.

    ``function`` is the operator's name in ``torch``, such as ``ops.aten.fill_.Scalar``. ``args`` and ``named`` have a
    :class:`StorageView` in place of each meta tensor. ``results`` has a :class:`StorageView` for each new meta tensor,
    and None for other tensors. ``writes``, ``overwrites`` (storages written in full) and ``reads`` are sets of storage
    numbers. ``draw`` is the number of the call, from 1, among the calls that draw from torch's default generator, or -1
    for other calls. Every recorded call of ``nn.init`` without a generator of its own counts as such a draw.
    """

    function: str
    args: Any
    named: Any
    results: tuple[StorageView | None, ...]
    writes: frozenset[int]
    overwrites: frozenset[int]
    reads: frozenset[int]
    draw: int


@dataclass
class RecordedWrites:
    """The write calls that a recorder has noted, and for each storage the indices of the calls that wrote to it."""

    calls: list[WriteCall] = field(default_factory=list)
    of_storage: dict[int, list[int]] = field(default_factory=dict)

    def needed(self, storage: int) -> list[int] | None:
        """Returns the indices, in order, of the calls that determine the values of the storage with this number.

        The result is None if no call has written the storage in full, or if that is so for a storage that these calls
        read.
        """
        places: set[int] = set()
        to_visit = [(storage, len(self.calls))]
        while to_visit:
            number, before = to_visit.pop()
            for place in reversed(self.of_storage.get(number, [])):
                if place >= before:
                    continue
                call = self.calls[place]
                if place not in places:
                    places.add(place)
                    to_visit += [(other, place) for other in call.reads]
                if number in call.overwrites:
                    break
            else:
                return None
        return sorted(places)


@dataclass
class RecordedValues:
    """The record of how a constructor filled one tensor, from which :meth:`values` computes its initial values.

    ``written`` has the recorded calls, and ``view`` is the tensor's view of its storage.
    """

    written: RecordedWrites
    view: StorageView

    def can_be_read(self) -> bool:
        """Returns whether all values were written, and none depends on draws from torch's default generator."""
        places = self._places()
        return places is not None and all(self.written.calls[place].draw < 0 for place in places)

    def storages(self) -> set[int]:
        """Returns the numbers of the storages from which the values are computed, the tensor's own among them."""
        calls = [self.written.calls[place] for place in self._places() or ()]
        return {self.view.storage}.union(*(call.reads | call.writes for call in calls))

    def text(self) -> list[str] | None:
        """Returns the calls as text, equal for tensors that are filled alike.

        The result is None if the values are not all written, or if they depend on values that are not all written.
        """
        places, numbers = self._places(), dict[int, int]()

        def described(leaf: Any) -> Any:
            leaf = leaf.state if isinstance(leaf, RngState) else leaf
            if isinstance(leaf, StorageView):
                return ("tensor", numbers.setdefault(leaf.storage, len(numbers)), *leaf[1:])
            if isinstance(leaf, Tensor):
                return hashlib.blake2b(bytes_of(leaf).numpy().tobytes(), digest_size=8).hexdigest()
            return leaf

        if places is None:
            return None
        calls = [self.written.calls[place] for place in places]
        return [f"{call.function} {_mapped(described, (call.args, call.named, call.results))}" for call in calls]

    def values(self, seed: int) -> Tensor:
        """Returns the tensor's initial values on the host; random values depend on ``seed`` and the order of draws.

        The constructor must have written all of them, that is, :meth:`text` must not be None.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        places = self._places()
        assert places is not None, "there are values"
        with torch.no_grad():
            for place in places:
                _run_again(self.written.calls[place], storages, seed)
        return self.view.of(storages)

    def _places(self) -> list[int] | None:
        return self.written.needed(self.view.storage) if self.view.num_bytes else []


def _run_again(call: WriteCall, storages: dict[int, torch.UntypedStorage], seed: int) -> None:
    def on_host(leaf: Any) -> Any:
        if isinstance(leaf, StorageView):
            return leaf.of(storages)
        if isinstance(leaf, RngState):
            return leaf.generator()
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    function: Any = torch
    for name in call.function.split("."):
        function = getattr(function, name)
    args, named = _mapped(on_host, (call.args, call.named))
    if call.draw < 0:
        results = function(*args, **named)
    else:
        with numbers_from(f"{seed}/{call.draw}"):
            results = function(*args, **named)
    tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]  # operators on lists may return None
    for view, result in zip(call.results, tensors, strict=True):
        if view is not None:
            view.of(storages).copy_(result)


def _mapped(function: Any, tree: Any) -> Any:
    return tree_map(function, tree, is_leaf=lambda leaf: isinstance(leaf, StorageView))
