"""Reads files that ``torch.save`` wrote, without running code: plain tensors, and dicts of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.parallelize.filling import StateTable
from shardwright.sharding.box import Box
from shardwright.weights.files import OpenFile, broken
from shardwright.weights.torch_records import TorchRecords, is_plain

MAGIC = b"PK\x03\x04"
"""The first bytes of a file of ``torch.save``, which is a zip archive."""

MOST_LEVELS = 16
"""The most dicts inside of each other in which tensors are looked for."""


class TorchFile:
    """A :class:`WeightStore` of one ``.pt`` or ``.bin`` file of ``torch.save``, which is unpickled safely.

    torch reads it with ``weights_only``: a file whose pickle names anything else than tensors and plain containers is
    refused, and no code of it runs. Dicts in dicts are joined by dots: ``{"model": {"a": tensor}}`` has "model.a".
    Values that are no tensors, such as a step number, are left out.

    Raises: CheckpointError: the file cannot be read, needs code, or has no tensors.
    """

    def __init__(self, path: Path) -> None:
        self.file = OpenFile(path)
        if bytes(self.file.read(0, min(4, self.file.num_bytes))) != MAGIC:
            why = "no zip archive, as torch.save writes it since torch 1.6; a plain pickle could run code"
            raise broken(path, why)
        self._records = TorchRecords(self.file, 0, self.file.num_bytes, f"'{path}'", lambda what: broken(path, what))
        content = self._records.content
        self._given: dict[str, Tensor] = {}
        for name, tensor in _tensors(path, "", content, 0):
            if name in self._given:
                raise broken(path, f"it has two tensors of the name {name!r:.80}")
            self._records.check(tensor)
            self._given[name] = tensor
        if not self._given:
            raise broken(path, f"a {type(content).__name__} without tensors by name")
        self.tensors: StateTable = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self._given.items()}

    def begin(self, name: str) -> None:
        """Does nothing: each rank reads for itself."""

    def place(self, name: str) -> object:
        """Returns where a tensor is stored; two names of one place have the same values."""
        tensor = self._given[name]
        return self._records.place(tensor), tensor.shape, tensor.stride(), tensor.dtype

    def read(self, name: str, box: Box) -> Tensor:
        """Returns the values of a box of a tensor; other elements are read only if rows are short, or it is transposed.

        Raises: CheckpointError: the file has become shorter, or has no values of the tensor.
        """
        return self._records.read(self._given[name], box)

    def end(self) -> None:
        """Raises CheckpointError if the file was written to since it was opened."""
        self.file.check_unchanged()


def _tensors(path: Path, prefix: str, value: Any, level: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the plain tensors in nested dicts, with their names joined by dots."""
    if not isinstance(value, Mapping):
        return
    if level == MOST_LEVELS:
        raise broken(path, f"more than {MOST_LEVELS} dicts inside of each other")
    for key, entry in value.items():
        name = f"{prefix}{key}"
        if is_plain(entry):
            yield name, entry.detach()
        else:
            yield from _tensors(path, f"{name}.", entry, level + 1)
