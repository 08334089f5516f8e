"""Reads a checkpoint under any layout: the transfer planner says which part of which file goes where."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shardwright.checkpoint.manifest import Manifest, check_files_on_all, find
from shardwright.checkpoint.manifest import read as read_manifest
from shardwright.checkpoint.saving import LOSS_SCALE, buffer_lies, kept_buffers, named_in
from shardwright.comm.agreement import gather_json
from shardwright.errors import CheckpointError
from shardwright.mesh import Coord
from shardwright.parallelize.run import Run
from shardwright.sharding.box import Piece, write
from shardwright.sharding.tensor_layout import TensorLayout
from shardwright.sharding.transfer import plan_transfer


def load(path: str | Path, run: Run, optimizer: torch.optim.Optimizer | None = None) -> Mapping[str, Any]:
    """Fills ``run`` and ``optimizer`` from a checkpoint that any layout wrote; returns its ``extra``.

    ``path`` is a checkpoint or a folder of them, whose newest is taken. Each rank reads only the files that
    hold some of its part, and checks their checksums.

    Raises: CheckpointError: missing, broken or foreign; another model's; or without the optimizer's state. Every
        check that does not need the files comes first.
    """
    folder = find(Path(path))
    manifest = read_manifest(folder)
    _check_names(folder, manifest, run)
    if optimizer is not None:
        _check_optimizer(optimizer, manifest)
    wanted, states = _wanted(run, optimizer, manifest)
    needed = {
        stored.file
        for name, lies, _ in wanted
        for stored in manifest.tensors[name][2]
        if any(stored.box.intersect(piece.whole) for piece in lies.pieces(run.coord)) or not lies.shape
    }
    check_files_on_all(run.axes["world"].for_strategy("checkpoint"), folder, manifest, needed)
    with torch.no_grad():
        for name, lies, local in wanted:
            local.copy_(_read(folder, manifest, name, lies, run.coord, local))
    run.changed()
    if optimizer is not None:
        for parameter, key, value in states:
            optimizer.state[parameter][key] = value
        _fill_optimizer(run, optimizer, manifest)
    if run.loss_scale is not None:
        for key, (_, value) in manifest.scalars.get(LOSS_SCALE, {}).items():
            setattr(run.loss_scale, key, value)
    run.num_steps = manifest.step
    run.rng.seed = manifest.seed
    return manifest.extra


def read_whole(folder: Path, manifest: Manifest, name: str) -> Tensor:
    """One whole tensor of a checkpoint."""
    dtype, shape, _ = manifest.tensors[name]
    local = torch.empty(shape, dtype=getattr(torch, dtype))
    return _read(folder, manifest, name, TensorLayout.whole(shape), {}, local)


def _wanted(
    run: Run, optimizer: torch.optim.Optimizer | None, manifest: Manifest
) -> tuple[list[tuple[str, TensorLayout, Tensor]], list[tuple[Tensor, str, Tensor]]]:
    """Every tensor that this rank fills: its global name, where it lies, and the tensor; whose state they are."""
    found: list[tuple[str, TensorLayout, Tensor]] = []
    states: list[tuple[Tensor, str, Tensor]] = []
    keys: dict[str, list[str]] = {}
    for name in manifest.tensors:
        if name.startswith("optimizer/"):
            owner, _, key = name.removeprefix("optimizer/").rpartition("/")
            keys.setdefault(owner, []).append(key)
    for name, parameter in run.parameters.items():
        if name not in manifest.tensors:
            continue  # it has no elements
        found.append((name, run.plan.state[name].parameter, parameter))
        for key in keys.get(name, []) if optimizer is not None else ():
            dtype = getattr(torch, manifest.tensors[f"optimizer/{name}/{key}"][0])
            state = _home(run, parameter, key, dtype)
            states.append((parameter, key, state))
            found.append((f"optimizer/{name}/{key}", run.plan.state[name].optimizer, state))
    for name, buffer in kept_buffers(run.model).items():
        lies = buffer_lies(run, name, buffer)
        if name in manifest.tensors and lies.pieces(run.coord):  # or else another stage has it
            found.append((name, lies, buffer))
    return found, states


def _home(run: Run, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
    if run.offload is not None:
        return run.offload.home(parameter, key, dtype)
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def _check_names(folder: Path, manifest: Manifest, run: Run) -> None:
    held = {name for name in manifest.tensors if not name.startswith("optimizer/")}
    wanted = {name: lies.shape for name, lies in run.plan.compute.items()}
    buffers = {name: list(buffer_lies(run, name, b).shape) for name, b in kept_buffers(run.model).items()}
    for theirs in gather_json(run.axes["world"].for_strategy("checkpoint"), buffers):  # other stages have others
        wanted.update({name: tuple(shape) for name, shape in theirs.items()})
    wanted = {name: shape for name, shape in wanted.items() if 0 not in shape}  # there is nothing to keep of others
    wrong = sorted(held ^ wanted.keys())
    for name in sorted(held & wanted.keys()):
        if manifest.tensors[name][1] != tuple(wanted[name]):
            wrong.append(f"{name} {list(manifest.tensors[name][1])} instead of {list(wanted[name])}")
    if wrong:
        raise CheckpointError(
            f"'{folder}' is a checkpoint of another model",
            given=f"{len(wrong)} tensors differ, first {', '.join(wrong[:3])}",
            allowed="the names and shapes of this model",
            fix="give the --model and --set that the run was started with",
        )


def _read(folder: Path, manifest: Manifest, name: str, lies: TensorLayout, coord: Coord, like: Tensor) -> Tensor:
    stored = manifest.tensors[name][2]
    sources = {i: (Piece(s.box, (0,) * len(s.box.start)),) for i, s in enumerate(stored)}
    here = len(stored)
    local = torch.empty(lies.local_shape(coord), dtype=like.dtype)
    for message in plan_transfer(sources, {here: lies.pieces(coord)}).messages_to(here):
        origin = stored[message.source]
        inside = message.box.shift(tuple(-a for a in origin.box.start))
        with safe_open(str(folder / origin.file), framework="pt") as file:
            values = file.get_slice(origin.key)[inside.slices] if inside.start else file.get_tensor(origin.key)
        write(local, message.destination_piece, message.box, values.to(like.dtype))
    return local


def _check_optimizer(optimizer: torch.optim.Optimizer, manifest: Manifest) -> None:
    if manifest.optimizer != type(optimizer).__name__:
        raise CheckpointError(
            "the checkpoint has the state of another optimizer",
            given=f"{manifest.optimizer or 'none'}, asked for {type(optimizer).__name__}",
            allowed=manifest.optimizer or "loading without an optimizer",
            fix=f"use {manifest.optimizer}" if manifest.optimizer else "leave out the optimizer",
        )


def _fill_optimizer(run: Run, optimizer: torch.optim.Optimizer, manifest: Manifest) -> None:
    of_elements = {name.rpartition("/")[2] for name in manifest.tensors if name.startswith("optimizer/")}
    for number, group in enumerate(optimizer.param_groups):
        held = named_in(run, group)
        for name, parameter in held.items():
            for key, (kind, value) in manifest.scalars.get(name, {}).items():
                state = optimizer.state[parameter]
                on_device = group.get("fused") or group.get("capturable")  # where torch itself keeps step counts
                device = parameter.device if on_device else torch.device("cpu")
                state[key] = torch.tensor(value, dtype=getattr(torch, kind), device=device) if kind else value
                if kind and key in of_elements:  # of a parameter without dims, which may rest in a slice now
                    state[key] = _home(run, parameter, key, state[key].dtype).fill_(value)
            if optimizer.state.get(parameter) and 0 in run.plan.compute[name].shape:
                optimizer.state[parameter].update((key, torch.empty_like(parameter)) for key in of_elements)
        options = _options_of(manifest, number, held.keys(), len(optimizer.param_groups))
        group.update({k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})


def _options_of(manifest: Manifest, number: int, names: Set[str], num_groups: int) -> Mapping[str, Any]:
    """What was saved for a group: the one that holds its parameters, or in its place where this stage has none."""
    if names:
        matching = [group for group in manifest.groups if names <= set(group["parameters"])]
    else:
        matching = list(manifest.groups[number : number + 1]) if len(manifest.groups) == num_groups else []
    options: Mapping[str, Any] = matching[0]["options"] if matching else {}
    return options
