"""Queries and sets up this process's accelerators: type, number, names, memory, timing, and exact kernels.

The functions use ``torch.accelerator`` and torch's module of the device type (``torch.cuda``), so every accelerator for
which torch has a backend like NCCL is used as CUDA is. Other files of the library use these functions, and not those of
``torch.cuda``. Where the accelerator has no such backend (``mps``), ranks run on the CPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any, TypeAlias, cast

import torch
from torch import backends, distributed

HOST = ("cpu", "meta")
"""Device types on which an operator is done when its call returns: tensors are in host memory, or have no values."""

NATIVE = ("nccl", "xccl")
"""torch's backends that send between accelerators directly, and that have the same interface."""

OPTION = "SHARDWRIGHT_DEVICE"
"""The environment variable that gives the ranks' device, such as "cpu" or "cuda/gloo", if the caller gives none."""

Moment: TypeAlias = Any
"""A point in time on a device: seconds of the host's clock, or a CUDA-like event in the device's current stream."""


def accelerator() -> str:
    """Returns the device type of this process's accelerator, such as "cuda", or "cpu" if there is none to use.

    Ranks can use one only if torch has a collective backend like NCCL for it, so ``mps`` gives "cpu".

    >>> accelerator() in ("cpu", "cuda", "xpu")
    True
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None and backend_of(device.type) in NATIVE else "cpu"


def backend_of(kind: str) -> str:
    """Returns the name of torch's collective backend for a device type, such as "nccl"; "gloo" if it has none.

    >>> backend_of("cuda"), backend_of("cpu"), backend_of("mps")
    ('nccl', 'gloo', 'gloo')
    """
    return (
        str(distributed.Backend.default_device_backend_map.get(kind, "gloo")) if distributed.is_available() else "gloo"
    )


def has_backend(kind: str) -> bool:
    """Returns whether this build of torch contains the collective backend of a device type.

    >>> has_backend("cpu")
    True
    """
    return distributed.is_available() and distributed.is_backend_available(backend_of(kind))


def count() -> int:
    """Returns the number of accelerators that this process sees; 0 if ranks cannot use their type, such as ``mps``.

    The variable SHARDWRIGHT_DEVICE does not change it.
    """
    return torch.accelerator.device_count() if accelerator() != "cpu" else 0


def default() -> torch.device:
    """Returns the accelerator that is current in this process, or the CPU if :func:`accelerator` is "cpu"."""
    kind = accelerator()
    return torch.device(kind, torch.accelerator.current_device_index()) if kind != "cpu" else torch.device("cpu")


def wanted() -> str:
    """Returns the device type that the variable SHARDWRIGHT_DEVICE asks for ranks, such as "cuda" for "cuda/gloo".

    If the variable is unset, empty or "auto", it is the type of this process's accelerator, or "cpu". Whether the
    device exists is not checked.
    """
    device_type = (os.environ.get(OPTION) or "auto").partition("/")[0]
    return accelerator() if device_type == "auto" else device_type


def select(index: int) -> torch.device:
    """Makes the visible accelerator number ``index`` the current one of this process, and returns it as a device."""
    # torch warns if autograd's thread begins with a matrix product; it then creates the context itself
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    torch.accelerator.set_device_index(index)
    return default()


def names() -> list[str]:
    """Returns the name of each accelerator that this process sees; its device type where torch knows no name."""
    return [str(getattr(_properties(index), "name", accelerator())) for index in range(count())]


def total_bytes() -> int:
    """Returns the total memory of all accelerators that this process sees, in bytes; 0 where torch does not know it."""
    return sum(int(getattr(_properties(index), "total_memory", 0)) for index in range(count()))


def num_multiprocessors() -> int:
    """Returns the number of multiprocessors of the first accelerator; 1 if there is none, or torch does not know it."""
    return int(getattr(_properties(0), "multi_processor_count", 1)) if count() else 1


def generation() -> int | None:
    """Returns the first accelerator's major compute capability, such as 9 for Hopper.

    None if this process sees no accelerator, or one without such a number.
    """
    return getattr(_properties(0), "major", None) if count() else None


def identity(device: torch.device) -> str:
    """Returns the UUID of an accelerator, by which ranks notice that they share it; "" if its type has no UUIDs."""
    return str(getattr(_properties(device.index), "uuid", ""))


def _properties(index: int) -> Any:
    """Returns torch's properties of an accelerator, or None if it has none; nothing is allocated on the device."""
    ask = getattr(module_of(torch.device(accelerator())), "get_device_properties", None)
    return ask(index) if ask is not None else None


