"""Saves a checkpoint: every rank writes the pieces that it owns into a temporary folder, which is renamed last."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwright.checkpoint.locking import one_save
from shardwright.checkpoint.manifest import MANIFEST, Manifest, StoredBox, checksum, steps_in
from shardwright.comm.agreement import gather_json
from shardwright.comm.axis import Axis
from shardwright.errors import CheckpointError
from shardwright.formatting import format_bytes
from shardwright.parallelize.run import Run
from shardwright.sharding.box import Box, Piece
from shardwright.sharding.box import read as read_box
from shardwright.sharding.tensor_layout import TensorLayout

LOSS_SCALE = "(loss scale)"
"""The key of the loss scale among a manifest's scalars; no parameter can have this name."""

MOST_BYTES = 2**28
"""The most bytes of a file, unless one tensor is larger; a file's tensors are copied in memory while it is written."""

Entries = dict[str, tuple[str, tuple[int, ...], list[StoredBox]]]


@dataclass
class _Part:
    """One file of a rank: tensors and the piece of each that the file holds, by key."""

    file: str
    pieces: dict[str, tuple[Tensor, Piece]] = field(default_factory=dict)
    num_bytes: int = 0


def save(
    folder: str | Path,
    run: Run,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int = 0,
) -> Path:
    """Saves model and optimizer as the checkpoint ``folder/step-N`` and returns its path. Every rank calls it.

    Every element is written once, by the first rank that holds it. A kill at any moment leaves the last complete
    checkpoint as it was. ``extra`` is stored as JSON, the same on every rank; ``keep`` > 0 removes all but this
    checkpoint and the ``keep`` - 1 of the highest steps beside it. Buffers that are not persistent are left out, as in
    ``state_dict``. Saves of several runs into one folder wait for each other.

    Raises: CheckpointError, on every rank: ``extra`` is not JSON, before anything is sent; or the disk is full or not
        writable. Earlier checkpoints are untouched.
    """
    check_extra(extra)
    everyone = run.axes["world"].for_strategy("checkpoint")
    root = Path(folder)
    name = f"step-{run.num_steps:08d}"
    gathered = gather_json(everyone, [uuid.uuid4().hex[:8], list(kept_buffers(run.model))])
    token = gathered[0][0]  # rank 0's: names the temporary folder of this save
    # stages have different buffers; each is written by the first rank that has it
    owners = {name: rank for rank, (_, names) in reversed(list(enumerate(gathered))) for name in names}
    partial = root / f".tmp-{name}-{token}"
    entries, parts = _owned(run, optimizer, owners)
    num_bytes = sum(part.num_bytes for part in parts)

    locked = ExitStack()

    def prepare() -> None:
        locked.enter_context(one_save(root))
        clear(root, token)
        partial.mkdir()

    def write() -> tuple[Any, ...]:
        free = shutil.disk_usage(partial).free
        if free < num_bytes:
            raise OSError(28, f"{format_bytes(free)} free, {format_bytes(num_bytes)} to write")
        files = {}
        for part in parts:
            file = partial / part.file
            save_file({key: _copied(*held) for key, held in part.pieces.items()}, str(file))
            flush(file)
            files[file.name] = file.stat().st_size, checksum(file)
            if run.offload is not None:
                run.offload.put_away()
        return pack_entries(entries), files, _scalars(run, optimizer), _groups(run, optimizer)

    def finish() -> None:
        manifest = _merged(run, optimizer, wrote, extra or {})
        publish(partial, root / name, manifest, token)
        others = [step for step in steps_in(root) if step.name != name]
        for each in others[: max(len(others) - keep + 1, 0)] if keep else ():
            _discard(each, token)

    first = run.world.rank == 0
    with locked:
        run_on_all(everyone, prepare if first else None, partial)
        wrote = run_on_all(everyone, write, partial)
        run_on_all(everyone, finish if first else None, partial)
    return root / name


