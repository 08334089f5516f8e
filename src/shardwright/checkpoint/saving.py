"""Writes a checkpoint: every rank what it owns, beside the last one, renamed when all is there."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwright.checkpoint.manifest import MANIFEST, Manifest, Stored, checksum, steps_in
from shardwright.comm.agreement import gather_json
from shardwright.comm.axis import Axis
from shardwright.errors import CheckpointError
from shardwright.formatting import format_bytes
from shardwright.parallelize.run import Run
from shardwright.sharding.box import Box, Piece
from shardwright.sharding.box import read as read_box
from shardwright.sharding.tensor_layout import TensorLayout

LOSS_SCALE = "(loss scale)"
"""The name under which a manifest's scalars keep it: no parameter has such a one."""

MOST_BYTES = 2**28
"""A file holds so much, or one tensor: so much lies in memory a second time while it is written."""

Entries = dict[str, tuple[str, tuple[int, ...], list[Stored]]]


@dataclass
class _Part:
    """One file of a rank: by key, the tensors and which piece of each it holds."""

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
    """Writes ``folder/step-N``, all ranks together; returns its path.

    Every element is written once, by the first rank that holds it. A kill at any moment leaves the last complete
    checkpoint as it was. ``extra`` is kept as JSON, the same on every rank; ``keep`` > 0 removes all but that many of
    the newest steps. Buffers that are not persistent are left out, as from ``state_dict``.

    Raises: CheckpointError, on every rank: ``extra`` is not JSON, before anything is sent; or the disk is full or
        not writable. What was there before is untouched.
    """
    check_extra(extra)
    everyone = run.axes["world"].for_strategy("checkpoint")
    root = Path(folder)
    name = f"step-{run.num_steps:08d}"
    told = gather_json(everyone, [uuid.uuid4().hex[:8], list(kept_buffers(run.model))])
    token = told[0][0]
    owners = {name: rank for rank, (_, names) in reversed(list(enumerate(told))) for name in names}
    partial = root / f".tmp-{name}-{token}"
    entries, parts = _owned(run, optimizer, owners)
    num_bytes = sum(part.num_bytes for part in parts)

    def prepare() -> None:
        for stale in root.glob(".tmp-*") if root.is_dir() else ():
            shutil.rmtree(stale, ignore_errors=True)  # left by a run that was killed
        partial.mkdir(parents=True)

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
        return packed(entries), files, _scalars(run, optimizer), _groups(run, optimizer)

    def finish() -> None:
        manifest = _join(run, optimizer, everyone_wrote, extra or {})
        publish(partial, root / name, manifest, token)
        for each in steps_in(root)[:-keep] if keep else ():
            _discard(each, token)

    first = run.world.rank == 0
    together(everyone, prepare if first else _nothing, partial)
    everyone_wrote = together(everyone, write, partial)
    together(everyone, finish if first else _nothing, partial)
    return root / name


def check_extra(extra: Mapping[str, Any] | None) -> None:
    """Raises CheckpointError unless it can be kept as JSON."""
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
    """Gives a checkpoint whose files are all there its manifest and its name."""
    (partial / MANIFEST).write_text(manifest.to_json())
    flush(partial / MANIFEST)
    flush(partial)
    old = final.with_name(f"{final.name}.old")
    if final.exists():  # the same step again: the old one still counts until the new one has its name
        _discard(old, token)
        final.rename(old)
    partial.rename(final)
    flush(final.parent)
    _discard(old, token)


def _discard(step: Path, token: str) -> None:
    """Removes a checkpoint, if it is there; half removed, it no longer has the name of one."""
    if step.exists():
        aside = step.with_name(f".tmp-{step.name}-{token}-old")
        step.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _nothing() -> None:
    return None


def _owned(run: Run, optimizer: torch.optim.Optimizer | None, owners: Mapping[str, int]) -> tuple[Entries, list[_Part]]:
    """What this rank writes: entries of the manifest, and what its files hold; of each buffer, the owner's."""
    entries: Entries = {}
    parts: list[_Part] = []
    mine = [name for name, rank in owners.items() if rank == run.world.rank or name in run.plan.buffers]
    for name, lies, local in (*_state(run, optimizer), *_buffers(run, mine)):
        whole = name in mine and not lies.axes
        pieces = _outermost(lies.pieces(run.coord) if whole else lies.owned(run.coord, run.plan.mesh))
        stored = []
        for number, piece in enumerate(pieces):
            key, size = f"{name}#{number}", piece.whole.size * local.element_size()
            if not parts or parts[-1].num_bytes + size > MOST_BYTES:
                more = f".{len(parts)}" if parts else ""
                parts.append(_Part(f"part-{run.world.rank:05d}{more}.safetensors"))
            parts[-1].pieces[key] = local.detach(), piece
            parts[-1].num_bytes += size
            stored.append(Stored(piece.whole, parts[-1].file, key))
        if stored:
            entries[name] = (str(local.dtype).removeprefix("torch."), lies.shape, stored)
    return entries, parts


