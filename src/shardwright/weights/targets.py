"""Writes weights into files and folders of other programs: beside their place, then renamed, so that no half is left.

Each writer takes a table of the tensors to come and an iterator of the tensors in that order, and holds one of them at
a time; only a ``.pt`` file needs all of them in memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from shardwright.checkpoint.writing import flush
from shardwright.errors import CheckpointError
from shardwright.formatting import first_line
from shardwright.weights.safetensors_file import TensorFile, header_of, write_values
from shardwright.weights.stores import INDEX, WHOLE
from shardwright.weights.torch_folder import METADATA, MOST_METADATA_BYTES

COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
)
"""The files that are copied from a folder of transformers, beside ``config.json``, if they are there."""

_WEIGHTS = re.compile(
    r"(adapter_)?model(-\d+-of-\d+)?\.safetensors|__\d+_\d+\.distcp|"
    + "|".join(re.escape(name) for name in (INDEX, METADATA))
)
"""The names of files of weights that this module writes.

A folder may be replaced only if every other file in it is written again too. So a ``config.json`` or a tokenizer, which
cannot be made from the weights, is replaced only by a new one.
"""


_OURS = "written by shardwright"
"""The text in files of weights that marks them as written by this library, which may therefore replace them."""


@dataclass(frozen=True)
class WeightEntry:
    """A tensor that is written, with all its names; formats that store a tied tensor once use the first."""

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its values in bytes."""
        return prod(self.shape) * self.dtype.itemsize


Written = Iterator[tuple[WeightEntry, Tensor]]
"""The tensors that are written, in order, each with its values; the next is made when it is asked for."""


def write_safetensors(to: Path, table: list[WeightEntry], written: Written) -> list[str]:
    """Writes one safetensors file, with other names of tied tensors in its metadata; returns a list of its name."""
    with _beside(to, folder=False) as partial:
        _write_file(partial, table, written)
    return [to.name]


def write_torch(to: Path, table: list[WeightEntry], written: Written) -> list[str]:
    """Writes one file by ``torch.save``: a dict of tensors, in which a tied tensor is one under each name.

    The comment of this zip file, which torch does not write and does not read, says that this library wrote it.
    """
    with _beside(to, folder=False) as partial:
        tensors = {}
        for weight, values in written:
            tensors.update(dict.fromkeys(weight.names, values.contiguous()))
        with partial.open("wb") as file:
            _save(tensors, file)
            file.seek(-2, os.SEEK_END)  # the length of a zip file's comment, which follows it
            file.write(len(_OURS).to_bytes(2, "little") + _OURS.encode())
    return [to.name]


def write_folder(
    to: Path, table: list[WeightEntry], written: Written, *, most_bytes: int, beside: Mapping[str, bytes],
    whole: str = WHOLE[0],
) -> list[str]:  # fmt: skip
    """Writes a folder of safetensors files of up to ``most_bytes`` of tensors, as transformers reads it.

    One file has the name ``whole``; several are numbered, and an index says which tensor is where. The
    contents of ``beside``, such as ``config.json``, are written too. Returns the names of all files.
    """
    groups: list[list[WeightEntry]] = [[]]
    for weight in table:
        if groups[-1] and sum(entry.num_bytes for entry in groups[-1]) + weight.num_bytes > most_bytes:
            groups.append([])
        groups[-1].append(weight)
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = [whole]
    with _beside(to, folder=True, beside=beside) as partial:
        for name, group in zip(names, groups, strict=True):
            _write_file(partial / name, group, written)
        more = dict(beside)
        if len(groups) > 1:
            places = {weight.names[0]: name for name, group in zip(names, groups, strict=True) for weight in group}
            index = {
                "metadata": {"total_size": sum(weight.num_bytes for weight in table)},
                "weight_map": dict(sorted(places.items())),
            }
            more[INDEX] = (json.dumps(index, indent=2) + "\n").encode()
        for name, content in more.items():
            (partial / name).write_bytes(content)
            flush(partial / name)
    return [*names, *more]


