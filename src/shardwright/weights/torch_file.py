"""Reads files that ``torch.save`` wrote, without running code: plain tensors, and dicts of them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import CheckpointError
from shardwright.formatting import first_line
from shardwright.parallelize.filling import Table
from shardwright.sharding.box import Box
from shardwright.weights.files import OpenFile, broken

MAGIC = b"PK\x03\x04"
"""The first bytes of a file of ``torch.save``, which is a zip archive."""

MOST_LEVELS = 16
"""The most dicts inside of each other in which tensors are looked for."""


class TorchFile:
    """A :class:`WeightStore` of one ``.pt`` or ``.bin`` file, which is mapped into memory and unpickled safely.

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
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as failure:
            raise CheckpointError(
                f"'{path}' holds more than plain tensors, and reading that could run code",
                given=_reason(failure),
                allowed="a dict of tensors, or dicts of such dicts",
                fix="write torch.save(model.state_dict(), path) in the program that made it",
            ) from failure
        except (RuntimeError, OSError, ValueError, EOFError, KeyError, TypeError, AttributeError) as failure:
            raise broken(path, first_line(failure)) from failure
        self._given: dict[str, Tensor] = {}
        for name, tensor in _tensors(path, "", content, 0):
            if name in self._given:
                raise broken(path, f"it has two tensors of the name {name!r:.80}")
            self._given[name] = tensor
        if not self._given:
            raise broken(path, f"a {type(content).__name__} without tensors by name")
        self.tensors: Table = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self._given.items()}

    def begin(self, name: str) -> None:
        """Does nothing: each rank reads for itself."""

    def read(self, name: str, box: Box) -> Tensor:
        """Returns a view of a box of the mapped tensor; the system reads its pages when they are used."""
        return self._given[name][box.slices]

    def end(self) -> None:
        """Raises CheckpointError if the file was written to since it was opened."""
        self.file.check_unchanged()


def _tensors(path: Path, prefix: str, value: Any, level: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the plain tensors in nested dicts, with their names joined by dots."""
    if not isinstance(value, Mapping):
        return
    if level == MOST_LEVELS:
        raise broken(path, f"more than {MOST_LEVELS} dicts inside of each other")
    for key, each in value.items():
        name = f"{prefix}{key}"
        if type(each) in (Tensor, torch.nn.Parameter) and each.layout == torch.strided and not each.is_quantized:
            if not each.is_meta:
                yield name, each.detach()
        else:
            yield from _tensors(path, f"{name}.", each, level + 1)


def _reason(failure: Exception) -> str:
    """Returns the line of torch's text that says what the file names, without its advice to trust the file."""
    lines = [line.strip() for line in str(failure).splitlines() if "Unsupported" in line or "GLOBAL" in line]
    return (lines[0].partition(" was not an allowed")[0] if lines else first_line(failure))[:200]
