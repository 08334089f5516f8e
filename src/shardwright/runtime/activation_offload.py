"""What the backward needs of blocks, kept in host memory or on disk while the forward goes on, beside recomputation.

::

    forward     x --> [ norm . product . gelu . product ] --> y      what autograd saves goes out, as it is saved
    backward    y --> [ product . gelu . product . norm ]            each comes back when it is asked for

A storage goes out once, whole, whoever looks at it; it comes back with the same strides, so that what computes with it
finds the same last bits. Weights and buffers stay where they are: they are state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.forward_stack import Forward, Rung, wrap
from shardwright.runtime.offload_storage import OffloadStorage

Saving = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What is done with a tensor that autograd saves, and how it comes back."""


@dataclass(eq=False)
class _Slot:
    """A storage's bytes, out; and back again, once somebody has asked."""

    home: Tensor
    device: torch.device
    back: Tensor | None = None


class _Known(NamedTuple):
    """A storage that is out as it was at this version; while this is held, no other has its key."""

    storage: StorageWeakRef
    version: int
    slot: _Slot


class _Packed(NamedTuple):
    """A tensor that looks at them."""

    slot: _Slot
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class ActivationOffload:
    """Takes out what autograd saves in the calls of some modules; ``outer`` is asked first, and may keep it its way.

    Room is used again once the graph that saved something is gone: at first by what is as large, and by anything once
    nothing is out, so that batches of any lengths take the room of the largest.
    """

    storage: OffloadStorage
    outer: Saving | None = None
    _free: dict[int, list[Tensor]] = field(default_factory=dict)
    _num_out: int = 0
    _lock: RLock = field(default_factory=RLock)

    def attach(self, module: nn.Module) -> None:
        """From now on what the module's calls save goes out."""

        def around(forward: Forward) -> Forward:
            def packed(*args: Any, **named: Any) -> Any:
                if not torch.is_grad_enabled():
                    return forward(*args, **named)
                with self._open(module):
                    return forward(*args, **named)

            return packed

        wrap(module, Rung.OFFLOAD, f"saved activations go to {self.storage.target}", by="core", around=around)

    @contextmanager
    def _open(self, module: nn.Module) -> Iterator[None]:
        known: dict[int, _Known] = {}

        def pack(tensor: Tensor) -> Any:
            kept = tensor if self.outer is None else self.outer[0](tensor)
            if kept is not tensor or tensor.layout != torch.strided or not tensor.untyped_storage().nbytes():
                return kept
            key = tensor.untyped_storage()._cdata
            if any(key == state.untyped_storage()._cdata for state in (*module.parameters(), *module.buffers())):
                return kept
            found = known.get(key)
            if found is None or found.storage.expired() or found.version != tensor._version:
                storage = StorageWeakRef(tensor.untyped_storage())
                found = known[key] = _Known(storage, tensor._version, self._out(tensor))
            return _Packed(found.slot, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

        with saved_tensors_hooks(pack, self._back):
            yield
        known.clear()

    @torch.no_grad()
    def _out(self, tensor: Tensor) -> _Slot:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        home = self._room(whole.numel())
        slot = _Slot(home.copy_(whole), tensor.device)
        weakref.finalize(slot, self._is_back, home)
        self.storage.put_away([home])
        return slot

    def _room(self, num_bytes: int) -> Tensor:
        with self._lock:
            self._num_out += 1
            free = self._free.get(num_bytes)
            return free.pop() if free else self.storage.empty(num_bytes, torch.uint8)

    def _is_back(self, home: Tensor) -> None:
        """What lay there is needed no more: called by whoever lets go of it, in any thread."""
        with self._lock:
            self._num_out -= 1
            self._free.setdefault(home.numel(), []).append(home)
            if not self._num_out and home.device.type != "meta":
                self._free.clear()
                self.storage.reset()

    @torch.no_grad()
    def _back(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Packed):
            kept: Tensor = packed if self.outer is None else self.outer[1](packed)
            return kept
        slot = packed.slot
        if slot.back is None:
            slot.back = torch.empty_like(slot.home, device=slot.device).copy_(slot.home)
            self.storage.put_away([slot.home])
        tensor = torch.empty(0, dtype=packed.dtype, device=slot.device)
        return tensor.set_(slot.back.untyped_storage(), packed.offset, packed.size, packed.stride)


__all__ = ["ActivationOffload", "Saving"]
