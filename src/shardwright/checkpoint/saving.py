"""Saves a run as a checkpoint: each rank writes its parts of tensors, and rank 0 writes the manifest that lists all."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwright.axes import mesh_axes
from shardwright.checkpoint.manifest import Manifest, StoredBox, checksum, steps_in
from shardwright.checkpoint.optimizer_trial import is_elementwise, keys_without_elements
from shardwright.checkpoint.schema import TENSOR, VALUES
from shardwright.checkpoint.survivors import Meeting, SavedDecision, Survivors, SurvivorState, new_token
from shardwright.checkpoint.writing import flush, prepare_alone, write_alone, write_checkpoint
from shardwright.comm.agreement import gather_json
from shardwright.errors import CheckpointError, explain
from shardwright.formatting import format_bytes, numbered
from shardwright.parallelize.run import Run, check_run
from shardwright.parallelize.whole_state import warn_of_extra_state
from shardwright.runtime.applied import Offload
from shardwright.sharding.box import Box, Piece
from shardwright.sharding.box import read as read_box
from shardwright.sharding.tensor_layout import TensorLayout

LOSS_SCALE = "(loss scale)"
"""The key of the fp16 loss scale among a manifest's scalars; no parameter can have this name."""

OPTIMIZER_STATE = "(optimizer)"
"""The key, among a manifest's scalars, of entries of the optimizer's state that belong to a name and no parameter."""

_RATES = ("lr", "initial_lr")
"""The options of a param group that are saved as numbers, also where the optimizer has tensors there."""

MOST_BYTES = 2**28
"""The most bytes of one file, unless one tensor is larger. A file's tensors are copied in memory to be written."""

_TOLD_S = 0.5
"""The seconds for which a rank whose save failed because of another rank waits for that rank to report the failure."""

Entries = dict[str, tuple[str, tuple[int, ...], list[StoredBox]]]


@dataclass
class _PartFile:
    """One file that a rank writes: by key, a tensor and the piece (a box) of it that the file holds."""

    file: str
    pieces: dict[str, tuple[Tensor, Piece]] = field(default_factory=dict)
    num_bytes: int = 0

    def copied(self, offload: Offload | None) -> dict[str, Tensor]:
        """Returns copies of the file's pieces in host memory, since safetensors refuses tensors that share memory."""
        copies = {
            key: read_box(local, piece, piece.whole).to("cpu", copy=True, memory_format=torch.contiguous_format)
            for key, (local, piece) in self.pieces.items()
        }
        if offload is not None:
            offload.put_away()
        return copies


def save(
    folder: str | Path,
    run: Run,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int = 0,
    wait: bool = True,
) -> Path:
    """Saves model and optimizer as the checkpoint ``folder/step-N`` and returns its path. Every rank calls it.

    N is ``run.num_steps``, in eight digits or more. Every element is written once, by the first rank that holds it. A
    kill at any moment leaves the last complete checkpoint as it was. ``extra`` is stored as JSON, the same on every
    rank; ``keep`` > 0 removes all but this checkpoint and the ``keep`` - 1 of the highest steps beside it. Buffers that
    are not persistent are left out, as in ``state_dict``. Saves of several runs into one folder wait for each other.
    Where a checkpoint of a later step stays in ``folder``, as of an earlier run, a warning on the first rank says so:
    ``sw.load(folder, run)`` would load that one.

    With ``wait=False`` the call returns once each rank's part is copied to host memory. A thread writes the copy while
    training goes on, and the path exists once the checkpoint is complete. The next save waits for it; so do
    ``run.wait_saves`` and ``launch``.

    Raises: CheckpointError, on every rank: ``extra`` is not JSON, before anything is sent; JSON cannot hold an option
        of the optimizer's param groups, functions and devices aside, which are not saved; or the disk is full or not
        writable, which with ``wait=False`` the call that waits raises. Earlier checkpoints are untouched. PlanError:
        the averages of ``optimizer`` are applied.
    """
    check_run(run, "sw.save(folder, run, optimizer)")
    extra = check_extra(extra)
    run.averages.check_not_applied(optimizer, verb="save")
    run.wait_saves()
    token, owners = agree_on_save(run)
    final = Path(folder) / _name(run.num_steps)
    write, merge, snapshot = _contents(run, optimizer, owners, extra)
    everyone = run.axes["world"].for_strategy("checkpoint")
    write_checkpoint(run.world, everyone, final, token, write, merge, keep=keep, snapshot=None if wait else snapshot)
    if run.world.rank == 0:  # after the collectives: a filter may turn the warning into an error of this rank alone
        warn_of_extra_state(run.model)
        if optimizer is not None:
            _warn_of_others(run, optimizer)
        if keep != 1:  # keep=1 removes all other checkpoints
            _warn_of_later(Path(folder), run.num_steps)
    if not any(index for axis, index in run.coord.items() if axis not in mesh_axes("stages")):
        # the first rank of each stage: only on stages that call the loss can its buffers have changed
        run.loss_buffers.warn_if_changed(kept=extra, stacklevel=2)
    return final


