"""Activation offload: tensors that autograd saves in some blocks are kept in host memory or on disk until used.

::

    forward     x --> [ norm . product . gelu . product ] --> y      each saved tensor is copied out as it is saved
    backward    y --> [ product . gelu . product . norm ]            each is copied back at its first use

A storage is copied once and whole, however many saved tensors are views of it. It comes back with the same strides, so
that results are equal to the last bit. Parameters and buffers are not copied: they stay on the device anyway. Copies to
host memory and back overlap the computation, and the host does not wait for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.comm.axis import Axis
from shardwright.forward_stack import Forward, Rung, wrap
from shardwright.plan.plan import Job, Plan
from shardwright.plan.recompute import activation_offload_target
from shardwright.runtime.applied import AppliedStrategy, Saving
from shardwright.runtime.copy_stream import CopyStream
from shardwright.runtime.offload_storage import LEAST_BYTES, OffloadStorage


def offload_activations(job: Job, plan: Plan, applied: Sequence[AppliedStrategy], everyone: Axis) -> None:
    """Offloads the tensors that autograd saves in the plan's ``offloaded_activations`` modules, to host memory or disk.

    All ranks call it. It wraps the forwards of these modules in place. If the layout offloads no activations, or
    offloads them to host memory and the ranks' device is the CPU or the meta device, it does nothing. ``applied`` are
    the results of the strategies' ``apply``: the first with ``saving`` packs tensors before this offload does.

    Traffic: one gather of text if anything is offloaded; none on the meta device.
    Raises: PlanError, on every rank: a rank cannot write to the folder for disk offload.
    """
    place = activation_offload_target(plan.layout)
    if place is None or (place == "host" and everyone.device.type in ("cpu", "meta")):
        return
    outer = next((strategy.saving for strategy in applied if strategy.saving is not None), None)
    storage = OffloadStorage(place, everyone, job.offload_folder)
    storage.reserve([LEAST_BYTES])  # an unwritable folder is an error now, not in the first step
    offload = ActivationOffload(storage, outer)
    for path in plan.offloaded_activations:
        offload.attach(job.model.get_submodule(path))


@dataclass(eq=False)
class _StorageCopy:
    """An offloaded storage: its bytes in host memory or on disk, and on the device again after the first use."""

    offloaded: Tensor
    device: torch.device
    restored: Tensor | None = None


class _Copied(NamedTuple):
    """A storage that was offloaded at this version; the weak reference keeps its address from being reused."""

    storage: StorageWeakRef
    version: int
    copy: _StorageCopy


class _OffloadedView(NamedTuple):
    """The form in which autograd saves an offloaded tensor: the copy of its storage, and its view of the storage."""

    copy: _StorageCopy
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class ActivationOffload:
    """Offloads the tensors that autograd saves in calls of some modules to host memory or disk, until the backward.

    ``outer`` is a strategy's own pair of saved-tensor hooks; it comes first, and a tensor that it packs is not
    offloaded. Memory is reused when the graph that saved a tensor is freed: at first by tensors of the same size, and
    by any once nothing is offloaded, so that batches of any lengths need the memory of the largest.
    """

    storage: OffloadStorage
    outer: Saving | None = None
    _stream: CopyStream | None = None
    _free: dict[int, list[Tensor]] = field(default_factory=dict)
    _num_offloaded: int = 0
    _lock: RLock = field(default_factory=RLock)

    def attach(self, module: nn.Module) -> None:
        """Wraps the forward of ``module``, so that the tensors that autograd saves in it are offloaded."""

        def around(forward: Forward) -> Forward:
            def packed(*args: Any, **named: Any) -> Any:
                with self._packing(module) if torch.is_grad_enabled() else nullcontext():
                    return forward(*args, **named)

            return packed

        wrap(module, Rung.OFFLOAD, f"saved activations go to {self.storage.target}", by="core", around=around)

    @contextmanager
    def _packing(self, module: nn.Module) -> Iterator[None]:
        copied: dict[int, _Copied] = {}

        def pack(tensor: Tensor) -> Any:
            packed = tensor if self.outer is None else self.outer[0](tensor)
            with torch._C.DisableTorchFunction():  # else ShardsMode would report a shard's whole shape
                return offloaded(tensor) if packed is tensor else packed

        def offloaded(tensor: Tensor) -> Any:
            if tensor.layout != torch.strided or not tensor.untyped_storage().nbytes():
                return tensor
            key = tensor.untyped_storage()._cdata
            if any(key == state.untyped_storage()._cdata for state in (*module.parameters(), *module.buffers())):
                return tensor
            record = copied.get(key)
            if record is None or record.storage.expired() or record.version != tensor._version:
                storage = StorageWeakRef(tensor.untyped_storage())
                record = copied[key] = _Copied(storage, tensor._version, self._offload(tensor))
            offset = int(tensor.storage_offset())
            return _OffloadedView(record.copy, tensor.dtype, tensor.size(), tensor.stride(), offset)

        with saved_tensors_hooks(pack, self._unpack):
            yield
        copied.clear()

    @torch.no_grad()
    def _offload(self, tensor: Tensor) -> _StorageCopy:
        """Copies the tensor's whole storage, as bytes, to host memory or disk, and returns the copy."""
        device_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        with self._lock:
            self._num_offloaded += 1
            free = self._free.get(device_bytes.numel())
            offloaded = free.pop() if free else self.storage.empty(device_bytes.numel(), torch.uint8)
            if self._stream is None and offloaded.is_pinned():
                self._stream = CopyStream(tensor.device, most_under_way=2)
        copy = _StorageCopy(offloaded, tensor.device)
        if self._stream is None:
            offloaded.copy_(device_bytes)
        else:
            self._stream.start(offloaded, device_bytes)
        weakref.finalize(copy, self._free_memory, offloaded)
        self.storage.put_away([offloaded])
        return copy

    def _free_memory(self, offloaded: Tensor) -> None:
        """Makes a copy's memory available for reuse; autograd may call it from any thread."""
        with self._lock:
            self._num_offloaded -= 1
            self._free.setdefault(offloaded.numel(), []).append(offloaded)
            if not self._num_offloaded and offloaded.device.type != "meta":
                self._free.clear()
                self.storage.reset()

    @torch.no_grad()
    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _OffloadedView):
            unpacked: Tensor = packed if self.outer is None else self.outer[1](packed)
            return unpacked
        copy = packed.copy
        if copy.restored is None:
            copy.restored = torch.empty_like(copy.offloaded, device=copy.device)
            if self._stream is None:
                copy.restored.copy_(copy.offloaded)
            else:
                self._stream.start(copy.restored, copy.offloaded)
                self._stream.wait()
            self.storage.put_away([copy.offloaded])
        tensor = torch.empty(0, dtype=packed.dtype, device=copy.device)
        return tensor.set_(copy.restored.untyped_storage(), packed.offset, packed.size, packed.stride)
