"""Finds out what a path is, and opens it as a :class:`WeightStore`: one file, several with an index, or a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.loading import averages_in, read_pieces
from shardwright.checkpoint.manifest import MANIFEST, check_files, find, read, reading, steps_in
from shardwright.errors import CheckpointError
from shardwright.parallelize.filling import StateTable, WeightStore
from shardwright.sharding.box import Box, Piece
from shardwright.text_files import folders_near
from shardwright.weights.files import OpenFile, broken, check_plain_name, read_json
from shardwright.weights.safetensors_file import TensorFile
from shardwright.weights.torch_file import MAGIC, TorchFile
from shardwright.weights.torch_folder import METADATA, TorchFolder

INDEX = "model.safetensors.index.json"
"""The name of the index of several safetensors files in a folder of transformers."""

WHOLE = ("model.safetensors", "pytorch_model.bin")
"""The files of a folder of transformers that has all weights in one, safetensors first."""

CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints in the folder of a run of the command."""


class JoinedStore:
    """A :class:`WeightStore` of several files: each tensor is read from the file that ``places`` gives for its name."""

    def __init__(self, places: Mapping[str, WeightStore]) -> None:
        self._places = dict(places)
        self.tensors: StateTable = {name: store.tensors[name] for name, store in places.items()}

    def begin(self, name: str) -> None:
        """Does nothing: each rank reads for itself."""

    def place(self, name: str) -> object:
        """Returns where a tensor is stored; two names of one place have the same values."""
        return id(self._places[name]), self._places[name].place(name)

    def read(self, name: str, box: Box) -> Tensor:
        """Returns the values of a box of a tensor; raises as the file's own store."""
        return self._places[name].read(name, box)

    def end(self) -> None:
        """Raises CheckpointError if a file was written to since it was opened."""
        for store in {id(store): store for store in self._places.values()}.values():
            store.end()


class CheckpointStore:
    """A :class:`WeightStore` of the model in a checkpoint of this library, whose checksums are compared.

    With ``averages``, the values of a parameter are those of its average, if the checkpoint has one.

    Raises: CheckpointError: there is no complete checkpoint, it is broken, or it has no averages.
    """

    def __init__(self, path: Path, *, averages: bool = False) -> None:
        self.folder = find(path)
        self.manifest = read(self.folder)
        self._checked: set[str] = set()
        self.tensors: StateTable = {
            name: (getattr(torch, dtype), shape)
            for name, (dtype, shape, _) in self.manifest.tensors.items()
            if not name.startswith("optimizer/")
        }
        self._averages = averages_in(self.manifest) if averages else {}
        if averages and not self._averages:
            raise CheckpointError(
                f"'{self.folder}' has no averages of parameters",
                given=f"the state of {self.manifest.optimizer or 'no optimizer'}, of step {self.manifest.step}",
                allowed="a checkpoint of sw.save(folder, run, optimizer) after run.average(optimizer)",
                fix="leave out averages=True, or --averages",
            )

    def begin(self, name: str) -> None:
        """Does nothing: each rank reads for itself."""

    def place(self, name: str) -> object:
        """Returns where a tensor is stored; two names of one place have the same values."""
        return name

    def read(self, name: str, box: Box) -> Tensor:
        """Returns the values of a box of a tensor. Raises CheckpointError if a file is not what was written."""
        stored_as = self._averages.get(name, name)
        if not isinstance(stored_as, str):
            return torch.tensor(stored_as, dtype=self.tensors[name][0])
        dtype, _, stored = self.manifest.tensors[stored_as]
        if not stored:  # no elements; a hostile manifest may list very many of these
            return torch.empty(box.shape, dtype=getattr(torch, dtype))
        needed = {piece.file for piece in stored if not box.start or piece.box.intersect(box)} - self._checked
        with reading(self.folder):
            check_files(self.folder, self.manifest, needed)
            self._checked |= needed
            values = torch.empty(box.shape, dtype=getattr(torch, dtype))
            read_pieces(self.folder, self.manifest, stored_as, (Piece(box, (0,) * len(box.start)),), values)
        return values

    def end(self) -> None:
        """Does nothing: a complete checkpoint is not written to."""


