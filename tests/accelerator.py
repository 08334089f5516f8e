"""A pretend accelerator for tests: device type ``acc``, over host memory, which counts what would stop the host.

Its tensors are plain tensors with storages of their own, made by handing over a tensor of the CPU as DLPack memory of
an external device. So views, ``set_``, ``.data`` and storages behave as everywhere. Every other operator runs the CPU's
kernel on the same memory, so results are equal to the CPU's to the last bit. What a real device would refuse or wait
for is told::

    a CPU tensor beside one of the device     the error that CUDA raises
    item, bool, nonzero, masks, unique, ...   a stop of the host, counted by file and line
    a copy either way that blocks             a stop too: from the host, or to it, unless pinned and non_blocking
    pinned host memory                        counted; a copy to it comes when something waits for it
    memory of the device                      live and peak bytes

Torch takes one such device in a process and never lets go of it: tests of it have a session of their own.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_HOST, _EXTERNAL = 1, 12  # DLPack's numbers of device types; torch takes an external device for PrivateUse1
_DEVICE_AT = 8  # bytes from the start of a DLManagedTensor
_OWN_FILES = ("tests/accelerator.py", "torch/_ops.py", "torch/library.py", "torch/_library/", "torch/utils/_contextlib")
_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

STOPPING = (
    "_local_scalar_dense", "bincount", "equal", "masked_select", "multinomial", "nonzero", "unique_consecutive",
    "_unique", "_unique2", "unique_dim", "unique_dim_consecutive",
)  # fmt: skip
"""Operators for which a device's kernel waits, since the host must know a value or how many there are."""