def clear(root: Path, token: str) -> None:
    """Removes what killed saves have left in a folder, under its lock: temporary folders, checkpoints put aside."""
    for stale in root.glob(".tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    for old in root.glob("step-*.old"):
        if (old.with_suffix("") / MANIFEST).is_file():
            _discard(old, token)


def check_extra(extra: Mapping[str, Any] | None) -> None:
    """Raises CheckpointError unless ``extra``, the user's data, can be written as JSON."""
    try:
        json.dumps(extra)
    except (TypeError, ValueError, RecursionError) as failure:
        raise CheckpointError(
            "'extra' cannot be kept as JSON",
            given=str(failure),
            allowed="dicts with text as keys, lists, text, numbers, booleans and None",
            fix="save numbers and text: tensor.tolist(), str(path)",
        ) from failure


def publish(partial: Path, final: Path, manifest: Manifest, token: str) -> None:
    """Writes the manifest of a checkpoint whose files are complete, and renames its folder to the final name."""
    (partial / MANIFEST).write_text(manifest.to_json())
    flush(partial / MANIFEST)
    flush(partial)
    old = final.with_name(f"{final.name}.old")
    if final.exists():  # the step is saved again: the old checkpoint stays readable until the new one has its name
        _discard(old, token)
        final.rename(old)
    partial.rename(final)
    flush(final.parent)
    _discard(old, token)


def _discard(step: Path, token: str) -> None:
    """Removes a checkpoint if it exists; it is renamed first, so that a half removed one is never read."""
    if step.exists():
        aside = step.with_name(f".tmp-{step.name}-{token}-old")
        step.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _owned(run: Run, optimizer: torch.optim.Optimizer | None, owners: Mapping[str, int]) -> tuple[Entries, list[_Part]]:
    """The manifest entries of what this rank writes, and its files; ``owners`` gives the rank that writes a buffer."""
    entries: Entries = {}
    parts: list[_Part] = []
    mine = [name for name, rank in owners.items() if rank == run.world.rank or name in run.plan.buffers]
    for name, layout, local in (*_state(run, optimizer), *_buffers(run, mine)):
        # the owner of an unsharded buffer writes it; of all other tensors, the first rank that holds a piece
        whole = name in mine and not layout.axes
        pieces = layout.pieces(run.coord) if whole else layout.owned(run.coord, run.plan.mesh)
        stored = []
        for number, piece in enumerate(p for p in pieces if p.whole.size or p.whole == Box((), ())):
            key, size = f"{name}#{number}", piece.whole.size * local.element_size()
            if not parts or parts[-1].num_bytes + size > MOST_BYTES:
                more = f".{len(parts)}" if parts else ""
                parts.append(_Part(f"part-{run.world.rank:05d}{more}.safetensors"))
            parts[-1].pieces[key] = local.detach(), piece
            parts[-1].num_bytes += size
            stored.append(StoredBox(piece.whole, parts[-1].file, key))
        if stored:
            entries[name] = (str(local.dtype).removeprefix("torch."), layout.shape, stored)
    return entries, parts


def _copied(local: Tensor, piece: Piece) -> Tensor:
    """A copy of the piece in host memory: safetensors refuses tensors that share memory."""
    part = read_box(local, piece, piece.whole)
    return part.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _state(run: Run, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, TensorLayout, Tensor]]:
    """Every parameter, and the optimizer's state of its shape: the global name, the layout and the local tensor."""
    for name, parameter in run.parameters.items():
        yield name, run.plan.state[name].parameter, parameter
        for key, value in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).items():
            if is_elementwise(value, parameter):
                yield f"optimizer/{name}/{key}", run.plan.state[name].optimizer, value


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the model's persistent buffers by name, as ``state_dict`` does, but a tied buffer only once."""
    found = {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    first = {id(buffer): name for name, buffer in reversed(found.items())}
    return {name: buffer for name, buffer in found.items() if first[id(buffer)] == name}


def _buffers(run: Run, names: Iterable[str]) -> Iterator[tuple[str, TensorLayout, Tensor]]:
    for name in names:
        buffer = run.model.get_buffer(name)
        yield name, buffer_layout(run, name, buffer), buffer


def buffer_layout(run: Run, name: str, buffer: Tensor) -> TensorLayout:
    """Returns how a buffer is sharded: a whole copy on every rank, unless the plan shards it."""
    return run.plan.buffers.get(name, TensorLayout.whole(tuple(buffer.shape)))


def is_elementwise(value: Any, parameter: Tensor) -> bool:
    """Whether a value of an optimizer's state has the parameter's shape, as Adam's moments have."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _scalars(run: Run, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    """The state that is equal on every rank: the optimizer's step counts and other scalars, and the fp16 loss scale."""
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in run.parameters.items():
        for key, value in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).items():
            if not is_elementwise(value, parameter) and value is not None:
                as_json = value.tolist() if isinstance(value, Tensor) else value
                dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else ""
                found.setdefault(name, {})[key] = [dtype, as_json]
    if run.loss_scale is not None:
        found[LOSS_SCALE] = {key: ["", value] for key, value in asdict(run.loss_scale).items()}
    return found


