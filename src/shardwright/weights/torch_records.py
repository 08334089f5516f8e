"""Finds the tensors in what ``torch.save`` wrote, and reads boxes of them, without running code and without mapping.

What ``torch.save`` writes is a zip archive: a pickle of everything but values, and for each storage an entry with its
bytes, which are not compressed. torch unpickles it safely (``weights_only``) onto the meta device, which gives shapes
and the places of the storages; these are compared with the archive's own list of entries before they are used.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.formatting import first_line
from shardwright.sharding.box import Box, runs
from shardwright.weights.files import FilePart, OpenFile

LEAST_RUN_BYTES = 2**10
"""The least length in bytes of contiguous parts of a box that are read one by one; shorter ones are read together."""

_LOCAL_HEADER_BYTES = 30
"""The bytes before the name of an entry in a zip archive; it ends in the lengths of the name and of what follows."""


def read_box(file: OpenFile, start: int, dtype: torch.dtype, shape: tuple[int, ...], box: Box) -> Tensor:
    """Returns the values of a box of a tensor whose elements are in row-major order in a file, from ``start`` on.

    No other bytes are read, unless the box is in many short parts. Raises CheckpointError if the file is shorter.
    """
    size = box.size * dtype.itemsize
    if not size:
        return torch.empty(box.shape, dtype=dtype)
    parts = [(at * dtype.itemsize, part.size * dtype.itemsize) for at, part in runs(shape, box)]
    if len(parts) > 1 and parts[0][1] < LEAST_RUN_BYTES:  # a cut of the last dim: whole rows take fewer calls
        ahead = (box.start[0], *(0,) * (len(shape) - 1))
        rows = Box(ahead, (box.stop[0], *shape[1:]))
        return read_box(file, start, dtype, shape, rows)[box.shift([-a for a in ahead]).slices].clone()
    values = torch.empty(size, dtype=torch.uint8)
    view, done = values.numpy().data, 0
    for at, length in parts:
        file.read_into(view[done : done + length], start + at)
        done += length
    return (values != 0 if dtype == torch.bool else values.view(dtype)).view(box.shape)


class TorchRecords:
    """What ``torch.save`` wrote into a part of a file: ``content``, with tensors on the meta device, for :meth:`read`.

    ``broken`` makes the error for a damaged archive from a text. ``what`` is the archive's description in the error for
    one that needs code.

    Raises: CheckpointError: the archive is damaged, or its pickle names more than tensors and plain containers.
    """

    def __init__(
        self, file: OpenFile, start: int, size: int, what: str, broken: Callable[[str], CheckpointError]
    ) -> None:
        self._file, self._start, self._broken = file, start, broken
        try:
            self._sizes = self._entries(size)
            self.content: Any = torch.load(
                FilePart(file, start, size),  # type: ignore[arg-type]
                map_location="meta",
                weights_only=True,
            )
        except pickle.UnpicklingError as failure:
            raise CheckpointError(
                f"{what} holds more than plain tensors, and reading that could run code",
                given=_reason(failure),
                allowed="a dict of tensors, or dicts of such dicts",
                fix="write torch.save(model.state_dict(), path) in the program that made it",
            ) from failure
        except CheckpointError:
            raise
        except Exception as failure:  # an archive that was made to do harm can fail anywhere
            raise broken(first_line(failure)[:200]) from failure

    def _entries(self, size: int) -> dict[int, int]:
        """Returns the bytes of each entry that is not compressed, by its place in the archive.

        Raises: CheckpointError: the archive holds numbers of the other byte order.
        """
        sizes = {}
        with zipfile.ZipFile(FilePart(self._file, self._start, size)) as archive:
            for entry in archive.infolist():
                header = self._file.read(self._start + entry.header_offset, _LOCAL_HEADER_BYTES)
                lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
                if entry.compress_type == zipfile.ZIP_STORED:
                    sizes[entry.header_offset + _LOCAL_HEADER_BYTES + lengths] = entry.file_size
                if entry.filename.endswith("/byteorder") and archive.read(entry) != b"little":
                    raise self._broken("numbers in the byte order of another processor")
        return sizes

    def place(self, tensor: Tensor) -> int:
        """Returns the place of a tensor's first element in the archive; negative if torch does not know it."""
        at: int = getattr(tensor.untyped_storage(), "_checkpoint_offset", -(2**63))
        return at + int(tensor.storage_offset()) * tensor.dtype.itemsize

    def check(self, tensor: Tensor) -> None:
        """Raises CheckpointError if the archive has no plain values for a tensor of :attr:`content`."""
        storage, num_bytes = tensor.untyped_storage(), _extent(tensor) * tensor.dtype.itemsize
        at: int = getattr(storage, "_checkpoint_offset", -1)
        inside = int(tensor.storage_offset()) * tensor.dtype.itemsize + num_bytes <= storage.nbytes()
        if num_bytes and not (self._sizes.get(at, -1) == storage.nbytes() and inside):
            raise self._broken("a tensor of which the archive has no values that are not compressed")

    def read(self, tensor: Tensor, box: Box) -> Tensor:
        """Returns the values of a box of a tensor of :attr:`content`, which :meth:`check` has accepted.

        A tensor that is not in row-major order in the archive, such as a transposed one, is read whole.

        Raises: CheckpointError: the file has become shorter.
        """
        if not tensor.numel():
            return torch.empty(box.shape, dtype=tensor.dtype)
        first, shape = self._start + self.place(tensor), tuple(tensor.shape)
        if tensor.is_contiguous():
            return read_box(self._file, first, tensor.dtype, shape, box)
        extent = (_extent(tensor),)
        span = read_box(self._file, first, tensor.dtype, extent, Box.of(extent))
        return span.as_strided(shape, tensor.stride())[box.slices].clone()


def _extent(tensor: Tensor) -> int:
    """Returns the number of elements in memory from a tensor's first to its last; 0 if it has none."""
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return sum(steps) + 1 if tensor.numel() else 0


def is_plain(value: Any) -> bool:
    """Returns whether a value is a plain tensor of the kind that can be read: strided, and not of a subclass."""
    plain = type(value) in (Tensor, torch.nn.Parameter)
    return plain and value.layout == torch.strided and not value.is_quantized and value.is_meta


def _reason(failure: Exception) -> str:
    """Returns the line of torch's text that says what a file names, without its advice to trust the file."""
    lines = [line.strip() for line in str(failure).splitlines() if "Unsupported" in line or "GLOBAL" in line]
    return (lines[0].partition(" was not an allowed")[0] if lines else first_line(failure))[:200]