def write_torch_folder(to: Path, table: list[WeightEntry], written: Written, *, most_bytes: int) -> list[str]:
    """Writes a folder of ``torch.distributed.checkpoint``: a flat state dict, a tied tensor under each of its names.

    The values of a tied tensor are written once, and each name points to them.
    """
    from torch.distributed.checkpoint import metadata as dcp  # loads much of torch.distributed
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    state: dict[str, Any] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    names: list[str] = []
    with _beside(to, folder=True) as partial, contextlib.ExitStack() as stack:
        file: Any = None
        for weight, values in written:
            if file is None or (file.tell() and file.tell() + weight.num_bytes > most_bytes):
                stack.close()
                names.append(f"__0_{len(names)}.distcp")
                file = stack.enter_context((partial / names[-1]).open("wb"))
            start = file.tell()
            _save(values.contiguous(), file)
            place = _StorageInfo(names[-1], start, file.tell() - start)
            zeros, size = torch.Size([0] * len(weight.shape)), torch.Size(weight.shape)
            chunk = dcp.ChunkStorageMetadata(zeros, size)
            for name in weight.names:
                properties = dcp.TensorProperties(dtype=weight.dtype)
                state[name] = dcp.TensorStorageMetadata(properties, size, [chunk])
                places[dcp.MetadataIndex(name, zeros, 0)] = place
        stack.close()
        metadata = dcp.Metadata(state, {name: (name,) for name in state}, places, dcp.StorageMeta(save_id=_OURS))
        (partial / METADATA).write_bytes(pickle.dumps(metadata))
        for name in (*names, METADATA):
            flush(partial / name)
    return [*names, METADATA]


def _write_file(path: Path, table: list[WeightEntry], written: Written) -> None:
    """Writes one safetensors file with the next tensors of ``written``, those that ``table`` lists."""
    metadata = {
        "format": "pt",
        "note": _OURS,
        **{other: weight.names[0] for weight in table for other in weight.names[1:]},
    }
    header = header_of({weight.names[0]: (weight.dtype, weight.shape) for weight in table}, metadata)
    size = len(header) + sum(weight.num_bytes for weight in table)
    with path.open("wb") as file:
        _reserve(file, size)
        file.write(header)
        for _ in table:
            write_values(file, next(written)[1])
        assert file.tell() == size, f"{file.tell()} bytes of {size}"
        file.flush()
        os.fsync(file.fileno())


def _save(value: Any, file: BinaryIO) -> None:
    """Appends what ``torch.save`` writes; its error for a full disk becomes an OSError."""
    try:
        torch.save(value, file)
    except RuntimeError as failure:
        raise OSError(errno.EIO, first_line(failure)) from failure


