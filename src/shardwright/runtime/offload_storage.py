"""Storage for offloaded tensors: pinned host memory, or files that are mapped into memory.

Used by ZeRO offload and activation offload. Files have no name, so the system frees one as soon as no tensor uses it,
also after a kill: there is nothing to clean up. The pages of a file are in the process's memory only while they are
used: :meth:`OffloadStorage.put_away` releases them, and the system writes them to disk when it needs their memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from shardwright.comm.agreement import first_problem
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.formatting import format_bytes

OffloadTarget = Literal["host", "disk"]

_PAGE = mmap.ALLOCATIONGRANULARITY
LEAST_BYTES = 2**22
"""The least size, in bytes, of a file that is opened when the reserved files are full."""


@dataclass(eq=False)
class _File:
    """A mapped file, filled with tensors from its start up to ``end``."""

    pages: mmap.mmap
    end: int = 0


class OffloadStorage:
    """Allocates one rank's offloaded tensors: in host memory or, if ``target`` is "disk", in memory-mapped files.

    The files are in ``folder``, by default the system's temporary folder. ``tensors`` are all allocated tensors.
    ``world`` is the axis of all ranks; if its device is the meta device, tensors are meta tensors, without memory.
    """

    def __init__(self, target: OffloadTarget, world: Axis, folder: Path | None = None) -> None:
        self.target, self.folder = target, Path(tempfile.gettempdir()) if folder is None else folder
        self.tensors: list[Tensor] = []
        self.device = world.device
        self._num_bytes = 0
        self._world = world
        self._files: list[_File] = []
        self._spans: dict[int, tuple[mmap.mmap, int, int]] = {}  # file, start and bytes, by the tensor's address

    def reserve(self, sizes: Iterable[int]) -> None:
        """Reserves disk space for tensors of these sizes in bytes; for host memory it reserves nothing.

        All ranks call it, before they allocate.

        Traffic: one gather of text; none on the meta device.
        Raises: PlanError, on every rank: a rank has too little disk space, or cannot write to the folder.
        """
        if self._world.device.type == "meta":
            return
        num_bytes = sum(map(_aligned, sizes))
        problem = ""
        if self.target == "disk" and num_bytes:
            try:
                self._open(num_bytes)
            except OSError as failure:
                problem = f"{failure.strerror or failure}, with {format_bytes(num_bytes)} to keep in '{self.folder}'"
        if rank_problem := first_problem(self._world, problem):
            raise _refused("rank {}: {}".format(*rank_problem))

    def _open(self, num_bytes: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes:
            raise OSError(errno.ENOSPC, f"{format_bytes(free)} free")
        with tempfile.TemporaryFile(dir=self.folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # a full disk raises here, and not SIGBUS on a write
            else:
                file.truncate(num_bytes)
            self._files.append(_File(mmap.mmap(file.fileno(), num_bytes)))
        self._num_bytes += num_bytes

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Returns a new uninitialized tensor of one dim, in host memory or in a file on disk, as set up by ``target``.

        On disk it takes reserved space if there is enough left, else the space of a new file. In host memory it is
        pinned if the rank's device is an accelerator.

        Raises: PlanError: there is no disk space for a new file.
        """
        device = self._world.device
        if device.type == "meta":
            tensor = torch.empty(num_elements, dtype=dtype, device=device)
        elif self.target == "host" or not num_elements:
            tensor = torch.empty(num_elements, dtype=dtype, pin_memory=device.type != "cpu")
        else:
            tensor = self._mapped(num_elements, dtype)
        self.tensors.append(tensor)
        return tensor

    def _mapped(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        num_bytes = num_elements * dtype.itemsize
        if all(file.end + num_bytes > len(file.pages) for file in self._files):
            # when the reserved space is used up, each new file is as large as all before together: so files stay few
            try:
                self._open(max(_aligned(num_bytes), self._num_bytes, LEAST_BYTES))
            except OSError as failure:
                raise _refused(f"{failure.strerror or failure}, in '{self.folder}'") from failure
        file = next(file for file in self._files if file.end + num_bytes <= len(file.pages))
        tensor = torch.frombuffer(file.pages, dtype=dtype, count=num_elements, offset=file.end)
        self._spans[tensor.data_ptr()] = file.pages, file.end, num_bytes
        file.end += _aligned(num_bytes)  # tensors share no page, or one could not be put away without the other
        return tensor

    def reset(self) -> None:
        """Makes the space of all allocated tensors free for new ones; the old tensors must not be used any more.

        Files stay open.
        """
        self.tensors.clear()
        self._spans.clear()
        for file in self._files:
            file.end = 0

    def put_away(self, tensors: Iterable[Tensor]) -> None:
        """Releases the process memory of tensors on disk, without waiting for a write; the next access reads them.

        No value is lost: the pages of a shared mapping stay in the system's page cache until they are written.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            for span in (self._spans.get(tensor.data_ptr()) for tensor in tensors):
                if span is not None:
                    file, start, num_bytes = span
                    file.madvise(mmap.MADV_DONTNEED, start, num_bytes)


def _refused(what: str) -> PlanError:
    return PlanError(
        "no room to offload to disk",
        given=what,
        allowed="a writable folder, on a disk with room for all offloaded tensors",
        fix="free space there, or name another folder: offload_folder=PATH, --offload-folder PATH",
    )


def _aligned(num_bytes: int) -> int:
    """Returns a number of bytes rounded up to whole pages, because only whole pages can be released."""
    return -(-num_bytes // _PAGE) * _PAGE
