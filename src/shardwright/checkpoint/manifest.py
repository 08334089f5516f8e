"""The checkpoint format: the files of a checkpoint folder, its manifest, and the checks of both.

::

    run/ckpt/
        step-00000100/
            manifest.json              every tensor's shape, and which box of it is stored in which file
            part-00000.safetensors     the pieces that rank 0 owned
            part-00001.safetensors
        .tmp-.../                      being written, or left by a killed run: never read

A checkpoint is complete exactly when its folder has its final name, which one rename gives it last. It contains no
pickle, so opening a checkpoint runs no code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwright.comm.agreement import first_problem
from shardwright.comm.axis import Axis
from shardwright.errors import CheckpointError
from shardwright.sharding.box import Box

FORMAT = "shardwright-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class StoredBox:
    """A box (range of every dim) of a tensor that is stored as one entry of one checkpoint file."""

    box: Box
    file: str
    key: str


@dataclass(frozen=True)
class Manifest:
    """One logical checkpoint: tensors by global name, whatever layout wrote them. Made by saving or :func:`read`.

    ``tensors`` maps a name to (dtype, shape, stored boxes); model tensors are named as in the plain model, optimizer
    state ``optimizer/<parameter>/<key>``. ``files`` maps a name to (bytes, SHA-256). ``scalars`` holds optimizer state
    without the parameter's shape, by parameter and key; ``groups`` the optimizer's param groups.
    """

    step: int
    layout: str
    seed: int
    tensors: Mapping[str, tuple[str, tuple[int, ...], tuple[StoredBox, ...]]]
    files: Mapping[str, tuple[int, str]]
    optimizer: str
    scalars: Mapping[str, Mapping[str, Any]]
    groups: tuple[Mapping[str, Any], ...]
    extra: Mapping[str, Any]

    def to_json(self) -> str:
        """Returns the manifest as the text of ``manifest.json``."""
        tensors = {
            name: {
                "dtype": dtype,
                "shape": shape,
                "pieces": [[list(s.box.start), list(s.box.stop), s.file, s.key] for s in stored],
            }
            for name, (dtype, shape, stored) in self.tensors.items()
        }
        files = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in self.files.items()}
        head = {"format": FORMAT, "version": VERSION, "step": self.step, "layout": self.layout, "seed": self.seed}
        state = {"optimizer": self.optimizer, "scalars": self.scalars, "groups": self.groups, "extra": self.extra}
        return json.dumps({**head, **state, "files": files, "tensors": tensors}, indent=1)

    @staticmethod
    def from_json(text: str, path: Path) -> Manifest:
        """Parses the text of ``manifest.json``. Raises CheckpointError for another format or a broken manifest."""
        try:
            found = json.loads(text)
            if found.get("format") != FORMAT:
                raise _foreign(path, f"a manifest of format {found.get('format')!r}")
            if found["version"] > VERSION:
                raise CheckpointError(
                    f"'{path}' was written by a newer shardwright",
                    given=f"version {found['version']}",
                    allowed=f"versions up to {VERSION}",
                    fix="upgrade shardwright",
                )
            tensors = {
                name: (
                    entry["dtype"],
                    tuple(entry["shape"]),
                    tuple(StoredBox(Box(tuple(a), tuple(b)), file, key) for a, b, file, key in entry["pieces"]),
                )
                for name, entry in found["tensors"].items()
            }
            files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in found["files"].items()}
            for dtype, _, stored in tensors.values():
                _ = getattr(torch, dtype), [files[each.file] for each in stored]  # raises if one does not exist
            return Manifest(
                found["step"], found["layout"], found["seed"], tensors, files,
                found["optimizer"], found["scalars"], tuple(found["groups"]), found["extra"],
            )  # fmt: skip
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            raise _broken(path, f"{MANIFEST}: {failure}") from failure


def steps_in(folder: Path) -> list[Path]:
    """Returns the complete checkpoints of a run, oldest first.

    ``step-N.old`` is one too: the previous checkpoint of step N, kept until the new one has its final name.
    """
    return sorted(path.parent for path in folder.glob(f"step-*/{MANIFEST}"))


def find(path: Path) -> Path:
    """Returns ``path`` if it is a checkpoint, else the newest complete one in it. Raises CheckpointError: none."""
    if (path / MANIFEST).is_file():
        return path
    if found := steps_in(path):
        return found[-1]
    if not path.exists():
        raise CheckpointError(
            f"there is no checkpoint at '{path}'",
            given="a path that does not exist",
            allowed="a checkpoint, or the folder of a run that saved one",
            fix="look for folders named step-*, or start without --resume",
        )
    raise _foreign(path, "no manifest in it")


def read(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint. Raises CheckpointError: missing, broken or foreign."""
    try:
        return Manifest.from_json((path / MANIFEST).read_text(), path)
    except (OSError, UnicodeDecodeError) as failure:
        raise _foreign(path, str(failure)) from failure


def check_files(path: Path, manifest: Manifest, names: set[str]) -> None:
    """Raises CheckpointError unless the checkpoint's files have the size and checksum that its manifest lists."""
    for name in sorted(names):
        size, digest = manifest.files[name]
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes"
            raise _broken(path, f"{name} {what}, {size} were written")
        if checksum(file) != digest:
            raise _broken(path, f"{name} does not match its checksum")


def check_files_on_all(everyone: Axis, path: Path, manifest: Manifest, names: set[str]) -> None:
    """Raises CheckpointError on every rank if :func:`check_files` raises on any, before any rank starts to load."""
    problem = ""
    try:
        check_files(path, manifest, names)
    except (CheckpointError, OSError) as failure:
        problem = str(failure)
    if found := first_problem(everyone, problem):
        raise CheckpointError(found[1])


def checksum(file: Path) -> str:
    """Returns the SHA-256 of a file as hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint '{path}' is broken",
        given=what,
        allowed="the files as they were written",
        fix="remove it to go on from the step before it, or copy it again",
    )


def _foreign(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"'{path}' is not a checkpoint of shardwright",
        given=what,
        allowed=f"a folder with {MANIFEST}, or with folders step-* that have one",
        fix="give the --out folder of a run, or one of its steps",
    )