def _copied(local: Tensor, piece: Piece) -> Tensor:
    """The piece in memory of its own: a file refuses tensors that share some."""
    part = read_box(local, piece, piece.whole)
    return part.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _outermost(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    return tuple(piece for piece in pieces if piece.whole.size or piece.whole == Box((), ()))


def _state(run: Run, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, TensorLayout, Tensor]]:
    """Every tensor that is trained, and the optimizer's: its global name, where it lies, and this rank's part."""
    for name, parameter in run.parameters.items():
        yield name, run.plan.state[name].parameter, parameter
        for key, value in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).items():
            if is_cut_like(value, parameter):
                yield f"optimizer/{name}/{key}", run.plan.state[name].optimizer, value


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds, by name: those that ``state_dict`` has, each once.

    >>> model = nn.BatchNorm1d(2)
    >>> model.register_buffer("table", torch.ones(3), persistent=False)
    >>> list(kept_buffers(model))
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
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
        yield name, buffer_lies(run, name, buffer), buffer


def buffer_lies(run: Run, name: str, buffer: Tensor) -> TensorLayout:
    """Where a buffer lies: whole on every rank, but for those that the plan cuts."""
    return run.plan.buffers.get(name, TensorLayout.whole(tuple(buffer.shape)))


def is_cut_like(value: Any, parameter: Tensor) -> bool:
    """Whether a value of an optimizer's state has an entry for each of the parameter's elements."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape


def _scalars(run: Run, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    """What is equal on every rank: the optimizer's step counts and the like, and in fp16 the scale of the loss."""
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in run.parameters.items() if optimizer is not None else ():
        for key, value in optimizer.state.get(parameter, {}).items() if optimizer is not None else ():
            if not is_cut_like(value, parameter) and value is not None:
                as_json = value.tolist() if isinstance(value, Tensor) else value
                dtype = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else ""
                found.setdefault(name, {})[key] = [dtype, as_json]
    if run.loss_scale is not None:
        found[LOSS_SCALE] = {key: ["", value] for key, value in asdict(run.loss_scale).items()}
    return found


def packed(entries: Entries) -> dict[str, Any]:
    """Entries as JSON takes them."""
    return {
        name: [dtype, list(shape), [[s.box.start, s.box.stop, s.file, s.key] for s in stored]]
        for name, (dtype, shape, stored) in entries.items()
    }


def joined_tensors(told: Iterable[dict[str, Any]]) -> dict[str, tuple[str, tuple[int, ...], tuple[Stored, ...]]]:
    """The manifest's tensors, from what each rank says it wrote."""
    tensors: Entries = {}
    for entries in told:
        for name, (dtype, shape, stored) in entries.items():
            pieces = [Stored(Box(tuple(a), tuple(b)), file, key) for a, b, file, key in stored]
            tensors.setdefault(name, (dtype, tuple(shape), []))[2].extend(pieces)
    return {name: (dtype, shape, tuple(stored)) for name, (dtype, shape, stored) in sorted(tensors.items())}


def _join(run: Run, optimizer: torch.optim.Optimizer | None, wrote: list[Any], extra: Mapping[str, Any]) -> Manifest:
    files: dict[str, tuple[int, str]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for _, some_files, some_scalars, _ in wrote:
        files.update({name: (size, digest) for name, (size, digest) in some_files.items()})
        scalars.update(some_scalars)
    tensors = joined_tensors(entries for entries, *_ in wrote)
    groups = joined_groups([some_groups for *_, some_groups in wrote])
    return Manifest(
        run.num_steps, str(run.plan.layout), run.rng.seed, tensors, files,
        type(optimizer).__name__ if optimizer is not None else "", scalars, groups, extra,
    )  # fmt: skip


def joined_groups(told: Iterable[Sequence[dict[str, Any]]]) -> tuple[dict[str, Any], ...]:
    """The optimizer's groups, from what each rank says of its own: a stage has some of a group's parameters, or none.

    Where it has none its options say nothing; and where it left out such a group, its next one has another's number.

    >>> first, last = {"parameters": ["a"], "options": {"lr": 1}}, {"parameters": ["b"], "options": {"lr": 2}}
    >>> none = {"parameters": [], "options": {"lr": 1}}
    >>> joined_groups([[first, none], [none, last]]) == joined_groups([[first], [last]]) == (first, last)
    True
    """
    numbered = sorted(((n, group) for groups in told for n, group in enumerate(groups)), key=lambda pair: pair[0])
    holding = {number for number, group in numbered if group["parameters"]}
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for number, group in numbered:
        if group["parameters"] or number not in holding:
            key = (number, json.dumps(group["options"], sort_keys=True) if number in holding else "")
            known = found.setdefault(key, {**group, "parameters": []})["parameters"]
            known += [name for name in group["parameters"] if name not in known]
    return tuple(found.values())


def named_in(run: Run, group: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """A group's parameters by name; what a stage that trains nothing gave torch in their place has none."""
    names = {id(parameter): name for name, parameter in run.parameters.items()}
    return {names[id(p)]: p for p in group["params"] if id(p) in names}


def _groups(run: Run, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Any], ...]:
    if optimizer is None:
        return ()
    return tuple(
        {
            "parameters": list(named_in(run, group)),
            "options": {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params" and isinstance(value, (int, float, bool, str, list, tuple, type(None), Tensor))
            },
        }
        for group in optimizer.param_groups
    )


# ---- all ranks together


def together(everyone: Axis, do: Callable[[], Any], partial: Path) -> list[Any]:
    """Every rank does its part; if one fails, all raise, and what was begun is removed."""
    mine: Any = None
    problem = ""
    try:
        mine = do()
    except (OSError, SafetensorError) as failure:
        problem = str(failure) or repr(failure)
    answers = gather_json(everyone, [problem, mine])
    failed = [(rank, text) for rank, (text, _) in enumerate(answers) if text]
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
    return [value for _, value in answers]


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name != "posix":
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
