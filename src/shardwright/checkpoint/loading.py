"""Loads a checkpoint under any layout: each rank reads from the files only the parts of tensors that it stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shardwright.checkpoint.manifest import MANIFEST, Manifest, check_files, find_on_all, on_all
from shardwright.checkpoint.manifest import read as read_manifest
from shardwright.checkpoint.optimizer_trial import check_options, check_steps, lacks_entry
from shardwright.checkpoint.saved_groups import saved_options
from shardwright.checkpoint.saving import (
    LOSS_SCALE,
    OPTIMIZER_STATE,
    buffer_layout,
    group_parameters,
    kept_buffers,
)
from shardwright.checkpoint.schema import TENSOR, VALUES
from shardwright.comm.agreement import gather_json
from shardwright.errors import CheckpointError
from shardwright.parallelize.averages import KEY
from shardwright.parallelize.run import Run, check_run
from shardwright.runtime.offload_storage import OffloadStorage
from shardwright.sharding.box import Piece, write
from shardwright.sharding.tensor_layout import TensorLayout
from shardwright.sharding.transfer import plan_transfer


@dataclass(frozen=True)
class _Read:
    """The content of a checkpoint that a rank has read, complete before anything of the run changes.

    ``values`` are the run's tensors to fill, each with the values read for it: in host memory or, if the run offloads
    its state to disk, on disk.
    """

    manifest: Manifest
    values: list[tuple[Tensor, Tensor]]
    states: Mapping[Tensor, dict[str, Any]]
    options: tuple[Mapping[str, Any], ...]


def load(path: str | Path, run: Run, optimizer: torch.optim.Optimizer | None = None) -> Mapping[str, Any]:
    """Fills ``run`` and ``optimizer`` from a checkpoint of any layout; returns ``extra``, the user data saved with it.

    Every rank calls it. ``path`` is a checkpoint, or a folder of which the newest checkpoint is taken. Beside tensors,
    the run's step number, seed and loss scale and the options of the optimizer's param groups are set. Each rank reads
    and verifies only the files that hold parts of its shards. Everything is read before anything is changed: a load
    that fails leaves run and optimizer unchanged. There is a warning if only one of the checkpoint and the run has
    averages (of ``run.average``). The call waits for saves that are under way, and all ranks read the step that rank 0
    finds.

    Traffic: all-gathers of short texts.
    Raises: CheckpointError, on every rank: the checkpoint is missing, broken, of another format or of another model,
        has no state with which the optimizer can step, or has other param groups; or a save that was under way has
        failed. PlanError: the averages of ``optimizer`` are applied.
    """
    check_run(run, "sw.load(path, run, optimizer)")
    run.averages.check_not_applied(optimizer, verb="load")
    run.wait_saves()
    everyone = run.axes["world"].for_strategy("checkpoint")
    folder = find_on_all(everyone, Path(path))
    shapes = {name: list(buffer_layout(run, name, b).shape) for name, b in kept_buffers(run.model).items()}
    buffers = {name: shape for rank_shapes in gather_json(everyone, shapes) for name, shape in rank_shapes.items()}
    contents = on_all(everyone, folder, lambda: _read(folder, run, optimizer, buffers))
    manifest = contents.manifest
    with torch.no_grad():
        for local, values in contents.values:
            local.copy_(values)
    run.changed()
    if optimizer is not None:
        for parameter in run.parameters.values():
            optimizer.state.pop(parameter, None)
        state: dict[Any, Any] = optimizer.state
        for key in [key for key in state if isinstance(key, str)]:
            del state[key]  # torch's load_state_dict drops such entries too
        state.update(contents.states)
        for group, options in zip(optimizer.param_groups, contents.options, strict=True):
            group.update(options)  # unsaved options stay, such as those of a schedule that was made before the load
    if run.loss_scale is not None:
        for key, (_, value) in manifest.scalars.get(LOSS_SCALE, {}).items():
            setattr(run.loss_scale, key, value)
    run.num_steps = manifest.step
    run.rng.seed = manifest.seed
    run.averages.note_load(run, optimizer, str(folder), loads=bool(averages_in(manifest)))
    return manifest.extra


def _read(
    folder: Path, run: Run, optimizer: torch.optim.Optimizer | None, buffers: Mapping[str, Sequence[int]]
) -> _Read:
    """Checks a checkpoint and reads this rank's part of it; ``buffers`` are the shapes of all ranks' buffers."""
    manifest = read_manifest(folder)
    _check_names(folder, manifest, run, buffers)
    if optimizer is not None:
        _check_optimizer(optimizer, manifest)
    wanted, states = _wanted(run, optimizer, manifest)
    needed = {
        stored.file
        for name, layout, _ in wanted
        for stored in manifest.tensors[name][2]
        if any(stored.box.intersect(piece.whole) for piece in layout.pieces(run.coord)) or not layout.shape
    }
    check_files(folder, manifest, needed)
    # new state tensors are filled in place; but offloaded state has a single place, whose values are still in use
    fresh = {t for state in states.values() for t in state.values()} if run.offload is None else set[Tensor]()
    disk = run.offload.storage if run.offload is not None and run.offload.place == "disk" else None
    room = None if disk is None else OffloadStorage("disk", run.axes["world"], disk.folder)
    values: list[tuple[Tensor, Tensor]] = []
    for name, layout, local in wanted:
        read = local
        if local not in fresh:
            shape = layout.local_shape(run.coord)
            size = prod(shape)
            read = torch.empty(shape, dtype=local.dtype) if room is None else room.empty(size, local.dtype).view(shape)
            values.append((local, read))
        read_pieces(folder, manifest, name, layout.pieces(run.coord), read)
        if room is not None:
            room.put_away([read])
    options = _fill_optimizer(run, optimizer, manifest, states, values) if optimizer is not None else ()
    if run.loss_scale is not None and not manifest.scalars.get(LOSS_SCALE, {}).keys() <= vars(run.loss_scale).keys():
        raise ValueError(f"{MANIFEST}: unknown entries of the loss scale")
    return _Read(manifest, values, states, options)


def averages_in(manifest: Manifest) -> dict[str, str | float]:
    """Returns the averages of parameters in a checkpoint, by the parameter's name.

    Each is the name of a tensor of the checkpoint, or a value where the parameter has no dims.
    """
    averages: dict[str, str | float] = {}
    for name, (_, shape, _) in manifest.tensors.items():
        key = f"optimizer/{name}/{KEY}"
        if key in manifest.tensors and manifest.tensors[key][1] == shape:
            averages[name] = key
        elif not shape and KEY in (state := manifest.scalars.get(name, {})):
            averages[name] = state[KEY][1]
    return averages


def read_whole(folder: Path, manifest: Manifest, name: str) -> Tensor:
    """Returns one tensor of a checkpoint, unsharded and in host memory, by its name in the manifest."""
    dtype, shape, _ = manifest.tensors[name]
    whole = torch.empty(shape, dtype=getattr(torch, dtype))
    read_pieces(folder, manifest, name, TensorLayout.whole(shape).pieces({}), whole)
    return whole


def read_pieces(folder: Path, manifest: Manifest, name: str, pieces: tuple[Piece, ...], local: Tensor) -> None:
    """Reads this rank's shard of one tensor of a checkpoint into ``local``, cast to the dtype of ``local``.

    ``pieces`` say which ranges of the whole tensor the shard holds; only these are read from disk.

    Raises: ValueError: a file holds a tensor of another dtype than the manifest says.
    """
    dtype, _, stored = manifest.tensors[name]
    sources = {i: (Piece(s.box, (0,) * len(s.box.start)),) for i, s in enumerate(stored)}
    here = len(stored)  # this rank's number in the plan of the transfer, after the numbers of the stored boxes
    files: dict[str, Any] = {}  # each file is opened once, since its header lists all of its pieces
    with ExitStack() as stack:
        for message in plan_transfer(sources, {here: pieces}).messages_to(here):
            origin = stored[message.source]
            inside = message.box.shift(tuple(-a for a in origin.box.start))
            if origin.file not in files:
                files[origin.file] = stack.enter_context(safe_open(str(folder / origin.file), framework="pt"))
            file = files[origin.file]
            values = file.get_slice(origin.key)[inside.slices] if inside.start else file.get_tensor(origin.key)
            if values.dtype != getattr(torch, dtype):
                raise ValueError(f"'{origin.key}' in {origin.file} is of {values.dtype}, and not of torch.{dtype}")
            write(local, message.destination_piece, message.box, values.to(local.dtype))


def _wanted(
    run: Run, optimizer: torch.optim.Optimizer | None, manifest: Manifest
) -> tuple[list[tuple[str, TensorLayout, Tensor]], dict[Tensor, dict[str, Any]]]:
    """Returns (global name, layout, tensor) of each tensor that this rank fills, and the new optimizer state."""
    tensors: list[tuple[str, TensorLayout, Tensor]] = []
    states: dict[Tensor, dict[str, Any]] = {}
    keys: dict[str, list[str]] = {}
    for name in manifest.tensors:
        if name.startswith("optimizer/"):
            owner, _, key = name.removeprefix("optimizer/").rpartition("/")
            keys.setdefault(owner, []).append(key)
    for name, parameter in run.parameters.items():
        if name not in manifest.tensors:
            continue  # a parameter without elements is not stored
        tensors.append((name, run.plan.state[name].parameter, parameter))
        for key in keys.get(name, []) if optimizer is not None and name not in run.plan.frozen else ():
            if key == KEY and run.offload is not None:
                continue  # the averages of such a run would not be updated
            dtype = getattr(torch, manifest.tensors[f"optimizer/{name}/{key}"][0])
            state = states.setdefault(parameter, {})[key] = _new_state(run, parameter, key, dtype)
            tensors.append((f"optimizer/{name}/{key}", run.plan.state[name].optimizer, state))
    for name, buffer in kept_buffers(run.model).items():
        layout = buffer_layout(run, name, buffer)
        if name in manifest.tensors and layout.pieces(run.coord):  # else the buffer belongs to another stage
            tensors.append((name, layout, buffer))
    return tensors, states


def _new_state(run: Run, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
    if run.offload is not None:
        return run.offload.home(parameter, key, dtype)
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def _check_names(folder: Path, manifest: Manifest, run: Run, buffers: Mapping[str, Sequence[int]]) -> None:
    held = {name for name in manifest.tensors if not name.startswith("optimizer/")}
    wanted = {name: layout.shape for name, layout in run.plan.compute.items()}
    wanted.update({name: tuple(shape) for name, shape in buffers.items()})  # other stages have other buffers
    wanted = {name: shape for name, shape in wanted.items() if 0 not in shape}  # empty tensors are not stored
    wrong = sorted(held ^ wanted.keys())
    for name in sorted(held & wanted.keys()):
        if manifest.tensors[name][1] != tuple(wanted[name]):
            wrong.append(f"{name} {list(manifest.tensors[name][1])} instead of {list(wanted[name])}")
    for name in sorted(manifest.tensors.keys() - held):
        owner = name.removeprefix("optimizer/").rpartition("/")[0]
        if owner not in held or manifest.tensors[name][1] != manifest.tensors[owner][1]:
            wrong.append(f"{name}, which is no state of a parameter")
    if wrong:
        raise CheckpointError(
            f"'{folder}' is a checkpoint of another model",
            given=f"{len(wrong)} tensors differ, first {', '.join(wrong[:3])}",
            allowed="the names and shapes of this model",
            fix="give the --model and --set that the run was started with",
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, manifest: Manifest) -> None:
    if manifest.optimizer != type(optimizer).__name__:
        raise CheckpointError(
            "the checkpoint has the state of another optimizer",
            given=f"{manifest.optimizer or 'none'}, to be loaded into {type(optimizer).__name__}",
            allowed=manifest.optimizer or "loading without an optimizer",
            fix=f"use {manifest.optimizer}" if manifest.optimizer else "leave out the optimizer",
        )


def _fill_optimizer(
    run: Run, optimizer: torch.optim.Optimizer, manifest: Manifest, states: dict[Any, dict[str, Any]],
    values: list[tuple[Tensor, Tensor]],
) -> tuple[Mapping[str, Any], ...]:  # fmt: skip
    """Adds to ``states`` the optimizer's scalars, such as step counts; returns the options of each param group."""
    elementwise = {name.rpartition("/")[2] for name in manifest.tensors if name.startswith("optimizer/")}
    now: Mapping[Any, Any] = optimizer.state
    for key, (kind, value) in manifest.scalars.get(OPTIMIZER_STATE, {}).items():
        present = now.get(key)
        device = present.device if isinstance(present, Tensor) else torch.device("cpu")
        states[key] = _entry(kind, value, device)
    every = []
    listed = {name for saved in manifest.groups for name in saved["parameters"]}
    for group, options in zip(optimizer.param_groups, saved_options(run, optimizer, manifest), strict=True):
        parameters = group_parameters(run, group)
        for name, parameter in parameters.items():
            for key, (kind, value) in manifest.scalars.get(name, {}).items():
                state = states.setdefault(parameter, {})
                on_device = group.get("fused") or group.get("capturable")  # then torch keeps step counts there
                device = parameter.device if on_device else torch.device("cpu")
                state[key] = _entry(kind, value, device)
                # a parameter without dims, and with it its state, may be stored in a flat slice
                if kind and key in elementwise and not run.plan.compute[name].shape and isinstance(value, int | float):
                    state[key] = _new_state(run, parameter, key, state[key].dtype)
                    values.append((state[key], torch.full_like(state[key], value)))
            if states.get(parameter) and 0 in run.plan.compute[name].shape:
                states[parameter].update((key, torch.empty_like(parameter)) for key in elementwise)
        device = next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
        every.append({key: _like(value, group.get(key), tuple, device) for key, value in options.items()})
        check_options(optimizer, group, every[-1])
        for parameter in parameters.values():
            state = states.get(parameter, {})
            # earlier versions saved a step count alone for a parameter without a gradient, if a rank had no part of it
            if state and not elementwise & state.keys() and lacks_entry(optimizer, group, every[-1], parameter, state):
                del states[parameter]
        if lost := sorted(name for name, p in parameters.items() if states.get(p) and name not in listed):
            raise ValueError(f"{MANIFEST}: no param group has '{lost[0]}', of which there is state")
        check_steps(optimizer, group, every[-1], {name: (p, states.get(p, {})) for name, p in parameters.items()})
    return tuple(every)