class Accelerator:
    """The state of the pretend device, and what it has counted; ``device`` is what tensors are moved to."""

    tells_what = True
    """What stops the host is counted by operator, file and line."""

    def __init__(self) -> None:
        self.device: torch.device
        self.stops: Counter[str] = Counter()
        """What would have stopped the host: how often, by operator, file and line."""
        self.num_pinned = 0
        self.peak_bytes: int | None = None
        """The most live bytes since :meth:`counting_memory` began; None outside of it."""
        self.here = threading.local()
        self._lock = threading.RLock()
        self._pinned: dict[int, StorageWeakRef] = {}
        self._memory: list[tuple[StorageWeakRef, int]] = []
        """Storages with their bytes; those that are freed are found by a sweep.

        No deleter is called into Python: torch frees tensors while an exception is on its way.
        """
        self._listed_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Returns a context with a counter of what stops the host in it, on all threads."""
        before, self.stops = self.stops, Counter()
        try:
            yield self.stops
        finally:
            before.update(self.stops)
            self.stops = before

    @contextmanager
    def counting_memory(self) -> Iterator[None]:
        """Within it the memory of storages is counted that are made in it; it costs as much as a small operator."""
        self._memory, self._listed_bytes, self.peak_bytes = [], 0, 0
        try:
            yield
        finally:
            self._memory, self.peak_bytes = [], None

    @property
    def stream(self) -> Stream:
        """The stream that this thread's operators run on; each thread has one, as each process of a run has."""
        if not hasattr(self.here, "stream"):
            self.here.stream = Stream(self, is_side=False)
        return self.here.stream

    def stop(self, what: str) -> None:
        """Counts a stop of the host at the line of the library, or of the test, that asked for it, and at torch's.

        What this thread's stream still holds is over then. A thread that a rank has started to wait in its place stops
        no rank.
        """
        self.stream.complete()
        if threading.current_thread().name.startswith("ThreadPoolExecutor"):
            return
        frame, theirs, place = sys._getframe(1), "", ""
        while frame is not None and not place:
            file = frame.f_code.co_filename
            if not any(own in file for own in _OWN_FILES):
                at = f"{short_file(file)}:{frame.f_lineno}"
                if "/torch/" in file:
                    theirs = theirs or f" by {at}"
                else:
                    place = at
            frame = frame.f_back
        with self._lock:
            self.stops[f"{what} at {place}{theirs}"] += 1

    # ---- memory

    def of_host(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the device over the memory of a tensor of the CPU, which is the device's from now on."""
        found = _handed_over(tensor, _EXTERNAL)
        if self.peak_bytes is not None:
            storage = found.untyped_storage()
            with self._lock:
                self._memory.append((StorageWeakRef(storage), storage.nbytes()))
                self._listed_bytes += storage.nbytes()
                if self._listed_bytes > self.peak_bytes:
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return found

    @property
    def live_bytes(self) -> int:
        """The bytes of the counted storages that are not freed."""
        assert self.peak_bytes is not None, "memory is counted in counting_memory() alone"
        with self._lock:
            self._memory = [each for each in self._memory if not each[0].expired()]
            self._listed_bytes = sum(num_bytes for _, num_bytes in self._memory)
            return self._listed_bytes

    def pin(self, tensor: Tensor) -> Tensor:
        """Marks a tensor's storage as pinned host memory; returns the tensor."""
        storage = tensor.untyped_storage()
        with self._lock:
            self.num_pinned += 1
            self._pinned[storage.data_ptr()] = StorageWeakRef(storage)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the tensor's storage is pinned host memory."""
        found = self._pinned.get(tensor.untyped_storage().data_ptr())
        return found is not None and not found.expired()


def _handed_over(tensor: Tensor, device_type: int) -> Tensor:
    """Returns a tensor of another device type over the same memory."""
    capsule = torch._C._to_dlpack(tensor)
    handle = _POINTER(capsule, b"dltensor")
    ctypes.c_int32.from_address(handle + _DEVICE_AT).value = device_type
    handed_over: Tensor = torch._C._from_dlpack(capsule)
    return handed_over


_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
_POINTER.restype, _POINTER.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def short_file(file: str) -> str:
    """Returns a path from the folder of this library or of torch on, or else the name of the file."""
    parts = Path(file).parts
    for root in ("shardwright", "torch"):
        if root in parts:
            return "/".join(parts[len(parts) - 1 - parts[::-1].index(root) :])
    return parts[-1]


# ---- operators

_WITHOUT_KERNEL = ("convolution", "convolution_backward", "copy_", "_to_copy")
"""Operators without a kernel of the CPU whose composite kernels choose by device."""


_Views = dict[int, tuple[Tensor, Tensor]]
"""A device's tensor and the CPU's over the same memory, by the id of the latter."""


class _Kernels:
    """What runs an operator on the pretend device; a method runs the operator of its name."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def register(self, library: torch.library.Library) -> None:
        """Registers a kernel for every operator that has one for the CPU: a composite one would hide the fallback."""
        for full_name in torch._C._dispatch_get_all_op_names():
            space, _, name = full_name.partition("::")
            packet, _, overload = name.partition(".")
            if space == "aten" and (
                torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CPU") or packet in _WITHOUT_KERNEL
            ):
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                library.impl(name, self._kernel_of(op, packet), "PrivateUse1")

    def _kernel_of(self, op: Any, name: str) -> Callable[..., Any]:
        own = getattr(self, name, None)
        if own is not None:
            return own
        returns = op._schema.returns
        is_view = bool(returns) and all(
            each.alias_info is not None and not each.alias_info.is_write for each in returns
        )
        if is_view or name == "set_":  # the CPU's kernel makes a tensor of the same storage and device
            return lambda *args, **named: op.redispatch(_KERNELS, *args, **named)
        return self._on_host(op, name)

    def _on_host(self, op: Any, name: str) -> Callable[..., Any]:
        """What runs the CPU's kernel of an operator on the memory of the device's tensors: most operators, often."""
        arguments, tensor = op._schema.arguments, torch.TensorType.get()
        names = tuple(each.name for each in arguments)
        of_tensors = frozenset(each.name for each in arguments if each.type == tensor)
        written = frozenset(each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write)
        stops, may_count = name in STOPPING, name == "repeat_interleave" or ("index" in name and "indices" in names)
        call, packet, host_device = op._op, op.overloadpacket, torch.device("cpu")

        def run(*args: Any, **named: Any) -> Any:
            views: _Views = {}
            host, has_number = [], False
            for key, value in (*zip(names, args, strict=False), *named.items()):
                if isinstance(value, Tensor):
                    host.append(self._to_host(key, value, key in written, views))
                elif isinstance(value, list | tuple):
                    host.append([
                        self._to_host(key, each, key in written, views) if isinstance(each, Tensor) else each
                        for each in value
                    ])  # fmt: skip
                else:
                    has_number |= key in of_tensors and isinstance(value, int | float | complex)
                    host.append(host_device if isinstance(value, torch.device) else value)
            if stops or (may_count and _counts_values(name, dict(zip(names, args, strict=False)) | named)):
                self.accelerator.stop(name)
            runs = packet if has_number else call  # torch has made a number of a tensor that it had made of one
            given = dict(zip(named, host[len(args) :], strict=True)) if named else {}
            with torch._C._AutoDispatchBelowAutograd():
                found = runs(*host[: len(args)], **given)
            for mine, view in views.values() if written else ():
                if view.shape != mine.shape:
                    self._take_over(mine, view)
            return self._to_device(found, views)

        return run

    def _to_host(self, key: str, value: Tensor, writes: bool, views: _Views) -> Tensor:
        """Returns a tensor for the CPU's kernel.

        Raises as CUDA does for a tensor of the CPU, unless it is one number that is only read.
        """
        if value.is_cpu or value.is_meta:
            if key == "indices" and value.dim():
                self.accelerator.stop("indices on the host")
            elif value.dim() or writes:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, acc:0 and cpu! "
                    f"(when checking argument for argument {key})"
                )
            return value
        resizes = writes and not value.numel()  # an ``out`` that the kernel enlarges
        view = torch.empty(value.shape, dtype=value.dtype) if resizes else _handed_over(value, _HOST)
        views[id(view)] = value, view
        return view

    def _to_device(self, value: Any, views: _Views) -> Any:
        if isinstance(value, Tensor):
            return views[id(value)][0] if id(value) in views else self.accelerator.of_host(value)
        if isinstance(value, list | tuple):
            return type(value)(self._to_device(each, views) for each in value)
        return value

    def _take_over(self, mine: Tensor, host: Tensor) -> None:
        """Gives a tensor of the device the memory and shape of one of the CPU."""
        storage = self.accelerator.of_host(host).untyped_storage()
        torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
            _KERNELS, mine, storage, 0, host.shape, host.stride()
        )

    # ---- operators with rules of their own

    def copy_(self, mine: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
        if not (mine.is_cpu or other.is_cpu):
            _copy(_handed_over(mine, _HOST), _handed_over(other, _HOST))
            return mine
        devices, stream = (other.device.type, mine.device.type), self.accelerator.stream
        ends = [_handed_over(each, _HOST) if each.device.type == "acc" else each for each in (mine, other)]
        if other.numel():
            if not (non_blocking and self.accelerator.is_pinned(mine if devices[1] == "cpu" else other)):
                self.accelerator.stop(f"copy {devices[0]} to {devices[1]}")
            elif stream.is_side or devices[1] == "cpu":  # it comes when something waits for it
                source = ends[1] if stream.is_side else ends[1].clone()  # the stream's next operators may write into it
                ends[0].view(-1).view(torch.uint8).fill_(0xFF)  # until then there is nothing to read
                stream.late.append(partial(_copy, ends[0], source))
                return mine
            else:
                stream.complete()  # the source may be what a copy before has brought
        _copy(*ends)
        return mine

    def _to_copy(
        self, mine: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
        non_blocking: bool = False, memory_format: Any = None,
    ) -> Tensor:  # fmt: skip
        order = memory_format or torch.preserve_format
        if mine.device.type == "acc" and (device is None or device.type == "acc"):
            with torch._C._AutoDispatchBelowAutograd():
                copy = _handed_over(mine, _HOST).to(dtype or mine.dtype, copy=True, memory_format=order)
            return self.accelerator.of_host(copy)
        made = torch.empty_like(mine, dtype=dtype, device=device, memory_format=order, requires_grad=False)
        if non_blocking and made.device.type == "cpu":
            self.accelerator.pin(made)  # as torch does: a copy to the host that does not wait needs it
        return (
            self.copy_(made, mine, non_blocking) if "acc" in (made.device.type, mine.device.type) else made.copy_(mine)
        )

    def resize_(self, mine: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
        host = torch.empty(tuple(size), dtype=mine.dtype)
        kept = mine.untyped_storage().nbytes() // mine.element_size() - mine.storage_offset()
        if host.numel() > kept:
            flat = mine.as_strided((kept,), (1,), mine.storage_offset())
            host.view(-1)[:kept].copy_(_handed_over(flat, _HOST))
            self._take_over(mine, host)
            return mine
        set_ = torch.ops.aten.set_.source_Storage_storage_offset
        return set_.redispatch(_KERNELS, mine, mine.untyped_storage(), mine.storage_offset(), host.shape, host.stride())


def _copy(mine: Tensor, other: Tensor) -> None:
    with torch._C._AutoDispatchBelowAutograd():
        mine.copy_(other)


def _counts_values(name: str, given: dict[str, Any]) -> bool:
    """Whether the device must tell the host how many elements there will be."""
    if "index" in name and "indices" in given:
        indices = given["indices"] if isinstance(given["indices"], list | tuple) else ()
        masks = any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)
        return masks and ("values" not in given or given["values"].numel() > 1)
    return name == "repeat_interleave" and given.get("output_size") is None


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention by the kernel that the CPU would choose: the composite one chooses by device."""
    host = [None if each is None else _handed_over(each.detach(), _HOST) for each in (q, k, v, mask)]
    choice = torch._fused_sdp_choice(*host, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, float("-inf"))
    if choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value and (mask is None or not mask.requires_grad):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, dropout, is_causal, attn_mask=mask, scale=scale)[0]
    math = torch.ops.aten._scaled_dot_product_attention_math
    return math(q, k, v, mask, dropout, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


# ---- set-up


class Stream:
    """A stream. Copies to pinned memory, and on a side stream from it, are late: until something waits for them."""

    def __init__(self, accelerator: Accelerator, *, is_side: bool) -> None:
        self.accelerator, self.is_side = accelerator, is_side
        self.late: deque[Callable[[], None]] = deque()
        self.lock = threading.RLock()
        self.num_done = 0

    def wait_stream(self, other: Stream) -> None:
        other.complete()

    def wait_event(self, event: Event) -> None:
        event.stream.complete(event.place)

    def record_event(self) -> Event:
        return Event(self, self.num_done + len(self.late))

    def complete(self, place: int | None = None) -> None:
        with self.lock:
            while self.late and (place is None or self.num_done < place):
                self.late.popleft()()
                self.num_done += 1


class Event(NamedTuple):
    """A place in a stream, by the number of late copies before it."""

    stream: Stream
    place: int

    def synchronize(self) -> None:
        self.stream.accelerator.stop("synchronize an event")
        self.stream.complete()

    def query(self) -> bool:
        return self.stream.num_done >= self.place


class _Module:
    """What torch offers of the device as ``torch.acc``."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def Stream(self, device: Any = None) -> Stream:
        return Stream(self._accelerator, is_side=True)

    def current_stream(self, device: Any = None) -> Stream:
        return self._accelerator.stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        here = self._accelerator.here
        before, here.stream = self._accelerator.stream, stream
        try:
            yield
        finally:
            here.stream = before

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        self._accelerator.stop("synchronize")

    def memory_allocated(self, device: Any = None) -> int:
        return self._accelerator.live_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        assert self._accelerator.peak_bytes is not None, "memory is counted in counting_memory() alone"
        return self._accelerator.peak_bytes


def set_up() -> Accelerator:
    """Makes the device type ``acc`` known to torch, for the rest of this process; called once."""
    accelerator = Accelerator()
    module = _Module(accelerator)
    _setup_privateuseone_for_python_backend("acc", backend_module=module)
    torch.accelerator.synchronize = module.synchronize  # torch looks for it in C++
    accelerator.device = torch.device("acc", 0)
    library = torch.library.Library("aten", "IMPL")
    _Kernels(accelerator).register(library)
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    library.impl("is_pinned", lambda tensor, device=None: accelerator.is_pinned(tensor), "CPU")
    library.impl("_pin_memory", lambda tensor, device=None: accelerator.pin(tensor.clone()), "CPU")
    plain_empty = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        made = plain_empty(*args, **named)
        return accelerator.pin(made) if pin_memory else made

    torch.empty = empty  # torch looks for the allocator of pinned memory in C++
    accelerator.kept = library
    return accelerator