def module_of(device: torch.device) -> Any:
    """Returns torch's module for the type of ``device``, such as ``torch.cuda``, with its streams and events."""
    return torch.get_device_module(device.type)


def synchronize(device: torch.device) -> None:
    """Waits until ``device`` has finished all queued work; returns at once for the CPU and the meta device."""
    if device.type not in HOST:
        torch.accelerator.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    """Returns the peak memory of this process's tensors on an accelerator in bytes, as torch's allocator counts it."""
    return int(torch.accelerator.max_memory_allocated(device))


def held_bytes(device: torch.device) -> int:
    """Returns the memory of this process's tensors on an accelerator now, in bytes, as torch's allocator counts it."""
    return int(torch.accelerator.memory_allocated(device))


def moment(device: torch.device) -> Moment:
    """Returns a timestamp on ``device``, from which :func:`seconds_between` computes a duration.

    On an accelerator the timestamp is an event recorded in the current stream: it marks when the work queued before it
    is done, and the host does not wait. On the CPU, the meta device and an accelerator without events, it is the host's
    clock; in the last case the host first waits for all queued work.
    """
    if device.type in HOST:
        return perf_counter()
    kind = getattr(module_of(device), "Event", None)
    if kind is None:
        synchronize(device)
        return perf_counter()
    event = kind(enable_timing=True)
    event.record(module_of(device).current_stream(device))  # named, since the current device may be another one
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    """Returns the seconds from ``start`` to ``end``, two timestamps that :func:`moment` returned for one device.

    The host waits until the device has reached ``end``.

    >>> cpu = torch.device("cpu")
    >>> start = moment(cpu)
    >>> 0 <= seconds_between(start, moment(cpu)) < 60
    True
    """
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


_LEGACY: tuple[tuple[Any, Any, Any], ...] = (
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    (lambda: backends.cudnn.allow_tf32, lambda value: setattr(backends.cudnn, "allow_tf32", value), False),
)
"""For each of torch's older settings of float32 products: functions to read and write it, and its exact value."""

_CUDNN, _MKLDNN = cast(Any, backends.cudnn), cast(Any, backends.mkldnn)  # torch's stubs lack what stands below
_PRECISIONS: tuple[Any, ...] = (
    *(backends, _CUDNN, backends.cuda.matmul, _CUDNN.conv, _CUDNN.rnn, _MKLDNN.matmul, _MKLDNN.conv, _MKLDNN.rnn),
)
"""The objects with torch's newer setting of float32 products, ``fp32_precision``.

If the setting of one is "none", it reads as that of a more general object, which comes earlier.
"""


@contextmanager
def exact_float32() -> Iterator[None]:
    """Returns a context in which float32 products have full float32 precision on every device, without TF32 or bf16.

    It applies to the whole process, and restores torch's settings at its end. torch has an older and a newer set of
    settings and raises where the two disagree, so both are written. Inside another such context it changes nothing, so
    that ranks that are threads may enter one each.

    >>> with exact_float32():
    ...     torch.backends.cudnn.allow_tf32, torch.backends.cudnn.conv.fp32_precision
    (False, 'ieee')
    """
    if all(setting.fp32_precision == "ieee" for setting in _PRECISIONS):
        yield
        return
    legacy: list[tuple[Any, Any]] = []
    for read, write, _ in _LEGACY:
        with suppress(RuntimeError):  # torch raises if the user has set the newer settings to another value
            legacy.append((write, read()))
    precisions = []
    for setting in _PRECISIONS:
        precisions.append(setting.fp32_precision)
        setting.fp32_precision = "none"  # so that less general settings, which come later, read as their own value
    for _, write, exact in _LEGACY:
        write(exact)
    for setting in _PRECISIONS:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for write, value in legacy:
            write(value)
        for setting, value in zip(_PRECISIONS, precisions, strict=True):
            setting.fp32_precision = value


def use_deterministic_kernels() -> None:
    """Makes this process use only kernels whose results repeat bit for bit; torch raises for operators without one.

    It also sets ``CUBLAS_WORKSPACE_CONFIG``, unless the user has, because cuBLAS's sums repeat only in a workspace of
    fixed size. cuBLAS reads the variable at its first product, so call this function before.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