def pack_entries(entries: Entries) -> dict[str, Any]:
    """Returns a rank's manifest entries (which box of a tensor is in which file) as lists, for sending as JSON."""
    return {
        name: [dtype, list(shape), [[s.box.start, s.box.stop, s.file, s.key] for s in stored]]
        for name, (dtype, shape, stored) in entries.items()
    }


def merge_tensors(packed: Iterable[dict[str, Any]]) -> dict[str, tuple[str, tuple[int, ...], tuple[StoredBox, ...]]]:
    """Returns the manifest's table of tensors, merged from the packed entries of every rank."""
    tensors: Entries = {}
    for entries in packed:
        for name, (dtype, shape, stored) in entries.items():
            pieces = [StoredBox(Box(tuple(a), tuple(b)), file, key) for a, b, file, key in stored]
            tensors.setdefault(name, (dtype, tuple(shape), []))[2].extend(pieces)
    return {name: (dtype, shape, tuple(stored)) for name, (dtype, shape, stored) in sorted(tensors.items())}


def _merged(run: Run, optimizer: torch.optim.Optimizer | None, wrote: list[Any], extra: Mapping[str, Any]) -> Manifest:
    files: dict[str, tuple[int, str]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for _, files_there, scalars_there, _ in wrote:
        files.update({name: (size, digest) for name, (size, digest) in files_there.items()})
        scalars.update(scalars_there)
    tensors = merge_tensors(entries for entries, *_ in wrote)
    groups = merge_groups([groups_there for *_, groups_there in wrote])
    return Manifest(
        run.num_steps, str(run.plan.layout), run.rng.seed, tensors, files,
        type(optimizer).__name__ if optimizer is not None else "", scalars, groups, extra,
    )  # fmt: skip


def merge_groups(by_rank: Iterable[Sequence[dict[str, Any]]]) -> tuple[dict[str, Any], ...]:
    """Returns the optimizer's param groups, merged over ranks: a pipeline stage has a part of each group.

    A group without parameters on a stage is ignored if others have parameters for it. A stage may also leave such a
    group out, so that its later groups have lower numbers: groups of one number are merged only if their options agree.

    >>> first, last = {"parameters": ["a"], "options": {"lr": 1}}, {"parameters": ["b"], "options": {"lr": 2}}
    >>> none = {"parameters": [], "options": {"lr": 1}}
    >>> merge_groups([[first, none], [none, last]]) == merge_groups([[first], [last]]) == (first, last)
    True
    """
    numbered = sorted(((n, group) for groups in by_rank for n, group in enumerate(groups)), key=lambda pair: pair[0])
    holding = {number for number, group in numbered if group["parameters"]}
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for number, group in numbered:
        if group["parameters"] or number not in holding:
            key = (number, json.dumps(group["options"], sort_keys=True) if number in holding else "")
            names = found.setdefault(key, {**group, "parameters": []})["parameters"]
            names += [name for name in group["parameters"] if name not in names]
    return tuple(found.values())


def group_parameters(run: Run, group: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Returns a param group's parameters by name, without the placeholder of a pipeline stage that has none."""
    names = {id(parameter): name for name, parameter in run.parameters.items()}
    return {names[id(p)]: p for p in group["params"] if id(p) in names}


def _groups(run: Run, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Any], ...]:
    if optimizer is None:
        return ()
    return tuple(
        {
            "parameters": list(group_parameters(run, group)),
            "options": {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params" and isinstance(value, (int, float, bool, str, list, tuple, type(None), Tensor))
            },
        }
        for group in optimizer.param_groups
    )


def run_on_all(everyone: Axis, do: Callable[[], Any] | None, partial: Path) -> list[Any]:
    """Runs ``do``, if given, on each rank; all-gathers and returns all ranks' results. Every rank calls it.

    Raises: CheckpointError, on every rank, if ``do`` failed on any; ``partial`` is then removed.
    """
    result: Any = None
    problem = ""
    try:
        result = do() if do is not None else None
    except (OSError, SafetensorError) as failure:
        problem = str(failure) or repr(failure)
    results = gather_json(everyone, [problem, result])
    failed = [(rank, text) for rank, (text, _) in enumerate(results) if text]
    if failed:
        if everyone.index == 0:
            shutil.rmtree(partial, ignore_errors=True)
        rank, text = failed[0]
        raise CheckpointError(
            "the checkpoint could not be written; the last complete one is untouched",
            given=f"rank {rank}: {text}",
            allowed="a folder that can be written, with room for the whole state",
            fix=f"free space at '{partial.parent}', or save to another folder",
        )
    return [value for _, value in results]


def flush(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
