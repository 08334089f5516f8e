"""Saves global tensors as a checkpoint, and loads them into global tensors of any placement and sbp."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shardwright.checkpoint.loading import read_pieces
from shardwright.checkpoint.manifest import Manifest, StoredBox, check_files, checksum, find_on_all, on_all
from shardwright.checkpoint.manifest import read as read_manifest
from shardwright.checkpoint.saving import Entries, check_extra, merge_tensors, pack_entries
from shardwright.checkpoint.survivors import new_token
from shardwright.checkpoint.writing import flush, write_checkpoint
from shardwright.comm.agreement import gather_json
from shardwright.comm.current_world import current_world, everyone_here
from shardwright.errors import CheckpointError
from shardwright.global_tensor.geometry import boxes, terms, whole_piece
from shardwright.global_tensor.same_arguments import check_everywhere
from shardwright.global_tensor.tensor import GlobalTensor, global_layout_of, redistributed_local, without_sums
from shardwright.global_tensor.view_tracking import check_fresh, count_writes, is_gathered_view


def save_tensors(
    tensors: Mapping[str, GlobalTensor], folder: str | Path, *, step: int = 0, extra: Mapping[str, Any] | None = None
) -> Path:
    """Saves global tensors by name as the checkpoint ``folder/step-N`` and returns its path; all ranks call it.

    N is ``step``, in eight digits or more, and ``extra`` is stored as JSON. Users call it as
    :func:`shardwright.global_tensor.save`.

    Raises: CheckpointError: a value is not a global tensor, ``extra`` is not JSON, or the checkpoint cannot be written;
        LayoutError: ranks give different tensors; PlanError: a tensor is the gathered copy of a view whose base was
        written to since.
    """
    extra = check_extra(extra)
    world, everyone, final = current_world(), everyone_here(), Path(folder) / f"step-{step:08d}"
    world.wait_pending()
    token = gather_json(everyone, new_token())[0]
    file = f"part-{world.rank:05d}.safetensors"
    _check_tensors(tensors)
    entries, parts = _owned(tensors, file)

    def write(partial: Path) -> Any:
        if parts:
            save_file(parts, str(partial / file))
            flush(partial / file)
        size = {file: [(partial / file).stat().st_size, checksum(partial / file)]} if parts else {}
        return pack_entries(entries), size

    def merge(wrote: list[Any]) -> Manifest:
        files = {name: tuple(pair) for _, files_there in wrote for name, pair in files_there.items()}
        return Manifest(step, "", 0, merge_tensors(rank_entries for rank_entries, _ in wrote), files, "", {}, (), extra)

    write_checkpoint(world, everyone, final, token, write, merge)
    return final


def _check_tensors(tensors: Mapping[str, GlobalTensor]) -> None:
    """Raises CheckpointError for plain tensors, LayoutError if ranks give different ones, PlanError for stale views."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, GlobalTensor):
            raise CheckpointError(
                f"'{name}' is no global tensor",
                given=type(tensor).__name__,
                allowed="global tensors by name",
                fix=f"write to_global({name}, placement, sbp) for it",
            )
    kinds = [(name, tuple(x.shape), x.dtype, global_layout_of(x)) for name, x in tensors.items()]
    check_everywhere("the tensors of a checkpoint", kinds)
    check_fresh("save or load", tensors.values())


def _owned(tensors: Mapping[str, GlobalTensor], file: str) -> tuple[Entries, dict[str, Tensor]]:
    """Returns the manifest entries of the boxes that this rank writes, and the tensors of its file by key."""
    entries: Entries = {}
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor_layout, rank, shape = global_layout_of(tensor), current_world().rank, tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        layout = tensor_layout._replace(sbp=without_sums(tensor_layout.sbp))
        local = redistributed_local(tensor, layout)  # sends messages, so every rank calls it, even if it writes nothing
        if 0 in shape and rank == layout.placement.ranks[0]:  # the manifest lists it, though no file has elements of it
            entries[name] = (dtype, shape, [])
        box_of = boxes(shape, layout)
        box = box_of.get(rank)
        if box is None or not (box.size or not box.start):
            continue
        if rank == next(other for other, copy in box_of.items() if copy == box):
            key = f"{name}#0"
            parts[key] = local.detach().contiguous().cpu().clone()
            entries[name] = (dtype, shape, [StoredBox(box, file, key)])
    return entries, parts


