"""Estimates an accelerator's memory beside tensors: allocator rounding, reserved segments, cuBLAS and NCCL buffers.

The numbers are from torch's sources and NCCL's manual.

Rounding and segments follow torch's caching allocator (``c10/core/AllocatorConfig.h``): a tensor takes whole blocks of
512 bytes. Blocks up to 1 MiB come from segments of 2 MiB, and blocks below 10 MiB from segments of 20 MiB. Each larger
block has a segment of its own, which is a multiple of 2 MiB. Segments are kept for later tensors, so the reserved
memory is the sum, over these classes of sizes, of the most that each class ever needed, if blocks fill their segments.
Unused gaps between blocks make it more, so the estimate is a lower bound.

The workspace is cuBLAS's (``aten/src/ATen/cuda/CublasHandlePool.cpp``): one for each thread that multiplies, which are
the threads of the forward and of the backward. Each NCCL communicator allocates a buffer (``NCCL_BUFFSIZE``, in NCCL's
list of environment variables) for each of its channels, outside of torch's allocator; the number of channels depends
on the links between cards. Not counted are the device's context, of some hundred MiB, and the memory of kernels such
as cuDNN's.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping

from shardwright import devices

BLOCK_BYTES = 512
SMALL_BYTES, LARGE_BYTES = 2**20, 10 * 2**20
"""The bytes up to which torch's caching allocator calls a tensor small, and the bytes from which it calls one large."""
SEGMENT_BYTES = {"small": 2 * 2**20, "middle": 20 * 2**20, "large": 2 * 2**20}
"""The bytes of a segment by class of tensor sizes; a large tensor's segment is a multiple of these bytes."""

NUM_WORKSPACES = 2
NUM_CHANNELS = 16
"""The assumed number of an NCCL communicator's channels, if ``NCCL_MAX_NCHANNELS`` is not set.

16 is a guess between the numbers over PCIe and over NVLink.
"""


def _rounded(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


class DeviceMemory:
    """Counts the memory of live tensors on an accelerator as torch's caching allocator does, by blocks and segments.

    >>> memory = DeviceMemory()
    >>> memory.count(1000)
    >>> memory.count(3 * 2**20)
    >>> memory.count(1000, freed=True)
    >>> memory.rounding_bytes, memory.most_bytes == 1024 + 3 * 2**20, memory.segment_bytes == 22 * 2**20
    (24, True, True)
    """

    def __init__(self) -> None:
        self.most_bytes = 0  # the peak of the bytes in blocks
        self._exact, self._most_exact = 0, 0
        self._now, self._most, self._total = Counter[str](), Counter[str](), 0

    def count(self, num_bytes: int, *, freed: bool = False) -> None:
        """Counts the storage of a tensor of ``num_bytes`` as allocated, or with ``freed`` as freed."""
        size = _rounded(num_bytes, BLOCK_BYTES)
        kind = "small" if size <= SMALL_BYTES else "middle" if size < LARGE_BYTES else "large"
        if kind == "large":  # the rest of its segment can be used again only if it is larger than a small tensor
            segment = _rounded(size, SEGMENT_BYTES[kind])
            size = segment if segment - size <= SMALL_BYTES else size
        if freed:
            self._exact -= num_bytes
            self._now[kind] -= size
            self._total -= size
            return
        self._exact += num_bytes
        self._now[kind] += size
        self._total += size
        self._most[kind] = max(self._most[kind], self._now[kind])
        self.most_bytes = max(self.most_bytes, self._total)
        self._most_exact = max(self._most_exact, self._exact)

    @property
    def rounding_bytes(self) -> int:
        """The bytes lost to rounding: the peak of bytes in blocks minus the peak of the tensors' own bytes."""
        return self.most_bytes - self._most_exact

    @property
    def segment_bytes(self) -> int:
        """The bytes of all segments that the allocator has reserved, at its peak."""
        return sum(_rounded(self._most[kind], unit) for kind, unit in SEGMENT_BYTES.items())


def beside_tensors(
    memory: DeviceMemory, kind: str, num_communicators: int, environment: Mapping[str, str] = os.environ
) -> dict[str, int]:
    """Returns estimates of the bytes that an accelerator holds beside tensors, by purpose.

    ``rounding`` are the bytes lost to block sizes, ``segments`` the bytes that the allocator has reserved and not used
    at the peak, ``workspace`` those of cuBLAS for matrix products, and ``nccl`` those of the buffers of
    ``num_communicators`` communicators. The last two exist only if the device type ``kind`` uses NCCL; their sizes are
    read from the variables in ``environment``.

    >>> beside_tensors(DeviceMemory(), "cuda", 2, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_MAX_NCHANNELS": "4"})
    {'rounding': 0, 'segments': 0, 'workspace': 67108864, 'nccl': 33554432}
    """
    estimates = {"rounding": memory.rounding_bytes, "segments": memory.segment_bytes - memory.most_bytes}
    if devices.backend_of(kind) == "nccl":
        estimates["workspace"] = NUM_WORKSPACES * workspace_bytes(environment)
        channels = int(environment.get("NCCL_MAX_NCHANNELS", NUM_CHANNELS))
        estimates["nccl"] = num_communicators * channels * int(environment.get("NCCL_BUFFSIZE", 4 * 2**20))
    return estimates


def workspace_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the bytes of one cuBLAS workspace, from ``CUBLAS_WORKSPACE_CONFIG`` or else by the GPU's generation.

    Without a GPU, the size is that of Hopper and later generations.

    >>> workspace_bytes({"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}) == (2 * 4096 + 8 * 16) * 1024
    True
    """
    buffers = re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    generation = devices.generation()
    if not buffers:
        buffers = [(4096, 8)] if generation is None or generation >= 9 else [(4096, 2), (16, 8)]
    return sum(int(size) * int(number) for size, number in buffers) * 1024