def _warn_of_others(run: Run, optimizer: torch.optim.Optimizer) -> None:
    """Warns of tensors that the optimizer updates and a checkpoint leaves out: they are no parameters of the run."""
    every = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
    num_own = sum(len(group_parameters(run, group)) for group in optimizer.param_groups)
    if len(every) > num_own:
        warnings.warn(
            explain(
                "a checkpoint leaves out tensors of the optimizer that are not the run's, and their state",
                given=f"{len(every) - num_own} of {len(every)} tensors, as of a second model",
                allowed="an optimizer over run.parameters alone, which a checkpoint keeps whole",
                fix="give the other tensors an optimizer of their own, and keep both in a file of your own",
            ),
            stacklevel=3,
        )


def _warn_of_later(folder: Path, step: int) -> None:
    """Warns if the folder has a checkpoint of a later step than ``step``, which a load of the folder would take."""
    others, name = steps_in(folder), _name(step)
    if others and step < int(others[-1].name.removeprefix("step-").removesuffix(".old")):
        warnings.warn(
            explain(
                f"a later checkpoint stays in '{folder}', and is what a load of the folder takes",
                given=f"{name} saved beside {others[-1].name}",
                allowed="steps that go on from the latest in the folder, or a folder of its own for each run",
                fix=f"save into another folder, or remove the later ones; to load this one, name '{folder / name}'",
            ),
            stacklevel=3,
        )


def agree_on_save(run: Run) -> tuple[str, Mapping[str, int]]:
    """Returns the token of a save and the writer of each buffer, which all ranks must agree on before they save.

    All ranks call it; it sends two all-gathers of short texts. The token is the random part of the name of the folder
    that the checkpoint is written to until it is complete. The writers are ranks, by the buffer's name.
    """
    gathered = gather_json(run.axes["world"].for_strategy("checkpoint"), [new_token(), list(kept_buffers(run.model))])
    # stages have different buffers; each is written by the first rank that has it
    owners = {name: rank for rank, (_, names) in reversed(list(enumerate(gathered))) for name in names}
    return gathered[0][0], owners


def survivors_of(run: Run, optimizer: torch.optim.Optimizer | None) -> Survivors:
    """Returns what :func:`save_alone` needs to know of all ranks; all ranks call it while they can communicate."""
    return Survivors(run, optimizer, kept_buffers(run.model))