def _entry(kind: str, value: Any, device: torch.device) -> Any:
    """Returns an entry of an optimizer's state from its dtype in a manifest, "" if it is no tensor, and its value."""
    return torch.tensor(value, dtype=getattr(torch, kind), device=device) if kind else _like(value, None, list, device)


def _like(
    saved: Any, present: Any, kind: type[list[Any] | tuple[Any, ...]] = list, device: torch.device | None = None
) -> Any:
    """Returns a saved option with tensors, tuples, sets and dtypes in place of what JSON has for them.

    If the present option is a tensor, a number becomes one too. A list becomes a list, tuple or set as the present
    option is, or a ``kind`` if that is none of these. Tensors that the present option lacks lie on ``device``.
    """
    if isinstance(saved, dict) and saved.keys() == {TENSOR, VALUES}:
        place = present.device if isinstance(present, Tensor) else device
        return torch.tensor(saved[VALUES], dtype=getattr(torch, saved[TENSOR]), device=place)
    if isinstance(present, Tensor) and isinstance(saved, int | float):
        return torch.full_like(present, saved)
    if isinstance(present, torch.dtype) and isinstance(saved, str):
        if not isinstance(dtype := getattr(torch, saved.removeprefix("torch."), None), torch.dtype):
            raise ValueError(f"{MANIFEST}: '{saved}' in place of a dtype")
        return dtype
    if isinstance(present, set | frozenset) and isinstance(saved, list):
        return type(present)(_like(value, None, tuple, device) for value in saved)
    if isinstance(saved, dict):
        known = present if isinstance(present, dict) else {}
        return {name: _like(value, known.get(name), list, device) for name, value in saved.items()}
    if not isinstance(saved, list):
        return saved
    inside = present if isinstance(present, list | tuple) else ()
    values = [_like(value, inside[n] if n < len(inside) else None, list, device) for n, value in enumerate(saved)]
    return (type(present) if type(present) in (list, tuple) else kind)(values)
