"""Global tensors in a checkpoint: written as they lie, read into whatever lies otherwise."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardwright.checkpoint.manifest import Manifest, Stored, check_files_on_all, checksum, find
from shardwright.checkpoint.manifest import read as read_manifest
from shardwright.checkpoint.saving import Entries, check_extra, flush, joined_tensors, packed, publish, together
from shardwright.comm.agreement import gather_json
from shardwright.comm.current_world import everyone_here, here
from shardwright.errors import CheckpointError
from shardwright.global_tensor import GlobalTensor
from shardwright.global_tensor.agreement import check_everywhere
from shardwright.global_tensor.geometry import boxes, terms, whole_piece
from shardwright.global_tensor.tensor import global_layout_of, moved, without_sums
from shardwright.global_tensor.view_tracking import check_fresh, is_apart, note_writes
from shardwright.sharding.box import Piece, write
from shardwright.sharding.transfer import plan_transfer


def save_tensors(
    tensors: Mapping[str, GlobalTensor], folder: str | Path, *, step: int = 0, extra: Mapping[str, Any] | None = None
) -> Path:
    """Writes ``folder/step-N`` with these tensors, all ranks of the world together; returns its path.

    Every element is written once, by the first rank that holds it; of a sum in parts, the sum is.

    Raises: CheckpointError, on every rank, as :func:`~shardwright.checkpoint.save`.
    """
    check_extra(extra)
    everyone, root, name = everyone_here(), Path(folder), f"step-{step:08d}"
    token = gather_json(everyone, uuid.uuid4().hex[:8])[0]
    partial = root / f".tmp-{name}-{token}"
    file = partial / f"part-{here().rank:05d}.safetensors"
    _check_tensors(tensors)
    entries, parts = _owned(tensors, file.name)

    def write_part() -> tuple[Any, ...]:
        if parts:
            save_file(parts, str(file))
            flush(file)
        return packed(entries), {file.name: (file.stat().st_size, checksum(file))} if parts else {}

    def finish() -> None:
        files = {name: tuple(each) for _, some in wrote for name, each in some.items()}
        every = joined_tensors(each for each, _ in wrote)
        publish(partial, root / name, Manifest(step, "", 0, every, files, "", {}, (), extra or {}), token)

    first = here().rank == 0
    together(everyone, lambda: partial.mkdir(parents=True) if first else None, partial)
    wrote = together(everyone, write_part, partial)
    together(everyone, finish if first else lambda: None, partial)
    return root / name


def _check_tensors(tensors: Mapping[str, GlobalTensor]) -> None:
    """Raises CheckpointError for what is not global; PlanError for stale views; LayoutError for different names."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, GlobalTensor):
            raise CheckpointError(
                f"'{name}' is no global tensor",
                given=type(tensor).__name__,
                allowed="global tensors by name",
                fix=f"write to_global({name}, placement, sbp) for it",
            )
    said = [(name, tuple(x.shape), x.dtype, global_layout_of(x)) for name, x in tensors.items()]
    check_everywhere("the tensors of a checkpoint", said)
    check_fresh("save or load", tensors.values())


def _owned(tensors: Mapping[str, GlobalTensor], file: str) -> tuple[Entries, dict[str, Tensor]]:
    entries: Entries = {}
    parts: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        given = global_layout_of(tensor)
        where = given._replace(sbp=without_sums(given.sbp))
        local, rank = moved(tensor, where), here().rank
        held, seen = boxes(tuple(tensor.shape), where), set()
        if 0 in tensor.shape and rank == where.placement.ranks[0]:  # it is known, and no file has any of it
            entries[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), [])
        for other, box in held.items():
            if other == rank and box not in seen and (box.size or not box.start):
                key = f"{name}#0"
                parts[key] = local.detach().contiguous().cpu().clone()
                stored = [Stored(box, file, key)]
                entries[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), stored)
            seen.add(box)
    return entries, parts


def load_tensors(path: str | Path, tensors: Mapping[str, GlobalTensor]) -> Mapping[str, Any]:
    """Fills these tensors, wherever they lie, from a checkpoint that any layout wrote; returns its ``extra``.

    Raises: CheckpointError, on every rank: missing, broken or foreign; or without one of the tensors.
    """
    _check_tensors(tensors)
    folder = find(Path(path))
    manifest = read_manifest(folder)
    for name, tensor in tensors.items():
        if name not in manifest.tensors or manifest.tensors[name][1] != tuple(tensor.shape):
            held = {each: list(shape) for each, (_, shape, _) in manifest.tensors.items()}
            raise CheckpointError(
                f"'{folder}' has no '{name}' of this shape",
                given=f"'{name}' of shape {list(tensor.shape)}",
                allowed=", ".join(f"'{each}' {shape}" for each, shape in list(held.items())[:9]),
                fix="give the tensors that were saved, by their names",
            )
        stored = getattr(torch, manifest.tensors[name][0])
        if stored != tensor.dtype and not (stored.is_floating_point and tensor.dtype.is_floating_point):
            raise CheckpointError(
                f"'{name}' was saved as another kind of number",
                given=f"{tensor.dtype}, saved as {stored}",
                allowed=f"{stored}; floating-point numbers are rounded to each other",
                fix=f"give a tensor of {stored}",
            )
    for name in (name for name, tensor in tensors.items() if is_apart(tensor)):
        raise CheckpointError(
            f"'{name}' is a view that was gathered: its base would not see what is loaded",
            given=f"a view of shape {list(tensors[name].shape)}",
            allowed="tensors of their own",
            fix="give the tensor that it is a view of, or a .clone()",
        )
    files = {stored.file for name in tensors for stored in manifest.tensors[name][2]}
    check_files_on_all(everyone_here(), folder, manifest, files)
    with torch.no_grad():
        for name, tensor in tensors.items():
            _fill(folder, manifest, name, tensor)
    note_writes(tensors.values())
    return manifest.extra


def _fill(folder: Path, manifest: Manifest, name: str, tensor: GlobalTensor) -> None:
    where, local = global_layout_of(tensor), tensor._local_tensor
    box = boxes(tuple(tensor.shape), where).get(here().rank)
    if box is None or 0 in box.shape:
        return
    if terms(where)[here().rank]:
        local.zero_()  # the first term is the whole
        return
    stored = manifest.tensors[name][2]
    sources = {i: (Piece(each.box, (0,) * len(each.box.start)),) for i, each in enumerate(stored)}
    for message in plan_transfer(sources, {len(stored): (whole_piece(box),)}).messages_to(len(stored)):
        origin = stored[message.source]
        inside = message.box.shift(tuple(-a for a in origin.box.start))
        with safe_open(str(folder / origin.file), framework="pt") as opened:
            values = opened.get_slice(origin.key)[inside.slices] if inside.start else opened.get_tensor(origin.key)
        write(local, message.destination_piece, message.box, values.to(local.dtype))