def save_alone(
    folder: Path, run: Run, optimizer: torch.optim.Optimizer, survivors: Survivors, state: SurvivorState, *,
    keep: int, failure: BaseException, most_s: float, settle: Callable[[], None],
) -> tuple[str, bool]:  # fmt: skip
    """Saves a checkpoint without collectives, after a failure, by the ranks that are left.

    Each rank that has failed or lost another calls it, with its ``state`` and the exception ``failure`` that ended its
    work. The connections of the rank are closed, so that the calls of ranks that wait for it fail and they come here
    too. The ranks that come agree on a step, whose state they hold whole between them (see ``survivors.py``). A rank
    that is to write calls ``settle`` before; ``keep``, if not 0, is how many checkpoints stay in the folder.
    ``most_s`` is the most seconds to wait for the parts of other ranks.

    Returns, on one of the ranks that came, text that says what was saved, or why nothing was. The text is "" on the
    others, and if there is nothing to say: no step is complete, the state is wrong, or the step has a checkpoint
    already. An error while saving is not raised, but becomes this text. The second value is whether this rank has
    completed a checkpoint, which is then that of ``state``'s step.
    """
    meeting = Meeting(folder / f".tmp-failed-{survivors.token}", survivors)
    step, decision = state.step, None

    def prepare(decision: SavedDecision) -> None:
        final = folder / _name(decision.step or 0)
        if decision.ranks and not final.exists():
            prepare_alone(final, survivors.token)

    try:
        try:
            meeting.come(state)
        finally:
            run.world.transport.abandon(failure)
        decision = meeting.agreed(prepare)
        final, step = folder / _name(decision.step or 0), decision.step
        if step is None or final.exists():
            return "", False
        if not decision.ranks:
            why = f"step {step}, the last that was complete, is not saved: {decision.why_not}"
            return (why if meeting.decided_here else ""), False
        if run.world.rank not in decision.ranks:
            return "", False
        settle()
        run.num_steps = step
        write, merge, _ = _contents(run, optimizer, survivors.writers(decision.ranks), {}, survivors, decision.ranks)
        wrote = write_alone(final, meeting, decision, write, merge, keep=keep, most_s=most_s)
        few = len(decision.ranks) < run.world.size
        by = f" by {numbered(decision.ranks)}, which held all of it" if few else ""
        return (f"step {step}, the last that was complete, is saved{by}" if wrote else ""), wrote
    except Exception as why:  # the failure before it is the one to raise
        knows = not isinstance(why, FileNotFoundError)
        tells = step is not None and not state.forbids and meeting.tells(after_s=0.0 if knows else _TOLD_S)
        return (f"step {step} could not be saved: {str(why) or repr(why)}" if tells else ""), False
    finally:
        meeting.leave(decision)


def _name(step: int) -> str:
    """Returns the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def _contents(
    run: Run, optimizer: torch.optim.Optimizer | None, owners: Mapping[str, int], extra: Mapping[str, Any],
    survivors: Survivors | None = None, ranks: Collection[int] = (),
) -> tuple[Callable[[Path], Any], Callable[[list[Any]], Manifest], Callable[[], None]]:  # fmt: skip
    """Returns three functions for ``write_checkpoint``: write this rank's files, merge the manifest, copy the state.

    ``owners`` gives the rank that writes a buffer. With ``survivors``, only ``ranks`` write, and they also write what
    the other ranks would have written. Once the state is copied, the functions hold nothing of the run.
    """

    def owned(layout: TensorLayout) -> tuple[Piece, ...]:
        return survivors.owned(layout, ranks) if survivors is not None else layout.owned(run.coord, run.plan.mesh)

    entries, parts = _owned(run, optimizer, owners, owned)
    state = pack_entries(entries), _scalars(run, optimizer), optimizer_groups(run, optimizer)
    kind = type(optimizer).__name__ if optimizer is not None else ""
    step, layout, seed = run.num_steps, str(run.plan.layout), run.rng.seed
    frozen = tuple(sorted(run.plan.frozen))
    names, num_bytes = [part.file for part in parts], sum(part.num_bytes for part in parts)
    copies = (part.copied(offload) for offload in (run.offload,) for part in parts)

    def snapshot() -> None:
        nonlocal copies
        every = list(copies)
        copies = (every.pop(0) for _ in names)  # each is freed once it is written

    def write(partial: Path) -> Any:
        free = shutil.disk_usage(partial).free
        if free < num_bytes:
            raise OSError(28, f"{format_bytes(free)} free, {format_bytes(num_bytes)} to write")
        files = {}
        for name in names:
            save_file(next(copies), str(partial / name))
            flush(partial / name)
            files[name] = (partial / name).stat().st_size, checksum(partial / name)
        return files, *state

    def merge(wrote: list[Any]) -> Manifest:
        files = {name: (size, digest) for rank_files, *_ in wrote for name, (size, digest) in rank_files.items()}
        scalars = {name: values for _, _, rank_scalars, _ in wrote for name, values in rank_scalars.items()}
        tensors = merge_tensors(entries for _, entries, *_ in wrote)
        groups = merge_groups([groups for *_, groups in wrote])
        return Manifest(step, layout, seed, tensors, files, kind, scalars, groups, extra, frozen)

    return write, merge, snapshot


def check_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns ``extra``, the user's data, as it comes back from JSON; an empty dict for None.

    Raises: CheckpointError: it is no mapping, or cannot be written as JSON.
    """
    try:
        if not isinstance(extra, Mapping | None):
            raise TypeError(f"a {type(extra).__name__}")
        data: dict[str, Any] = json.loads(json.dumps(dict(extra or {})))
    except (TypeError, ValueError, RecursionError) as failure:
        raise CheckpointError(
            "'extra' cannot be kept as JSON",
            given=str(failure),
            allowed="dicts with text as keys, lists, text, numbers, booleans and None",
            fix="save numbers and text: tensor.tolist(), str(path)",
        ) from failure
    return data


