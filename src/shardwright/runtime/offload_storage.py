"""Memory that is not the device's, for state that rests: the host's, or files that are mapped into it.

A file has no name. The system frees it with the last tensor that looks at it, after a kill as after an end: nothing is
left to clean up, nothing old is taken for new, and a run that was killed gets its state back from its checkpoint.

A file's pages are memory of the process only while they are in use: :meth:`OffloadStorage.put_away` takes them out,
and the system writes them to the disk when it wants their room.
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
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardwright.comm.axis import Axis
from shardwright.comm.values import gather_json
from shardwright.errors import PlanError
from shardwright.formatting import format_bytes

Place = Literal["host", "disk"]

_PAGE = mmap.ALLOCATIONGRANULARITY
LEAST_BYTES = 2**22
"""The smallest file that is made without being asked for."""


class _Piece(NamedTuple):
    """Where a tensor lies in a mapped file."""

    file: mmap.mmap
    start: int
    num_bytes: int


@dataclass(eq=False)
class _File:
    """A mapped file, and where the next tensor goes."""

    pages: mmap.mmap
    next: int = 0


class OffloadStorage:
    """One rank's tensors at ``place``; on disk they are in a file of ``folder``, the system's temporary one by default.

    ``tensors`` are all that it has made. A rehearsal on the meta device takes no room.
    """

    def __init__(self, place: Place, everyone: Axis, folder: Path | None = None) -> None:
        self.place, self.folder = place, Path(tempfile.gettempdir()) if folder is None else folder
        self.tensors: list[Tensor] = []
        self._num_bytes = 0
        self._everyone = everyone
        self._files: list[_File] = []
        self._pieces: dict[int, _Piece] = {}

    def reserve(self, sizes: Iterable[int]) -> None:
        """Takes the room for tensors of so many bytes, so that none is missing later; all ranks call it.

        Raises: PlanError, on every rank, where one of them cannot: a disk too small, a folder that cannot be written.
        """
        if self._everyone.device.type == "meta":
            return
        num_bytes = sum(map(_aligned, sizes))
        problem = ""
        if self.place == "disk" and num_bytes:
            try:
                self._open(num_bytes)
            except OSError as failure:
                problem = f"{failure.strerror or failure}, with {format_bytes(num_bytes)} to keep in '{self.folder}'"
        for rank, text in enumerate(gather_json(self._everyone, problem)):
            if text:
                raise _refused(f"rank {rank}: {text}")

    def _open(self, num_bytes: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if free < num_bytes:
            raise OSError(errno.ENOSPC, f"{format_bytes(free)} free")
        with tempfile.TemporaryFile(dir=self.folder) as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # or else a full disk would kill the run as it writes
            else:
                file.truncate(num_bytes)
            self._files.append(_File(mmap.mmap(file.fileno(), num_bytes)))
        self._num_bytes += num_bytes

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A tensor without values, in the room that is reserved."""
        device = self._everyone.device
        if device.type == "meta":
            tensor = torch.empty(num_elements, dtype=dtype, device=device)
        elif self.place == "host" or not num_elements:
            tensor = torch.empty(num_elements, dtype=dtype, pin_memory=device.type != "cpu")
        else:
            tensor = self._mapped(num_elements, dtype)
        self.tensors.append(tensor)
        return tensor

    def _mapped(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        num_bytes = num_elements * dtype.itemsize
        if all(file.next + num_bytes > len(file.pages) for file in self._files):
            self._grow(num_bytes)
        file = next(file for file in self._files if file.next + num_bytes <= len(file.pages))
        tensor = torch.frombuffer(file.pages, dtype=dtype, count=num_elements, offset=file.next)
        self._pieces[tensor.data_ptr()] = _Piece(file.pages, file.next, num_bytes)
        file.next += _aligned(num_bytes)
        return tensor

    def start_over(self) -> None:
        """Nobody needs what lies here any more: its room is for others."""
        self.tensors.clear()
        self._pieces.clear()
        for file in self._files:
            file.next = 0

    def _grow(self, num_bytes: int) -> None:
        """Room that nobody could foresee: as much as there was before, so that files stay few."""
        try:
            self._open(max(_aligned(num_bytes), self._num_bytes, LEAST_BYTES))
        except OSError as failure:
            raise _refused(f"{failure.strerror or failure}, in '{self.folder}'") from failure

    def put_away(self, tensors: Iterable[Tensor]) -> None:
        """Nobody works on these now: their pages leave the process. Nothing is lost, and no write is waited for."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for piece in (self._pieces.get(tensor.data_ptr()) for tensor in tensors):
                if piece is not None:
                    piece.file.madvise(mmap.MADV_DONTNEED, piece.start, piece.num_bytes)


def _refused(what: str) -> PlanError:
    return PlanError(
        "no room to offload to disk",
        given=what,
        allowed="a folder that can be written, on a disk with room for all that is offloaded",
        fix="free space there, or name another folder: offload_folder=PATH, --offload-folder PATH",
    )


def _aligned(num_bytes: int) -> int:
    """The next multiple of a page: only whole pages can be put away."""
    return -(-num_bytes // _PAGE) * _PAGE


__all__ = ["LEAST_BYTES", "OffloadStorage", "Place"]