def _reserve(file: BinaryIO, size: int) -> None:
    """Raises OSError if the disk has too little room, before the first tensor is gathered."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as failure:
            if failure.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):  # else the file system cannot reserve room
                raise


def check_target(to: Path, *, folder: bool, beside: Collection[str] = ()) -> None:
    """Raises CheckpointError unless ``to`` is new, or a regular file or a folder of weights, which may be replaced.

    ``beside`` are the names of other files that are written into the folder, and that it may have already.

    >>> check_target(Path("/dev/null"), folder=False)
    Traceback (most recent call last):
    shardwright.errors.CheckpointError: cannot write '/dev/null'
      given:   a device or a pipe
      ...
    """
    try:
        mode = os.lstat(to).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as failure:
        raise _refused(to, str(failure), folder=folder) from failure
    if folder and stat.S_ISDIR(mode):
        others = sorted(
            path.name
            for path in to.iterdir()
            if not ((_WEIGHTS.fullmatch(path.name) or path.name in beside) and path.is_file())
        )
        if others:
            raise _refused(to, f"a folder with files of another kind, such as {others[0]!r:.80}", folder=folder)
    elif folder or not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFREG: "a file"}
        raise _refused(to, kinds.get(stat.S_IFMT(mode), "a device or a pipe"), folder=folder)


def check_replaces(to: Path, sources: Iterable[Path]) -> None:
    """Raises CheckpointError if ``to`` is one of the ``sources``, or a file or folder that another program has written.

    ``sources`` are the files and folders from which the weights and the config were read.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "model.safetensors").write_bytes(b"pretrained")
    >>> check_replaces(folder, [])
    Traceback (most recent call last):
    shardwright.errors.CheckpointError: the weights in '...' would be replaced
      given:   'model.safetensors' there, which shardwright has not written
      ...
    """
    if not to.exists():
        return
    read = {source for path in sources for source in (path.resolve(), path.resolve().parent)}
    files = [to] if to.is_file() else sorted(path for path in to.iterdir() if _WEIGHTS.fullmatch(path.name))
    others = [file for file in files if not _is_ours(file)]
    if others or (files and to.resolve() in read):
        why = f"'{others[0].name}' there, which shardwright has not written" if others else "what was read from there"
        raise CheckpointError(
            f"{'the file' if to.is_file() else 'the weights in'} '{to}' would be replaced",
            given=why,
            allowed="a new place, or one that shardwright wrote and did not read",
            fix=f"give another {'file' if to.is_file() else 'folder'}; or, to lose the weights there, force=True "
            "(--force of the command)",
        )


def _is_ours(file: Path) -> bool:
    try:
        if not file.stat().st_size:
            return True  # nothing would be lost
        if file.suffix == ".safetensors":
            return TensorFile(file).metadata.get("note") == _OURS
        if file.name == METADATA:
            return file.stat().st_size <= MOST_METADATA_BYTES and _OURS.encode() in file.read_bytes()
        if file.name != INDEX and file.suffix != ".distcp":  # these two are of no use without the other files
            with file.open("rb") as opened:
                opened.seek(max(0, file.stat().st_size - len(_OURS)))
                return opened.read() == _OURS.encode()
    except (CheckpointError, OSError):
        return False
    return True


def prepare(to: Path, *, folder: bool = False, beside: Collection[str] = (), num_bytes: int = 0) -> None:
    """Makes the folder in which a file, or a ``folder``, is to be written later.

    Raises: CheckpointError: as :func:`check_target`; or no file can be written there, or ``num_bytes`` bytes do not fit
        there.
    """
    try:
        check_target(to, folder=folder, beside=beside)
        to.parent.mkdir(parents=True, exist_ok=True)
        partial = to.with_name(f".{uuid.uuid4().hex}.tmp")
        partial.touch()
        partial.unlink()
        if shutil.disk_usage(to.parent).free < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as failure:
        raise _refused(to, str(failure), folder=folder) from failure


@contextlib.contextmanager
def _beside(to: Path, *, folder: bool, beside: Collection[str] = ()) -> Iterator[Path]:
    """Returns a context whose path beside ``to`` is renamed to ``to`` at its end, and is removed after an error."""
    partial = to.with_name(f".{uuid.uuid4().hex}.tmp")
    remove: Callable[[Path], Any] = shutil.rmtree if folder else Path.unlink
    try:
        check_target(to, folder=folder, beside=beside)
        to.parent.mkdir(parents=True, exist_ok=True)
        if folder:
            partial.mkdir()
        yield partial
        flush(partial)
        _put(partial, to, folder=folder, beside=beside)
        flush(to.parent)
    except OSError as failure:
        raise _refused(to, str(failure), folder=folder) from failure
    finally:
        with contextlib.suppress(OSError):
            remove(partial)


def _put(partial: Path, to: Path, *, folder: bool, beside: Collection[str]) -> None:
    """Renames what was written to its place; an earlier folder there is renamed first, and removed after."""
    aside = partial.with_suffix(".old")
    if earlier := folder and to.exists():
        check_target(to, folder=True, beside=beside)  # again: other files may have come meanwhile
        to.rename(aside)
    try:
        partial.replace(to)
    except OSError:
        if earlier:
            aside.rename(to)
        raise
    if earlier:
        shutil.rmtree(aside)


def _refused(to: Path, why: str, *, folder: bool) -> CheckpointError:
    allowed = "a new folder, or one of weights alone" if folder else "a new file, or a regular file"
    return CheckpointError(
        f"cannot write '{to}'",
        given=why,
        allowed=f"{allowed}, on a disk with room for it",
        fix=f"give the path of another {'folder' if folder else 'file'}",
    )
