"""Reads and writes folders of ``torch.distributed.checkpoint`` (DCP), as torchtitan and FSDP2 users have them.

::

    folder/.metadata       a pickle: the size of each tensor, its chunks, and the place of each chunk
    folder/__0_0.distcp    chunks one after the other, each as torch.save writes it

torch itself unpickles ``.metadata``, which can run any code. Here its classes are replaced by empty ones, and any other
name in it is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.formatting import first_line
from shardwright.parallelize.filling import StateTable
from shardwright.sharding.box import Box
from shardwright.weights.files import OpenFile, broken, check_plain_name
from shardwright.weights.torch_records import TorchRecords, is_plain

METADATA = ".metadata"
"""The name of the file that makes a folder one of DCP."""

MOST_METADATA_BYTES = 2**30
"""The size in bytes up to which ``.metadata`` is read."""

_DCP = "torch.distributed.checkpoint."
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
_RECORDS = {
    f"{_DCP}metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    f"{_DCP}filesystem": {"_StorageInfo"},
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # in Python 3.13
}
"""The classes that torch's own pickles name, by module."""


class _Chunk(NamedTuple):
    """One stored box of a tensor: the file, and the bytes in it."""

    box: Box
    file: str
    start: int
    num_bytes: int


class TorchFolder:
    """A :class:`WeightStore` of a DCP folder, read without a process group; only the boxes asked for are read.

    Names are those of the saved state dict, flat, as in ``model.layers.0.weight``.

    Raises: CheckpointError: the folder cannot be read, or names code that torch's own folders do not.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = OpenFile(folder / METADATA)
        if file.num_bytes > MOST_METADATA_BYTES:
            raise broken(folder, f"a {METADATA} of {file.num_bytes} bytes")
        try:
            metadata = _Unpickler(io.BytesIO(file.read(0, file.num_bytes))).load()
            self._chunks, self.tensors = _read_metadata(metadata)
        except CheckpointError:
            raise
        except Exception as failure:  # a pickle that was made by another program can fail anywhere
            raise broken(folder, f"{METADATA}: {first_line(failure)}"[:200]) from failure
        names = {chunk.file for chunks in self._chunks.values() for chunk in chunks}
        self.files = {name: OpenFile(folder / check_plain_name(folder, name)) for name in sorted(names)}
        for name, chunks in self._chunks.items():
            for chunk in chunks:
                if not 0 <= chunk.start <= chunk.start + chunk.num_bytes <= self.files[chunk.file].num_bytes:
                    raise broken(folder, f"{name!r:.80} is not inside of {chunk.file}")

    def begin(self, name: str) -> None:
        """Does nothing: each rank reads for itself."""

    def place(self, name: str) -> object:
        """Returns where a tensor is stored; two names of one place have the same values."""
        return self._chunks[name]

    def read(self, name: str, box: Box) -> Tensor:
        """Returns the values of a box of a tensor, from the chunks that hold a part of it.

        Raises: CheckpointError: a chunk is not what the metadata say, or elements are in no chunk.
        """
        dtype, _ = self.tensors[name]
        values, missing = None, [box]
        for chunk in self._chunks[name]:
            common = box.intersect(chunk.box) if box.start else box
            if common is None or not missing:
                continue
            part = self._read_chunk(name, chunk, common.shift([-a for a in chunk.box.start]))
            if common == box:
                return part
            values = torch.empty(box.shape, dtype=dtype) if values is None else values
            values[common.shift([-a for a in box.start]).slices] = part
            missing = [rest for gap in missing for rest in gap.minus(common)]
        if missing and box.size:
            raise broken(self.folder, f"no chunk has the elements {missing[0]} of {name!r:.80}")
        return torch.empty(box.shape, dtype=dtype) if values is None else values

    def _read_chunk(self, name: str, chunk: _Chunk, box: Box) -> Tensor:
        """Returns the values of a box of a chunk, counted from the start of the chunk."""
        where = f"{name!r:.80} in {chunk.file}"
        records = TorchRecords(
            self.files[chunk.file],
            chunk.start,
            chunk.num_bytes,
            where,
            lambda what: broken(self.folder, f"{where}: {what}"),
        )
        content = records.content
        if not is_plain(content):
            raise broken(self.folder, f"{where} is a {type(content).__name__}")
        if (content.dtype, tuple(content.shape)) != (self.tensors[name][0], chunk.box.shape):
            raise broken(self.folder, f"{where} is {content.dtype} {list(content.shape)}")
        records.check(content)
        return records.read(content, box)

    def end(self) -> None:
        """Raises CheckpointError if a file was written to since the folder was opened."""
        for file in self.files.values():
            file.check_unchanged()


class _Unpickler(pickle.Unpickler):
    """Unpickles a DCP's metadata into records of this module; every name that such metadata does not need is refused.

    The records are new classes for each file, so that a pickle can change no class of torch.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._records: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Returns a record class, a plain container or a dtype. Raises CheckpointError for any other name."""
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(constant := getattr(torch, name, None), torch.dtype | torch.layout):
            return constant
        if name in _RECORDS.get(module, ()):
            return self._records.setdefault(name, type(name, (_StoredRecord,), {}))
        raise CheckpointError(
            f"{METADATA} names code that could run",
            given=f"{module}.{name}"[:200],
            allowed="the classes of torch.distributed.checkpoint.metadata",
            fix="take the folder from a source that you trust",
        )

    def persistent_load(self, pid: Any) -> Any:
        """Always raises ValueError, because metadata refer to no objects outside of the pickle."""
        raise ValueError("a reference to something outside of the file")


class _StoredRecord:
    """A value of a class of torch: its arguments, and its state as attributes or as a tuple."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


def _read_metadata(metadata: Any) -> tuple[dict[str, list[_Chunk]], StateTable]:
    """Returns the chunks, and the dtype and shape, of every tensor. Raises any error if the metadata are damaged."""
    places = {}
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{index.fqn!r:.80} is compressed, which is not read")
        places[index.fqn, tuple(getattr(index, "offset", None) or ())] = (info.relative_path, info.offset, info.length)
    chunks: dict[str, list[_Chunk]] = {}
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry).__name__ != "TensorStorageMetadata":
            continue  # values that are no tensors, such as a step number
        properties = entry.properties
        dtype = properties.state[0] if properties.state else properties.dtype
        size = _sizes(entry.size)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name!r:.80} without a dtype")
        tensors[name], chunks[name] = (dtype, size), []
        for chunk in entry.chunks:
            start, shape = _sizes(chunk.offsets), _sizes(chunk.sizes)
            box = Box(start, tuple(a + b for a, b in zip(start, shape, strict=True)))
            if len(start) != len(size) or any(stop > whole for stop, whole in zip(box.stop, size, strict=True)):
                raise ValueError(f"{name!r:.80} has a chunk {box} outside of its shape {list(size)}")
            chunks[name].append(_Chunk(box, *places[name, start]))
    return chunks, tensors


def _sizes(numbers: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(numbers)
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError(f"sizes that are no sizes: {sizes!r:.80}")
    return sizes