def load_tensors(path: str | Path, tensors: Mapping[str, GlobalTensor]) -> Mapping[str, Any]:
    """Fills global tensors by name from a checkpoint, and returns the checkpoint's ``extra``; all ranks call it.

    ``path`` is a checkpoint, or a folder of which the newest checkpoint is taken. Floating-point values are rounded to
    the dtype of the tensor. Users call it as :func:`shardwright.global_tensor.load`.

    Raises: CheckpointError, on every rank: the checkpoint is missing or broken, or has no tensor of a name with that
        shape and kind of dtype, or a value is not a global tensor or is the gathered copy of a view. Nothing is changed
        then. LayoutError: ranks give different tensors; PlanError: a gathered copy of a view whose base was written to
        since.
    """
    _check_tensors(tensors)
    current_world().wait_pending()
    everyone = everyone_here()
    folder = find_on_all(everyone, Path(path))
    manifest, values = on_all(everyone, folder, lambda: _read(folder, tensors))
    with torch.no_grad():
        for name, read in values.items():
            tensors[name]._local_tensor.copy_(read)
    count_writes(tensors.values())
    return manifest.extra


def _read(folder: Path, tensors: Mapping[str, GlobalTensor]) -> tuple[Manifest, dict[str, Tensor]]:
    """Checks a checkpoint and reads this rank's shards of the tensors, before anything is changed."""
    manifest = read_manifest(folder)
    for name, tensor in tensors.items():
        if name not in manifest.tensors or manifest.tensors[name][1] != tuple(tensor.shape):
            shapes = {saved_name: list(shape) for saved_name, (_, shape, _) in manifest.tensors.items()}
            raise CheckpointError(
                f"'{folder}' has no '{name}' of this shape",
                given=f"'{name}' of shape {list(tensor.shape)}",
                allowed=", ".join(f"'{saved_name}' {shape}" for saved_name, shape in list(shapes.items())[:9]),
                fix="give the tensors that were saved, by their names",
            )
        stored = getattr(torch, manifest.tensors[name][0])
        if stored != tensor.dtype and not (stored.is_floating_point and tensor.dtype.is_floating_point):
            raise CheckpointError(
                f"'{name}' was saved with another kind of dtype",
                given=f"{tensor.dtype}, saved as {stored}",
                allowed=f"{stored}; floating-point numbers are rounded to each other",
                fix=f"give a tensor of {stored}",
            )
    for name in (name for name, tensor in tensors.items() if is_gathered_view(tensor)):
        raise CheckpointError(
            f"'{name}' is a view that was gathered: its base would not see what is loaded",
            given=f"a view of shape {list(tensors[name].shape)}",
            allowed="tensors that are no views",
            fix="give the tensor that it is a view of, or a .clone()",
        )
    check_files(folder, manifest, {stored.file for name in tensors for stored in manifest.tensors[name][2]})
    parts = {name: _part(folder, manifest, name, tensor) for name, tensor in tensors.items()}
    return manifest, {name: part for name, part in parts.items() if part is not None}


def _part(folder: Path, manifest: Manifest, name: str, tensor: GlobalTensor) -> Tensor | None:
    """Returns the values for this rank's local tensor; None if it has no elements."""
    layout, local = global_layout_of(tensor), tensor._local_tensor
    box = boxes(tuple(tensor.shape), layout).get(current_world().rank)
    if box is None or 0 in box.shape:
        return None
    values = torch.zeros(local.shape, dtype=local.dtype)
    # of a partial sum, the first term gets all of the value, and the other terms are zeros
    if not terms(layout)[current_world().rank]:
        read_pieces(folder, manifest, name, (whole_piece(box),), values)
    return values