def open_store(path: Path, *, averages: bool = False) -> WeightStore:
    """Returns the store of the weights at ``path``, which is one of these:

    - a safetensors file, or a file of ``torch.save``;
    - a folder of transformers: ``model.safetensors`` or ``pytorch_model.bin``, or several files with an index;
    - any folder of safetensors files, of which no two have a tensor of one name;
    - a folder of ``torch.distributed.checkpoint``;
    - a checkpoint of this library, or the folder of a run; with ``averages``, only this, and its averages are read.

    Raises: CheckpointError: it is none of these, is broken, or has no averages.
    """
    try:
        store = _of_folder(path, averages=averages) if path.is_dir() else _of_file(path)
    except OSError as failure:
        raise broken(path, failure.strerror or str(failure)) from failure
    if averages and not isinstance(store, CheckpointStore):
        raise CheckpointError(
            f"'{path}' is no checkpoint of this library, and has no averages of parameters",
            given=f"averages of {'a folder' if path.is_dir() else 'a file'} of weights",
            allowed="the folder of a run, or of its checkpoints",
            fix="leave out averages=True, or --averages",
        )
    return store


def _meant(path: Path) -> dict[str, str]:
    """Returns the fix of an error that proposes folders near the path that hold weights, if there are any."""
    near = folders_near(path, _holds_weights)
    return {"fix": f"write {near}"} if near else {}


def _holds_weights(folder: Path) -> bool:
    """Whether a folder seems to hold weights, by the names of its files; their contents are not read."""
    names = (METADATA, MANIFEST, INDEX, *WHOLE)
    return any((folder / name).is_file() for name in names) or bool(steps_in(folder / CHECKPOINTS))


def _of_file(path: Path) -> WeightStore:
    if path.name.endswith(".index.json"):
        return _indexed(path)
    if not os.path.lexists(path) and (meant := _meant(path)):
        raise broken(path, os.strerror(errno.ENOENT), **meant)
    file = OpenFile(path)
    start = bytes(file.read(0, min(9, file.num_bytes)))
    if start[:4] == MAGIC:
        return TorchFile(path)
    if path.suffix != ".safetensors" and start[8:] != b"{":
        return TorchFile(path) if path.suffix in (".pt", ".pth", ".bin") else _none(path, "a file of another kind")
    return TensorFile(path)


def _of_folder(path: Path, *, averages: bool = False) -> WeightStore:
    if (path / METADATA).exists():
        return TorchFolder(path)
    for inside in (path, path / CHECKPOINTS):
        if (inside / MANIFEST).exists() or steps_in(inside):
            return CheckpointStore(inside, averages=averages)
    indexes = sorted(path.glob("*.index.json"))
    for index in (path / INDEX, *(file for file in indexes if ".safetensors." in file.name)):
        if index.exists():
            return _indexed(index)
    for name in WHOLE[:1]:
        if (path / name).exists():
            return _of_file(path / name)
    if files := sorted(path.glob("*.safetensors")):
        return _all_of(path, files)
    if indexes:
        return _indexed(indexes[0])
    for name in WHOLE[1:]:
        if (path / name).exists():
            return _of_file(path / name)
    raise broken(path, "no file of weights in it", **_meant(path))


def _indexed(index: Path) -> WeightStore:
    """Returns the store of the files that an index names, all of them in the index's own folder."""
    folder, content = index.parent, read_json(index)
    files: Any = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise broken(index, "no 'weight_map' in it")
    names = sorted({check_plain_name(folder, name) for name in files.values()}, key=str)
    opened = {name: _of_file(folder / name) for name in names}
    for tensor, name in files.items():
        if tensor not in opened[name].tensors:
            raise broken(folder, f"{index.name} says that {name} has {tensor!r:.80}, and it has not")
    return JoinedStore({tensor: opened[name] for tensor, name in files.items()})


def _all_of(folder: Path, files: Sequence[Path]) -> WeightStore:
    places: dict[str, WeightStore] = {}
    for file in files:
        store = TensorFile(file)
        for name in store.tensors:
            if name in places:
                raise broken(folder, f"two files have a tensor {name!r:.80}, and no index says which counts")
            places[name] = store
    return JoinedStore(places)


def _none(path: Path, what: str) -> WeightStore:
    raise broken(path, what)
