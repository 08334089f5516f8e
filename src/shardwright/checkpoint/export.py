"""Exports the model of a checkpoint as one safetensors file, for use without shardwright."""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from shardwright.checkpoint.loading import read_whole
from shardwright.checkpoint.manifest import Manifest, check_files, read, reading
from shardwright.checkpoint.writing import flush
from shardwright.errors import PlanError


def export_model(folder: Path, to: Path) -> tuple[Manifest, int]:
    """Writes the model of the checkpoint ``folder``, unsharded, into the safetensors file ``to``.

    Returns the checkpoint's manifest and the number of tensors written: parameters and persistent buffers, without
    optimizer state. The file is written beside its place and renamed, so that a kill leaves no half file.

    Raises: CheckpointError: ``folder`` is no checkpoint, or a broken one. PlanError: ``to`` is no regular file, or
        cannot be written.
    """
    _check_target(to)
    manifest = read(folder)
    names = [name for name in manifest.tensors if not name.startswith("optimizer/")]
    with reading(folder):
        check_files(folder, manifest, {stored.file for name in names for stored in manifest.tensors[name][2]})
        tensors = {name: read_whole(folder, manifest, name) for name in names}
    partial = to.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(partial))
        flush(partial)
        partial.replace(to)
    except (OSError, SafetensorError) as failure:
        raise _refused(to, str(failure)) from failure
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return manifest, len(names)


def _check_target(to: Path) -> None:
    """Raises PlanError if ``to`` exists and is no regular file: a device, a pipe, a folder, a link."""
    try:
        mode = os.lstat(to).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as failure:
        raise _refused(to, str(failure)) from failure
    if not stat.S_ISREG(mode):
        raise _refused(to, "a folder, a link or a device")


def _refused(to: Path, why: str) -> PlanError:
    return PlanError(
        f"cannot write '{to}'", given=why, allowed="a new file, or a regular file", fix="give the path of another file"
    )