def _owned(
    run: Run, optimizer: torch.optim.Optimizer | None, owners: Mapping[str, int],
    owned: Callable[[TensorLayout], tuple[Piece, ...]],
) -> tuple[Entries, list[_PartFile]]:  # fmt: skip
    """Returns the manifest entries of the pieces that this rank writes, and its files.

    ``owners`` gives the rank that writes a buffer, and ``owned`` the pieces of a tensor that this rank writes.
    """
    entries: Entries = {}
    parts: list[_PartFile] = []
    mine = [name for name, rank in owners.items() if rank == run.world.rank or name in run.plan.buffers]
    for name, layout, local in (*_state(run, optimizer), *_buffers(run, mine)):
        # the owner of an unsharded buffer writes it; of all other tensors, the first rank that holds a piece
        whole = name in mine and not layout.axes
        pieces = layout.pieces(run.coord) if whole else owned(layout)
        stored = []
        for number, piece in enumerate(p for p in pieces if p.whole.size or p.whole == Box((), ())):
            key, size = f"{name}#{number}", piece.whole.size * local.element_size()
            if not parts or parts[-1].num_bytes + size > MOST_BYTES:
                more = f".{len(parts)}" if parts else ""
                parts.append(_PartFile(f"part-{run.world.rank:05d}{more}.safetensors"))
            parts[-1].pieces[key] = local.detach(), piece
            parts[-1].num_bytes += size
            stored.append(StoredBox(piece.whole, parts[-1].file, key))
        if stored:
            entries[name] = (str(local.dtype).removeprefix("torch."), layout.shape, stored)
    return entries, parts


def _state(run: Run, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, TensorLayout, Tensor]]:
    """Yields (global name, layout, local tensor) of each parameter and of the optimizer's per-element state."""
    for name, parameter in run.parameters.items():
        yield name, run.plan.state[name].parameter, parameter
        whole = _keys_without_elements(optimizer, parameter)
        for key, value in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).items():
            if is_elementwise(value, parameter) and key not in whole:
                yield f"optimizer/{name}/{key}", run.plan.state[name].optimizer, value


