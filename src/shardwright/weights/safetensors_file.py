"""Reads and writes safetensors files tensor by tensor, so that memory never holds more than one tensor of the file.

The format::

    8 bytes: length of the header | header: JSON, by name (dtype, shape, first byte, last byte) | the tensors' bytes

Reads are of the boxes that a rank needs. The library's own ``safe_open`` maps the file into memory instead, and
``save_file`` takes all tensors at once; files of both kinds are read by both.

Source: the format's description in the README of huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.parallelize.filling import StateTable
from shardwright.sharding.box import Box
from shardwright.tensor_bytes import bytes_of
from shardwright.weights.files import OpenFile, broken, parse_json
from shardwright.weights.torch_records import read_box

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""The dtypes that both torch and safetensors have, by their name in a file."""

MOST_HEADER_BYTES = 10**8
"""The size in bytes up to which a header is read; safetensors has the same limit."""

METADATA = "__metadata__"
"""The key of a header that is no tensor: texts by name, which other programs read."""


class TensorFile:
    """A :class:`WeightStore` of one safetensors file, of which only the boxes asked for are read.

    Raises: CheckpointError: the file cannot be read, or is not what its header says.
    """

    def __init__(self, path: Path) -> None:
        self.file = OpenFile(path)
        try:
            self._start, tensors, self.metadata = _header(self.file)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
            raise broken(path, f"no safetensors file: {failure}".splitlines()[0]) from failure
        self._places = {name: begin for name, (_, _, begin) in tensors.items()}
        self.tensors: StateTable = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}

    def begin(self, name: str) -> None:
        """Does nothing: each rank reads for itself."""

    def place(self, name: str) -> object:
        """Returns where a tensor is stored; two names of one place have the same values."""
        return self._places[name]

    def read(self, name: str, box: Box) -> Tensor:
        """Returns the values of a box of a tensor, and reads no other bytes unless the box is in many short parts.

        Shapes: returns the shape of ``box``.
        Raises: CheckpointError: the file has become shorter.
        """
        dtype, shape = self.tensors[name]
        return read_box(self.file, self._start + self._places[name], dtype, shape, box)

    def end(self) -> None:
        """Raises CheckpointError if the file was written to since it was opened."""
        self.file.check_unchanged()


def _header(file: OpenFile) -> tuple[int, dict[str, tuple[torch.dtype, tuple[int, ...], int]], Mapping[str, Any]]:
    """Returns where the tensors of a file begin; by name the dtype, the shape and the place after that; the metadata.

    Raises: ValueError, KeyError, TypeError or AttributeError: the header is not one of a complete file.
    """
    if file.num_bytes < 8:
        raise ValueError(f"{file.num_bytes} bytes")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(MOST_HEADER_BYTES, file.num_bytes - 8):
        raise ValueError(f"a header of {length} bytes in a file of {file.num_bytes}")
    entries = parse_json(bytes(file.read(8, length)))
    metadata = dict(entries.pop(METADATA, {}))
    tensors = {name: _entry(name, entry) for name, entry in entries.items()}
    end = 0
    for name, (dtype, shape, begin) in sorted(tensors.items(), key=lambda item: (item[1][2], _size(item[1]))):
        if begin != end:
            raise ValueError(f"{name!r:.80} begins at byte {begin}, and the tensor before it ends at {end}")
        end += prod(shape) * dtype.itemsize
    if 8 + length + end != file.num_bytes:
        raise ValueError(f"{file.num_bytes} bytes, and its header describes {8 + length + end}")
    return 8 + length, tensors, metadata


def _entry(name: str, entry: Mapping[str, Any]) -> tuple[torch.dtype, tuple[int, ...], int]:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(size) is int and 0 <= size < 2**63 for size in (*shape, begin, end)):
        raise ValueError(f"sizes of {name!r:.80} that are no sizes")
    if (dtype := DTYPES.get(entry["dtype"])) is None:
        raise ValueError(f"{name!r:.80} has the dtype {entry['dtype']!r:.20}, which torch does not have")
    if end - begin != prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r:.80} of shape {list(shape)} in {end - begin} bytes")
    return dtype, shape, begin


def _size(entry: tuple[torch.dtype, tuple[int, ...], int]) -> int:
    return prod(entry[1]) * entry[0].itemsize


def header_of(tensors: StateTable, metadata: Mapping[str, str]) -> bytes:
    """Returns the start of a safetensors file of these tensors, in this order, up to the first tensor's bytes.

    Raises: CheckpointError: safetensors has no such dtype.
    """
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in dtype_names or name == METADATA:
            raise CheckpointError(
                f"safetensors cannot hold '{name}'",
                given=dtype,
                allowed=", ".join(str(allowed_dtype).removeprefix("torch.") for allowed_dtype in dtype_names),
                fix="write a .pt file",
            )
        begin, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": dtype_names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write_values(file: BinaryIO, values: Tensor) -> None:
    """Appends a tensor's bytes to a file."""
    if values.numel():
        file.write(bytes_of(values.cpu()).numpy().data)