def _keys_without_elements(optimizer: torch.optim.Optimizer | None, parameter: Tensor) -> frozenset[str]:
    """Returns the keys of state that is not elementwise, for a parameter of one element; empty for any other.

    Only for a parameter of one element do shapes not show which state is elementwise.
    """
    if optimizer is None or parameter.shape != (1,) or not optimizer.state.get(parameter):
        return frozenset()
    group = next(group for group in optimizer.param_groups if any(member is parameter for member in group["params"]))
    return keys_without_elements(optimizer, group)


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the model's persistent buffers by name, those that ``state_dict`` has; a tied buffer only once."""
    buffers = {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    first = {id(buffer): name for name, buffer in reversed(buffers.items())}
    return {name: buffer for name, buffer in buffers.items() if first[id(buffer)] == name}


def _buffers(run: Run, names: Iterable[str]) -> Iterator[tuple[str, TensorLayout, Tensor]]:
    for name in names:
        buffer = run.model.get_buffer(name)
        yield name, buffer_layout(run, name, buffer), buffer


def buffer_layout(run: Run, name: str, buffer: Tensor) -> TensorLayout:
    """Returns the layout of a buffer: a whole copy on every rank, unless the plan shards it."""
    shape = tuple(buffer.shape)
    layout = run.plan.buffers.get(name, TensorLayout.whole(shape))
    return layout.of_shape(shape) if layout.is_held_at(run.coord) else layout


def _scalars(run: Run, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    """Returns the state that is equal on all ranks that have it: optimizer scalars such as step counts, the loss scale.

    Scalars are left out for a parameter of which this rank stores no element.

    Raises: CheckpointError: an entry of the state is neither a tensor of real numbers nor a value that JSON can hold,
        or is neither for a parameter nor for a name.
    """
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in run.parameters.items():
        if not parameter.numel() and 0 not in run.plan.state[name].optimizer.shape:
            continue  # an empty gradient comes even if no backward reached the elements, so the step count may be wrong
        whole = _keys_without_elements(optimizer, parameter)
        for key, value in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).items():
            if value is not None and (key in whole or not is_elementwise(value, parameter)):
                scalars.setdefault(name, {})[key] = _as_scalar(f"the state '{key}' of '{name}'", value)
    state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    for key, value in state.items():
        if isinstance(key, Tensor):
            continue  # a parameter of this rank, or the placeholder of a stage that trains nothing
        what = f"the state '{key}'"
        if not isinstance(key, str) or (isinstance(value, Tensor) and value.numel() != 1):
            raise _not_saved(what, value)
        scalars.setdefault(OPTIMIZER_STATE, {})[key] = _as_scalar(what, value)
    if run.loss_scale is not None:
        scalars[LOSS_SCALE] = {key: ["", value] for key, value in asdict(run.loss_scale).items()}
    return scalars


def _as_scalar(what: str, value: Any) -> list[Any]:
    """Returns an entry of an optimizer's state as a manifest has it: its dtype ("" without one), and its value."""
    if isinstance(value, Tensor) and not value.is_complex():
        return [str(value.dtype).removeprefix("torch."), value.tolist()]
    return ["", _as_json(what, value, nan=True)]


def pack_entries(entries: Entries) -> dict[str, Any]:
    """Returns a rank's manifest entries (which range of which tensor is in which file) as a dict of lists, for JSON."""
    return {
        name: [dtype, list(shape), [[s.box.start, s.box.stop, s.file, s.key] for s in stored]]
        for name, (dtype, shape, stored) in entries.items()
    }


def merge_tensors(packed: Iterable[dict[str, Any]]) -> dict[str, tuple[str, tuple[int, ...], tuple[StoredBox, ...]]]:
    """Returns the manifest's table of tensors: by name, the dtype, the shape, and the place of each part in the files.

    ``packed`` has the result of :func:`pack_entries` from each rank.
    """
    tensors: Entries = {}
    for entries in packed:
        for name, (dtype, shape, stored) in entries.items():
            pieces = [StoredBox(Box(tuple(a), tuple(b)), file, key) for a, b, file, key in stored]
            tensors.setdefault(name, (dtype, tuple(shape), []))[2].extend(pieces)
    return {name: (dtype, shape, tuple(stored)) for name, (dtype, shape, stored) in sorted(tensors.items())}


def merge_groups(by_rank: Iterable[Sequence[dict[str, Any]]]) -> tuple[dict[str, Any], ...]:
    """Returns the optimizer's param groups merged over ranks, since a pipeline stage has only a part of each group.

    ``by_rank`` has the groups of each rank. A group without parameters on a stage is ignored if the group has
    parameters elsewhere. A stage may also leave such a group out, so that its later groups have lower numbers: groups
    of one number are merged only if their options agree.

    >>> first, last = {"parameters": ["a"], "options": {"lr": 1}}, {"parameters": ["b"], "options": {"lr": 2}}
    >>> none = {"parameters": [], "options": {"lr": 1}}
    >>> merge_groups([[first, none], [none, last]]) == merge_groups([[first], [last]]) == (first, last)
    True
    """
    numbered = sorted(((n, group) for groups in by_rank for n, group in enumerate(groups)), key=lambda pair: pair[0])
    holding = {number for number, group in numbered if group["parameters"]}
    group_by_key: dict[tuple[int, str], dict[str, Any]] = {}
    for number, group in numbered:
        if group["parameters"] or number not in holding:
            key = (number, json.dumps(group["options"], sort_keys=True) if number in holding else "")
            names = group_by_key.setdefault(key, {**group, "parameters": []})["parameters"]
            names += [name for name in group["parameters"] if name not in names]
    return tuple(group_by_key.values())


def group_parameters(run: Run, group: Mapping[str, Any]) -> dict[str, nn.Parameter]:
    """Returns those of an optimizer group's parameters that are the run's, by name.

    The placeholder parameter of a pipeline stage that trains nothing is left out.
    """
    names = {id(parameter): name for name, parameter in run.parameters.items()}
    return {names[id(p)]: p for p in group["params"] if id(p) in names}


def optimizer_groups(run: Run, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Any], ...]:
    """Returns the optimizer's param groups as a manifest has them: the names of this rank's parameters, the options.

    Functions and devices among the options are left out: a run that loads the checkpoint keeps those of its own
    optimizer.
    """
    if optimizer is None:
        return ()
    return tuple(
        {
            "parameters": list(group_parameters(run, group)),
            "options": {
                key: _as_json(f"the option '{key}' of a param group", _number(value) if key in _RATES else value)
                for key, value in group.items()
                if key != "params" and not callable(value) and not isinstance(value, torch.device)
            },
        }
        for group in optimizer.param_groups
    )


def _as_json(what: str, value: Any, *, nan: bool = False) -> Any:
    """Returns an entry of an optimizer's groups or state, ``what`` in errors, as JSON can hold it.

    A tensor of one element is a dict of its dtype and its values, a dtype its name, and a set a sorted list. An array
    or a scalar of NumPy with one element is that element. Of a tensor with more elements a rank may have only a part.

    Raises: CheckpointError: JSON cannot hold the value, or :func:`~shardwright.load` would refuse it; ``nan`` allows
        NaN.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return {TENSOR: str(value.dtype).removeprefix("torch."), VALUES: _as_json(what, value.tolist(), nan=nan)}
    value = _number(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        return [_as_json(what, entry, nan=nan) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted((_as_json(what, entry, nan=nan) for entry in value), key=str)
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _as_json(what, entry, nan=nan) for name, entry in value.items()}
    if isinstance(value, int | float | str | None) and (nan or value == value):
        return value
    raise _not_saved(what, value)


def _number(value: Any) -> Any:
    """Returns a tensor, an array or a scalar of NumPy of one element as a Python number, other values unchanged."""
    is_one = isinstance(value, Tensor) and value.numel() == 1
    is_one = is_one or (type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1)
    return value.item() if is_one else value


def _not_saved(what: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"{what} of the optimizer cannot be saved",
        given=f"{value!r:.60}, a {type(value).__name__}",
        allowed="a real tensor for a parameter; tensors of one element, numbers, text, dtypes and None, and lists, "
        "tuples, sets and dicts (with text as keys) of these, for a parameter or a name; functions and devices among "
        "the options of a group, which are not saved",
        fix="keep it in an attribute of the optimizer, and take it out of its param_groups and state before the save",
    )
